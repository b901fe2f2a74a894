"""Strides: how a tensor lies in memory that is made of another one, as by a reshard.

in:  its shape, and the strides of the other one
out: its strides, without gaps

    (2, 2, 6, 8), two of four heads of strides (192, 8, 32, 1)   ->   (96, 8, 16, 1)
"""

from __future__ import annotations

from collections.abc import Sequence


def dense_strides(shape: Sequence[int], like: Sequence[int], expanded: bool = True) -> list[int]:
    """The strides of a tensor without gaps whose dims lie in memory in the order in which dims of strides `like` do.

    Args:
        shape: of the tensor.
        like: the strides of the other one.
        expanded: whether dims of stride 0 stay so; else they are the innermost ones.
    """
    made, inner = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (like[dim], -dim)):
        if like[dim] or not expanded:
            made[dim], inner = inner, inner * max(shape[dim], 1)
    return made


__all__ = ["dense_strides"]
