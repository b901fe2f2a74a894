"""Relative errors between a whole tensor and what the ranks hold of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tpplan.compiler.ir.layout import Pack


def magnitude(tensor: Tensor) -> float:
    """The largest finite magnitude; 0 for none."""
    largest = _largest(tensor.detach())
    return largest if math.isfinite(largest) else _largest(tensor.detach()[tensor.isfinite()])


def relative_error(expected: Tensor, found: Tensor, scale: float | None = None) -> float:
    """The largest difference, relative to `scale` (the largest magnitude of `expected` unless given).

    Infinities and NaNs must stand in the same places. Tensors of whole numbers are equal (0) or not (inf).
    """
    if expected.shape != found.shape:
        return math.inf
    if not (expected.is_floating_point() or expected.is_complex()):
        return 0.0 if torch.equal(expected, found) else math.inf
    difference = _largest(expected - found)
    if not math.isfinite(difference):
        finite = expected.isfinite() & found.isfinite()
        alike = finite | (expected == found) | (expected.isnan() & found.isnan())
        if not bool(alike.all()):
            return math.inf
        difference = _largest(expected[finite] - found[finite])
    scale = magnitude(expected) if scale is None else scale
    if difference == 0.0:
        return 0.0
    return difference / scale if scale else math.inf


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def joined(parts: Sequence[Tensor], shape: tuple[int, ...]) -> Iterator[Tensor]:
    """Whole tensors of `shape` that the ranks' `parts` may be of, the plain concatenation first.

    Shards of a dim that was flattened from several, or that packs several projections, are interleaved: rank r holds
    the r-th part of each of k blocks. Every k that the parts' sizes allow is tried.
    """
    dims = {split_dim(tuple(part.shape), shape) for part in parts} - {None}
    if len(dims) != 1 or any(part.dim() != len(shape) for part in parts):
        return
    (dim,) = dims
    assert dim is not None
    sizes = [part.shape[dim] for part in parts]
    for blocks in range(1, max(sizes) + 1):
        block = Pack(shape[dim] // blocks)
        if shape[dim] % blocks == 0 and sizes == [blocks * block.local(len(parts), rank) for rank in range(len(parts))]:
            pieces: list[Tensor] = [part.unflatten(dim, (blocks, part.shape[dim] // blocks)) for part in parts]
            yield torch.cat(pieces, dim + 1).flatten(dim, dim + 1)


def split_dim(local: tuple[int, ...], whole: tuple[int, ...]) -> int | None:
    """The one dim along which `local` is a part of `whole`; None if that isn't so."""
    if len(local) != len(whole):
        return None
    differing = [dim for dim, (ours, all_of_it) in enumerate(zip(local, whole, strict=True)) if ours != all_of_it]
    return differing[0] if len(differing) == 1 and local[differing[0]] < whole[differing[0]] else None
