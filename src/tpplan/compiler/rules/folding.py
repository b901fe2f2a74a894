"""Folding: operations that turn places of an image into channels, or channels into places, and sampling at a grid.

in:  such an operation and the layouts of its operands
out: the layout of its result, or the reason why there is none

    pixel_shuffle(x: S(1), 2)                  ->   S(1): each channel is made of four that lie together
    im2col(x: S(1), 3)                         ->   S(1): each channel becomes nine that lie together
    col2im(x: S(2), places)                    ->   refused: an image is summed of all places
    grid_sampler(x: S(0), grid: S(0))          ->   S(0), as of heads that are flattened with their batch
    grid_sampler(x: S(1), grid: R·∂P)          ->   S(1): each channel is read at the same places
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tpplan.compiler.ir.layout import Layout
from tpplan.compiler.ir.region import LocalValue, OperationNode
from tpplan.compiler.ir.trace import Operation, Value
from tpplan.compiler.rules.views import viewed
from tpplan.ops.registry import image_dims

_FOREIGN = "needs values that other ranks hold"


def folded(node: OperationNode, values: Sequence[LocalValue], held: Layout, size: int, batch: int) -> Layout | str:
    """The layout of what is folded or unfolded, which is a view of the channels and of places behind them."""
    before, after = values[node.inputs[0]].shape, values[next(o for o in node.outputs if o is not None)].shape
    channels = len(before) - 1 - image_dims(node.name)
    assert held.dim is not None
    if held.dim != channels or held.within:
        return _FOREIGN
    many, few = before[channels], after[channels]
    source, target = ((many,), (few, many // few)) if many >= few else ((many, few // many), (few,))
    front = before[:channels]
    made = viewed((*front, *source), (*front, *target), held, size, batch)
    return made if made is not None and made.dim == channels and not made.within else "cuts across folded channels"


def sampled(node: OperationNode, layouts: Mapping[int, Layout]) -> Layout | str:
    """The layout of what is read of images at the places of a grid."""
    images, grid = (layouts[number] for number in node.inputs)
    alike = images == grid and images.dim == 0 and not images.within
    by_channel = images.is_sharded and images.dim == 1 and not images.within and grid.is_replicated
    return images if alike or by_channel else _FOREIGN


def folded_into(operation: Operation, values: Sequence[Value], dim: int) -> int | None:
    """Of how many channels an operation makes fewer, folding `dim`, which counts them; None if it doesn't."""
    if not operation.is_a("fold"):
        return None
    before = values[operation.inputs[0]].shape
    if dim != len(before) - 1 - image_dims(operation.name):
        return None
    count = values[next(o for o in operation.outputs if o is not None)].shape[dim]
    return count if count < before[dim] else None


__all__ = ["folded", "folded_into", "sampled"]
