"""Kept: operations that leave a split dim as it is, by their dim maps, wherever it stands then.

in:  an operation of one operand, and how that lies
out: the layout of its results; None where the dim isn't kept

    permute(x, [2, 0, 1])      of S(2, packs=32|16)    ->   S(0, packs=32|16)
    max_pool2d                 of S(1), channels       ->   S(1), and S(1) of the places of the largest
    avg_pool2d                 of S(2), rows           ->   None: at the edges it needs what other ranks hold
    _fft_r2c(x, [2], …)        of S(1)                 ->   S(1)

Uneven parts, packs and what the holders of one part share out need no cases: a rank has the entries that it had.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tpplan.compiler.ir.layout import Layout, in_packs
from tpplan.compiler.ir.region import LocalValue, OperationNode
from tpplan.ops.dim_map import dim_map

# Those of the operators with a dim map whose results have the same entries, or make each of entries of other dims.
_KEEPING = (
    "alias", "copy", "detach", "transposition", "unsqueeze", "squeeze", "select", "unbind", "repeat", "pairs", "pool",
    "fold", "along", "matrices",
)  # fmt: skip


def kept_layouts(
    node: OperationNode, values: Sequence[LocalValue], layouts: Mapping[int, Layout]
) -> tuple[Layout, ...] | None:
    """The layouts of the results of an operation that keeps what is split; None for any other."""
    made = next((o for o in node.outputs if o is not None), None)
    if made is None or len(layouts) != 1 or not node.is_a(*_KEEPING):
        return None
    ((number, held),) = layouts.items()
    if held.dim is None:  # a sum that is still to be made, which may pass through what is linear alone
        return tuple(held for _ in node.outputs)
    mapped = dim_map(node.target, node.arguments, values[number].shape, values[made].shape)
    split = (held.dim, held.next_dim) if held.within else (held.dim,)
    if mapped is None or held.inner_dim is not None or not {*split} <= {*mapped}:
        return None
    place, *after = (mapped.index(dim) for dim in split)
    if after not in ([], [place + 1]):
        return None
    held = held if place == 0 else in_packs(held, values[number].shape)
    return tuple(replace(held, dim=place) for _ in node.outputs)


__all__ = ["kept_layouts"]
