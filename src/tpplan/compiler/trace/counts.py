"""Counts: what a body is told of numbers that say how many rows each of several gets, such as tokens of experts.

in:  a tensor of whole numbers that nobody knows, of which a body asks for a list; a split of rows by that list
out: how many rows each gets in the trace

    counts = hits.sum(0).tolist()   ->   four counts, of which nothing is known yet
    rows.split(counts)              ->   of 96 rows, 23, 23, 19 and 31: no axis divides them, if that can be
    end = start + count             ->   the counts up to this one
    rows[start:end]                 ->   as many of 96 rows as in a split by all of them
    count == 0                      ->   false; true of every second one, or two, in other captures (`CaptureSettings`)

They differ from call to call. So a body may do nothing else with them: whoever compares or prints one reads a number
that isn't there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

SPLITS: frozenset[Any] = frozenset((Tensor.split, torch.split))  # pyright: ignore


class CountedRows:
    """All counts of one list.

    Attributes:
        empty: the places of those that are told to be zero, if anybody asks.
        asked: whether anybody has.
    """

    def __init__(self, number: int, emptied: tuple[int, int] | None, refuse: Callable[[], Exception]) -> None:
        """Raise what `refuse` makes for whoever asks for a number; see `CaptureSettings.emptied`."""
        self.number, self.refuse, self.asked = number, refuse, False
        self._rows: int | None = None  # how many they all are in the trace
        run, first = emptied or (number, 1)
        self.empty = frozenset(place for place in range(number) if place // run % 2 == first)

    def each(self) -> list[RowCount]:
        """They, one by one."""
        return [RowCount(self, frozenset((place,))) for place in range(self.number)]

    def shares(self, rows: int) -> list[int]:
        """How many of so many rows each stands for: the same in all that they slice."""
        self._rows = rows if self._rows is None else self._rows
        if rows != self._rows:
            raise self.refuse()
        return _shares(rows, self.each())


class RowCount:
    """The sum of some counts, which isn't known."""

    def __init__(self, of: CountedRows, places: frozenset[int]) -> None:
        """Be the sum of those at `places`."""
        self.of, self.places = of, places - of.empty

    def __add__(self, other: Any) -> RowCount:
        both = self._others(other)
        return RowCount(self.of, self.places | both) if self.places.isdisjoint(both) else self._asked()

    __radd__ = __add__

    def __eq__(self, other: object) -> bool:
        return self._is_empty(self.places ^ self._others(other))

    def __gt__(self, other: Any) -> bool:
        less = self._others(other)
        return not self._is_empty(self.places - less) if less <= self.places else self._asked()

    def __le__(self, other: Any) -> bool:
        return not self > other

    def __bool__(self) -> bool:
        return self > 0

    def stop(self, rows: int) -> int:
        """How many rows the first ones have together, if these are the first."""
        if not self.places or self.places == frozenset(range(max(self.places) + 1)) - self.of.empty:
            return sum(self.of.shares(rows)[: max(self.places, default=-1) + 1])
        return self._asked()

    def __deepcopy__(self, _: object) -> RowCount:
        return self

    def _others(self, other: object) -> frozenset[int]:
        if isinstance(other, RowCount) and other.of is self.of:
            return other.places
        return frozenset() if type(other) is int and other == 0 else self._asked()

    def _is_empty(self, places: frozenset[int]) -> bool:
        """Whether one count is zero."""
        if len(places) > 1:
            self._asked()
        self.of.asked = True
        return not places

    def _asked(self, *_: object) -> NoReturn:
        raise self.of.refuse()

    __index__ = __int__ = __float__ = __hash__ = __str__ = __repr__ = __format__ = __lt__ = __ge__ = _asked
    __sub__ = __rsub__ = __mul__ = __rmul__ = __neg__ = _asked
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
    counted = _shares(tensor.shape[dim], sizes)  # pyright: ignore
    if name is not None:
        return args, {**keywords, name: counted}
    return (*args[:1], counted, *args[2:]), keywords


def with_counted_rows(item: slice, rows: int) -> slice:
    """A slice of so many rows with numbers for its counts."""
    start, stop = (end.stop(rows) if isinstance(end, RowCount) else end for end in (item.start, item.stop))
    return slice(start, stop, item.step)


def _shares(rows: int, sizes: Sequence[object]) -> list[int]:
    """How many of so many rows each size stands for."""
    empty = [isinstance(size, RowCount) and not size.places for size in sizes]
    left = iter(shared_out(rows, empty.count(False)))
    return [0 if none else next(left) for none in empty]


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


__all__ = [
    "SPLITS", "CountedRows", "RowCount", "found_count", "is_counts", "shared_out", "with_counted", "with_counted_rows",
]  # fmt: skip
