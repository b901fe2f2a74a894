"""Extremes: the largest or smallest entries along a split dim, of which each rank knows those of its own part.

in:  a reduction, and the layouts of its operands
out: the layouts of its results; how they are made whole, a number for each row, before an operation reads them

    amax(x: S(2), -1)             ->   MAX
    clamp(scale: MAX, min=1e-5)   ->   scale: R or R·∂P, by an all-gather

So it is for values to which no gradient comes back, as of the scales that a straight-through estimator rounds by.
Where the largest entry is, no rank knows of another's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from tpplan.compiler.ir.layout import LARGEST, REPLICATED, REPLICATED_PARTIAL, SMALLEST, UNKNOWN, Layout
from tpplan.compiler.ir.region import LocalValue, OperationNode
from tpplan.ops.dim_map import dims_of


def extremes(
    node: OperationNode, values: Sequence[LocalValue], layout: Callable[[int], Layout], size: int
) -> tuple[Layout, ...] | None:
    """The layouts of the largest entries over a split dim, and of where they are; None for anything else."""
    if not node.is_a("largest", "smallest") or values[made(node)].answered:
        return None
    (x,) = node.inputs
    held, shape = layout(x), values[x].shape
    if held.dim is None or held.dim not in dims_of(node.target, node.arguments, len(shape)):
        return None
    if not all(held.local_size(shape[held.dim], size, rank) for rank in range(size)):
        return None  # of no entries none is the largest
    return (LARGEST if node.is_a("largest") else SMALLEST, *(UNKNOWN for _ in node.outputs[1:]))


def made(node: OperationNode) -> int:
    """What an operation makes first."""
    return next(o for o in node.outputs if o is not None)


def ways_to_compare(
    numbers: Sequence[int], values: Sequence[LocalValue], layout: Callable[[int], Layout]
) -> Iterator[dict[int, Layout]]:
    """Whole layouts for the operands of which each rank has its own largest."""
    own = [i for i in dict.fromkeys(numbers) if layout(i).is_extreme]
    for whole in (REPLICATED_PARTIAL, REPLICATED) if own else ():
        yield {i: whole if values[i].differentiable else REPLICATED for i in own}


__all__ = ["extremes", "ways_to_compare"]
