"""Regions: module calls with their names taken off, so that equal layers are one object and are solved once.

in:  a trace and the bindings of its modules
out: a tree of `Instance`s over shared `Region`s

    layers.0, layers.1, … layers.125   ->   one Region; 126 Instances that map its local values to the trace's
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from tpplan.compat.schemas import OpOverload
from tpplan.compiler.ir.layout import Layout, Pack
from tpplan.compiler.ir.locations import Location
from tpplan.compiler.ir.replaced_bodies import Recurrence, SharedExperts
from tpplan.compiler.ir.trace import Frame, Path, operator_name
from tpplan.ops.registry import has_role
from tpplan.plan import Pin, Style

_PICKS = 64


@dataclass(frozen=True, slots=True)
class LocalValue:
    """A value of a region.

    Attributes:
        shape, stride, dtype, differentiable: see `Value`.
        parameter: of a parameter: its layout when sharded, REPLICATED otherwise; of a buffer its layout when sharded.
        constant: whether it is there before the call.
        picks: the numbers of a short row of integers that the model made of Python's.
        gradless: see `Trace`.
        weight: whether it follows from parameters alone, of which one is split.
        lengths: how many of its first dims have the size of the call's batch and sequence, of a value that follows from
            what is passed: these count neither heads nor features, whatever the example's size.
        answered: of the largest entries along a dim: whether a gradient may come back to them.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool
    parameter: Layout | None = None
    constant: bool = False
    picks: tuple[int, ...] | None = None
    gradless: bool = False
    weight: bool = False
    lengths: int = 0
    answered: bool = False

    @property
    def bytes(self) -> int:
        """Of the whole value."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class OperationNode:
    """An operation of a region; `Reference`s hold local numbers."""

    target: OpOverload
    arguments: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...]
    inputs: tuple[int, ...]
    outputs: tuple[int | None, ...]
    overwritten: tuple[int, ...]
    location: Location | None = field(compare=False)

    @property
    def name(self) -> str:
        """The operator's name, such as `aten.mm.default`."""
        return operator_name(self.target)

    def is_a(self, *roles: str) -> bool:
        """Whether the operator has one of these roles of the registry."""
        return has_role(operator_name(self.target), *roles)


@dataclass(frozen=True, slots=True)
class CallNode:
    """A module call inside a region; numbers are local to the calling region."""

    region: Region
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RegionBoundary:
    """A crossing; numbers are local.

    `pin` is what the plan demands of the layout on the inside (of an entry) or on the outside (of an exit); `packs` are
    those of a value that is pinned to be sharded; `unread` are results of layers that compute for nobody; `dead` are
    results that nobody reads, through whatever modules they leave, and that no plan pins; `final` are those of the
    root, and results of a module with many that leave the model and that nobody reads before.
    """

    path: Path
    aliases: tuple[Path, ...]
    source: int
    target: int
    pin: Pin | None
    packs: tuple[Pack, ...] = ()
    unread: bool = False
    dead: bool = False
    final: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """The content of a module call, up to names. Compared by identity: equal regions are the same object.

    Attributes:
        values: geometry by local number.
        inputs: values that come from outside: sources of entries first, then values read without crossing.
        outputs: values handed outside: targets of exits first, then values that leave without crossing.
        entries, exits: boundaries that can carry a reshard.
        nodes: the body.
        style: the plan's style of the module; None where it has none.
        reduced: whether it is a product by rows or a look-up by rows and nothing else, whose result is partial.
        depth: nesting, for breaking ties.
        fixed: whether its boundaries may carry a reshard only where the plan pins one.
        example: the module and call that it was first met in; a name for the region.
        has_own_backward: whether there is code in its backward that torch didn't derive, so that what computes the same
            forward can't take its place.
        shared: whether each rank runs whole experts of its own.
        recurrent: what recurrent layer it is, if each rank computes its features of the hidden state.
        stack: the experts, if they are stacked.
        of_weights: whether it computes of parameters alone, of which one is split.
    """

    values: tuple[LocalValue, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    entries: tuple[RegionBoundary, ...]
    exits: tuple[RegionBoundary, ...]
    nodes: tuple[OperationNode | CallNode, ...]
    style: Style | None
    reduced: bool
    depth: int
    fixed: bool
    example: tuple[str, int]
    has_own_backward: bool = False
    shared: bool = False
    recurrent: Recurrence | None = None
    stack: SharedExperts | None = None
    of_weights: bool = False


@dataclass(frozen=True, slots=True)
class Instance:
    """One module call: its region, the trace's values by local number, and the calls inside, in order."""

    frame: Frame
    region: Region
    values: tuple[int, ...]
    children: tuple[Instance, ...]

    def walk(self) -> Iterator[Instance]:
        """This call and all inside of it, outermost first."""
        yield self
        for child in self.children:
            yield from child.walk()


def picks_of(numbers: torch.Tensor | None) -> tuple[int, ...] | None:
    """The numbers of a row of integers that is short enough to be written out."""
    if numbers is None or numbers.dtype is not torch.int64 or numbers.dim() != 1 or not 0 < len(numbers) <= _PICKS:
        return None
    return tuple(int(n) for n in numbers)
