"""Sketches: what stands for tensors in code that stacks, joins and cuts them, and tells afterwards which went where.

in:  the tensors of a checkpoint, code that is written for tensors
out: which boxes of them its result consists of; transformers has to read them all whole to know
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from tpplan.checkpoint.assembled import Piece, Source, pieces_of
from tpplan.checkpoint.dequantised import unsqueezed
from tpplan.runtime.parameters.pieces import Box


class Sketch:
    """A tensor in pieces of stored ones. Torch's functions that rearrange whole boxes take it; others raise."""

    functions: ClassVar[dict[Any, Callable[..., Any]]] = {}

    def __init__(self, shape: tuple[int, ...], pieces: tuple[Piece, ...]) -> None:
        """A tensor of this shape, covered by these pieces."""
        self.shape = shape
        self.pieces = pieces

    @classmethod
    def of(cls, source: Source) -> Sketch:
        """All of a checkpoint's tensor."""
        return cls(source.shape, pieces_of(source))

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Torch's functions on sketches."""
        known = cls.functions.get(function)
        if known is None:
            raise NotImplementedError(f"it needs torch.{getattr(function, '__name__', function)}")
        return known(*args, **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        """Refuse what a tensor has and a sketch hasn't."""
        raise NotImplementedError(f"it needs Tensor.{name}")

    def size(self, dim: int | None = None) -> Any:
        """As a tensor's."""
        return self.shape if dim is None else self.shape[dim]

    def contiguous(self) -> Sketch:
        """As a tensor's."""
        return self

    def narrowed(self, dim: int, first: int, count: int) -> Sketch:
        """`count` entries of a dim, from `first` on."""
        dim %= len(self.shape)
        shape = _with(self.shape, dim, count)
        start = _with((0,) * len(shape), dim, first)
        met = [(piece.stored, box) for piece in self.pieces if (box := piece.box.met(start, shape)) is not None]
        return Sketch(shape, tuple(Piece(stored, _moved(box, dim, -first)) for stored, box in met))

    def unsqueezed(self, dim: int) -> Sketch:
        """With a dim of one entry before `dim`."""
        dim %= len(self.shape) + 1
        pieces: list[Piece] = []
        for stored, box in ((piece.stored, piece.box) for piece in self.pieces):
            start, place, sizes = _more(box.start, dim, 0), _more(box.place, dim, 0), _more(box.sizes, dim, 1)
            pieces.append(Piece(unsqueezed(stored, dim), Box(start, place, sizes, box.owned)))
        return Sketch(_more(self.shape, dim, 1), tuple(pieces))


def _with(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])


def _more(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim:])


def _moved(box: Box, dim: int, by: int) -> Box:
    return box._replace(start=_with(box.start, dim, box.start[dim] + by))


def _cat(sketches: Iterable[Sketch], dim: int = 0) -> Sketch:
    every = list(sketches)
    dim %= len(every[0].shape)
    pieces: list[Piece] = []
    edge = 0
    for sketch in every:
        if _with(sketch.shape, dim, 0) != _with(every[0].shape, dim, 0):
            raise ValueError(f"shapes {list(every[0].shape)} and {list(sketch.shape)} can't be joined along dim {dim}")
        pieces += [Piece(piece.stored, _moved(piece.box, dim, edge)) for piece in sketch.pieces]
        edge += sketch.shape[dim]
    return Sketch(_with(every[0].shape, dim, edge), tuple(pieces))


def _stack(sketches: Iterable[Sketch], dim: int = 0) -> Sketch:
    every = [sketch.unsqueezed(dim) for sketch in sketches]
    return _cat(every, dim % len(every[0].shape))


def _split(sketch: Sketch, sizes: int | Sequence[int], dim: int = 0) -> tuple[Sketch, ...]:
    length = sketch.shape[dim]
    every = [min(sizes, length - i) for i in range(0, length, sizes)] if isinstance(sizes, int) else list(sizes)
    if sum(every) != length:
        raise ValueError(f"{length} can't be split into {every}")
    edges = [sum(every[:i]) for i in range(len(every))]
    return tuple(sketch.narrowed(dim, first, count) for first, count in zip(edges, every, strict=True))


def _chunk(sketch: Sketch, chunks: int, dim: int = 0) -> tuple[Sketch, ...]:
    length = sketch.shape[dim]
    return _split(sketch, -(-length // chunks) if length else [0] * chunks, dim)


Sketch.functions |= {torch.cat: _cat, torch.stack: _stack, torch.split: _split, torch.chunk: _chunk}


__all__ = ["Sketch"]
