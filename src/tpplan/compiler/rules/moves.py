"""Moves: values that a body makes, which ranks exchange before an operation that can't run as they lie.

in:  the operands of such an operation
out: other layouts for some of them, each a reshard inside of the body

    softmax(scores: S(2), -1)   ->   scores: R or R·∂P, by an all-gather
    add(mean: P, eps)           ->   mean: R or R·∂P, by an all-reduce

Of a mean over a split dim each rank has its part of the sum, divided by the whole's count: a partial value, which is
summed like any other.

    mean(x: S(2), -1)           ->   P

A boundary can't serve a value that its body makes and reads. Nor is every operation worth a move: where a result is
viewed or taken apart in a way that doesn't fit its split, the plan splits it wrongly.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import replace

from tpplan.compiler.ir.layout import REPLICATED, REPLICATED_PARTIAL, Layout, reshard_between
from tpplan.compiler.ir.region import LocalValue, OperationNode
from tpplan.ops.dim_map import dims_of

_MOST = 4


def averages(node: OperationNode, values: Sequence[LocalValue], layout: Callable[[int], Layout]) -> bool:
    """Whether it is a mean over a dim of which each rank has its own part."""
    if not node.is_a("mean"):
        return False
    (x,) = node.inputs
    held = layout(x)
    if held.dim is None or held.has_replicas or held.within or any(pack.among for pack in held.packs):
        return False
    return held.dim in dims_of(node.target, node.arguments, len(values[x].shape))


def may_move(node: OperationNode) -> bool:
    """Whether operands of an operation may be moved before it."""
    return not node.overwritten and not node.is_a("reshape", "split", "select", "slice", "unbind")


def ways_to_move(
    numbers: Sequence[int], values: Sequence[LocalValue], layout: Callable[[int], Layout], kept: Set[int]
) -> Iterator[dict[int, Layout]]:
    """Other layouts for operands, those of fewer operands first.

    Args:
        numbers: of the operands, by local number.
        values: the body's.
        layout: how each operand lies.
        kept: values that aren't moved: no parameter is split to be gathered in each call. What is computed of a split
            one may be summed.
    """
    summed = {i for i in numbers if values[i].weight and values[i].parameter is None and not layout(i).is_sharded}
    operands = [i for i in dict.fromkeys(numbers) if not values[i].constant and (i not in kept or i in summed)]
    known: list[dict[int, Layout]] = []
    for targets in _targets(operands, [*dict.fromkeys(numbers)], values, layout):
        movable = [i for i in targets if layout(i) != targets[i] and _is_move(layout(i), targets[i])]
        counts = range(1, len(movable) + 1) if len(movable) <= _MOST else (1, len(movable))
        for chosen in itertools.chain.from_iterable(itertools.combinations(movable, count) for count in counts):
            way = {i: targets[i] for i in chosen}
            if way not in known:
                known.append(way)
    yield from sorted(known, key=len)


def _is_move(source: Layout, target: Layout) -> bool:
    """Whether a reshard makes `target`; that a gradient counts once alone is for boundaries."""
    return reshard_between(source, target) is not None and (source, target) != (REPLICATED_PARTIAL, REPLICATED)


def _targets(
    operands: Sequence[int], numbers: Sequence[int], values: Sequence[LocalValue], layout: Callable[[int], Layout]
) -> Iterator[dict[int, Layout]]:
    """Layouts that operands could have together: whole ones, or like one that is split."""
    for whole in (REPLICATED_PARTIAL, REPLICATED):
        yield {i: whole if values[i].differentiable else REPLICATED for i in operands}
    for other in numbers:
        held, shape = layout(other), values[other].shape
        if held.dim is None or held.interleave != 1 or held.within:
            continue
        for i in (operand for operand in operands if not values[operand].weight):
            alike = [d for d, count in enumerate(values[i].shape) if count == shape[held.dim] and i != other]
            yield from ({i: replace(held, dim=dim)} for dim in alike)


__all__ = ["averages", "may_move", "ways_to_move"]
