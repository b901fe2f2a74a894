"""Stretches of a dim that several packs share: q|k|v as the model has it, q₀k₀v₀|q₁k₁v₁ as the ranks hold it.

in:  tensors whole along the dim
out: a rank's stretches of them; or the whole, from the packs' order into the ranks' and back
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tpplan.compiler.ir.layout import Layout, Pack


def taken(tensor: Tensor, dim: int, intervals: Sequence[tuple[int, int]]) -> Tensor:
    """The (start, length) `intervals` of `dim`, one after the other; a view if there is one only."""
    parts = [tensor.narrow(dim, start, length) for start, length in intervals]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def padded(tensor: Tensor, dim: int, length: int) -> Tensor:
    """`tensor` with zeros at the end of `dim`, up to `length`."""
    missing = length - tensor.shape[dim]
    return tensor if not missing else torch.cat([tensor, _zeros(tensor, dim, missing)], dim)


def in_ranks(tensor: Tensor, dim: int, packs: tuple[Pack, ...], size: int) -> Tensor:
    """A whole tensor with what each of `size` ranks holds together, rank after rank, padded to the longest part."""
    parts: list[Tensor] = []
    for held in _by_rank(packs, size):
        parts += [tensor.narrow(dim, start, length) for start, length in held]
        missing = _longest(packs, size) - sum(length for _, length in held)
        if missing:
            parts.append(_zeros(tensor, dim, missing))
    return torch.cat(parts, dim)


def in_packs(tensor: Tensor, dim: int, packs: tuple[Pack, ...], size: int) -> Tensor:
    """The inverse of `in_ranks`: the ranks' padded parts, one after the other, as the packs without the padding."""
    places: dict[int, tuple[int, int]] = {}
    for rank, held in enumerate(_by_rank(packs, size)):
        offset = rank * _longest(packs, size)
        for start, length in held:
            if length:
                places[start] = (offset, length)
            offset += length
    intervals = _merged([places[start] for start in sorted(places)])
    made = taken(tensor, dim, intervals)
    if len(intervals) > 1 or made.shape == tensor.shape:
        return made
    # No view of the padded ones: autograd lets nobody write to one that a function of ours returns.
    return made.clone(memory_format=torch.contiguous_format)


def _by_rank(packs: tuple[Pack, ...], size: int) -> list[list[tuple[int, int]]]:
    layout = Layout("S", "S", 0, packs=packs)
    whole = sum(pack.size for pack in packs)
    return [layout.intervals(whole, size, rank) for rank in range(size)]


def _longest(packs: tuple[Pack, ...], size: int) -> int:
    return Layout("S", "S", 0, packs=packs).longest(sum(pack.size for pack in packs), size)


def _merged(intervals: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The intervals with those that touch made one."""
    found: list[tuple[int, int]] = []
    for start, length in intervals:
        if found and sum(found[-1]) == start:
            start, length = found[-1][0], found.pop()[1] + length
        found.append((start, length))
    return found


def _zeros(tensor: Tensor, dim: int, length: int) -> Tensor:
    return tensor.new_zeros((*tensor.shape[:dim], length, *tensor.shape[dim + 1 :]))
