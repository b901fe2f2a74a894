"""Backwards: how the values lie of code in the backward that torch didn't derive.

in:  its record on whole tensors, and how the gradients that arrive, and the values of the forward that it reads, lie
out: the layouts of its values, and which of them the ranks exchange before its operations; or why there are none

    g.clamp(-1, 1)         g: S(2)  ->  S(2), as x: S(2) demands
    g.clamp(-1, 1)         g: P     ->  refused: not linear in a partial gradient
    g / g.norm()           g: S(2)  ->  refused: needs entries that other ranks hold
    g * 448 / g.abs().max()   g: S(2)  ->  S(2), and the ranks' largest entries are compared

The gradient of a value lies as its layout says: split alike; partial where the value is `R·∂P`; whole where it is `R`
or `P`. The operations between are propagated by the rules of the forward.

The gradient of what several ranks hold, as keys that they share, is partial among these: it is a *term*. What becomes
of terms is asked twice, of all ranks by their parts, and of the ranks with one part, to which a term is partial.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from tpplan.compiler.ir.layout import PARTIAL, REPLICATED, Layout, sharded
from tpplan.compiler.ir.region import LocalValue, OperationNode, picks_of
from tpplan.compiler.ir.trace import BackwardGraph, ForeignBackward, Operation, Value
from tpplan.compiler.rules.propagate import Propagator, Refusal
from tpplan.ops.declared import rule_of

SAME = ("copy", "detach", "alias")


@dataclass(frozen=True, slots=True)
class BackwardFault:
    """Why a backward can't run on a rank's part.

    Attributes:
        reason: in words.
        operation: the operation that isn't right for a part, with numbers of the record; None for another reason.
    """

    reason: str
    operation: Operation | None = None


@dataclass(frozen=True, slots=True)
class BackwardLayouts:
    """How the values of a backward lie.

    Attributes:
        layouts: by number of the record.
        moves: by the first result of an operation, the operands that are exchanged before it, and how they lie then.
    """

    layouts: Mapping[int, Layout]
    moves: Mapping[int, Mapping[int, Layout]]


@dataclass(frozen=True, slots=True)
class Around:
    """How the values of a forward lie.

    Attributes:
        layouts: by value of the trace.
        values: of the trace.
        partial: of a parameter, whether its gradient comes out in parts where it is whole; None of other values.
    """

    layouts: Callable[[int], Layout]
    values: Sequence[Value]
    partial: Callable[[int], bool | None]

    def forward_of(self, value: int) -> Layout:
        """How a value of the forward lies, as a body reads it."""
        held = self.layouts(value)
        return REPLICATED if held.is_replicated else held

    def gradient_of(self, value: int) -> Layout:
        """How the gradient of a value lies."""
        held = self.layouts(value)
        if held.is_sharded:
            return held
        known = self.partial(value)
        return PARTIAL if (held.gradient == "P" if known is None else known) else REPLICATED

    def is_whole(self, backward: ForeignBackward) -> bool:
        """Whether all that a backward reads and makes is whole on each rank."""
        places = (value for value in (*backward.inputs, *backward.outputs, *backward.saved) if value is not None)
        return all(self.layouts(v) == REPLICATED and self.gradient_of(v) == REPLICATED for v in places)


def backward_layouts(
    around: Around,
    propagator: Propagator,
    backward: ForeignBackward,
    rank: int = 0,
    local: Mapping[int, Value] | None = None,
) -> BackwardLayouts | BackwardFault:
    """The layouts of a backward's values, by which the gradients that it makes lie as the forward takes for granted.

    Args:
        around: how the forward's values lie.
        propagator: the rules.
        backward: with its record on whole tensors.
        rank: whose shapes `local` has.
        local: its values on a rank's shapes, where these are known.
    """  # fmt: skip
    graph = backward.graph
    layouts = dict(zip(graph.arriving, map(around.gradient_of, backward.outputs), strict=True))
    layouts |= dict(zip(graph.saved, map(around.forward_of, backward.saved), strict=True))
    promised = zip(graph.results, backward.inputs, strict=True)
    demands = [
        (result, around.gradient_of(value))
        for result, value in promised
        if result is not None and value is not None and around.values[value].differentiable
    ]
    return _Typing(propagator, graph, rank, local, demands).found(layouts)


_Moves = Mapping[int, Layout]
_Way = tuple[tuple[Layout, ...], bool, _Moves]
"""The layouts of an operation's results, whether these are terms, and what is exchanged before it."""


@dataclass(slots=True)
class _Typing:
    """The layouts of one backward's values, found operation by operation; the furthest failure is the reason."""

    propagator: Propagator
    graph: BackwardGraph
    rank: int
    local: Mapping[int, Value] | None
    demands: Sequence[tuple[int, Layout]]
    furthest: tuple[int, BackwardFault] = (-1, BackwardFault(""))
    values: tuple[LocalValue, ...] = field(init=False)
    moves: dict[int, _Moves] = field(default_factory=dict[int, _Moves], init=False)

    def __post_init__(self) -> None:
        self.values = tuple(map(_local_value, self.graph.values))

    def found(self, layouts: dict[int, Layout]) -> BackwardLayouts | BackwardFault:
        """The layouts of all values; why there are none otherwise."""
        for value, held in layouts.items():
            if not self._fits(value, held):
                return BackwardFault("it reads a value of a different shape on a rank's part")
        terms = frozenset(value for value in self.graph.arriving if _has_terms(layouts[value]))
        known = self._extend(0, layouts, terms)
        return self.furthest[1] if known is None else BackwardLayouts(known, self.moves)

    def _extend(self, position: int, layouts: dict[int, Layout], terms: frozenset[int]) -> dict[int, Layout] | None:
        if position == len(self.graph.body):
            return layouts if self._finish(layouts, terms) else None
        node = self.graph.body[position]
        made = [output for output in node.outputs if output is not None]
        ways = self._ways(node, layouts, terms)
        if isinstance(ways, str):
            self._note(position, BackwardFault(f"{node.name} {ways}", node))
            return None
        tried = False
        for way, is_term, moves in ways:
            outputs = [held for output, held in zip(node.outputs, way, strict=True) if output is not None]
            if not all(self._fits(output, held) for output, held in zip(made, outputs, strict=True)):
                continue
            tried = True
            known = layouts | dict(zip(made, outputs, strict=True))
            known = self._extend(position + 1, known, terms.union(made) if is_term else terms.difference(made))
            if known is not None:
                self.moves |= {made[0]: moves} if moves else {}
                return known
        if not tried:
            self._note(position, BackwardFault(f"{node.name} makes a different shape on a rank's part", node))
        return None

    def _finish(self, layouts: dict[int, Layout], terms: frozenset[int]) -> bool:
        for result, demanded in self.demands:
            held = layouts.get(result, REPLICATED)
            reason = ""
            if not self._same(held, demanded, self.graph.values[result].shape):
                reason = f"a gradient that it makes is {_in_words(held)}, where it should be {_in_words(demanded)}"
            elif _has_terms(demanded) and result not in terms:
                reason = "a gradient that it makes is whole on each of the ranks that share it, which would add it up"
            if reason:
                self._note(len(self.graph.body), BackwardFault(reason))
                return False
        return True

    def _ways(self, node: Operation, layouts: dict[int, Layout], terms: frozenset[int]) -> list[_Way] | str:
        operands = {value: layouts.get(value, REPLICATED) for value in (*node.inputs, *node.overwritten)}
        if node.is_a(*SAME):
            return [((operands[node.inputs[0]],), node.inputs[0] in terms, {})]
        made = OperationNode(
            node.target, node.arguments, tuple(node.keywords.items()), node.inputs, node.outputs, node.overwritten, None
        )
        rule = rule_of(node.name)
        derived = rule is not None and rule.derived  # linear in the gradients, and sums over what it lacks
        summed = [] if derived else self._terms(made, operands, terms)
        if not derived and not terms.isdisjoint(operands):
            return summed or "isn't linear in a gradient that is still to be summed over the ranks that share it"
        answer = self.propagator.outcomes(made, self.values, operands.__getitem__)
        if isinstance(answer, Refusal):
            return summed or answer.reason
        ways = [(outcome.outputs, derived, dict(outcome.moves)) for outcome in answer] + summed
        replicated = all(held.is_replicated for held in operands.values())
        one = node.is_a("repeat") and math.prod(self.values[node.inputs[0]].shape) == 1
        if node.is_a("fill", "new", "like") or ((node.is_a("expand") or one) and replicated):
            filled = [h for output in node.outputs if output is not None for h in self._splits(output, layouts, one)]
            ways += [((held,), False, {}) for held in filled]
        if node.is_a("zeros"):
            ways += [(way, True, moves) for way, _, moves in ways if _has_terms(way[0])]
        return ways

    def _terms(self, node: OperationNode, operands: Mapping[int, Layout], terms: Set[int]) -> list[_Way]:
        """The ways in which it makes terms, of such or of what the ranks with one part share out."""
        shared = {held.packs[0].replicas for held in operands.values() if held.within}
        if (terms.isdisjoint(operands) and not shared) or node.overwritten:
            return []
        among: dict[int, Layout] = {}
        for value, held in operands.items():
            if held.is_sharded and not held.has_replicas:
                return []
            among[value] = PARTIAL if value in terms else sharded(held.next_dim) if held.within else REPLICATED
        inside = Propagator(max(shared, default=self.propagator.size), self.propagator.batch)
        answer = inside.outcomes(node, self.values, among.__getitem__)
        if isinstance(answer, Refusal) or not any(all(h == PARTIAL for h in way.outputs) for way in answer):
            return []
        parts = {value: replace(held, within=()) for value, held in operands.items()}
        found = self.propagator.outcomes(node, self.values, parts.__getitem__)
        return [] if isinstance(found, Refusal) else [(outcome.outputs, True, dict(outcome.moves)) for outcome in found]

    def _splits(self, output: int, layouts: dict[int, Layout], one: bool) -> Iterator[Layout]:
        """The ways in which a value that each rank makes for itself may be a part, by its local shape.

        Of `one` number that is repeated, where that isn't known, along dims of as many entries as are split elsewhere.
        """
        whole = self.graph.values[output].shape
        if self.local is None:
            split = {self.graph.values[v].shape[h.dim] for v, h in layouts.items() if h.dim is not None and h.is_plain}
            yield from (sharded(dim) for dim, count in enumerate(whole) if one and count in split)
            return
        local = self.local[output].shape
        different = [dim for dim, (a, b) in enumerate(zip(whole, local, strict=False)) if a != b]
        if len(different) == 1:
            known = {held for held in layouts.values() if held.dim == different[0]}
            yield from (*known, sharded(different[0]))

    def _fits(self, value: int, held: Layout) -> bool:
        whole = self.graph.values[value].shape
        if held.dim is not None and held.dim >= len(whole):
            return False
        return self.local is None or (
            held.local_shape(whole, self.propagator.size, self.rank) == self.local[value].shape
        )

    def _same(self, held: Layout, demanded: Layout, shape: tuple[int, ...]) -> bool:
        if held == demanded or held.dim is None or held.dim != demanded.dim:
            return held == demanded
        if held.within or demanded.within or held.interleave != demanded.interleave:
            return False
        count, size = shape[held.dim], self.propagator.size
        return all(held.intervals(count, size, r) == demanded.intervals(count, size, r) for r in range(size))

    def _note(self, position: int, fault: BackwardFault) -> None:
        if position > self.furthest[0]:
            self.furthest = (position, fault)


def _has_terms(held: Layout) -> bool:
    """Whether the gradient of a value that lies so is partial among the ranks that hold the same of it."""
    return held.has_replicas and not held.within


def _local_value(value: Value) -> LocalValue:
    return LocalValue(value.shape, value.stride, value.dtype, False, picks=picks_of(value.numbers))


def _in_words(held: Layout) -> str:
    if held == PARTIAL:
        return "partial (each rank has a term of the sum)"
    return "whole" if held.is_replicated else f"split, {held}"


__all__ = ["SAME", "Around", "BackwardFault", "BackwardLayouts", "backward_layouts"]
