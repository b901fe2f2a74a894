"""Lying: what was made of a tensor, in memory as that one lies there.

    heads 0 and 1 of (2, 4, 6, 8), a slice with gaps   ->   the same without gaps
    (2, 2, 6, 8) of strides (96, 8, 16, 1), gathered   ->   (2, 4, 6, 8) of strides (192, 8, 32, 1)

Collectives and slices know nothing of strides. But a stock body may do what only works on a tensor that lies as the
whole one does, such as a view.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tpplan.compiler.ir.strides import dense_strides


def lying_as(made: Tensor, given: Tensor) -> Tensor:
    """`made`, or a copy of it that has no gaps, its dims in memory in the order of those of `given`."""
    if made.is_contiguous() and given.is_contiguous():
        return made
    wanted = dense_strides(made.shape, given.stride(), expanded=0 in made.stride())
    lies = zip(made.shape, made.stride(), wanted, strict=True)
    if all(here == there for count, here, there in lies if count != 1):
        return made
    return _copied(made, wanted)


def _copied(made: Tensor, wanted: list[int]) -> Tensor:
    once = made
    for dim, stride in enumerate(wanted):
        if not stride and made.shape[dim] > 1:
            once = once.narrow(dim, 0, 1)
    copy = torch.empty_strided(once.shape, wanted, dtype=made.dtype, device=made.device)
    return copy.copy_(once).expand(made.shape)


def in_memory_order(run: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """What `run` makes of a tensor entry by entry, whatever the order of its dims; `run` gets a contiguous one."""
    order = sorted(range(tensor.dim()), key=lambda dim: -tensor.stride(dim))
    back = sorted(range(tensor.dim()), key=lambda dim: order[dim])
    return run(tensor.permute(order).contiguous()).permute(back)


__all__ = ["in_memory_order", "lying_as"]
