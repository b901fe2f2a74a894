"""Tensors of a model that a checkpoint stores in pieces, or as pieces of others: experts, packed projections."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from tpplan.checkpoint.dequantised import Readable, raw
from tpplan.checkpoint.ranges import elements
from tpplan.runtime.parameters.pieces import Box, whole_box

Region = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a stored tensor, which is a box of another tensor.

    Attributes:
        stored: the tensor that has it, with as many dims as the other.
        box: its offsets in the other tensor (`start`) and in the stored one (`place`).
    """

    stored: Readable
    box: Box

    def within(self, boxes: Iterable[Box]) -> tuple[Box, ...]:
        """What boxes of the other tensor have of this piece, as boxes of the stored one."""
        found: list[Box] = []
        for box in boxes:
            ours = self.box.met(box.start, box.sizes)
            if ours is not None:
                theirs = box.met(ours.start, ours.sizes)
                assert theirs is not None
                found.append(theirs._replace(start=ours.place))
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Assembled:
    """A tensor in pieces.

    Attributes:
        name: the model's.
        shape: of the whole.
        pieces: which cover it once.
    """

    name: str
    shape: Region
    pieces: tuple[Piece, ...]

    @property
    def path(self) -> Path:
        """The file of the first piece."""
        return self.pieces[0].stored.path if self.pieces else Path()

    @property
    def start(self) -> int:
        """Where in its file the first piece's tensor begins."""
        return self.pieces[0].stored.start if self.pieces else 0

    @property
    def nbytes(self) -> int:
        """The bytes of its numbers."""
        return sum(held.bytes_of(elements(boxes)) for held, boxes in raw(reads(self, whole_box(self.shape))))

    @property
    def dtype(self) -> str:
        """Of the pieces, as safetensors calls it."""
        return " and ".join(dict.fromkeys(piece.stored.dtype for piece in self.pieces))

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """Torch's dtype; None if it has none, or the pieces have several and aren't all plain floats."""
        dtypes = list(dict.fromkeys(piece.stored.torch_dtype for piece in self.pieces))
        plain = all(dtype is not None and dtype.is_floating_point and dtype.itemsize > 1 for dtype in dtypes)
        return next(iter(dtypes), None) if len(dtypes) == 1 or plain else None


Source = Readable | Assembled
"""Where a tensor of a model lies."""

Sources = Mapping[str, Source]
"""By the names of the model."""


def pieces_of(source: Source) -> tuple[Piece, ...]:
    """A tensor's pieces; of a stored one, itself."""
    if isinstance(source, Assembled):
        return source.pieces
    zeros = (0,) * len(source.shape)
    return (Piece(source, Box(zeros, zeros, source.shape, True)),)


def reads(source: Source, boxes: tuple[Box, ...]) -> list[tuple[Readable, tuple[Box, ...]]]:
    """Which boxes of which stored tensors hold those of a tensor."""
    found = [(piece.stored, piece.within(boxes)) for piece in pieces_of(source)]
    return [(stored, inside) for stored, inside in found if inside]


def assembled(name: str, shape: Region, pieces: tuple[Piece, ...]) -> Source:
    """A tensor in pieces; the stored one, if there is one piece that is all of both."""
    first = pieces[0].stored if pieces else None
    if first is not None and len(pieces) == 1 and first.shape == pieces[0].box.sizes == shape:
        return first
    return Assembled(name, shape, pieces)


__all__ = ["Assembled", "Piece", "Source", "Sources", "assembled", "pieces_of", "reads"]
