"""Weigh: what a plan costs, by which one is taken before another.

    weight = bytes of parameters that a rank holds + 8 · bytes that it sends in a step of the example

A step reads all parameters, and a byte takes about eight times as long on the wire as from a GPU's memory (450 GB/s of
NVLink, 3.35 TB/s of an H100's memory).
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

from tpplan.compiler.ir.layout import PARTIAL
from tpplan.compiler.ir.program import ModuleProgram, Program, Reshard
from tpplan.cost.traffic import gradient_sum_traffic, memory, module_traffic

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


def sums_at_boundaries(program: Program, crossing: Collection[int]) -> Program:
    """The program as if sums inside of bodies stood at boundaries, which are of as many elements as what crosses one.

    A body that adds what a row makes to its own argument sums it before, and the gradient of what a column reads, too:
    those are no other sums than such a module's inside of it would have at their boundaries.
    """

    def moved(module: ModuleProgram) -> ModuleProgram:
        sums = tuple(r for r in module.inner if _is_sum(r) and math.prod(r.shape) in crossing)
        return replace(module, inner=tuple(r for r in module.inner if r not in sums), exits=(*module.exits, *sums))

    return replace(program, modules=tuple(map(moved, program.modules)))


def _is_sum(reshard: Reshard) -> bool:
    """Whether it is a sum over the ranks of a value, or of its gradient alone."""
    return (reshard.source == PARTIAL or reshard.source.is_replicated) and reshard.target.is_replicated


__all__ = ["SENT", "exchanges_little", "sums_at_boundaries", "weigh"]
