"""Weights that a checkpoint stores as codes and scales, as tensors that answer with numbers for any box.

in:  the stored tensors of a weight, and how many of its entries an entry of each stands for
out: which boxes of them hold a box of the weight, and the numbers that they make

Whatever the format, a number is (code - zero point) · scale. Formats differ in how codes are packed, and in how many
numbers share a scale: a rank reads the scales of every block that its part reaches into.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from tpplan.checkpoint.header import Stored
from tpplan.runtime.parameters.pieces import Box

Region = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ingredient:
    """Codes, scales or zero points of a weight.

    Attributes:
        stored: the tensor, with as many dims as the weight, in the file's order.
        steps: along each dim, how many of the weight's entries one of its own stands for.
        decode: makes numbers of what is stored; entries that are packed become several, side by side.
    """

    stored: Stored
    steps: Region
    decode: Callable[[Tensor], Tensor]

    def box(self, start: Region, sizes: Region) -> Box:
        """What of it a box of the weight needs."""
        first = tuple(begin // step for begin, step in zip(start, self.steps, strict=True))
        ends = (-(-(begin + n) // step) for begin, n, step in zip(start, sizes, self.steps, strict=True))
        return Box(first, (0,) * len(first), tuple(end - f for end, f in zip(ends, first, strict=True)), True)

    def spread(self, held: Tensor, start: Region, sizes: Region) -> Tensor:
        """Its numbers for each entry of a box, or one for all along a dim.

        Args:
            held: what `box` says.
            start, sizes: the box of the weight.
        """
        made = self.decode(held)
        for dim in reversed(range(made.dim())):  # from the last one on: single entries are the least then
            if made.shape[dim] == 1:
                continue
            offset, count = start[dim] % self.steps[dim], sizes[dim]
            shared = self.steps[dim] * held.shape[dim] // made.shape[dim]
            if shared > 1 and dim < made.dim() - 1:
                made = made.index_select(dim, torch.arange(offset, offset + count, device="cpu") // shared)
                continue
            wide = made if shared == 1 else made.repeat_interleave(shared, dim)
            made = wide.narrow(dim, offset, count)
        return made


@dataclass(frozen=True, slots=True)
class Picked(Ingredient):
    """Scales or zero points of groups in any order of inputs; the dim before the last is that of the groups.

    Attributes:
        groups: of each input, which group it is of. `steps` has 1 there.
    """

    groups: Tensor

    def _rows(self, start: Region, sizes: Region) -> Tensor:
        return self.groups.narrow(0, start[-2], sizes[-2])

    def box(self, start: Region, sizes: Region) -> Box:
        """What of it a box of the weight needs, with all groups that lie between."""
        rows = self._rows(start, sizes)
        first, last = (int(rows.min()), int(rows.max())) if len(rows) else (0, -1)
        return Ingredient.box(self, (*start[:-2], first, start[-1]), (*sizes[:-2], last + 1 - first, sizes[-1]))

    def spread(self, held: Tensor, start: Region, sizes: Region) -> Tensor:
        """Its numbers for each entry of a box, or one for all along a dim."""
        rows = self._rows(start, sizes)
        return Ingredient.spread(self, held.index_select(-2, rows - rows.min()), start, sizes)


@dataclass(frozen=True, slots=True)
class Dequantised:
    """A weight, of which numbers are made when they are read.

    Attributes:
        name: in the checkpoint.
        shape: of the weight.
        ingredients: its codes, their scales, and zero points if there are some.
        order: for each dim of the weight, the dim of the file that it is.
    """

    name: str
    shape: Region
    ingredients: tuple[Ingredient, ...]
    order: Region

    @property
    def path(self) -> Path:
        """The file of the codes."""
        return self.ingredients[0].stored.path

    @property
    def start(self) -> int:
        """Where in their file the codes begin."""
        return self.ingredients[0].stored.start

    @property
    def dtype(self) -> str:
        """Of the codes, as safetensors calls it."""
        return self.ingredients[0].stored.dtype

    @property
    def torch_dtype(self) -> torch.dtype:
        """What numbers are made in, before they are cast."""
        return torch.float32

    @property
    def nbytes(self) -> int:
        """The bytes of all that is stored of it."""
        return sum(ingredient.stored.nbytes for ingredient in self.ingredients)

    def unsqueezed(self, dim: int) -> Dequantised:
        """With a dim of one entry before `dim`; in the file, it is the first."""
        ingredients = tuple(
            replace(held, stored=replace(held.stored, shape=(1, *held.stored.shape)), steps=(1, *held.steps))
            for held in self.ingredients
        )
        order = [place + 1 for place in self.order]
        return Dequantised(
            self.name, (*self.shape[:dim], 1, *self.shape[dim:]), ingredients, (*order[:dim], 0, *order[dim:])
        )

    def reads(self, boxes: Iterable[Box]) -> list[tuple[Stored, tuple[Box, ...]]]:
        """Which boxes of what is stored hold those of the weight."""
        places = [(self._filed(box.start), self._filed(box.sizes)) for box in boxes]
        return [(held.stored, tuple(held.box(*place) for place in places)) for held in self.ingredients]

    def fill(self, target: Tensor, box: Box, read: Callable[[Stored, Box], Tensor], limit: int) -> Iterator[Tensor]:
        """Put the numbers of a box where they belong; what was filled, bit by bit.

        Args:
            target: of the box's sizes, in any floating-point dtype, on any device.
            box: of the weight.
            read: a box of what is stored.
            limit: how many numbers are made at once.
        """
        start, sizes = self._filed(box.start), self._filed(box.sizes)
        target = target.permute([self.order.index(dim) for dim in range(len(self.order))])
        codes, *others = self.ingredients
        around = [(held, held.box(start, sizes)) for held in others]
        whole = [read(held.stored, its) for held, its in around]
        for first, counts in _bits(start, sizes, codes.steps, limit):
            numbers = codes.spread(read(codes.stored, codes.box(first, counts)), first, counts)
            spread = [
                held.spread(_within(tensor, held.box(first, counts), its), first, counts)
                for (held, its), tensor in zip(around, whole, strict=True)
            ]
            for zeros in spread[1:]:
                numbers = numbers - zeros
            piece = _within(target, Box(first, first, counts, True), Box(start, start, sizes, True))
            piece.copy_(numbers * spread[0])
            yield piece

    def _filed(self, values: Region) -> Region:
        """By the file's order of dims."""
        return tuple(values[self.order.index(dim)] for dim in range(len(self.order)))


Readable = Stored | Dequantised
"""A tensor of a checkpoint, which answers with the numbers of a box."""


def raw(reads: Iterable[tuple[Readable, Sequence[Box]]]) -> list[tuple[Stored, Sequence[Box]]]:
    """What is read of the files for boxes of tensors."""
    found: list[tuple[Stored, Sequence[Box]]] = []
    for held, boxes in reads:
        found += held.reads(boxes) if isinstance(held, Dequantised) else [(held, boxes)]
    return found


def unsqueezed(held: Readable, dim: int) -> Readable:
    """A tensor with a dim of one entry before `dim`."""
    if isinstance(held, Dequantised):
        return held.unsqueezed(dim)
    return replace(held, shape=(*held.shape[:dim], 1, *held.shape[dim:]))


def _within(tensor: Tensor, box: Box, around: Box) -> Tensor:
    """A box in the tensor of one around it; a view."""
    start = tuple(first - begin for first, begin in zip(box.start, around.start, strict=True))
    return box._replace(start=start).of_whole(tensor)


def _bits(start: Region, sizes: Region, steps: Region, limit: int) -> Iterator[tuple[Region, Region]]:
    """A box as boxes of about `limit` entries, cut along dims without packed ones: none is read twice."""
    dim = next((d for d, (count, step) in enumerate(zip(sizes, steps, strict=True)) if count > 1 and step == 1), None)
    if dim is None or math.prod(sizes) <= limit:
        yield start, sizes
        return
    count, end = max(limit * sizes[dim] // math.prod(sizes), 1), start[dim] + sizes[dim]
    for edge in range(start[dim], end, count):
        first = (*start[:dim], edge, *start[dim + 1 :])
        yield from _bits(first, (*sizes[:dim], min(count, end - edge), *sizes[dim + 1 :]), steps, limit)


__all__ = ["Dequantised", "Ingredient", "Picked", "Readable", "raw", "unsqueezed"]
