"""Ranges: where the boxes that a rank holds of a tensor lie in the file, which has it row by row."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator

from tpplan.runtime.parameters.pieces import Box


def _run_dim(box: Box, shape: tuple[int, ...]) -> int:
    """The dim from which on a box is one stretch of the file: all dims after it are whole."""
    cut = [dim for dim, (count, whole) in enumerate(zip(box.sizes, shape, strict=True)) if count != whole]
    return cut[-1] if cut else 0


def run_length(box: Box, shape: tuple[int, ...]) -> int:
    """How many elements follow each other in the file."""
    return math.prod(box.sizes[_run_dim(box, shape) :])


def runs(box: Box, shape: tuple[int, ...]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Every stretch of the file: the element that it begins at, and its index in the dims before those it is in."""
    dim = _run_dim(box, shape)
    steps = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    begin = sum(first * step for first, step in zip(box.start, steps, strict=True))
    for index in itertools.product(*(range(count) for count in box.sizes[:dim])):
        yield begin + sum(i * step for i, step in zip(index, steps, strict=False)), index


def elements(boxes: Iterable[Box]) -> int:
    """How many elements a rank reads for them."""
    return sum(math.prod(box.sizes) for box in boxes)


__all__ = ["elements", "run_length", "runs"]
