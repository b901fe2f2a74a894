"""Slots: the places of a model and its surroundings that hold state, by name.

in:  a model, and what is around it
out: for each number, text and tensor, for each container's length, for each table's order, and for what a large
     container stores, where it is

    self.calls                ->   "calls"
    TABLES = {"sin": …}       ->   "my_file.TABLES['sin']"
    lambda x: x * self.k      ->   "a hook of up.self.k"

What is around models has thousands of places and hardly ever changes: it is looked through once for all compilations,
and again where a container in it no longer holds the same objects. Files that hold large tensors, modules or objects
of the user's are forgotten after each compilation, so as not to keep these alive.
"""

from __future__ import annotations

import functools
import logging
import operator
import sys
from collections import ChainMap, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextvars import ContextVar
from itertools import chain, count
from operator import is_
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, cast
from weakref import ReferenceType

import numpy
from torch import Tensor, nn

from tpplan.compat.hooks import hooks_of
from tpplan.compat.modules import named_modules, own_buffers
from tpplan.compiler.ir.hidden import (
    VALUES,
    by_kind,
    is_numbers,
    is_plain,
    is_read_only,
    is_value,
    key_name,
    members,
    rows_in,
    shown_items,
)
from tpplan.compiler.trace.surroundings import (
    CONTENTS,
    DEFAULTS,
    Contents,
    Recent,
    Space,
    Surroundings,
    cached_objects,
    holds_the_same,
    is_filled,
    keeps_much,
)
from tpplan.compiler.trace.watched_state import WatchedArray, WatchedDeque, WatchedList, WatchedNumber
from tpplan.state.parts import (
    MemberSlot,
    attributes,
    attributes_of,
    has_attributes,
    is_library,
    stored_as,
    stored_in,
)
from tpplan.state.parts import slots_of as member_slots

FEW = 1000  # items of a container that are told apart
LENGTH = " (its length)"
ORDER = " (its order)"
ITEMS = " (its items)"
_MOVING = (Tensor, WatchedNumber, WatchedArray, count)
_UNSET = object()
_STOCK = frozenset(vars(nn.Module())) | {"forward"}
_LOGGERS = logging.Logger.manager.loggerDict  # each logger leads to all of the process
Setter = Callable[[Any, Any, Any], object]


class Slot(NamedTuple):
    """A place that holds state. There may be thousands, of which few are ever written to.

    Attributes:
        value: what it holds.
        holder, key: where that is.
        setter: called with `holder`, `key` and another value, puts it there; None if nobody can.
        counted: the list or deque whose length it is.
        outside: whether it is a hook's or Python's own, and no attribute of a module.
        cached: whether it is the size of a `functools.lru_cache`.
    """

    value: Any
    holder: Any = None
    key: Any = None
    setter: Setter | None = None
    counted: list[Any] | deque[Any] | None = None
    outside: bool = False
    cached: bool = False

    def put(self, value: object) -> None:
        """Put another value there."""
        assert self.setter is not None
        self.setter(self.holder, self.key, value)


class SlotGroup(dict[str, Slot]):
    """The places in one container."""

    def __init__(self) -> None:
        """None yet."""
        super().__init__()
        self._told: dict[object, dict[str, Any]] = {}

    @functools.cached_property
    def moving(self) -> dict[str, Slot]:
        """Those whose numbers may be others though the container holds the same."""
        return {name: slot for name, slot in self.items() if isinstance(slot.value, _MOVING) or is_numbers(slot.value)}

    def told(self, tell: Callable[[Any], object]) -> dict[str, Any]:
        """What is told of the rest, which is asked once."""
        if tell not in self._told:
            self._told[tell] = {name: tell(slot.value) for name, slot in self.items() if name not in self.moving}
        return self._told[tell]


class AroundSlots(dict[str, Slot]):
    """Places around models, the same object for as long as their containers hold the same objects.

    Attributes:
        moving: those whose numbers may be others all the same.
    """

    def __init__(self, groups: Sequence[SlotGroup]) -> None:
        """Of all groups."""
        super().__init__()
        self._groups = groups
        self._told: dict[object, dict[str, Any]] = {}
        self.moving: dict[str, Slot] = {}
        for group in groups:
            self.update(group)
            self.moving |= group.moving

    def told(self, tell: Callable[[Any], object]) -> dict[str, Any]:
        """What is told of the rest: the same object each time."""
        if tell not in self._told:
            told = self._told[tell] = dict[str, Any]()
            for group in self._groups:
                told |= group.told(tell)
        return self._told[tell]


class Slots(ChainMap[str, Slot]):
    """The places of a model, its hooks and its surroundings, by name."""

    def __init__(self, own: dict[str, Slot], around: AroundSlots | None = None) -> None:
        """Those of the model, and those around it."""
        self.own, self.around = own, AroundSlots(()) if around is None else around
        super().__init__(self.own, self.around)

    def tensors(self) -> Iterator[tuple[str, Slot]]:
        """Those that hold tensors."""
        for held in (self.own, self.around.moving):
            yield from ((name, slot) for name, slot in held.items() if isinstance(slot.value, Tensor))


def slots_of(model: nn.Module, around: Surroundings) -> Slots:
    """The places of a model, its hooks and its surroundings that hold numbers, tensors and containers, by name."""
    own = _own(model)
    found, logs = own.slots(), own.logs
    for cache in around.caches.values():
        kept = _Collector()  # which changes are seen of: what calls make of it, nobody follows
        for place, held in enumerate(cached_objects(cache)):
            kept.collect(f"what {cache.__qualname__} has returned[{place}]", held)
        logs = logs or kept.logs
        found |= {name: slot._replace(setter=None, outside=True) for name, slot in kept.slots().items()}
        found[f"the cache of {cache.__qualname__}"] = Slot(cache.cache_info().currsize, cached=True)
    return Slots(found, _outside(around, logs).without(own.groups.keys()))


def _own(model: nn.Module) -> _Collector:
    own = _Collector()
    modules = list(named_modules(model))
    for prefix, module in modules:
        held = vars(module)
        for leaf, item in held.items():
            if leaf not in _STOCK:
                own.collect(f"{prefix}.{leaf}" if prefix else leaf, item, held, leaf, operator.setitem)
        for leaf, buffer in own_buffers(module).items():
            if buffer is not None:
                own.found[f"{prefix}.{leaf}" if prefix else leaf] = Slot(buffer)
    own.outside = True
    for prefix, module in modules:
        for number, hook in enumerate(hooks_of(module)):
            own.collect(hook_name(prefix, number), hook)
    return own


def hook_name(module: str, number: int) -> str:
    """How a module's hook of this number is called."""
    return f"a hook of {module or 'the model'}" + (f" (number {number + 1})" if number else "")


_sections = Recent(1000)  # from one compilation to the next


def _outside(around: Surroundings, logs: bool) -> _Outside:
    """The places around a model; looked through again is what no longer holds the same objects.

    Args:
        around: what is around it.
        logs: whether the model, or what a cache has returned, holds a logger.
    """
    known: _Outside | None = around.remembered.get(_outside)
    values = [*(around.values(space) for _, space in around.spaces), {}]
    keys = [*((name, space.holder) for name, space in around.spaces), ("functions", *around.functions)]
    before: list[_Section | None] = [*map(_sections.get, keys)] if known is None else [*known.sections]
    sections = [
        section if section is not None and section.is_same(held) else _section(around, number, held)
        for number, (held, section) in enumerate(zip(values, before, strict=False))
    ]
    if logs or any(section.logs for section in sections):
        (section,), held = before[len(sections) :] or [None], {**_LOGGERS}
        sections.append(section if section is not None and section.is_same(held) else _in_loggers(held))
    if known is None or [*map(id, sections)] != [*map(id, known.sections)]:
        known = around.remembered[_outside] = _Outside(sections)
        for key, section in zip(keys, sections, strict=False):
            _remember(key, section, around)
    return known


def _remember(key: tuple[object, ...], section: _Section, around: Surroundings) -> None:
    """Keep what was found in a space for later compilations, unless it is one of the user's and keeps much alive."""
    name = str(key[0])
    if (section.is_light and "<locals>" not in name) or (isinstance(key[-1], ModuleType) and is_library(name)):
        _sections.keep(key, section)
    else:
        around.forget()


def _section(around: Surroundings, number: int, held: dict[str, Any]) -> _Section:
    """The places in the space of this number; after the last one those in the user's functions."""
    collector = _Collector(outside=True)
    for leaf, item in held.items():
        name, space = around.spaces[number]
        collector.collect(f"{name}.{leaf}", item, space, leaf, Space.set)
    for function in around.functions if number == len(around.spaces) else ():
        collector.collect(f"{function.__module__}.{function.__qualname__}", function)
    return _Section(held, collector)


def _in_loggers(held: dict[str, Any]) -> _Section:
    """The places in all loggers of the process."""
    collector = _Collector(outside=True)
    for name, logger in held.items():
        collector.collect(f"logging.getLogger({name!r})", logger, _LOGGERS, name, operator.setitem)
    return _Section(held, collector)


class _Outside:
    """What was found around a model."""

    def __init__(self, sections: Sequence[_Section]) -> None:
        """In these sections; what several of them share goes by its names in the first."""
        self.sections = sections
        self._named = [section.groups[0] for section in sections]
        self._groups: dict[int, SlotGroup] = {}
        for key, group in chain.from_iterable(section.groups.items() for section in sections):
            self._groups.setdefault(key, group)
        self._found: dict[frozenset[int], AroundSlots] = {}

    def without(self, own: Collection[int]) -> AroundSlots:
        """The places but for those in a model's own containers: what it holds goes by its names there."""
        left = frozenset(self._groups.keys() & own) | {0}
        if left not in self._found:
            inner = [slots for held, slots in self._groups.items() if held not in left]
            self._found[left] = AroundSlots([*self._named, *inner])
        return self._found[left]


class _Section:
    """What was found in one space, and the containers that were looked through, with what they held.

    Attributes:
        groups: the places, by the container that they are in.
        logs: whether a logger was among them.
        is_light: whether it keeps little alive; see `keeps_much`.
    """

    def __init__(self, values: dict[str, Any], collector: _Collector) -> None:
        """What names stand for, and what was found of it."""
        self.groups, self.logs = collector.groups, collector.logs
        self._values = values
        self._objects, self._looks = collector.objects, collector.looks
        self._dicts = [*map(vars, self._objects)]
        self._contents = Contents((*collector.containers, *self._dicts))
        self._looked = [look() for look in self._looks]
        self._functions = collector.functions
        cells = [cell for function in self._functions for cell in function.__closure__ or ()]
        self._filled, self._empty = ([cell for cell in cells if is_filled(cell) is full] for full in (True, False))
        self._in_functions = [*self._read_functions()]
        self.is_light = not (collector.heavy or self._contents.are_many)

    def _read_functions(self) -> Iterator[Any]:
        """Defaults of functions, and what they close over, read in C: a file has hundreds."""
        yield from chain.from_iterable(map(DEFAULTS, self._functions))
        yield from map(CONTENTS, self._filled)

    def is_same(self, values: dict[str, Any]) -> bool:
        """Whether all holds the same objects still."""
        return (
            holds_the_same(values, self._values)
            and all(map(is_, map(vars, self._objects), self._dicts))  # an object may be given another `__dict__`
            and self._contents.are_same()
            and all(holds_the_same(look(), before) for look, before in zip(self._looks, self._looked, strict=True))
            and all(map(is_filled, self._filled))
            and not any(map(is_filled, self._empty))
            and all(map(is_, self._read_functions(), self._in_functions))
        )


class _Collector:
    """Finds slots, by the containers that they are in; each object is looked into once."""

    def __init__(self, outside: bool = False) -> None:
        """Begin with the slots that are in no container.

        Args:
            outside: whether the places are around a model, and what was looked into is kept.
        """
        self.found = SlotGroup()
        self.groups: dict[int, SlotGroup] = {0: self.found}
        self.containers: list[Any] = []
        self.objects: list[Any] = []
        self.functions: list[FunctionType] = []
        self.looks: list[Callable[[], list[Any]]] = []
        self.logs = self.heavy = False
        self.outside = self._keeps = outside

    def slots(self) -> dict[str, Slot]:
        """All that were found."""
        return {name: slot for group in self.groups.values() for name, slot in group.items()}

    def collect(
        self, name: str, item: object, holder: object = None, key: object = None, setter: Setter | None = None
    ) -> None:
        """Note what `item`, which `holder` has at `key`, is or holds."""
        held = cast("Any", item)
        numbers = is_numbers(held)
        self.heavy = self.heavy or keeps_much(held)
        if numbers or is_plain(held) or isinstance(held, (*VALUES, *_MOVING)):
            if not (numbers and is_read_only(held)):
                self.found[name] = Slot(held, holder, key, setter, None, self.outside)
            return
        if id(held) in self.groups or isinstance(held, (nn.Module, type)):
            return
        if held is _LOGGERS:
            self.logs = True
            return
        kind: Any = type(item)
        stored = stored_as(kind)
        home = str(getattr(held if kind is FunctionType else kind, "__module__", "")).partition(".")[0]
        if home in ("torch", "tpplan") and not issubclass(kind, (WatchedList, WatchedDeque, ReferenceType)):
            return  # what torch keeps is no state of the model
        outer, self.found = self.found, self.groups.setdefault(id(held), SlotGroup())
        if stored is not None:
            self._look_into_store(name, held, stored, Slot(None, holder, key, setter, None, self.outside))
            if kind is not stored or kind is OrderedDict:
                self._look_into_attributes(name, held)
        else:
            self._look_into(name, held, kind)
        if self._keeps:
            self._keep(held, kind)
        self.found = outer

    def _keep(self, held: Any, kind: Any) -> None:
        """Keep what was looked into, if it may hold other objects later."""
        names, has_dict, stored = member_slots(kind), has_attributes(held), stored_as(kind)
        if stored not in (None, tuple, frozenset):
            self.containers.append(held)
        if issubclass(kind, defaultdict):
            self.looks.append(lambda: [held.default_factory])
        if issubclass(kind, numpy.ndarray):
            self.looks.append(lambda: held.ravel().tolist())
        if kind is ContextVar:
            self.looks.append(lambda: [held.get(_UNSET)])
        elif kind is FunctionType:
            self.containers += [vars(held), held.__kwdefaults__ or {}]
            self.functions.append(held)
        elif not (names or has_dict):
            return
        elif stored is None and (issubclass(kind, (MethodType, functools.partial)) or shown_items(held) is not None):
            self.looks.append(functools.partial(_members, held))
        elif names:
            self.looks.append(functools.partial(_in_slots, held, names, has_dict))
        elif has_dict:
            self.objects.append(held)

    def _look_into_store(self, name: str, held: Any, stored: Any, at: Slot) -> None:
        """What a container stores, whatever its class makes of it."""
        keys, items = stored_in(held)
        size, unordered = len(items), stored in (set, frozenset)
        if stored not in (tuple, frozenset):
            counted = held if type(held) in (list, deque) else None
            self.found[f"{name}{LENGTH}"] = at._replace(value=size, counted=counted)
        if keys is not None and size > 1:
            order = (
                _told(keys, rows_in(keys))
                if size > FEW
                else tuple(each if type(each) is str else key_name(each) for each in keys)
            )
            self.found[f"{name}{ORDER}"] = Slot(order, outside=self.outside)
        if size > FEW:
            rows = rows_in(items)
            told = _told(items, rows)
            self.found[f"{name}{ITEMS}"] = Slot(frozenset(told) if unordered else told, held, outside=self.outside)
            if rows is not None:
                self.containers += [row for row in rows if self._keeps and type(row) is not tuple]
                return
        put: Setter | None = getattr(stored, "__setitem__", None)
        if stored is tuple and at.setter is not None:
            put = functools.partial(_put_in_tuple, at, [*items])
        for place, (key, inner) in enumerate(zip(range(size) if keys is None else keys, items, strict=True)):
            if size > FEW and is_value(inner):
                continue
            if unordered:  # a copy may have another order
                value = is_value(inner)
                self.collect(f"{name}{{{inner!r}}}" if value else name, repr(inner) if value else inner)
            else:
                self.collect(f"{name}[{key_name(key, place)}]", inner, held, key, put)

    def _look_into(self, name: str, held: Any, kind: Any) -> None:
        if kind is FunctionType:
            for leaf, cell in zip(held.__code__.co_freevars, held.__closure__ or (), strict=False):
                self._collect_cell(f"{name}.{leaf}", cell)
            for i, inner in enumerate(held.__defaults__ or ()):
                self.collect(f"{name}.__defaults__[{i}]", inner, held, i, _put_default)
            named: dict[str, Any] = held.__kwdefaults__ or {}
            for leaf, inner in named.items():
                self.collect(f"{name}.__kwdefaults__[{leaf!r}]", inner, named, leaf, operator.setitem)
            self._look_into_attributes(name, held)
        elif issubclass(kind, numpy.ndarray):
            for place, inner in enumerate(held.ravel().tolist()):
                self.collect(f"{name}[{place}]", inner, held.flat, place, operator.setitem)
        elif issubclass(kind, ReferenceType):
            self.collect(name, held())
        elif kind is BuiltinFunctionType:  # a method of a list or a tensor
            self.collect(name, held.__self__)
        elif kind is ContextVar:
            self.collect(f"{name}.get()", held.get(_UNSET), held, None, _put_variable)
        else:
            for leaf, inner in [*members(held)]:
                self.collect(f"{name}.{leaf}", inner, held, leaf, _put_attribute)

    def _look_into_attributes(self, name: str, held: Any) -> None:
        for leaf, inner in attributes(held):
            self.collect(f"{name}.{leaf}", inner, held, leaf, _put_attribute)

    def _collect_cell(self, name: str, cell: CellType) -> None:
        """What a function closes over."""
        try:
            self.collect(name, cell.cell_contents, cell, "cell_contents", setattr)
        except ValueError:  # not filled yet
            return


def _told(items: list[Any], rows: list[Any] | None) -> tuple[Any, ...]:
    """Of many items what they are, or of which classes; with what the rows among them hold, see `rows_in`."""
    if rows is None:
        return tuple([each if is_value(each) else type(each) for each in items])
    tables, lists = by_kind(rows)
    leaves = [*items, *chain.from_iterable(map(dict[Any, Any].values, tables)), *chain.from_iterable(lists)]
    named = {kind: kind for kind in map(type, rows)}
    told = map(named.get, map(type, leaves), leaves)
    return (*map(len, rows), *chain.from_iterable(tables), *told) if rows else tuple(items)


def _put_in_tuple(at: Slot, items: list[Any], held: Any, place: int, value: object) -> None:
    """Put another tuple in the place of one, `at`, that holds something else."""
    items[place] = value
    made: Any = getattr(held, "_make", cast("Any", type(held)))
    at.put(made(items))


def _put_attribute(holder: Any, name: str, value: object) -> None:
    """Put an attribute, whatever the class makes of that."""
    own = attributes_of(holder)
    slot = next((slot for slot in member_slots(cast("Any", type(holder))) if slot.name == name), None)
    if own is not None and name in own:
        own[name] = value
    elif slot is not None:
        slot.put(holder, value)
    else:
        object.__setattr__(holder, name, value)


def _put_variable(variable: ContextVar[Any], _: object, value: object) -> None:
    variable.set(value)


def _put_default(function: FunctionType, place: int, value: object) -> None:
    before = function.__defaults__ or ()
    function.__defaults__ = (*before[:place], value, *before[place + 1 :])


def _members(held: Any) -> list[Any]:
    return [part for name, inner in members(held) for part in (sys.intern(name), inner)]


def _in_slots(held: Any, slots: tuple[MemberSlot, ...], has_dict: bool) -> list[Any]:
    own = attributes_of(held) or {}
    return [*(slot.get(held) if slot.is_set(held) else _UNSET for slot in slots), *own, *own.values()]


__all__ = ["FEW", "ITEMS", "LENGTH", "ORDER", "AroundSlots", "Slot", "Slots", "hook_name", "slots_of"]
