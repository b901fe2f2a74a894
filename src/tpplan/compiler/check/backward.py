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
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tpplan.compiler.check.compare import REARRANGING, CheckInput, scalars
from tpplan.compiler.ir.layout import PARTIAL, REPLICATED, Layout, sharded
from tpplan.compiler.ir.region import LocalValue, OperationNode, picks_of
from tpplan.compiler.ir.trace import BackwardGraph, ForeignBackward, Operation, Value
from tpplan.compiler.rules.propagate import Propagator, Refusal
from tpplan.compiler.trace.draws import is_draw
from tpplan.compiler.trace.symbolic import fix
from tpplan.ops.registry import is_entrywise


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
    differs = _compared(graph, run)
    if differs is not None:
        return differs
    if given.symbolic:  # the rules were asked for the example's sizes
        fix([(*node.arguments, *node.keywords.values()) for node in graph.body if not is_entrywise(node.name)])
        return None
    layouts = dict(zip(graph.arriving, (_gradient_of(given, value) for value in whole.outputs), strict=True))
    layouts |= dict(zip(graph.saved, (_forward_of(given, value) for value in whole.saved), strict=True))
    promised = zip(graph.results, whole.inputs, strict=True)
    demands = [(r, held) for r, v in promised if r is not None and v is not None for held in _demanded(given, v)]
    return _Typing(given, propagator, graph, run, demands).fault(layouts)


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


def _compared(whole: BackwardGraph, local: BackwardGraph) -> BackwardFault | None:
    """The first operation that differs between the two records, in kind or in its numbers."""
    for mine, its in zip(whole.body, local.body, strict=False):
        same = mine.target is its.target or (mine.is_a("split") and its.is_a("split"))
        if not same or mine.inputs != its.inputs or mine.outputs != its.outputs:
            return BackwardFault(f"it runs {its.name} instead of {mine.name} on a rank's part", mine)
        if _numbers(mine) != _numbers(its) or not _same_constants(whole, local, mine):
            return BackwardFault(f"{mine.name} reads a different number on a rank's part", mine)
    if len(whole.body) != len(local.body) or whole.results != local.results or whole.saved != local.saved:
        return BackwardFault("it runs different operations on a rank's part")
    return None


def _numbers(node: Operation) -> object:
    """The arguments that aren't tensors nor sizes: those show in the results' shapes."""
    if node.is_a(*REARRANGING):
        return None
    if node.is_a("slice", "select"):
        return (*node.arguments[1:3], *node.arguments[4:])
    if node.is_a("split"):
        return node.arguments[2:]
    return [(type(held), held) for held in scalars(node)]


def _same_constants(whole: BackwardGraph, local: BackwardGraph, node: Operation) -> bool:
    for value in node.inputs:
        mine, its = whole.values[value].numbers, local.values[value].numbers
        if mine is not None and its is not None and not (mine.shape == its.shape and bool((mine == its).all())):
            return False
    return True


@dataclass(slots=True)
class _Typing:
    """The layouts of one backward's values, found operation by operation; the furthest failure is the reason."""

    given: CheckInput
    propagator: Propagator
    graph: BackwardGraph
    local: BackwardGraph
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
        return None if self._extend(0, layouts) else self.furthest[1]

    def _extend(self, position: int, layouts: dict[int, Layout]) -> bool:
        if position == len(self.graph.body):
            return self._finish(layouts)
        node = self.graph.body[position]
        made = [output for output in node.outputs if output is not None]
        ways = self._ways(node, layouts)
        if isinstance(ways, str):
            self._note(position, BackwardFault(f"{node.name} {ways}", node))
            return False
        tried = False
        for way in ways:
            outputs = [held for output, held in zip(node.outputs, way, strict=True) if output is not None]
            if not all(self._fits(output, held) for output, held in zip(made, outputs, strict=True)):
                continue
            tried = True
            if self._extend(position + 1, layouts | dict(zip(made, outputs, strict=True))):
                return True
        if not tried:
            self._note(position, BackwardFault(f"{node.name} makes a different shape on a rank's part", node))
        return False

    def _finish(self, layouts: dict[int, Layout]) -> bool:
        for result, demanded in self.demands:
            held = layouts.get(result, REPLICATED)
            if not self._same(held, demanded, self.graph.values[result].shape):
                reason = f"a gradient that it makes is {_in_words(held)}, where it should be {_in_words(demanded)}"
                self._note(len(self.graph.body), BackwardFault(reason))
                return False
        return True

    def _ways(self, node: Operation, layouts: dict[int, Layout]) -> list[tuple[Layout, ...]] | str:
        operands = {value: layouts.get(value, REPLICATED) for value in (*node.inputs, *node.overwritten)}
        if node.is_a("copy", "detach", "alias"):
            return [(operands[node.inputs[0]],)]
        made = OperationNode(
            node.target, node.arguments, tuple(node.keywords.items()), node.inputs, node.outputs, node.overwritten, None
        )
        answer = self.propagator.outcomes(made, self.values, operands.__getitem__)
        if isinstance(answer, Refusal):
            return answer.reason
        ways = [outcome.outputs for outcome in answer]
        replicated = all(held.is_replicated for held in operands.values())
        if node.is_a("fill", "new", "like") or (node.is_a("expand") and replicated):
            ways += [(held,) for output in node.outputs if output is not None for held in self._splits(output, layouts)]
        return ways

    def _splits(self, output: int, layouts: dict[int, Layout]) -> Iterator[Layout]:
        """The ways in which a value that each rank makes for itself may be a part, by its local shape."""
        whole, local = self.graph.values[output].shape, self.local.values[output].shape
        different = [dim for dim, (a, b) in enumerate(zip(whole, local, strict=False)) if a != b]
        if len(different) == 1:
            known = {held for held in layouts.values() if held.dim == different[0]}
            yield from (*known, sharded(different[0]))

    def _fits(self, value: int, held: Layout) -> bool:
        whole = self.graph.values[value].shape
        if held.dim is not None and held.dim >= len(whole):
            return False
        return held.local_shape(whole, self.given.size, self.given.rank) == self.local.values[value].shape

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


def _local_value(value: Value) -> LocalValue:
    return LocalValue(value.shape, value.stride, value.dtype, False, picks=picks_of(value.numbers))


def _in_words(held: Layout) -> str:
    if held == PARTIAL:
        return "partial (each rank has a term of the sum)"
    return "whole" if held.is_replicated else f"split, {held}"


__all__ = ["BackwardFault", "backward_fault"]
