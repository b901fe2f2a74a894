"""Pieces: which stretches of a whole tensor a rank holds, and where they lie in its part.

in:  a layout on one axis of a mesh, and along which dims other axes cut the part further, as FSDP does
out: `Part`: its shape, its boxes in both tensors, the part of a whole tensor
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from tpplan.compiler.ir.layout import Layout, Pack
from tpplan.runtime.ranks.segments import taken


class Stretch(NamedTuple):
    """A stretch of a dim.

    Attributes:
        start: where it begins in the whole.
        place: where it begins in the part.
        length: of both.
        owned: whether this rank is the first of those that hold it.
    """

    start: int
    place: int
    length: int
    owned: bool


class Box(NamedTuple):
    """A box of a tensor: its offsets in the whole and in the part, its sizes, and whether this rank is its first."""

    start: tuple[int, ...]
    place: tuple[int, ...]
    sizes: tuple[int, ...]
    owned: bool

    def of_whole(self, tensor: Tensor) -> Tensor:
        """The box in a whole tensor; a view."""
        return narrowed(tensor, self.start, self.sizes)

    def of_part(self, tensor: Tensor) -> Tensor:
        """The box in the part; a view."""
        return narrowed(tensor, self.place, self.sizes)

    def met(self, start: tuple[int, ...], sizes: tuple[int, ...]) -> Box | None:
        """What it shares with another box of the whole tensor; None if that is nothing."""
        first = tuple(map(max, self.start, start))
        ends = zip(self.start, self.sizes, start, sizes, strict=True)
        shared = tuple(min(a + n, b + m) - f for (a, n, b, m), f in zip(ends, first, strict=True))
        if any(count <= 0 for count in shared):
            return None
        place = tuple(p + f - s for p, f, s in zip(self.place, first, self.start, strict=True))
        return Box(first, place, shared, self.owned)


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank holds of a tensor.

    Attributes:
        shape: of the part.
        dims: the dims of which it holds some stretches only, with these.
        boxes: all that it holds, in the part's order.
    """

    shape: tuple[int, ...]
    dims: tuple[tuple[int, tuple[Stretch, ...]], ...]
    boxes: tuple[Box, ...]

    def of(self, whole: Tensor) -> Tensor:
        """The part of a whole tensor; a view if it is one stretch."""
        for dim, stretches in self.dims:
            whole = taken(whole, dim, [(s.start, s.length) for s in stretches] or [(0, 0)])
        return whole

    @property
    def owned(self) -> tuple[Box, ...]:
        """The boxes of which this rank is the first holder."""
        return tuple(box for box in self.boxes if box.owned)


@functools.lru_cache(maxsize=4096)
def part(
    layout: Layout,
    axis: int,
    chunks: tuple[int | None, ...],
    shape: tuple[int, ...],
    sizes: tuple[int, ...],
    place: tuple[int, ...],
) -> Part:
    """What one rank of a mesh holds of a tensor.

    Args:
        layout: how it lies on mesh axis `axis`.
        axis: the axis.
        chunks: for each axis of the mesh the dim along which it cuts what `layout` gives to a rank; None for an axis
            that doesn't.
        shape: of the whole tensor.
        sizes: of the mesh.
        place: of the rank in the mesh.
    """
    held = _by_layout(layout, shape, sizes[axis], place[axis])
    for number, dim in enumerate(chunks):
        if dim is not None:
            stretches = held.get(dim, [Stretch(0, 0, shape[dim], True)])
            whole = sum(stretch.length for stretch in stretches)
            held[dim] = _cut(stretches, *Pack(whole).part(sizes[number], place[number]))
    dims = tuple((dim, tuple(_merged(stretches))) for dim, stretches in sorted(held.items()))
    local = list(shape)
    for dim, stretches in dims:
        local[dim] = sum(stretch.length for stretch in stretches)
    return Part(tuple(local), dims, tuple(_boxes(dict(dims), shape)))


def _by_layout(layout: Layout, shape: tuple[int, ...], size: int, rank: int) -> dict[int, list[Stretch]]:
    if layout.dim is None:
        return {}
    held: dict[int, list[Stretch]] = {}
    for dim in (layout.dim, layout.next_dim) if layout.within else (layout.dim,):
        packs, ranks, place = layout.shares(dim, size, rank)
        found: list[Stretch] = []
        edge = offset = 0
        for pack in packs or (Pack(shape[dim]),):
            start, length = pack.part(ranks, place)
            own, owned = pack.owned(ranks, place)
            if dim == layout.dim and layout.within:
                own, owned = start, length
            for first, count in ((start, own - start), (own, start + length - own)) if owned else ((start, length),):
                found.append(Stretch(edge + first, offset + first - start, count, bool(owned) and first == own))
            edge, offset = edge + pack.size, offset + length
        held[dim] = found
    return held


def _cut(stretches: list[Stretch], first: int, count: int) -> list[Stretch]:
    """Those from `first` on in the part, `count` entries."""
    found: list[Stretch] = []
    for stretch in stretches:
        begin, end = max(stretch.place, first), min(stretch.place + stretch.length, first + count)
        if begin < end:
            start = stretch.start + begin - stretch.place
            found.append(Stretch(start, begin - first, end - begin, stretch.owned))
    return found


def _merged(stretches: list[Stretch]) -> list[Stretch]:
    found: list[Stretch] = []
    for stretch in stretches:
        if not stretch.length:
            continue
        last = found[-1] if found else None
        if last is not None and last.start + last.length == stretch.start and last.owned == stretch.owned:
            found[-1] = last._replace(length=last.length + stretch.length)
        else:
            found.append(stretch)
    return found


def _boxes(dims: dict[int, tuple[Stretch, ...]], shape: tuple[int, ...]) -> Iterator[Box]:
    every = [dims.get(dim, (Stretch(0, 0, size, True),) if size else ()) for dim, size in enumerate(shape)]
    for stretches in itertools.product(*every):
        yield Box(
            tuple(s.start for s in stretches),
            tuple(s.place for s in stretches),
            tuple(s.length for s in stretches),
            all(s.owned for s in stretches),
        )


def whole_box(shape: tuple[int, ...]) -> tuple[Box, ...]:
    """All of a tensor as boxes; none if it is empty."""
    return tuple(_boxes({}, tuple(shape)))


def beginning(tensor: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """The first `sizes` of a padded tensor; a view."""
    return narrowed(tensor, (0,) * len(sizes), tuple(sizes))


def narrowed(tensor: Tensor, start: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
    """A box of a tensor; a view."""
    for dim, (first, count) in enumerate(zip(start, sizes, strict=True)):
        if count != tensor.shape[dim]:
            tensor = tensor.narrow(dim, first, count)
    return tensor


__all__ = ["Box", "Part", "Stretch", "beginning", "narrowed", "part", "whole_box"]
