"""Watched state: numbers and lists that each call changes, which tell when they are read.

in:  a number, a list or a deque
out: what stands in its place: arithmetic gives another such number, writing is silent, all else calls `note`
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable
from typing import Any


class WatchedNumber:
    """A number that each call changes. Arithmetic with numbers gives another one; all else is told of."""

    __slots__ = ("name", "note", "number")
    __hash__ = None  # pyright: ignore

    def __init__(self, number: Any, name: str, note: Callable[[str], None]) -> None:
        """Stand for `number`."""
        self.number, self.name, self.note = number, name, note

    def read(self) -> Any:
        """Tell that the number is read, and return it."""
        self.note(self.name)
        return self.number


def _arithmetic(name: str, reflected: bool) -> Callable[[WatchedNumber, Any], Any]:
    compute: Callable[[Any, Any], Any] = getattr(operator, name)

    def method(self: WatchedNumber, other: Any) -> Any:
        plain = other.number if isinstance(other, WatchedNumber) else other
        if type(plain) not in (int, float):
            return compute(plain, self.read()) if reflected else compute(self.read(), plain)
        result = compute(plain, self.number) if reflected else compute(self.number, plain)
        return WatchedNumber(result, self.name, self.note)

    return method


def _reading(name: str) -> Callable[..., Any]:
    def method(self: WatchedNumber, *others: Any) -> Any:
        others = tuple(other.number if isinstance(other, WatchedNumber) else other for other in others)
        return getattr(self.read(), name)(*others)

    return method


for _operation in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(WatchedNumber, f"__{_operation}__", _arithmetic(_operation, False))
    setattr(WatchedNumber, f"__r{_operation}__", _arithmetic(_operation, True))
for _read in (
    "bool",
    "int",
    "float",
    "index",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "str",
    "repr",
    "format",
    "neg",
    "abs",
):
    setattr(WatchedNumber, f"__{_read}__", _reading(f"__{_read}__"))


class WatchedCount:
    """An `itertools.count` that gives watched numbers."""

    def __init__(self, number: Any, step: Any = 1) -> None:
        """Begin with `number`."""
        self._number, self._step = number, step

    def __iter__(self) -> WatchedCount:
        return self

    def __next__(self) -> Any:
        number, self._number = self._number, self._number + self._step
        return number


class WatchedList(list[Any]):
    """A list that each call makes longer; it may be written to, and whoever reads it is told of."""

    note: Callable[[], None]


class WatchedDeque(deque[Any]):
    """The same of a deque, which may forget what is older."""

    note: Callable[[], None]


def _reading_list(kind: type[Any], name: str) -> Callable[..., Any]:
    plain: Callable[..., Any] = getattr(kind, name)

    def method(self: WatchedList | WatchedDeque, *args: Any) -> Any:
        self.note()
        return plain(self, *args)

    return method


_LIST_READS = (
    "__len__", "__iter__", "__getitem__", "__contains__", "__eq__", "__add__", "__reversed__", "index", "count", "copy",
    "pop",
)  # fmt: skip
for _read in _LIST_READS:
    setattr(WatchedList, _read, _reading_list(list, _read))
for _read in (*_LIST_READS, "popleft"):
    setattr(WatchedDeque, _read, _reading_list(deque, _read))


__all__ = ["WatchedCount", "WatchedDeque", "WatchedList", "WatchedNumber"]
