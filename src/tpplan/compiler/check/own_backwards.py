"""Backward: whether code in the backward that torch didn't derive does on a rank's part what it does on the whole.

in:  its record on whole tensors, its record on local ones, how the values of the forward lie
out: None if each gradient that it makes lies as the rest of the backward takes for granted; the reason otherwise

    g.clamp(-1, 1)    g: S(2)  ->  S(2), as x: S(2) demands
    g.clamp(-1, 1)    g: P     ->  refused: not linear in a partial gradient
    g / g.norm()      g: S(2)  ->  refused: needs entries that other ranks hold
    g / x.shape[-1]   g: S(2)  ->  refused: another number on local shapes

The gradient of a value lies as its layout says: split alike; partial where the value is `R·∂P`; whole where it is `R`
or `P`. The operations between are propagated by the rules of the forward. They are propagated side by side with the
record on local shapes, since what is made anew, or expanded, may be a part or the whole.

The gradient of what several ranks hold, as keys that they share, is partial among these: it is a *term*. What becomes
of terms is asked twice, of all ranks by their parts, and of the ranks with one part, to which a term is partial.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from tpplan.compiler.check.same_steps import REARRANGING, CheckInput, scalars
from tpplan.compiler.ir.layout import PARTIAL, REPLICATED, Layout, sharded
from tpplan.compiler.ir.region import LocalValue, OperationNode, picks_of
from tpplan.compiler.ir.trace import BackwardGraph, ForeignBackward, Operation, Value
from tpplan.compiler.rules.propagate import Propagator, Refusal
from tpplan.compiler.trace.random_draws import is_draw
from tpplan.compiler.trace.symbolic import fix
from tpplan.ops.declared import rule_of
from tpplan.ops.registry import is_entrywise

_SAME = ("copy", "detach", "alias")


@dataclass(frozen=True, slots=True)
class BackwardFault:
    """Why a backward can't run on a rank's part.

    Attributes:
        reason: in words.
        operation: the operation that isn't right for a part, with numbers of the record; None for another reason.
    """

    reason: str
    operation: Operation | None = None


def backward_fault(
    given: CheckInput, propagator: Propagator, whole: ForeignBackward, local: ForeignBackward
) -> BackwardFault | None:
    """The first reason why `whole`, which is `local` on one rank's shapes, isn't right there."""
    if whole.sealed:
        return BackwardFault(whole.graph.failure)
    places = [value for value in (*whole.inputs, *whole.outputs, *whole.saved) if value is not None]
    if all(_is_whole(given, value) for value in places):
        return None
    graph, run = whole.graph, local.graph
    if graph.failure or run.failure:
        return BackwardFault(f"it wasn't recorded: {graph.failure or run.failure}")
    drawn = next((node for node in graph.body if is_draw(node.target, node.arguments, node.keywords)), None)
    if drawn is not None:
        return BackwardFault(f"{drawn.name} draws random numbers, which would have to differ between the ranks", drawn)
    paired = _paired(graph, run)
    if isinstance(paired, BackwardFault):
        return paired
    if given.symbolic:  # the rules were asked for the example's sizes
        fix([(*node.arguments, *node.keywords.values()) for node in graph.body if not is_entrywise(node.name)])
        return None
    layouts = dict(zip(graph.arriving, (_gradient_of(given, value) for value in whole.outputs), strict=True))
    layouts |= dict(zip(graph.saved, (_forward_of(given, value) for value in whole.saved), strict=True))
    promised = zip(graph.results, whole.inputs, strict=True)
    demands = [(r, held) for r, v in promised if r is not None and v is not None for held in _demanded(given, v)]
    local_values = {mine: run.values[its] for mine, its in paired.items()}
    return _Typing(given, propagator, graph, local_values, demands).fault(layouts)


def _forward_of(given: CheckInput, value: int) -> Layout:
    """How a value of the forward lies, as a body reads it."""
    held = given.assignment.layouts.get(value, REPLICATED)
    return REPLICATED if held.is_replicated else held


def _gradient_of(given: CheckInput, value: int) -> Layout:
    """How the gradient of a value lies."""
    held = given.assignment.layouts.get(value, REPLICATED)
    if held.is_sharded:
        return held
    names = given.trace.parameters.get(value)
    partial = names[0] in given.assignment.partial if names is not None else held.gradient == "P"
    return PARTIAL if partial else REPLICATED


def _demanded(given: CheckInput, value: int) -> tuple[Layout, ...]:
    return (_gradient_of(given, value),) if given.trace.values[value].differentiable else ()


def _is_whole(given: CheckInput, value: int) -> bool:
    return given.assignment.layouts.get(value, REPLICATED) == REPLICATED and _gradient_of(given, value) == REPLICATED


def _paired(whole: BackwardGraph, local: BackwardGraph) -> dict[int, int] | BackwardFault:
    """The values of one record in the other; the first operation that differs, in kind or in its numbers.

    Where the strides differ torch may view what it copies on the whole, or copy what it views.
    """
    pairing = _Pairing(whole, local)
    strict = any(node.overwritten for node in (*whole.body, *local.body))
    mine, its = [*whole.body], [*local.body]
    while mine or its:
        if mine and its and _are_alike(mine[0], its[0]) and pairing.reads_the_same(mine[0], its[0]):
            if _numbers(mine[0]) != _numbers(its[0]) or not pairing.same_constants(mine[0]):
                return BackwardFault(f"{mine[0].name} reads a different number on a rank's part", mine[0])
            pairing.pair(mine.pop(0), its.pop(0))
        elif not strict and mine and pairing.is_copy(mine[0]):
            pairing.skip(mine.pop(0))
        elif not strict and its and its[0].is_a(*_SAME):
            pairing.skip_local(its.pop(0))
        elif mine and its:
            return BackwardFault(f"it runs {its[0].name} instead of {mine[0].name} on a rank's part", mine[0])
        else:
            return BackwardFault("it runs different operations on a rank's part")
    if not pairing.makes_the_same():
        return BackwardFault("it runs different operations on a rank's part")
    return pairing.of


def _are_alike(mine: Operation, its: Operation) -> bool:
    kinds = (("split",), ("reshape", "strided reshape"))
    return mine.target is its.target or any(mine.is_a(*kind) and its.is_a(*kind) for kind in kinds)


class _Pairing:
    """Which value of one record is which of the other, of which copies are what they are copies of."""

    def __init__(self, whole: BackwardGraph, local: BackwardGraph) -> None:
        self._whole, self._local = whole, local
        self._originals: dict[int, int] = {}
        given = [(*graph.arriving, *graph.saved) for graph in (whole, local)]
        same = len(given[0]) == len(given[1])
        self.of: dict[int, int] = dict(zip(given[0], given[1], strict=True)) if same else {}
        self._made = {output for node in whole.body for output in node.outputs}

    def _original(self, value: int) -> int:
        return self._originals.get(value, value)

    def _same(self, mine: int, its: int) -> bool:
        if mine not in self.of and mine not in self._made:  # a constant
            self.of[mine] = its
        return mine in self.of and self._original(self.of[mine]) == self._original(its)

    def reads_the_same(self, mine: Operation, its: Operation) -> bool:
        pairs = [*zip(mine.inputs, its.inputs, strict=False), *zip(mine.overwritten, its.overwritten, strict=False)]
        counts = [(len(node.inputs), len(node.overwritten), len(node.outputs)) for node in (mine, its)]
        return counts[0] == counts[1] and all(self._same(*pair) for pair in pairs)

    def same_constants(self, node: Operation) -> bool:
        for value in node.inputs:
            mine, its = self._whole.values[value].numbers, self._local.values[self.of[value]].numbers
            if mine is not None and its is not None and not (mine.shape == its.shape and bool((mine == its).all())):
                return False
        return True

    def is_copy(self, mine: Operation) -> bool:
        """Whether it is a copy on local shapes, as a sum over dims of one entry is, which torch leaves out."""
        if not mine.inputs or mine.inputs[0] not in self.of:
            return False
        if not mine.is_a("sum") or mine.arguments[2:] != (True,) or mine.keywords:
            return mine.is_a(*_SAME)
        shape = self._local.values[self.of[mine.inputs[0]]].shape
        dims: tuple[int, ...] = mine.arguments[1]
        return all(shape[dim] == 1 for dim in dims)

    def pair(self, mine: Operation, its: Operation) -> None:
        self.of |= {a: b for a, b in zip(mine.outputs, its.outputs, strict=True) if a is not None and b is not None}

    def skip(self, copy: Operation) -> None:
        self.of |= {output: self.of[copy.inputs[0]] for output in copy.outputs if output is not None}

    def skip_local(self, copy: Operation) -> None:
        self._originals |= {o: self._original(copy.inputs[0]) for o in copy.outputs if o is not None}

    def makes_the_same(self) -> bool:
        results = [*zip(self._whole.results, self._local.results, strict=False)]
        return len(self._whole.results) == len(self._local.results) and all(
            mine is its or (mine is not None and its is not None and self._same(mine, its)) for mine, its in results
        )


def _numbers(node: Operation) -> object:
    """The arguments that aren't tensors nor sizes: those show in the results' shapes."""
    if node.is_a(*REARRANGING):
        return None
    if node.is_a("slice", "select"):
        return (*node.arguments[1:3], *node.arguments[4:])
    if node.is_a("split"):
        return node.arguments[2:]
    return [(type(held), held) for held in scalars(node)]


_Way = tuple[tuple[Layout, ...], bool]  # the layouts of an operation's results, and whether these are terms


@dataclass(slots=True)
class _Typing:
    """The layouts of one backward's values, found operation by operation; the furthest failure is the reason."""

    given: CheckInput
    propagator: Propagator
    graph: BackwardGraph
    local: Mapping[int, Value]
    demands: Sequence[tuple[int, Layout]]
    furthest: tuple[int, BackwardFault] = (-1, BackwardFault(""))
    values: tuple[LocalValue, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.values = tuple(map(_local_value, self.graph.values))

    def fault(self, layouts: dict[int, Layout]) -> BackwardFault | None:
        """Why there are no layouts of all values; None if there are."""
        for value, held in layouts.items():
            if not self._fits(value, held):
                return BackwardFault("it reads a value of a different shape on a rank's part")
        terms = frozenset(value for value in self.graph.arriving if _has_terms(layouts[value]))
        return None if self._extend(0, layouts, terms) else self.furthest[1]

    def _extend(self, position: int, layouts: dict[int, Layout], terms: frozenset[int]) -> bool:
        if position == len(self.graph.body):
            return self._finish(layouts, terms)
        node = self.graph.body[position]
        made = [output for output in node.outputs if output is not None]
        ways = self._ways(node, layouts, terms)
        if isinstance(ways, str):
            self._note(position, BackwardFault(f"{node.name} {ways}", node))
            return False
        tried = False
        for way, is_term in ways:
            outputs = [held for output, held in zip(node.outputs, way, strict=True) if output is not None]
            if not all(self._fits(output, held) for output, held in zip(made, outputs, strict=True)):
                continue
            tried = True
            found = layouts | dict(zip(made, outputs, strict=True))
            if self._extend(position + 1, found, terms.union(made) if is_term else terms.difference(made)):
                return True
        if not tried:
            self._note(position, BackwardFault(f"{node.name} makes a different shape on a rank's part", node))
        return False

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
        if node.is_a(*_SAME):
            return [((operands[node.inputs[0]],), node.inputs[0] in terms)]
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
        ways = [(outcome.outputs, derived) for outcome in answer] + summed
        replicated = all(held.is_replicated for held in operands.values())
        if node.is_a("fill", "new", "like") or (node.is_a("expand") and replicated):
            filled = [h for output in node.outputs if output is not None for h in self._splits(output, layouts)]
            ways += [((held,), False) for held in filled]
        if node.is_a("zeros"):
            ways += [(way, True) for way, _ in ways if _has_terms(way[0])]
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
        inside = Propagator(max(shared, default=self.given.size), self.given.batch)
        answer = inside.outcomes(node, self.values, among.__getitem__)
        if isinstance(answer, Refusal) or not any(all(h == PARTIAL for h in way.outputs) for way in answer):
            return []
        parts = {value: replace(held, within=()) for value, held in operands.items()}
        found = self.propagator.outcomes(node, self.values, parts.__getitem__)
        return [] if isinstance(found, Refusal) else [(outcome.outputs, True) for outcome in found]

    def _splits(self, output: int, layouts: dict[int, Layout]) -> Iterator[Layout]:
        """The ways in which a value that each rank makes for itself may be a part, by its local shape."""
        whole, local = self.graph.values[output].shape, self.local[output].shape
        different = [dim for dim, (a, b) in enumerate(zip(whole, local, strict=False)) if a != b]
        if len(different) == 1:
            known = {held for held in layouts.values() if held.dim == different[0]}
            yield from (*known, sharded(different[0]))

    def _fits(self, value: int, held: Layout) -> bool:
        whole = self.graph.values[value].shape
        if held.dim is not None and held.dim >= len(whole):
            return False
        return held.local_shape(whole, self.given.size, self.given.rank) == self.local[value].shape

    def _same(self, held: Layout, demanded: Layout, shape: tuple[int, ...]) -> bool:
        if held == demanded or held.dim is None or held.dim != demanded.dim:
            return held == demanded
        if held.within or demanded.within or held.interleave != demanded.interleave:
            return False
        count, size = shape[held.dim], self.given.size
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


__all__ = ["BackwardFault", "backward_fault"]
