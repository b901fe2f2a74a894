"""The captured program: values, operations, and the tree of module calls that they happened in.

Every tensor that enters or leaves a module call through its arguments or results gets a value of its own on the
inside (a `Crossing`), so that a crossing is a node of the data flow: the one place that can carry a reshard.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, MappingProxyType
from typing import Any

import torch

from tpplan.compat.schemas import OpOverload
from tpplan.compiler.ir.facts import Facts
from tpplan.ops.registry import has_role

Path = tuple[str | int, ...]
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


@dataclass(frozen=True, slots=True)
class Location:
    """The line of the model's own source that an operation came from."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def short(self) -> str:
        """File and line without the folders that differ from machine to machine."""
        _, installed, inside = self.file.rpartition("site-packages/")
        name = inside if installed else "/".join(self.file.split("/")[-2:])
        return f"{name}:{self.line}"


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
    """

    values: tuple[Value, ...]
    body: tuple[Operation, ...]
    arriving: tuple[int, ...]
    saved: tuple[int, ...]
    results: tuple[int | None, ...]
    failure: str = ""


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


@dataclass(frozen=True, slots=True)
class Assumption:
    """A branch of the model that depends on data: the trace holds the side on which `location`'s test was `taken`.

    `drawn` is whether it depends on random numbers alone, as where a model skips layers by chance.
    """

    module: str
    location: Location | None
    taken: bool = False
    drawn: bool = False


class Sides(frozenset[Location]):
    """The branches on data that take their true side, by line; of some, the side that each test takes, in order.

    Attributes:
        exact: these, by line.
        inside: the same by call of a module and line, which a run knows as well that leaves equal calls out.
    """

    exact: Mapping[Location, tuple[bool, ...]] = MappingProxyType({})
    inside: Mapping[tuple[str, int, Location], tuple[bool, ...]] = MappingProxyType({})

    @classmethod
    def of(cls, tests: Iterable[tuple[Location, bool]], calls: Iterable[tuple[str, int]] = ()) -> Sides:
        """The sides of a run, test by test; and the calls of modules that they were met in, if these are known."""
        tests = [*tests]
        exact: dict[Location, tuple[bool, ...]] = {}
        for location, side in tests:
            exact[location] = (*exact.get(location, ()), side)
        inside: dict[tuple[str, int, Location], tuple[bool, ...]] = {}
        for (location, side), call in zip(tests, calls, strict=False):
            inside[*call, location] = (*inside.get((*call, location), ()), side)
        made = cls(location for location, sides in exact.items() if any(sides))
        made.exact, made.inside = MappingProxyType(exact), MappingProxyType(inside)
        return made

    def also(self, locations: Iterable[Location]) -> Sides:
        """These, and the true sides of further branches."""
        made = Sides((*self, *locations))
        made.exact, made.inside = self.exact, self.inside
        return made

    def side(self, location: Location, number: int, call: tuple[str, int], there: int) -> bool:
        """Which side a test takes that is the `number`th at its line, and the one numbered `there` in its call."""
        own = self.inside.get((*call, location), ())
        if there < len(own):
            return own[there]
        sides = self.exact.get(location, ())
        return sides[number] if number < len(sides) else location in self


@dataclass(frozen=True, slots=True)
class Asked:
    """What the bodies ask for that isn't otherwise part of a call's kind.

    Attributes:
        memory: the methods by which they ask how tensors lie in memory.
        flags: the parameters of which they ask whether these require grad.
        settings: of torch, that they ask for; see `state/ambient`.
    """

    memory: frozenset[str] = frozenset()
    flags: frozenset[str] = frozenset()
    settings: frozenset[str] = frozenset()

    def __or__(self, other: Asked) -> Asked:
        return Asked(self.memory | other.memory, self.flags | other.flags, self.settings | other.settings)


@dataclass(frozen=True, slots=True)
class Trace:
    """One run of the model.

    Attributes:
        root: the call of the whole model, without operations whose results nobody reads.
        recorded: the same with every operation, to compare another run with.
        values: all values, by identifier.
        parameters: value identifier to the parameter's qualified names (more than one if it is tied).
        buffers: the same of buffers.
        inputs: identifiers of the root's example inputs.
        training: whether the run was in training mode.
        assumptions: data-dependent branches met on the way.
        kept: values that modules hold in attributes after the run, with the attributes' names.
        chosen: frames, as (module, call), whose bodies look for the entries of a tensor that aren't zero.
        arguments: the inputs by where they sit in the call's arguments.
        left: values that the run leaves in lists and dicts among the call's arguments, by their place there.
        hidden: values in objects among the results that nobody can look into, with the objects' classes.
        device: where the bodies were told that their tensors lie.
        gradless: values made with gradients off, in calls that began with gradients on: under `no_grad`, or inside of a
            function with a backward of its own.
        unanswered: values that cross a boundary, may have a gradient, and get none: passed to a module under `no_grad`,
            or of which nobody reads what is made.
        unread: results of calls that nobody reads, outside of them.
        given: values that follow from what the call is passed; all others are there before it, or made of what is.
        of_buffers: constants that are buffers, whose numbers all ranks take from the first.
        takes_gradients: whether the forward takes gradients itself.
        sides: those that branches on data were told to take.
        cached: the code of functions that keep their results, such as those under `functools.lru_cache`.
        tested: values that the model branches on, with the lines where it does.
        written: the places that the run changes: attributes, globals and what these hold.
        state: what all such places hold after the run, in numbers or text; None for what can't be told so.
        outside: of what is `kept` that which no attribute of a module holds, but a hook or a global.
        seeded: random numbers that were drawn after the forward had set the generator.
        asked: what the bodies ask for beside sizes, dtypes and numbers.
        reducing: modules whose bodies' reductions are recorded as functions over classes.
        in_objects: the places of what is `left` that are in objects, such as caches, which only models read.
        facts: what the bodies read of the example's numbers; None if these were kept from them.
        reads: the same by call, as (module, call).
        known: values whose numbers follow from the example's.
        wraps: whether the run is passed, or leaves, tensors of classes of their own.
        looking: modules whose bodies' look-ups are recorded as functions over the rows of their tables.
        effects: values that the run makes for more than its results, such as what it writes and leaves.
        picking: of how many numbers bodies pick something by those that aren't zero, with how many are found.
        drawn: generators of random numbers, by name, that Python is told numbers of.
        draws_unseen: whether any such number was drawn otherwise than to compare it.
        tests: the sides of all branches on data, test by test.
        records: whether autograd recorded the run.
        reread: the places around the modules, of those that the run fills, of which this run or the next reads what
            stood there before.
    """

    root: Frame
    recorded: Frame
    values: tuple[Value, ...]
    parameters: dict[int, tuple[str, ...]]
    inputs: tuple[int, ...]
    training: bool
    assumptions: tuple[Assumption, ...] = field(default=())
    kept: dict[int, str] = field(default_factory=dict[int, str])
    chosen: frozenset[tuple[str, int]] = frozenset()
    arguments: dict[Path, int] = field(default_factory=dict[Path, int])
    left: dict[Path, int] = field(default_factory=dict[Path, int])
    buffers: dict[int, tuple[str, ...]] = field(default_factory=dict[int, tuple[str, ...]])
    hidden: dict[int, str] = field(default_factory=dict[int, str])
    device: torch.device = field(default=torch.device("cpu"))
    gradless: frozenset[int] = frozenset()
    takes_gradients: bool = False
    sides: Sides = field(default_factory=Sides)
    cached: frozenset[CodeType] = frozenset()
    tested: dict[int, Location | None] = field(default_factory=dict["int", "Location | None"])
    written: frozenset[str] = frozenset()
    state: Mapping[str, object] = field(default_factory=dict[str, object])
    outside: frozenset[int] = frozenset()
    seeded: frozenset[int] = frozenset()
    asked: Asked = field(default_factory=Asked)
    reducing: frozenset[str] = frozenset()
    in_objects: frozenset[Path] = frozenset()
    facts: Facts | None = None
    reads: Mapping[tuple[str, int], Sequence[object]] = field(default_factory=dict[tuple[str, int], "Sequence[object]"])
    known: frozenset[int] = frozenset()
    wraps: bool = False
    unanswered: frozenset[int] = frozenset()
    looking: frozenset[str] = frozenset()
    unread: frozenset[int] = frozenset()
    effects: frozenset[int] = frozenset()
    picking: frozenset[tuple[int, int]] = frozenset()
    given: frozenset[int] = frozenset()
    of_buffers: frozenset[int] = frozenset()
    drawn: frozenset[str] = frozenset()
    draws_unseen: bool = False
    tests: Sides = field(default_factory=Sides)
    records: bool = True
    reread: frozenset[str] = frozenset()

    def sends_back(self, value: int) -> bool:
        """Whether a gradient comes back for a value that crosses a boundary."""
        return self.values[value].differentiable and value not in self.unanswered

    @property
    def stored(self) -> dict[int, tuple[str, ...]]:
        """The parameters and the buffers."""
        return self.parameters | self.buffers

    @property
    def batch(self) -> int:
        """The example's batch size: the first size of its first tensor."""
        shape = self.values[self.inputs[0]].shape if self.inputs else ()
        return shape[0] if shape else 1

    @property
    def taken(self) -> Sides:
        """Where data-dependent branches were taken on their true side."""
        if self.sides.exact:
            return self.sides
        return Sides(a.location for a in self.assumptions if a.taken and a.location is not None)


def quoted(module: str) -> str:
    """A module's name as messages show it; the root has none."""
    return f"`{module}`" if module else "the model"
