"""Backward: whether code in the backward that torch didn't derive does on a rank's part what it does on the whole.

in:  its record on whole tensors, its record on local ones, how the values of the forward lie
out: None if each gradient that it makes lies as the rest of the backward takes for granted; the reason otherwise

    g.clamp(-1, 1)    g: S(2)  ->  right, as x: S(2) demands
    g / x.shape[-1]   g: S(2)  ->  refused: another number on local shapes

The layouts are found by the rules (`rules/backwards.py`), side by side with the record on local shapes, since what is
made anew, or expanded, may be a part or the whole.
"""

from __future__ import annotations

from tpplan.compiler.check.same_steps import REARRANGING, CheckInput, scalars
from tpplan.compiler.ir.trace import BackwardGraph, ForeignBackward, Operation
from tpplan.compiler.rules.backwards import SAME, BackwardFault, backward_layouts
from tpplan.compiler.rules.propagate import Propagator
from tpplan.compiler.trace.random_draws import is_draw
from tpplan.compiler.trace.symbolic import fix
from tpplan.ops.issued import ALIAS_COPY
from tpplan.ops.registry import is_entrywise


def backward_fault(
    given: CheckInput, propagator: Propagator, whole: ForeignBackward, local: ForeignBackward
) -> BackwardFault | None:
    """The first reason why `whole`, which is `local` on one rank's shapes, isn't right there.

    Where a body runs from its record, so does its backward, which exchanges values then: as aliases, on shapes.
    """
    if whole.sealed:
        return BackwardFault(whole.graph.failure)
    around = given.assignment.around(given.trace)
    if around.is_whole(whole):
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
    shapes = {mine: run.values[its] for mine, its in paired.items()}
    found = backward_layouts(around, propagator, whole, given.rank, shapes)
    if isinstance(found, BackwardFault):
        return found
    wanted = {(value, target) for moves in found.moves.values() for value, target in moves.items()}
    if len(wanted) != sum(node.target is ALIAS_COPY for node in run.body):
        node = next((node for node in graph.body if not found.moves.keys().isdisjoint(node.outputs)), None)
        return BackwardFault("it needs the largest or smallest entries of all ranks", node)
    return None


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
        elif its and (its[0].target is ALIAS_COPY or (not strict and its[0].is_a(*SAME))):
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
            return mine.is_a(*SAME)
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
    if node.is_a("repeat", *REARRANGING):
        return None
    if node.is_a("slice", "select"):
        return (*node.arguments[1:3], *node.arguments[4:])
    if node.is_a("split"):
        return node.arguments[2:]
    return [(type(held), held) for held in scalars(node)]


__all__ = ["backward_fault"]
