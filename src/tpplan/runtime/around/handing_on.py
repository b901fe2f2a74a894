"""Handing on: whether each stage of a pipeline takes parts of a sequence where the one before returns them.

    layers 0 to 3, which return parts   ->   layers 4 to 7, which take whole tensors: TP195

A stage compiles by itself. One that takes parts runs on whole tensors all the same, each rank on all of it, and is
wrong; so is one that takes parts for whole tensors. Only who sees both can tell.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import nn

from tpplan.compat.modules import named_modules
from tpplan.plan import CompileError
from tpplan.runtime.modules.sharded_modules import RUNTIME, ShardedRoot

_LAYER = re.compile(r"((?:[^.]*[^.\d][^.]*\.)*)(\d+)")  # of no list inside of another layer


@dataclass(frozen=True, slots=True)
class Handing:
    """What a stage that is sharded takes and returns.

    Attributes:
        first: the least number of each list that it has layers of, by the list's name.
        takes, returns: whether tensors that arrive and leave are parts.
    """

    first: Mapping[str, int]
    takes: bool
    returns: bool


def handing(stage: nn.Module) -> Handing | None:
    """What a stage takes and returns; None if it isn't sharded yet."""
    root: Any = next((module for module in stage.modules() if isinstance(module, ShardedRoot)), None)
    guard: Any = None if root is None else root.__dict__[RUNTIME].guard
    if guard is None:
        return None
    return Handing(layers_of(stage), bool(guard.program.arriving), guard.program.hands_on)


def layers_of(stage: nn.Module) -> dict[str, int]:
    """The least number of each list of layers, by its name with the dot after it."""
    first: dict[str, int] = {}
    for found in filter(None, (_LAYER.fullmatch(name) for name, _ in named_modules(stage))):
        first[found[1]] = min(int(found[2]), first.get(found[1], int(found[2])))
    return first


def refuse_disagreeing(stages: Sequence[Handing | None]) -> None:
    """Raise if stages, in the order of their layers, don't take what the ones before them return.

    Raises:
        CompileError: TP195.
    """
    known = [stage for stage in stages if stage is not None]
    layered = [stage for stage in known if stage.first]
    orders: dict[str, list[int]] = {}
    for name in layered[0].first if layered else ():
        numbers = [stage.first.get(name, -1) for stage in layered]
        if len(set(numbers)) == len(numbers) and min(numbers) >= 0:
            orders[name] = sorted(range(len(numbers)), key=numbers.__getitem__)
    of = next(iter(orders), "")
    if len(known) < len(stages) or any(order != orders[of] for order in orders.values()):
        return  # some aren't sharded yet, or nobody can tell their order
    for before, after in pairwise([layered[place] for place in orders.get(of, ())]):
        if before.returns != after.takes:
            here, there = f"{of}{before.first[of]}", f"{of}{after.first[of]}"
            parts, whole = "each rank's part of a sequence", "whole sequences"
            made, taken = (parts, whole) if before.returns else (whole, parts)
            mend = f"`input: sequence` for `{there}`" if before.returns else "`output: sequence` for the layer before"
            drop = f"`output` before `{there}`" if before.returns else f"`input` of `{there}`"
            raise CompileError.of(
                "TP195",
                f"the stage from `{here}` on returns {made}, and the one from `{there}` on takes {taken}",
                help=f"write {mend} as well, or remove {drop}",
                subject=there,
            )


__all__ = ["Handing", "handing", "layers_of", "refuse_disagreeing"]
