"""The building of regions: module calls with their names taken off, so that equal layers are one object.

in:  a trace and the bindings of its modules
out: a tree of `Instance`s over shared `Region`s

    layers.0, layers.1, … layers.125   ->   one Region; 126 Instances that map its local values to the trace's
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tpplan.compiler.bind.bind import Binding, Bound
from tpplan.compiler.ir.layout import REPLICATED, Pack
from tpplan.compiler.ir.region import CallNode, Instance, LocalValue, OperationNode, Region, RegionBoundary, picks_of
from tpplan.compiler.ir.replaced_bodies import Recurrence
from tpplan.compiler.ir.trace import (
    Crossing,
    ForeignBackward,
    Frame,
    Operation,
    Path,
    Reference,
    Trace,
    filled,
    made_inside,
)
from tpplan.compiler.rules.recurrent import made_layout
from tpplan.compiler.trace.unread import final_values, live_values
from tpplan.plan import Pin, Style

_FEW = 2  # results of a call, of which all combinations of layouts may be tried


@dataclass(slots=True)
class RegionTable:
    """The regions made so far, by content, so that those of a later build are the same objects where they are equal."""

    regions: dict[object, Region] = field(default_factory=dict[object, Region])
    values: dict[object, LocalValue] = field(default_factory=dict[object, LocalValue])


def build_regions(
    trace: Trace,
    binding: Binding,
    fixed: frozenset[str] = frozenset(),
    table: RegionTable | None = None,
    parts: Collection[int] = (),
) -> Instance:
    """Turn a trace into instances over shared regions.

    Args:
        trace: as captured.
        binding: what the plan says of modules and parameters.
        fixed: modules whose boundaries may not carry a reshard unless the plan pins one.
        table: regions of an earlier build of the same trace, and after it of this one.
        parts: inputs of the trace of which a rank gets its part only.
    """
    return _Builder(trace, binding, fixed, table or RegionTable(), parts).build(trace.root, 0)


class _Builder:
    """Numbers each frame's values and writes its content as a key; a region is made only for a key that is new."""

    def __init__(
        self, trace: Trace, binding: Binding, fixed: frozenset[str], table: RegionTable, parts: Collection[int]
    ) -> None:
        self.trace = trace
        self.binding = binding
        self.fixed = fixed
        self.interned = table.regions
        self.free, self.escapes, self.constants = _uncrossed(trace, parts)
        passed = {c.source for frame in trace.root.walk() for c in frame.entries}  # also where nobody reads it there
        live = live_values(trace.root) | trace.unread | passed
        self.dead = {c.target for frame in trace.root.walk() for c in frame.exits if c.target not in live}
        self.final = final_values(trace.root, self.dead)
        self.lasting, self.weights, self.passed = _lasting(trace, binding, self.constants)
        self._kinds = table.values
        self._answered: set[int] = set()
        self._left = trace.effects.leaving

    def build(self, frame: Frame, depth: int) -> Instance:
        local = _Numbers()
        bound = self.binding.modules.get(frame.module)
        sources = [crossing.source for crossing in frame.entries]
        inputs = tuple(dict.fromkeys(local(i) for i in (*sources, *self.free.get(id(frame), ()))))
        entries = tuple([(c.path, c.aliases, local(c.source), local(c.target)) for c in frame.entries])
        children: list[Instance] = []
        nodes: list[object] = []
        for node in frame.body:
            if isinstance(node, Operation):
                nodes.append(_operation_key(node, local))
                continue
            child = self.build(node, depth + 1)
            children.append(child)
            nodes.append(
                CallNode(
                    child.region,
                    tuple([local(child.values[i]) for i in child.region.inputs]),
                    tuple([local(child.values[i]) for i in child.region.outputs]),
                )
            )
        exits = tuple([(c.path, c.aliases, local(c.source), local(c.target)) for c in frame.exits])
        outputs = tuple(
            dict.fromkeys(local(i) for i in (*(c.target for c in frame.exits), *self.escapes.get(id(frame), ())))
        )
        backwards = tuple([_backward_key(held, local) for held in frame.backwards])
        if any(isinstance(node, Operation) and node.is_a("largest", "smallest") for node in frame.body):
            self._answered |= self._answered_in(frame)
        values = [self._local_value(identifier) for identifier in local.numbers]
        entry_pin, exit_pin = _entry_pin(bound), bound.output if bound is not None else None
        style, packs = (bound.style, bound.packs) if bound is not None else (None, ())
        style = None if style is Style.NONE else style
        reduced = bool(exits) and bound is not None and style in (Style.ROWWISE, Style.VOCAB) and not bound.walked
        shared = bool(exits) and bound is not None and bound.experts is not None
        recurrent = bound.recurrent if bound is not None and exits else None
        exit_packs = [_exit_packs(c.path, recurrent, packs) for c in frame.exits]
        stack = bound.experts if shared and bound is not None and bound.experts is not None else None
        stack = None if stack is None or stack.owner is not None else stack
        fixed = frame.module in self.fixed
        of_weights = not self.weights.isdisjoint(local.numbers) and self.lasting.issuperset(local.numbers)
        unread = tuple([c.target in self.trace.unread for c in frame.exits])
        free = exit_pin is None and style is None
        dead = tuple([free and depth > 0 and c.target in self.dead for c in frame.exits])
        leads_out = free and not fixed and len(frame.exits) > _FEW  # else the last of equal layers would be another
        final = tuple([depth == 0 or (leads_out and c.target in self.final) for c in frame.exits])
        key = (
            tuple(map(id, values)), inputs, outputs, entries, exits, unread, dead, final, tuple(nodes),
            entry_pin, exit_pin, style, reduced, packs, fixed, backwards, shared, recurrent, stack, of_weights,
        )  # fmt: skip
        region = self.interned.get(key)
        if region is None:
            made = [
                _operation(node, local) if isinstance(node, Operation) else held
                for node, held in zip(frame.body, nodes, strict=True)
            ]
            region = self.interned[key] = Region(
                tuple(values), inputs, outputs,
                tuple(RegionBoundary(*entry, None if i else entry_pin, packs) for i, entry in enumerate(entries)),
                tuple(
                    RegionBoundary(*held, exit_pin, own, *read)
                    for held, own, *read in zip(exits, exit_packs, unread, dead, final, strict=True)
                ),
                tuple(node for node in made if isinstance(node, (OperationNode, CallNode))),
                style, reduced, depth, fixed, (frame.module, frame.call), bool(backwards), shared,
                recurrent, stack, of_weights,
            )  # fmt: skip
        return Instance(frame, region, tuple(local.numbers), tuple(children))

    def _answered_in(self, frame: Frame) -> set[int]:
        """The largest entries that a body finds to which a gradient may come back from what it does with them.

        What leaves the body, or is passed on, may get one.
        """
        operations = [node for node in frame.body if isinstance(node, Operation)]
        calls = [node for node in frame.body if isinstance(node, Frame)]
        apart = self.trace.gradients.taken_inside or any(node.overwritten for node in operations)
        found = {c.source for crossings in (frame.exits, *(call.entries for call in calls)) for c in crossings}
        found |= {*self.escapes.get(id(frame), ()), *self._left, *(i for call in calls for i in self._free_in(call))}
        for node in reversed(operations):
            if not found.isdisjoint(o for o in node.outputs if o is not None and self._has_gradient(o)):
                found.update(node.inputs)
        made = {o for node in operations if node.is_a("largest", "smallest") for o in node.outputs if o is not None}
        made -= made_inside(frame, self.trace.gradients.gradless)  # their gradients are what is recorded of a backward
        return {o for o in made if self._has_gradient(o) and (frame.backwards or apart or o in found)}

    def _has_gradient(self, identifier: int) -> bool:
        return self.trace.values[identifier].differentiable

    def _free_in(self, frame: Frame) -> Iterator[int]:
        """What a call and those inside of it read that they aren't passed."""
        yield from self.free.get(id(frame), ())
        for node in frame.body:
            if isinstance(node, Frame):
                yield from self._free_in(node)

    def _local_value(self, identifier: int) -> LocalValue:
        """The value without its number: one object for all that are equal."""
        value = self.trace.values[identifier]
        names = self.trace.parameters.get(identifier)
        layout = None if names is None else self.binding.parameters[names[0]]
        buffer = self.binding.parameters.get(self.trace.buffers.get(identifier, ("",))[0])
        layout = buffer if buffer not in (None, REPLICATED) else layout
        constant, picks = identifier in self.constants, picks_of(value.numbers)
        gradless = identifier in self.trace.gradients.gradless
        weight, lengths = identifier in self.weights, self._lengths(identifier)
        key = (
            value.shape, value.stride, value.dtype, value.differentiable, layout, constant, picks, gradless, weight,
            lengths, identifier in self._answered,
        )  # fmt: skip
        found = self._kinds.get(key)
        if found is None:
            found = self._kinds[key] = LocalValue(*key)
        return found

    def _lengths(self, identifier: int) -> int:
        """How many of its first dims are the batch and the sequence: of the sizes of the call's first tensor."""
        if identifier not in self.passed:
            return 0
        shape, first = self.trace.values[identifier].shape, self.trace.values[self.trace.inputs[0]].shape
        if not shape or shape[:1] != first[:1]:
            return 0
        return 2 if len(shape) == 3 and shape[1:2] == first[1:2] else 1  # of four dims, the second are heads


class _Numbers:
    """Numbers a frame's values by the order in which they are met."""

    __slots__ = ("numbers",)

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}

    def __call__(self, identifier: int) -> int:
        return self.numbers.setdefault(identifier, len(self.numbers))


def _entry_pin(bound: Bound | None) -> Pin | None:
    """What the plan demands of the first argument."""
    if bound is None:
        return None
    if bound.input is not None:
        return bound.input
    return {
        Style.COLWISE: Pin.REPLICATE,
        Style.ROWWISE: Pin.SHARD,
        Style.VOCAB: Pin.REPLICATE,
        Style.SEQUENCE: Pin.SEQUENCE,
        Style.REPLICATE: Pin.REPLICATE,
    }.get(bound.style)


def _exit_packs(path: Path, recurrent: Recurrence | None, packs: tuple[Pack, ...]) -> tuple[Pack, ...]:
    """The packs of a result that is pinned to be sharded."""
    return packs if recurrent is None else made_layout(recurrent, path, 1).packs


def _operation(node: Operation, local: _Numbers) -> OperationNode:
    def refer(value: int) -> Reference:
        return Reference(local(value))

    return OperationNode(
        node.target,
        filled(node.arguments, refer),
        tuple((name, filled(a, refer)) for name, a in node.keywords.items()),
        tuple(local(i) for i in node.inputs),
        tuple(None if o is None else local(o) for o in node.outputs),
        tuple(local(i) for i in node.overwritten),
        node.location,
    )


def _operation_key(node: Operation, local: _Numbers) -> object:
    def typed(argument: Any) -> object:
        # Python holds 1 == 1.0 == True; operators don't.
        if isinstance(argument, Reference):
            return (Reference, local(argument.identifier))
        if isinstance(argument, tuple):
            return tuple([typed(item) for item in argument])  # pyright: ignore
        return (type(argument), argument)  # pyright: ignore[reportUnknownVariableType]

    return (
        id(node.target),
        tuple([typed(argument) for argument in node.arguments]),
        tuple([(name, typed(argument)) for name, argument in node.keywords.items()]),
        tuple([local(i) for i in node.inputs]),
        tuple([None if o is None else local(o) for o in node.outputs]),
        tuple([local(i) for i in node.overwritten]),
    )


def _backward_key(held: ForeignBackward, local: _Numbers) -> object:
    numbers = [None if i is None else local(i) for i in (*held.inputs, *held.outputs, *held.saved)]
    return (id(held.graph), len(held.inputs), len(held.outputs), tuple(numbers), held.sealed)


def _uncrossed(
    trace: Trace, parts: Collection[int]
) -> tuple[dict[int, list[int]], dict[int, list[int]], frozenset[int]]:
    """Values that pass a module boundary other than through arguments and results.

    Returns, by id of the frame, those that it reads from outside, and those that it leaves for the outside; and the
    values that nothing in the trace made: buffers, and tensors that the model keeps elsewhere. Of inputs those alone
    count as read from outside that are `parts`; others are like constants, if they don't cross.
    """
    ancestors: dict[int, tuple[Frame, ...]] = {}
    home: dict[int, Frame] = {}
    uses: dict[int, list[Frame]] = defaultdict(list)

    def visit(frame: Frame, above: tuple[Frame, ...]) -> None:
        path = (*above, frame)
        ancestors[id(frame)] = path
        for crossing in frame.entries:
            home[crossing.target] = frame
            if above:
                uses[crossing.source].append(above[-1])
        for crossing in frame.exits:
            uses[crossing.source].append(frame)
            if above:
                home[crossing.target] = above[-1]
        for node in frame.body:
            if isinstance(node, Frame):
                visit(node, path)
                continue
            for identifier in (*node.inputs, *node.overwritten):
                if identifier not in trace.parameters:
                    uses[identifier].append(frame)
            for output in node.outputs:
                if output is not None:
                    home[output] = frame

    visit(trace.root, ())
    free: dict[int, list[int]] = defaultdict(list)
    escapes: dict[int, list[int]] = defaultdict(list)
    for identifier, readers in uses.items():
        origin = home.get(identifier)
        if origin is None and identifier not in parts:
            continue
        source = () if origin is None else ancestors[id(origin)]
        for reader in readers:
            if reader is origin:
                continue
            target = ancestors[id(reader)]
            shared = sum(1 for a, b in zip(source, target, strict=False) if a is b)
            for frame in source[shared:]:
                if identifier not in escapes[id(frame)]:
                    escapes[id(frame)].append(identifier)
            for frame in target[shared:]:
                if identifier not in free[id(frame)]:
                    free[id(frame)].append(identifier)
    made = {*home, *trace.inputs, *trace.parameters, *(crossing.target for crossing in trace.root.exits)}
    return free, escapes, frozenset(range(len(trace.values))).difference(made)


def _lasting(trace: Trace, binding: Binding, constants: Collection[int]) -> tuple[set[int], set[int], set[int]]:
    """The values that follow from what is there before a call alone; of these the ones made of split parameters.

    What is looked up in a table isn't among them, as it depends on what is looked up how much that is. And the values
    that follow from what a call is passed.
    """
    lasting = {*constants, *trace.parameters}
    weights = {v for v, names in trace.stored.items() if v in lasting and binding.parameters[names[0]].is_sharded}
    passed = set(trace.inputs)

    def cross(frame_crossings: Iterable[Crossing]) -> None:
        for crossing in frame_crossings:
            for held in (lasting, weights, passed):
                if crossing.source in held:
                    held.add(crossing.target)

    def visit(frame: Frame) -> None:
        cross(frame.entries)
        for node in frame.body:
            if isinstance(node, Frame):
                visit(node)
                continue
            if not passed.isdisjoint(node.inputs):
                passed.update(o for o in node.outputs if o is not None)
            if not node.is_a("table", "pick", "gather") and lasting.issuperset((*node.inputs, *node.overwritten)):
                made = [o for o in node.outputs if o is not None]
                lasting.update(made)
                if not weights.isdisjoint(node.inputs):
                    weights.update(made)
        cross(frame.exits)

    visit(trace.root)
    return lasting, weights, passed
