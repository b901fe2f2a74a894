"""Counts: what a body is told of numbers that say how many rows each of several gets, such as tokens of experts.

in:  a tensor of whole numbers that nobody knows, of which a body asks for a list; a split of rows by that list
out: how many rows each gets in the trace

    counts = hits.sum(0).tolist()   ->   four counts, of which nothing is known yet
    rows.split(counts)              ->   of 96 rows, 23, 23, 19 and 31: no axis divides them, if that can be

They differ from call to call. So a body may split by them and do nothing else: whoever compares, adds or prints one
reads a number that isn't there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

SPLITS: frozenset[Any] = frozenset((Tensor.split, torch.split))  # pyright: ignore


class RowCount:
    """One of the numbers, which isn't known."""

    def __init__(self, refuse: Callable[[], Exception]) -> None:
        """Raise what `refuse` makes for whoever asks for the number."""
        self._refuse = refuse

    def _asked(self, *_: object) -> NoReturn:
        raise self._refuse()

    __index__ = __int__ = __float__ = __bool__ = __hash__ = __str__ = __repr__ = __format__ = _asked
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _asked
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __neg__ = _asked
    __floordiv__ = __rfloordiv__ = __truediv__ = __rtruediv__ = __mod__ = __rmod__ = _asked


def is_counts(tensor: Tensor) -> bool:
    """Whether a tensor may be the counts of several."""
    return tensor.dim() == 1 and len(tensor) > 1 and tensor.dtype in (torch.int64, torch.int32)


def with_counted(args: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments of a split with numbers for its counts; None if it is by none."""
    name = next((name for name in ("split_size_or_sections", "split_size") if name in keywords), None)
    sizes = keywords[name] if name is not None else args[1]
    if not isinstance(sizes, (list, tuple)) or not any(isinstance(size, RowCount) for size in sizes):  # pyright: ignore
        return None
    tensor = keywords.get("tensor", args[0] if args else None)
    dim = keywords.get("dim", args[2] if len(args) > 2 else 0)
    counted = shared_out(tensor.shape[dim], len(sizes))  # pyright: ignore
    if name is not None:
        return args, {**keywords, name: counted}
    return (*args[:1], counted, *args[2:]), keywords


def shared_out(rows: int, among: int) -> list[int]:
    """How many of so many rows each of several gets: numbers that no axis divides, as far as they add up."""
    counts: list[int] = []
    for left in range(among, 1, -1):
        near = rows // left
        options = [count for count in range(near, 0, -1) if _is_indivisible(count)]
        fitting = [count for count in options if left > 2 or _is_indivisible(rows - count)]
        counts.append(next(iter(fitting or options), near))
        rows -= counts[-1]
    return [*counts, rows]


def found_count(entries: int) -> int:
    """How many of so many entries `nonzero` finds in a trace: a prime, that no number of ranks divides."""
    return next((n for n in range(entries, 2, -1) if _is_prime(n)), entries)


def _is_indivisible(count: int) -> bool:
    return count == 1 or (count > 2 and found_count(count) == count)


def _is_prime(number: int) -> bool:
    return all(number % n for n in range(2, int(number**0.5) + 1))


__all__ = ["SPLITS", "RowCount", "found_count", "is_counts", "shared_out", "with_counted"]
