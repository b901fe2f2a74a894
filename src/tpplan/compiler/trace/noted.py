"""What a recorder notes beside operations: calls under way, functions and hooks that have a part in the backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tpplan.compiler.ir.steps import Heard, Step
from tpplan.compiler.ir.trace import Cut, Frame, Location, Operation


@dataclass(slots=True)
class OpenFrame:
    """A frame that is being recorded; `differentiates` tells whether gradients were on when it was opened."""

    module: str
    call: int
    body: list[Operation | Frame]
    steps: list[Step | Heard] = field(default_factory=list[Step | Heard])
    differentiates: bool = field(default_factory=torch.is_grad_enabled)
    cuts: list[Cut] = field(default_factory=list[Cut])


@dataclass(slots=True)
class Aside:
    """What is recorded beside the run: operations, how often modules are called, whether it branches on data."""

    body: list[Operation | Frame] = field(default_factory=list["Operation | Frame"])
    calls: int = 0
    branches: bool = False


@dataclass(frozen=True, slots=True)
class NotedFunction:
    """A function with a backward in Python: autograd's node, the line where it was met, its results by position."""

    node: Any
    location: Location | None
    outputs: dict[int, int]


@dataclass(frozen=True, slots=True)
class NotedHook:
    """A hook in the backward.

    Attributes:
        name: what it is, as messages show it.
        location: where it was registered.
        frame: the call under way, as (module, call).
        run: takes a gradient, or None, for each of `outputs`; returns one, or None, for each of `inputs`.
        outputs, inputs: values whose gradients it gets, and makes; None for what isn't a tensor with a gradient.
        impossible: why it can't run in a sharded model at all; empty if it can.
    """

    name: str
    location: Location | None
    frame: tuple[str, int]
    run: Callable[[Sequence[Tensor | None]], Sequence[Any]]
    outputs: tuple[int | None, ...]
    inputs: tuple[int | None, ...]
    impossible: str = ""


class UnfollowedError(Exception):
    """A body does what shows neither in its operations nor in their backward.

    Attributes:
        way_out: what to do instead; "" where only leaving it out helps.
    """

    def __init__(self, what: str, way_out: str = "") -> None:
        """Say what it does."""
        super().__init__(what)
        self.way_out = way_out


class PackedSequencesError(UnfollowedError):
    """An encoder of torch packs padded sequences; the argument is its name."""


class UnrecordedError(Exception):
    """Why there is no record of a backward."""


__all__ = [
    "Aside",
    "NotedFunction",
    "NotedHook",
    "OpenFrame",
    "PackedSequencesError",
    "UnfollowedError",
    "UnrecordedError",
]
