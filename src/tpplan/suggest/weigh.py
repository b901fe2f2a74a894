"""Weigh: what a plan costs, by which one is taken before another.

    weight = bytes of parameters that a rank holds + 8 · bytes that it sends in a step of the example

A step reads all parameters, and a byte takes about eight times as long on the wire as from a GPU's memory (450 GB/s of
NVLink, 3.35 TB/s of an H100's memory).
"""

from __future__ import annotations

from tpplan.compiler.ir.program import Program
from tpplan.cost.program import gradient_sum_traffic, memory, module_traffic

SENT = 8
"""What a byte that is sent weighs, in bytes of parameters."""


def weigh(program: Program) -> int:
    """What a step by a program weighs."""
    step = module_traffic(program.modules, program.size)
    sent = step.forward.total + step.backward.total + gradient_sum_traffic(program).total
    return memory(program.parameters).local + SENT * sent


__all__ = ["SENT", "weigh"]
