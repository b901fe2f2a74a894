"""The captured program: values, operations, and the tree of module calls that they happened in.

Every tensor that enters or leaves a module call through its arguments or results gets a value of its own on the
inside (a `Crossing`), so that a crossing is a node of the data flow: the one place that can carry a reshard.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import torch

from tpplan.compat.schemas import OpOverload
from tpplan.compiler.ir.facts import Path
from tpplan.compiler.ir.locations import Location
from tpplan.compiler.ir.observations import (
    Asked,
    Branches,
    CaptureSettings,
    Effects,
    Gradients,
    RandomNumbers,
    ReadNumbers,
)
from tpplan.ops.registry import has_role

Geometry = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of the trace, with its *global* geometry.

    Attributes:
        identifier: position in `Trace.values`.
        shape, stride: in elements.
        dtype: of the captured run.
        differentiable: whether a gradient flows to it.
        numbers: the entries of a constant that was computed for real, to compare with another run's.
    """

    identifier: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool
    numbers: torch.Tensor | None = field(default=None, compare=False, repr=False)

    @property
    def geometry(self) -> Geometry:
        """Shape, stride and dtype."""
        return self.shape, self.stride, self.dtype

    @property
    def bytes(self) -> int:
        """Of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Reference:
    """Stands for a value in the arguments of an operation."""

    identifier: int


@functools.cache
def operator_name(target: OpOverload) -> str:
    """An operator's name, such as `aten.mm.default`."""
    return str(target)


@dataclass(frozen=True, slots=True)
class Operation:
    """One aten operator call.

    Attributes:
        target: the operator overload.
        arguments, keywords: as called, tensors replaced by `Reference`.
        inputs: the values read, in order of appearance.
        outputs: the values made, in order; None where a result isn't a tensor.
        overwritten: values whose storage the operation wrote to, other than its result.
        location: where in the model's source it was called; None for operators that torch itself issued.
    """

    target: OpOverload
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    inputs: tuple[int, ...]
    outputs: tuple[int | None, ...]
    overwritten: tuple[int, ...]
    location: Location | None

    @property
    def name(self) -> str:
        """The operator's name, such as `aten.mm.default`."""
        return operator_name(self.target)

    def is_a(self, *roles: str) -> bool:
        """Whether the operator has one of these roles of the registry."""
        return has_role(operator_name(self.target), *roles)

    def renumbered(self, numbers: Mapping[int, int]) -> Operation:
        """The same of other values; those that `numbers` lacks stay."""

        def number(value: int) -> int:
            return numbers.get(value, value)

        def refer(value: int) -> Reference:
            return Reference(number(value))

        return Operation(
            self.target,
            filled(self.arguments, refer),
            {name: filled(argument, refer) for name, argument in self.keywords.items()},
            tuple(map(number, self.inputs)),
            tuple(None if value is None else number(value) for value in self.outputs),
            tuple(map(number, self.overwritten)),
            self.location,
        )


def filled(argument: Any, fill: Callable[[int], Any]) -> Any:
    """An argument of an operation with something else in place of its references."""
    if isinstance(argument, Reference):
        return fill(argument.identifier)
    return tuple([filled(item, fill) for item in argument]) if isinstance(argument, tuple) else argument  # pyright: ignore


@dataclass(frozen=True, slots=True)
class Crossing:
    """A tensor passing a module boundary.

    Attributes:
        path: where it sits in the arguments (first the parameter's name) or in the results.
        source: the value on the side that it comes from.
        target: the value on the side that it goes to.
        aliases: further places where the very same tensor sits.
    """

    path: Path
    source: int
    target: int
    aliases: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class BackwardGraph:
    """What a backward that torch didn't derive does, with numbers of its own. Equal ones of a trace are one object.

    Attributes:
        values: all values, by number.
        body: the operations that its results depend on.
        arriving: the gradients that it gets.
        saved: the values of the forward that it reads.
        results: the gradients that it makes; None for one that it doesn't.
        failure: why there is no record of it; empty if there is.
        writes: whether it writes to what outlasts it, such as a buffer or an attribute.
    """

    values: tuple[Value, ...]
    body: tuple[Operation, ...]
    arriving: tuple[int, ...]
    saved: tuple[int, ...]
    results: tuple[int | None, ...]
    failure: str = ""
    writes: bool = False


@dataclass(frozen=True, slots=True)
class ForeignBackward:
    """Code in the backward that torch didn't derive: of a `torch.autograd.Function`, a custom operator, or a hook.

    Attributes:
        name: what it is, as messages show it.
        location: the line that it was met at.
        inputs: the values whose gradients it makes; None where it makes none.
        outputs: the values whose gradients it gets.
        saved: the values of the forward that it reads.
        graph: what it does; its `results`, `arriving` and `saved` are those of `inputs`, `outputs` and `saved`.
        sealed: whether it hides values of the forward, so that not even replicated inputs and outputs make it right.
    """

    name: str
    location: Location | None
    inputs: tuple[int | None, ...]
    outputs: tuple[int, ...]
    saved: tuple[int, ...]
    graph: BackwardGraph
    sealed: bool = False

    @property
    def is_hook(self) -> bool:
        """Whether it gets and makes the gradients of the same values, as hooks do; a function's are of others."""
        return set(self.outputs) <= set(self.inputs)


@dataclass(frozen=True, slots=True)
class Cut:
    """The first entries of a tensor, of which a body asks for all that there are, or more: torch records nothing.

    Attributes:
        value: the tensor.
        dim: of it.
        beyond: how many more the body asks for than there are.
    """

    value: int
    dim: int
    beyond: int


@dataclass(frozen=True, slots=True)
class Frame:
    """One call of one module.

    Attributes:
        module: fully qualified name; "" for the root.
        call: how many calls of this module came before.
        entries, exits: the tensors passed in and out.
        body: operations and inner frames, in order of execution.
        backwards: code in its backward that torch didn't derive.
        cuts: where it takes the first entries of a tensor, which are all.
    """

    module: str
    call: int
    entries: tuple[Crossing, ...]
    exits: tuple[Crossing, ...]
    body: tuple[Operation | Frame, ...]
    backwards: tuple[ForeignBackward, ...] = ()
    cuts: tuple[Cut, ...] = ()

    def walk(self) -> Iterator[Frame]:
        """This frame and every inner one, in order of execution."""
        waiting: list[Frame] = [self]
        while waiting:
            frame = waiting.pop()
            yield frame
            waiting.extend([node for node in reversed(frame.body) if isinstance(node, Frame)])

    def in_order(self) -> Iterator[tuple[Frame, Operation | Crossing]]:
        """Operations and crossings, here and in inner frames, in order of execution, each with its frame."""
        yield from ((self, crossing) for crossing in self.entries)
        for node in self.body:
            if isinstance(node, Frame):
                yield from node.in_order()
            else:
                yield self, node
        yield from ((self, crossing) for crossing in self.exits)


def made_inside(frame: Frame, gradless: Set[int]) -> set[int]:
    """What functions with a backward of their own make in a body: their results, what they keep, and what these are of.

    Args:
        frame: a call.
        gradless: what was made with gradients off, as a function's forward is run.
    """
    functions = [held for held in frame.backwards if not held.is_hook]
    found = {value for held in functions for value in (*held.outputs, *held.saved) if value in gradless}
    for node in reversed(frame.body):
        if isinstance(node, Operation) and not found.isdisjoint(node.outputs):
            found.update(value for value in node.inputs if value in gradless)
    return found


@dataclass(frozen=True, slots=True)
class Trace:
    """One run of the model.

    Attributes:
        root: the call of the whole model, without operations whose results nobody reads.
        recorded: the same with every operation, to compare another run with.
        values: all values, by identifier.
        parameters: value identifier to the parameter's qualified names (more than one if it is tied).
        buffers: the same of buffers.
        arguments: the values of the call's tensors by where they sit in its arguments.
        given: values that follow from what the call is passed; all others are there before it, or made of what is.
        settings: how another run is recorded that goes the same way.
        asked: what the bodies ask for beside sizes, dtypes and numbers.
        branches, numbers, draws, gradients, effects: what else was seen of the run; see `ir/observations.py`.
        unread: results of calls that nobody reads, outside of them.
    """

    root: Frame
    recorded: Frame
    values: tuple[Value, ...]
    parameters: dict[int, tuple[str, ...]]
    buffers: dict[int, tuple[str, ...]]
    arguments: dict[Path, int]
    given: frozenset[int]
    settings: CaptureSettings
    asked: Asked
    branches: Branches
    numbers: ReadNumbers
    draws: RandomNumbers
    gradients: Gradients
    effects: Effects
    unread: frozenset[int] = frozenset()

    def sends_back(self, value: int) -> bool:
        """Whether a gradient comes back for a value that crosses a boundary."""
        return self.values[value].differentiable and value not in self.gradients.unanswered

    @property
    def inputs(self) -> tuple[int, ...]:
        """The values of the call's tensors, in order."""
        return tuple(self.arguments.values())

    @property
    def stored(self) -> dict[int, tuple[str, ...]]:
        """The parameters and the buffers."""
        return self.parameters | self.buffers

    @property
    def batch(self) -> int:
        """The example's batch size: the first size of its first tensor."""
        shape = next((self.values[value].shape for value in self.arguments.values()), ())
        return shape[0] if shape else 1


def quoted(module: str) -> str:
    """A module's name as messages show it; the root has none."""
    return f"`{module}`" if module else "the model"
