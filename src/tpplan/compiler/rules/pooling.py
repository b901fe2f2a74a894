"""Pooling: operations that treat each channel by itself, such as pools, interpolation and padding of images.

in:  such an operation and the layout of its operand
out: the layout of its results, or the reason why there is none

    max_pool2d of S(1), channels     ->   S(1), and S(1) of the places of the largest
    avg_pool2d of S(2), rows         ->   refused: at the edges it needs what other ranks hold
"""

from __future__ import annotations

from collections.abc import Mapping

from tpplan.compiler.ir.layout import Layout
from tpplan.compiler.ir.region import LocalValue, OperationNode

_DIMS = {
    1: "upsample_nearest1d _upsample_nearest_exact1d upsample_linear1d reflection_pad1d replication_pad1d",
    2: "max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d adaptive_max_pool2d upsample_nearest2d "
    "_upsample_nearest_exact2d upsample_bilinear2d upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa "
    "reflection_pad2d replication_pad2d",
    3: "max_pool3d_with_indices avg_pool3d _adaptive_avg_pool3d adaptive_max_pool3d upsample_nearest3d "
    "_upsample_nearest_exact3d upsample_trilinear3d reflection_pad3d replication_pad3d",
}  # how many dims an image has
POOLING: Mapping[str, int] = {f"aten.{name}.default": n for n, names in _DIMS.items() for name in names.split()}


def pooled(node: OperationNode, value: LocalValue, held: Layout) -> tuple[Layout, ...] | str:
    """The layouts of the results of an operation on `value`; a text tells why there are none."""
    last = (held.dim or 0) + (1 if held.within else 0)
    if not held.is_sharded or last >= len(value.shape) - POOLING[node.name]:
        return "needs values that other ranks hold"
    return tuple(held for _ in node.outputs)


__all__ = ["POOLING", "pooled"]
