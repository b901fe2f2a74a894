"""Pooling: operations that treat each channel by itself, such as pools, interpolation and padding of images.

in:  such an operation and the layout of its operand
out: the layout of its results, or the reason why there is none

    max_pool2d of S(1), channels     ->   S(1), and S(1) of the places of the largest
    avg_pool2d of S(2), rows         ->   refused: at the edges it needs what other ranks hold
"""

from __future__ import annotations

from tpplan.compiler.ir.layout import Layout
from tpplan.compiler.ir.region import LocalValue, OperationNode
from tpplan.ops.registry import image_dims


def pooled(node: OperationNode, value: LocalValue, held: Layout) -> tuple[Layout, ...] | str:
    """The layouts of the results of an operation on `value`; a text tells why there are none."""
    last = (held.dim or 0) + (1 if held.within else 0)
    if not held.is_sharded or last >= len(value.shape) - image_dims(node.name):
        return "needs values that other ranks hold"
    return tuple(held for _ in node.outputs)


__all__ = ["pooled"]
