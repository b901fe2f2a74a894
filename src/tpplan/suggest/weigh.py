"""Weigh: what a plan costs, by which one is taken before another.

    weight = bytes of parameters that a rank holds + 8 · bytes that it sends in a step of the example

A step reads all parameters, and a byte takes about eight times as long on the wire as from a GPU's memory (450 GB/s of
NVLink, 3.35 TB/s of an H100's memory).
"""

from __future__ import annotations

from dataclasses import replace

from tpplan.compiler.ir.program import Program
from tpplan.cost.program import gradient_sum_traffic, memory, module_traffic

SENT = 8
"""What a byte that is sent weighs, in bytes of parameters."""


def weigh(program: Program) -> int:
    """What a step by a program weighs."""
    step = module_traffic(program.modules, program.size)
    sent = step.forward.total + step.backward.total + gradient_sum_traffic(program).total
    return memory(program.parameters).local + SENT * sent


def exchanges_little(program: Program) -> bool:
    """Whether a step sends no more between the operations of bodies than at their boundaries."""
    inside = [replace(module, entries=(), exits=()) for module in program.modules]
    sent, all_sent = (module_traffic(modules, program.size) for modules in (inside, program.modules))
    return 2 * (sent.forward.total + sent.backward.total) <= all_sent.forward.total + all_sent.backward.total


__all__ = ["SENT", "exchanges_little", "weigh"]
