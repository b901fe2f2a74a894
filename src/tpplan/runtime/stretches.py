"""Stretches of a dim that several packs share: q|k|v as the model has it, q₀k₀v₀|q₁k₁v₁ as the ranks hold it.

in:  tensors whole along the dim
out: a rank's stretches of them; or the whole, from the packs' order into the ranks' and back
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tpplan.compiler.layout import Layout, Pack


def taken(tensor: Tensor, dim: int, intervals: Sequence[tuple[int, int]]) -> Tensor:
    """The (start, length) `intervals` of `dim`, one after the other; a view if there is one only."""
    parts = [tensor.narrow(dim, start, length) for start, length in intervals]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def in_ranks(tensor: Tensor, dim: int, packs: tuple[Pack, ...], size: int) -> Tensor:
    """A whole tensor with what each of `size` ranks holds together, rank after rank."""
    return taken(tensor, dim, _rank_order(packs, size))


def in_packs(tensor: Tensor, dim: int, packs: tuple[Pack, ...], size: int) -> Tensor:
    """The inverse of `in_ranks`: a concatenation of the ranks' parts in the order of the packs."""
    order = _rank_order(packs, size)
    places: dict[int, tuple[int, int]] = {}
    offset = 0
    for start, length in order:
        places[start] = (offset, length)
        offset += length
    return taken(tensor, dim, [places[start] for start in sorted(places)])


def _rank_order(packs: tuple[Pack, ...], size: int) -> list[tuple[int, int]]:
    layout = Layout("S", "S", 0, packs=packs)
    whole = sum(pack.size for pack in packs)
    return [held for rank in range(size) for held in layout.intervals(whole, size, rank)]
