"""Handing on: whether each stage of a pipeline takes parts of a sequence where the one before returns them.

    layers 0 to 3, which return parts   ->   layers 4 to 7, which take whole tensors: TP195

A stage compiles by itself. One that takes parts runs on whole tensors all the same, each rank on all of it, and is
wrong; so is one that takes parts for whole tensors. Only who sees both can tell.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import nn

from tpplan.compat.modules import named_modules
from tpplan.plan import CompileError
from tpplan.runtime.modules.sharded_modules import RUNTIME, ShardedRoot

_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Handing:
    """What a stage that is sharded takes and returns.

    Attributes:
        numbers, name: of its first layer; none if it has no layers.
        takes, returns: whether tensors that arrive and leave are parts.
    """

    numbers: tuple[int, ...]
    name: str
    takes: bool
    returns: bool


def handing(stage: nn.Module) -> Handing | None:
    """What a stage takes and returns; None if it isn't sharded yet."""
    root: Any = next((module for module in stage.modules() if isinstance(module, ShardedRoot)), None)
    guard: Any = None if root is None else root.__dict__[RUNTIME].guard
    if guard is None:
        return None
    names = [name for name, _ in named_modules(stage)]
    first = min((name for name in names if _NUMBER.search(name)), key=_numbers, default="")
    return Handing(_numbers(first), first, bool(guard.program.arriving), guard.program.hands_on)


def _numbers(name: str) -> tuple[int, ...]:
    return tuple(map(int, _NUMBER.findall(name)))


def refuse_disagreeing(stages: Sequence[Handing | None]) -> None:
    """Raise if stages, in the order of their layers, don't take what the ones before them return.

    Raises:
        CompileError: TP195.
    """
    known = [stage for stage in stages if stage is not None]
    if len(known) < len(stages) or len({stage.numbers for stage in known}) < len(known):
        return  # some aren't sharded yet, or nobody can tell their order
    for before, after in pairwise(sorted(known, key=lambda stage: stage.numbers)):
        if before.returns != after.takes:
            parts, whole = "each rank's part of a sequence", "whole sequences"
            made, taken = (parts, whole) if before.returns else (whole, parts)
            mend = (
                f"`input: sequence` for `{after.name}`" if before.returns else "`output: sequence` for the layer before"
            )
            drop = f"`output` before `{after.name}`" if before.returns else f"`input` of `{after.name}`"
            raise CompileError.of(
                "TP195",
                f"the stage from `{before.name}` on returns {made}, and the one from `{after.name}` on takes {taken}",
                help=f"write {mend} as well, or remove {drop}",
                subject=after.name,
            )


__all__ = ["Handing", "handing", "refuse_disagreeing"]
