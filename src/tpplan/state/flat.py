"""Flat: whether what some objects hold is what they held, to the bottom, by a few comparisons that C does.

in:  objects
out: whether something else stands in them, or in what they hold

All that can be written to is found once, and laid out with what stands in it. What is compared is which objects stand
there: if others do, they may still be equal, which their `content` says.
"""

from __future__ import annotations

import functools
import os
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from itertools import chain
from operator import attrgetter, is_, itemgetter
from types import CellType, FunctionType, MappingProxyType
from typing import Any, cast
from weakref import ReferenceType

from torch import Tensor, nn

from tpplan.compat.modes import Unwatched
from tpplan.state.content import Identity, Reader, is_constant, is_small, numbers, plain
from tpplan.state.parts import (
    PLAIN,
    Bytes,
    UnseenError,
    environment_of,
    functions_in,
    is_library,
    own_bases,
    parts,
    spaces_of,
)

Look = Callable[[], Iterable[object]]
_VALUES = cast("Any", dict).values
_NAMES = cast("Any", MappingProxyType).values
_ROWS = (list, deque, set, OrderedDict)
_CONTAINERS = (tuple, frozenset, dict, *_ROWS)
_FUNCTION = attrgetter("__code__", "__defaults__", "__kwdefaults__")
_CELL = attrgetter("cell_contents")
_OWN = attrgetter("__dict__")


class Values:
    """What stands in many tables by some of their names, such as the numbers among the attributes of modules."""

    def __init__(self, places: Iterable[tuple[dict[Any, Any], Any]]) -> None:
        """Look."""
        holders: dict[Any, list[dict[Any, Any]]] = {}
        for table, name in places:
            holders.setdefault(name, []).append(table)
        self._held = [(itemgetter(name), tables, [table[name] for table in tables]) for name, tables in holders.items()]

    def is_same(self) -> bool:
        """Whether the same objects stand there."""
        try:
            return all([all(map(is_, map(get, tables), before)) for get, tables, before in self._held])
        except KeyError:
            return False


class Standing:
    """What stands in many small tables, such as the parameters of modules."""

    def __init__(self, tables: Iterable[dict[Any, Any]]) -> None:
        """Look."""
        self._tables = [*tables]
        self._lengths = [*map(len, self._tables)]
        self._values = Values((table, name) for table in self._tables for name in table)

    def is_same(self) -> bool:
        """Whether the same objects stand there by the same names."""
        return [*map(len, self._tables)] == self._lengths and self._values.is_same()


class Flat:
    """What some objects hold, as it was."""

    def __init__(
        self,
        held: Iterable[Any],
        modules: Mapping[nn.Module, str],
        names: Mapping[Any, Sequence[str]] = MappingProxyType({}),
    ) -> None:
        """Look.

        Args:
            held: the objects.
            modules: these aren't looked into.
            names: of what has names, such as modules of Python, those by which something else may stand there.
        """
        found = _Found(held, modules)
        self._tables = [*found.tables, *map(_OWN, found.objects)]
        self._rows = found.rows
        self._measured = [*map(len, self._tables), *map(len, self._rows)]
        self._keys = [*chain.from_iterable(self._tables)]
        self._values = [*chain.from_iterable(map(_VALUES, self._tables))]
        # What isn't there is no work: most models have no more than tables.
        looks: list[Look] = []
        if found.objects:
            looks.append(lambda: map(_OWN, found.objects))
        if found.rows:
            looks.append(lambda: chain.from_iterable(found.rows))
        if found.classes:
            looks.append(lambda: chain.from_iterable(map(_NAMES, found.classes)))
        if found.functions:
            looks.append(lambda: chain.from_iterable(map(_FUNCTION, found.functions)))
        if found.cells:
            looks.append(lambda: map(_CELL, found.cells))
        looks += [_named(space, names) for space, names in found.globals.values() if names]
        self._looks = [(look, [*look()]) for look in looks]
        others: list[Look] = [*found.others, *([lambda: _numbers(found.tensors)] if found.tensors else [])]
        for space, listed in names.items():
            own = cast("dict[str, Any]", vars(space))
            others += [_named(own, there)] if (there := [name for name in listed if name in own]) else []
            others += [functools.partial(_size, own)] if len(there) < len(listed) else []
        self._others = [(look, [*look()]) for look in others]

    def is_same(self) -> bool:
        """Whether nothing else stands anywhere."""
        tables = self._tables
        try:
            if [*map(len, tables), *map(len, self._rows)] != self._measured:
                return False
            if not all(map(is_, chain.from_iterable(map(_VALUES, tables)), self._values)):
                return False
            if [*chain.from_iterable(tables)] != self._keys:
                return False
            for look, before in self._looks:
                if not all(map(is_, look(), before)):
                    return False
            for look, before in self._others:
                if [*look()] != before:
                    return False
        except Exception:  # of a class that is asked whether it is equal, or how it is pickled
            return False
        return True


class _Found:
    """All that can be written to in some objects, by how it is compared."""

    def __init__(self, held: Iterable[Any], modules: Mapping[nn.Module, str]) -> None:
        self._modules = modules
        self.tables: list[dict[Any, Any]] = []
        self.objects: list[Any] = []
        self.rows: list[Any] = []
        self.classes: list[MappingProxyType[str, Any]] = []
        self.functions: list[FunctionType] = []
        self.cells: list[CellType] = []
        self.globals: dict[int, tuple[dict[str, Any], set[str]]] = {}
        self.tensors: list[Tensor] = []
        self.others: list[Look] = []
        waiting, seen = [*held], dict[int, Any]()
        while waiting:
            item = waiting.pop()
            if type(item) in PLAIN or id(item) in seen or (issubclass(type(item), nn.Module) and item in modules):
                continue
            seen[id(item)] = item  # what was made for a look must live as long
            if isinstance(item, type):
                waiting += self._class(item)
            elif isinstance(item, FunctionType):
                waiting += self._function(item)
            else:
                waiting += self._object(item)

    def _class(self, item: type[Any]) -> Iterable[Any]:
        if is_library(item.__module__):
            return ()
        self.classes.append(vars(item))
        inside = [*vars(item).values()]
        functions = [function for held in inside for function in functions_in(held)]
        closed = [held for function in functions for held in self._closure(function)]
        return [*closed, *(held for held in inside if not functions_in(held)), *item.__mro__[1:]]

    def _function(self, item: FunctionType) -> Iterable[Any]:
        inside = [*vars(item).values(), *self._closure(item)]
        if not is_library(item.__module__):
            self.functions.append(item)
            for name, leaf, space in spaces_of(item):
                self.globals.setdefault(id(space), (space, set()))[1].add(leaf or name)
                inside.append(space[leaf or name])
            inside += [item.__defaults__, item.__kwdefaults__]
            variables = environment_of(item.__code__)
            if variables:
                self.others.append(lambda: map(os.environ.get, variables))
        if vars(item):
            self.objects.append(item)
        return inside

    def _closure(self, item: FunctionType) -> Iterable[Any]:
        for cell in item.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # the variable isn't set yet
                continue
            self.cells.append(cell)

    def _object(self, item: Any) -> Iterable[Any]:
        if isinstance(item, ReferenceType):  # what is kept of it must not keep what it refers to
            self.others.append(lambda: [Reader(self._modules)(item())])
            return ()
        try:
            inner = parts(item)
        except UnseenError:
            return ()
        if inner is None:
            return ()
        own = getattr(item, "__dict__", None)
        own: dict[str, Any] | None = own if type(own) is dict and own is not item else None
        if own is not None:
            self.objects.append(item)
        if isinstance(item, Tensor) and (is_constant(item) or is_small(item)):
            if "nan" in str(numbers(item)):  # no list of it equals another
                self.others.append(lambda: _told(item))
            else:
                self.tensors.append(item)
        if isinstance(item, dict):
            self.tables.append(item)  # pyright: ignore[reportUnknownArgumentType]
        if isinstance(item, _ROWS):
            self.rows.append(item)
        if isinstance(item, defaultdict):
            self.others.append(lambda: (Identity(item.default_factory),))
        shown = set(own or ())
        if not isinstance(item, (Tensor, *_CONTAINERS)) and any(step not in shown for step, _ in inner):
            self.others.append(lambda: (_standing(*part) for part in parts(item) or () if part[0] not in shown))
        kinds = () if isinstance(item, _CONTAINERS) else own_bases(cast("type[Any]", type(item)))
        return [*kinds, *(held for step, held in inner if not isinstance(step, Bytes))]


def _numbers(tensors: list[Tensor]) -> list[object]:
    """What tensors hold: writing through `.data`, or to an array that shares their memory, tells no version."""
    with Unwatched():
        return [cast("Any", tensor).tolist() for tensor in tensors]


def _told(tensor: Tensor) -> list[object]:
    with Unwatched():
        return [numbers(tensor)]


def _size(space: Sized) -> Iterable[object]:
    return (len(space),)


def _named(space: dict[str, Any], names: Iterable[str]) -> Look:
    """What the globals of a file stand for."""
    get: Callable[[Any], Any] = itemgetter(*names, *names)  # of a single name it would be no tuple
    return lambda: get(space)


def _standing(step: object, held: Any) -> object:
    """Of what stands somewhere, what is equal only while it does; what is made for each look is read."""
    if isinstance(step, Bytes):
        return held
    if type(held) in PLAIN:
        return plain(held)
    if isinstance(step, str) and step.startswith("__reduce"):
        return Reader({})(held)
    return Identity(held)


__all__ = ["Flat", "Standing", "Values"]
