"""Dispatch: what ranks send each other where each token goes to the ranks that hold the experts chosen for it.

in:  the tokens of a call, the numbers of the experts chosen for each, their weights, and the result
out: what each rank exchanges, as reshards: the sizes, the pairs (token, choice), and what experts make of these

The pairs are taken to be spread evenly over the ranks. How many each rank sends and receives is in the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol

import torch

from tpplan.compiler.ir.layout import PARTIAL, REPLICATED_PARTIAL, Collective, Layout, sharded
from tpplan.compiler.ir.program import Reshard, dtype_name

_ORIGIN = "tokens that are split go to the ranks that hold the experts chosen for them"


class Geometry(Protocol):
    """What is known of a value without its numbers."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole value."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of its entries."""
        ...

    @property
    def differentiable(self) -> bool:
        """Whether a gradient flows to it."""
        ...


def splits_tokens(layouts: Iterable[Layout]) -> bool:
    """Whether all arguments of a call are split by tokens, and alike."""
    first, *others = layouts
    return first.is_sharded and first.dim == 0 and first.is_plain and all(held == first for held in others)


def exchanged(
    tokens: Geometry, chosen: Geometry, weights: Geometry, result: Geometry, count: int, size: int
) -> tuple[Reshard, ...]:
    """What `size` ranks that share `count` experts exchange in a call and in its backward."""
    pairs = math.prod(chosen.shape)
    sizes = _exchange("sizes", (size, count), torch.int64, size * count * torch.int64.itemsize, False)
    row = math.prod(tokens.shape[1:]) * tokens.dtype.itemsize + weights.dtype.itemsize
    wanted = tokens.differentiable or weights.differentiable
    there = _exchange("pairs", (pairs, *tokens.shape[1:]), tokens.dtype, pairs * row, wanted)
    shape = (pairs, *result.shape[1:])
    back = _exchange("made", shape, result.dtype, math.prod(shape) * result.dtype.itemsize, result.differentiable)
    return sizes, there, back


def summed(tokens: Geometry, result: Geometry) -> tuple[Reshard, ...]:
    """What is exchanged instead if each rank gets all tokens, and the ranks' results are summed."""
    split = sharded(0)
    gather = (split, REPLICATED_PARTIAL, Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
    scatter = (PARTIAL, split, Collective.REDUCE_SCATTER, Collective.ALL_GATHER)
    return tuple(
        Reshard(
            path=(), source=source, target=target, forward=there, backward=back, shape=held.shape,
            dtype=dtype_name(held.dtype), bytes=math.prod(held.shape) * held.dtype.itemsize,
            differentiable=held.differentiable, origin=_ORIGIN,
        )
        for held, (source, target, there, back) in ((tokens, gather), (result, scatter))
    )  # fmt: skip


def _exchange(name: str, shape: tuple[int, ...], dtype: torch.dtype, held: int, differentiable: bool) -> Reshard:
    return Reshard(
        path=(name,), source=sharded(0), target=sharded(0), forward=Collective.ALL_TO_ALL,
        backward=Collective.ALL_TO_ALL if differentiable else Collective.NONE, shape=shape, dtype=dtype_name(dtype),
        bytes=held, differentiable=differentiable, origin=_ORIGIN,
    )  # fmt: skip


__all__ = ["exchanged", "splits_tokens", "summed"]
