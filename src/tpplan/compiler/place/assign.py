"""Assign: read the chosen way back out of the placement, module call by module call.

in:  instances and the root's solution
out: `Assignment`: the layout of every value of the trace, the reshards of every call, the parameters' gradients
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace

from tpplan.compiler.ir.layout import PARTIAL, REPLICATED, Features, Layout
from tpplan.compiler.ir.region import CallNode, Instance, OperationNode, Region, RegionBoundary
from tpplan.compiler.ir.replaced_bodies import MovedOperand, RecordedBody
from tpplan.compiler.ir.trace import BackwardGraph, Frame, Operation, Path, Trace, Value
from tpplan.compiler.place.solution import (
    Called,
    Choice,
    Decided,
    Dispatched,
    Entered,
    Left,
    Normed,
    PlacedRun,
    Recurred,
    Solution,
    settled,
)
from tpplan.compiler.rewrite.recognise import Norm
from tpplan.compiler.rewrite.replay import recorded_body
from tpplan.compiler.rewrite.settle import moved_operand
from tpplan.compiler.rules.backwards import Around, BackwardFault, BackwardLayouts, backward_layouts
from tpplan.compiler.rules.propagate import Propagator


@dataclass(frozen=True, slots=True)
class PlacedReshard:
    """A change of layout at one boundary of one call.

    Attributes:
        path: where the tensor sits in the arguments or results.
        aliases: further places where the very same tensor sits.
        source, target: the layouts before and after.
        value: the value of the trace on the inside for an entry, on the outside for an exit.
    """

    path: Path
    aliases: tuple[Path, ...]
    source: Layout
    target: Layout
    value: int


@dataclass(frozen=True, slots=True)
class PlacedNorm:
    """A norm over split features.

    Attributes:
        norm: what it computes.
        layout: how the features lie.
        weight, bias: its parameters' values of the trace.
    """

    norm: Norm
    layout: Layout
    weight: int | None
    bias: int | None


@dataclass(frozen=True, slots=True)
class PlacedMove:
    """A change of layout inside of a body, before an operation.

    Attributes:
        place: which operation of the body, and which of its operands.
        operation: the operation.
        value: the operand's value of the trace.
        source, target: the layouts before and after.
        again: whether the same value was moved so before, for another operation, and nothing was written since.
        backward: the record of which it is an operation and a value, if it isn't the body's own but of its backward.
    """

    place: MovedOperand
    operation: OperationNode | Operation
    value: int
    source: Layout
    target: Layout
    again: bool
    backward: BackwardGraph | None = None

    def moved(self, trace: Trace) -> Value:
        """What is moved."""
        return (trace if self.backward is None else self.backward).values[self.value]


@dataclass(slots=True)
class FrameAssignment:
    """What was decided for one call.

    Attributes:
        frame: the call.
        entries, exits: reshards of its arguments and results.
        normed: the norm over split features that its body is replaced by.
        dispatched: how tokens lie that go to the ranks with their experts.
        moves: reshards inside of its body.
        averages: whether ranks make their parts of a mean.
    """

    frame: Frame
    entries: list[PlacedReshard] = field(default_factory=list[PlacedReshard])
    exits: list[PlacedReshard] = field(default_factory=list[PlacedReshard])
    normed: PlacedNorm | None = None
    dispatched: Layout | None = None
    moves: list[PlacedMove] = field(default_factory=list[PlacedMove])
    averages: bool = False


@dataclass(slots=True)
class Assignment:
    """Everything decided.

    Attributes:
        layouts: by value of the trace.
        frames: by module and call, in order of execution.
        partial: names of replicated parameters that get a partial gradient, with the modules whose bodies cause it.
        whole: names of replicated parameters that get a whole gradient, likewise.
        once: names of biases that one rank alone adds to a partial result, with the modules that they are added in.
        heads: the numbers of heads, as packs, by which values could be split.
        features: the numbers of features, likewise, by which tensors made anew could be.
        sliced: modules whose bodies take parts of whole values, with the operations that read these.
        moved: modules whose bodies reshard values between their operations.
    """

    layouts: dict[int, Layout] = field(default_factory=dict[int, Layout])
    frames: list[FrameAssignment] = field(default_factory=list[FrameAssignment])
    partial: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    whole: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    once: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    heads: Features = frozenset()
    features: Features = frozenset()
    sliced: dict[str, list[OperationNode]] = field(default_factory=lambda: defaultdict(list))
    moved: set[str] = field(default_factory=set[str])

    @property
    def replayed(self) -> set[str]:
        """Modules whose bodies have to run from their records."""
        return {*self.sliced, *self.moved}

    def around(self, trace: Trace) -> Around:
        """How the values lie that code in a backward reads, and whose gradients it gets and makes."""

        def partial(value: int) -> bool | None:
            names = trace.parameters.get(value)
            return None if names is None else names[0] in self.partial

        return Around(lambda value: self.layouts.get(value, REPLICATED), trace.values, partial)

    def exchange_in_backwards(self, trace: Trace, rules: Propagator, unrecorded: Collection[str]) -> None:
        """Note what bodies exchange in code in their backwards that torch didn't derive, but these modules' bodies."""
        around = self.around(trace)
        for decided in self.frames:
            name = decided.frame.module
            for backward in decided.frame.backwards if name and name not in unrecorded else ():
                if backward.graph.failure or backward.sealed or around.is_whole(backward):
                    continue
                found = backward_layouts(around, rules, backward)
                if isinstance(found, BackwardFault):
                    continue  # the check tells it
                for place, node, value, target in _moved_in(backward.graph, found):
                    source = found.layouts.get(value, REPLICATED)
                    decided.moves.append(PlacedMove(place, node, value, source, target, False, backward.graph))
                    self.moved.add(name)


def _moved_in(graph: BackwardGraph, found: BackwardLayouts) -> Iterator[tuple[MovedOperand, Operation, int, Layout]]:
    """What is exchanged before which operation of a backward."""
    for position, node in enumerate(graph.body):
        number = sum(other.name == node.name for other in graph.body[:position])
        for value, target in found.moves.get(next((o for o in node.outputs if o is not None), -1), {}).items():
            operand = [*dict.fromkeys(node.inputs)].index(value)
            yield MovedOperand(node.name, number, operand, target), node, value, target


def assign(
    root: Instance,
    solution: Solution,
    parameters: dict[int, tuple[str, ...]],
    inputs: tuple[Layout, ...],
    heads: Features = frozenset(),
    features: Features = frozenset(),
) -> Assignment:
    """Read `solution` of the root region back onto the trace.

    Args:
        root: the instance tree.
        solution: of `root.region`, for these `inputs`.
        parameters: names by value, from the trace.
        inputs: the layouts of the region's inputs.
        heads: the numbers of heads that it was solved for.
        features: the ways to split features that it was solved for.
    """
    reader = _AssignmentReader(parameters)
    reader.assignment.heads, reader.assignment.features = heads, features
    reader.read(root, solution, inputs)
    return reader.assignment


def record_of(assignment: Assignment, trace: Trace, module: str, size: int) -> RecordedBody:
    """What a module's record has to know of an assignment."""
    decided = next(held for held in assignment.frames if held.frame.module == module)
    partial = [name for names in trace.parameters.values() if names[0] in assignment.partial for name in names]
    moves = [move.place for move in decided.moves if move.backward is None]
    body = recorded_body(
        decided.frame, assignment.layouts, assignment.heads, assignment.features, moves, partial
    )  # fmt: skip
    shapes = {path: trace.values[c.target].shape for c in decided.frame.entries for path in (c.path, *c.aliases)}
    lengths = tuple((path, _uneven(layout, shapes[path], size)) for path, layout in body.inputs)
    weights = tuple(c.path for c in decided.frame.entries if moves and c.target not in trace.given)
    return replace(
        body, averages=decided.averages, lengths=tuple((path, n) for path, n in lengths if n), weights=weights
    )


def _uneven(layout: Layout, shape: tuple[int, ...], size: int) -> int:
    """The length of a split dim of which ranks have unequal parts; 0 if there is none."""
    return 0 if layout.dim is None or layout.is_even(shape[layout.dim], size) else shape[layout.dim]


def _position(choice: Choice) -> float:
    """Where in the body a choice was made: what was left open was chosen later."""
    if isinstance(choice, (PlacedRun, Called)):
        return choice.node
    return math.inf if isinstance(choice, Left) else -1


class _AssignmentReader:
    """Reads solutions back; what equal layers share, a region or a solution, is looked at once."""

    def __init__(self, parameters: dict[int, tuple[str, ...]]) -> None:
        self.assignment = Assignment()
        self._parameters = parameters
        self._fixed: dict[int, list[tuple[int, Layout]]] = {}
        self._calls: dict[int, list[int]] = {}
        self._choices: dict[tuple[object, ...], list[Choice]] = {}
        self._taken: dict[int, list[Choice]] = {}

    def read(self, instance: Instance, solution: Solution, inputs: tuple[Layout, ...]) -> None:
        region, values = instance.region, instance.values
        held = self.assignment.layouts
        for number, layout in zip(region.inputs, inputs, strict=True):
            held.setdefault(values[number], layout)
        for number, layout in self._fixed_in(region):
            held.setdefault(values[number], layout)
        decided = FrameAssignment(instance.frame)
        self.assignment.frames.append(decided)
        children = dict(zip(self._calls[id(region)], instance.children, strict=True))
        fresh: set[tuple[int, Layout]] = set()
        chosen = self._chosen(instance, solution)
        held.update((values[c.value], c.layout) for c in chosen if isinstance(c, Decided))  # before these are made
        for choice in chosen:
            if isinstance(choice, PlacedRun):
                for output, layout in zip(region.nodes[choice.node].outputs, choice.outcome.outputs, strict=True):
                    if output is not None:
                        held[values[output]] = layout
                if choice.outcome.slices:
                    node = region.nodes[choice.node]
                    assert isinstance(node, OperationNode)
                    self.assignment.sliced[instance.frame.module].append(node)
                self._move(instance, choice, decided, fresh)
                self._note(choice.outcome.partial_parameters, self.assignment.partial, instance)
                self._note(choice.outcome.replicated_parameters, self.assignment.whole, instance)
            elif isinstance(choice, Called):
                self.read(children[choice.node], choice.solution, choice.inputs)
                outputs = region.nodes[choice.node].outputs
                for output, layout in zip(outputs, choice.solution.outputs, strict=True):
                    if output is not None and layout is not None:
                        held[values[output]] = layout
            elif isinstance(choice, Normed):
                own = [None if i is None else values[i] for i in (choice.norm.weight, choice.norm.bias)]
                decided.normed = PlacedNorm(choice.norm, choice.layout, *own)
                held[values[region.exits[0].source]] = choice.layout
            elif isinstance(choice, Recurred):
                for boundary, layout in zip(region.exits, choice.layouts, strict=True):
                    held[values[boundary.source]] = layout
            elif isinstance(choice, Dispatched):
                decided.dispatched = held[values[region.exits[0].source]] = choice.layout
            elif isinstance(choice, Entered):
                self._cross(instance, region.entries, choice.layouts, decided.entries)
            elif isinstance(choice, Left):
                if region.reduced or (region.shared and decided.dispatched is None):
                    held[values[region.exits[0].source]] = PARTIAL
                self._cross(instance, region.exits, self._outside(instance, choice), decided.exits)
                self._note(choice.partial_parameters, self.assignment.partial, instance)
                self._note(choice.replicated_parameters, self.assignment.whole, instance)
                self._note(choice.added_once, self.assignment.once, instance)

    def _outside(self, instance: Instance, choice: Left) -> tuple[Layout, ...]:
        """The layouts of what leaves: as its reader decided, or as it is made if nobody reads it."""
        held, values = self.assignment.layouts, instance.values
        return tuple(
            layout or held.get(values[boundary.target]) or held.get(values[boundary.source], REPLICATED)
            for boundary, layout in zip(instance.region.exits, choice.layouts, strict=True)
        )

    def _move(
        self, instance: Instance, choice: PlacedRun, decided: FrameAssignment, fresh: set[tuple[int, Layout]]
    ) -> None:
        """Note what an operation's operands are moved to; `fresh` are the moves since something was written."""
        node = instance.region.nodes[choice.node]
        assert isinstance(node, OperationNode)
        if node.overwritten:
            fresh.clear()
        if choice.outcome.averages:
            decided.averages = True
            self.assignment.moved.add(instance.frame.module)
        for number, target in choice.outcome.moves:
            value = instance.values[number]
            place = moved_operand(instance.region, choice.node, number, target)
            source, again = self.assignment.layouts.get(value, REPLICATED), (value, target) in fresh
            decided.moves.append(PlacedMove(place, node, value, source, target, again))
            fresh.add((value, target))
            self.assignment.moved.add(instance.frame.module)

    def _cross(
        self,
        instance: Instance,
        boundaries: tuple[RegionBoundary, ...],
        layouts: tuple[Layout, ...],
        decided: list[PlacedReshard],
    ) -> None:
        held, values = self.assignment.layouts, instance.values
        for boundary, layout in zip(boundaries, layouts, strict=True):
            source = held.get(values[boundary.source], REPLICATED)
            held[values[boundary.target]] = layout
            if source != layout:
                decided.append(PlacedReshard(boundary.path, boundary.aliases, source, layout, values[boundary.target]))

    def _fixed_in(self, region: Region) -> list[tuple[int, Layout]]:
        """The layouts of a region's parameters and constants."""
        if id(region) not in self._fixed:
            self._calls[id(region)] = [i for i, node in enumerate(region.nodes) if isinstance(node, CallNode)]
            self._fixed[id(region)] = [
                (number, value.parameter or REPLICATED)
                for number, value in enumerate(region.values)
                if value.parameter is not None or value.constant
            ]
        return self._fixed[id(region)]

    def _chosen(self, instance: Instance, solution: Solution) -> list[Choice]:
        """What was chosen, in the order of the body, where the caller has chosen the layouts of results left open."""
        if id(solution) not in self._taken:
            assert solution.steps is not None
            self._taken[id(solution)] = solution.steps.in_order()
        taken, held = self._taken[id(solution)], self.assignment.layouts
        left = taken[-1]
        ways = left.ways if isinstance(left, Left) else ()
        picked = [
            held.setdefault(instance.values[boundary.target], next(iter(way)))
            for boundary, way in zip(instance.region.exits, ways, strict=False)
            if way
        ]
        key = (id(solution), *picked)
        if key not in self._choices:
            later = [way[layout] for way, layout in zip(filter(None, ways), picked, strict=True)]
            choices = [*taken, *(choice for trail in later if trail is not None for choice in trail.in_order())]
            self._choices[key] = sorted(settled(choices), key=_position)
        return self._choices[key]

    def _note(self, numbers: frozenset[int], into: dict[str, list[str]], instance: Instance) -> None:
        for number in sorted(numbers) if numbers else ():
            into[self._parameters[instance.values[number]][0]].append(instance.frame.module)
