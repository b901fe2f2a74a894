"""Watched state: numbers, arrays and lists that each call changes, which tell when they are read.

in:  a number, an array of numbers, a list or a deque
out: what stands in its place: arithmetic gives another such number, writing is silent, all else calls `note`
"""

from __future__ import annotations

import copy
import operator
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import numpy
from numpy.lib.mixins import NDArrayOperatorsMixin

from tpplan.compiler.ir.hidden import ARRAYS


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


class WatchedArray(NDArrayOperatorsMixin):
    """An array that each call changes: what is computed of its numbers is watched, too, and all else is told of."""

    __slots__ = ("array", "name", "note")
    __hash__ = None  # pyright: ignore

    def __init__(self, array: Any, name: str, note: Callable[[str], None]) -> None:
        """Stand for `array`."""
        self.array, self.name, self.note = array, name, note

    def __getitem__(self, key: Any) -> Any:
        return self._watched(self.array[_plain(key)])

    def __setitem__(self, key: Any, value: Any) -> None:
        self.array[_plain(key)] = _plain(value)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        made = getattr(ufunc, method)(*_plain(inputs), **{name: _plain(held) for name, held in options.items()})
        return tuple(map(self._watched, made)) if isinstance(made, tuple) else self._watched(made)  # pyright: ignore

    def __array_function__(self, function: Any, _: object, inputs: Any, options: Any) -> Any:
        self.note(self.name)
        return function(*_plain(inputs), **{name: _plain(held) for name, held in options.items()})

    def __len__(self) -> int:
        if not hasattr(self.array, "shape"):  # it may become longer
            self.note(self.name)
        return len(self.array)

    def __getattr__(self, name: str) -> Any:
        held = getattr(self.array, name)
        if name in _WRITING:
            return lambda *given: held(*_plain(given))  # pyright: ignore
        if name not in _GEOMETRY:
            self.note(self.name)
        return held

    def _watched(self, made: Any) -> Any:
        if issubclass(kind := cast("Any", type(made)), numpy.generic):
            made = made.item() if issubclass(kind, (numpy.number, numpy.bool_)) else numpy.asarray(made)
        kind = WatchedArray if isinstance(made, ARRAYS) else WatchedNumber
        return None if made is None else kind(made, self.name, self.note)


_WRITING = frozenset(("append", "clear", "extend", "fill", "frombytes", "fromlist", "insert", "put"))
_GEOMETRY = frozenset(("dtype", "format", "itemsize", "ndim", "shape", "size", "typecode"))


def _plain(held: Any) -> Any:
    """Arguments without what is watched."""
    if isinstance(held, (tuple, list)):
        return type(held)(map(_plain, held))  # pyright: ignore
    return held.array if isinstance(held, WatchedArray) else held.number if isinstance(held, WatchedNumber) else held


def _reading_array(read: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: WatchedArray, *others: Any) -> Any:
        self.note(self.name)
        return read(self.array, *_plain(others))

    return method


_OF_ARRAYS: dict[str, Callable[..., Any]] = {
    **{kind.__name__: kind for kind in (bool, bytes, float, int, iter, str)},
    **{function.__name__: function for function in (format, repr, operator.contains, operator.index)},
    **{"array": numpy.asarray, "copy": copy.copy, "deepcopy": copy.deepcopy},
}
for _read, _function in _OF_ARRAYS.items():
    setattr(WatchedArray, f"__{_read}__", _reading_array(_function))


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


__all__ = ["WatchedArray", "WatchedCount", "WatchedDeque", "WatchedList", "WatchedNumber"]
