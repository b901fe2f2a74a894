"""Share: how much of the parameters a program shards, and what it leaves whole.

in:  a program
out: `Share`s, of the repeated blocks and of the whole model; the parameters that stay whole, by module pattern
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from tpplan.compiler.ir.program import ParameterPlacement, Program
from tpplan.suggest.patterns import is_repeated, shape_of


@dataclass(frozen=True, slots=True)
class Share:
    """A number of parameters, and how many of them are sharded."""

    sharded: int
    total: int

    @property
    def percent(self) -> float:
        """The sharded ones, of all; 100 where there are none."""
        return 100 * self.sharded / self.total if self.total else 100.0


@dataclass(frozen=True, slots=True)
class Whole:
    """Parameters of equal modules that every rank holds.

    Attributes:
        pattern: the modules.
        example: one of them.
        count: the number of parameters in all of them.
        matrices: whether there is more than norms' weights and biases.
    """

    pattern: str
    example: str
    count: int
    matrices: bool


def model_share(program: Program) -> Share:
    """Of all parameters."""
    return _share(program.parameters)


def block_share(program: Program) -> Share:
    """Of the parameters in numbered blocks: all but tables, heads and what stands by itself."""
    return _share([p for p in program.parameters if is_repeated(p.name)])


def left_whole(program: Program) -> list[Whole]:
    """Modules with parameters that stay whole, those with the most first."""
    return _by_module(p for p in program.parameters if not p.layout.is_sharded)


def shared_parts(program: Program) -> list[Whole]:
    """Modules with split parameters of which several ranks use, and store, the same part, those with the most first."""
    return _by_module(p for p in program.parameters if p.layout.has_replicas)


def _by_module(parameters: Iterable[ParameterPlacement]) -> list[Whole]:
    counts: dict[str, Whole] = {}
    for parameter in parameters:
        module, _, leaf = parameter.name.rpartition(".")
        pattern = shape_of(module or leaf)
        known = counts.get(pattern)
        count = math.prod(parameter.shape) + (known.count if known is not None else 0)
        matrices = sum(n > 1 for n in parameter.shape) > 1 or (known is not None and known.matrices)
        counts[pattern] = Whole(pattern, known.example if known is not None else module, count, matrices)
    return sorted(counts.values(), key=lambda held: (-held.count, held.pattern))


def _share(parameters: Iterable[ParameterPlacement]) -> Share:
    sizes = [(math.prod(p.shape), p.layout.is_sharded) for p in parameters]
    return Share(sum(n for n, split in sizes if split), sum(n for n, _ in sizes))
