"""Surroundings: what a forward can change besides its module, and how to put it back.

in:  the classes of a model's modules
out: a record of the globals and class attributes of the files that they come from, of their `functools.lru_cache`s, and
     of the generators of random numbers

A capture runs the model's own code. What that leaves behind would meet the user's next call: tensors without numbers in
a cache, a counter that is one too high.
"""

from __future__ import annotations

import argparse
import copy
import dis
import functools
import gc
import io
import logging
import operator
import os
import random
import sys
import threading
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from enum import EnumType
from itertools import chain, count
from operator import is_
from types import CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, cast
from weakref import ProxyTypes, ReferenceType, WeakKeyDictionary, WeakSet, WeakValueDictionary

import numpy
import torch
from torch import Tensor, nn

from tpplan.compat.generators import random_state, set_random_state
from tpplan.compat.hooks import global_hooks, hooks_of
from tpplan.compat.modules import named_modules
from tpplan.compat.tensors import as_bytes, storage_key
from tpplan.compiler.ir.hidden import ARRAYS, VALUES, hidden_tensors, is_numbers, is_read_only, is_value, rows_in
from tpplan.state.parts import (
    FACTORY,
    MemberSlot,
    attributes,
    attributes_of,
    counted,
    functions_in,
    is_library,
    names_in,
    slots_of,
    stored_as,
    stored_in,
    unbound,
)

Cache = Any  # functools has no public name for what `lru_cache` makes
_CACHE: Any = type(functools.lru_cache(lambda: None))
_OURS = ("torch", "tpplan", "builtins")
_SCALARS = frozenset((bool, int, float, str, type(None)))
CONTAINERS = frozenset((list, dict, set, deque, OrderedDict, defaultdict))
_WRITTEN = (
    *(functools.partial, MethodType, SimpleNamespace, argparse.Namespace, threading.local, ContextVar, count),
    *(ReferenceType, logging.Logger, logging.LoggerAdapter),
    *(UserDict, UserList, ChainMap, WeakKeyDictionary, WeakValueDictionary, WeakSet),
)
_PLAIN_ATTRIBUTES = frozenset((*_SCALARS, OrderedDict, torch.dtype, torch.device, Tensor))
_STOCK = frozenset(vars(nn.Module()))
_BARE = frozenset((tuple, list, deque, set, frozenset, dict))  # without attributes
_CODE = (type, FunctionType, nn.Module, _CACHE)
_LARGEST = 1 << 16
_MOST = 256
_LARGE = 1 << 20  # bytes
_PLAIN_KINDS = frozenset((*_SCALARS, *CONTAINERS, tuple, FunctionType, bytes))
_MANY = 20_000  # objects
DEFAULTS = operator.attrgetter("__defaults__", "__kwdefaults__")
CONTENTS = operator.attrgetter("cell_contents")
_UNSET = object()
_NO_STATE = (type, Tensor, nn.Module, ModuleType, FunctionType)


class Space:
    """The names of a module of Python, or of a class."""

    def __init__(self, holder: ModuleType | type) -> None:
        """Of `holder`."""
        self.holder = holder

    def names(self) -> MutableMapping[str, Any]:
        """What they stand for; of a class it can't be written to."""
        return vars(self.holder)  # pyright: ignore[reportReturnType]

    def set(self, name: str, value: object) -> None:
        """Let `name` stand for `value`."""
        setattr(self.holder, name, value)

    def delete(self, name: str) -> None:
        """Forget `name`."""
        delattr(self.holder, name)


class Contents:
    """What containers store, to be compared with what they store later: the same objects in the same order."""

    def __init__(self, held: Iterable[Any]) -> None:
        """Of lists, deques, sets and dicts."""
        self._views: list[Any] = [*_views(held)]
        self._sizes, self._items = [*map(len, self._views)], [*chain.from_iterable(self._views)]
        self.are_many = len(self._items) > _MANY

    def are_same(self) -> bool:
        """Whether they hold the same still."""
        return [*map(len, self._views)] == self._sizes and all(map(is_, chain.from_iterable(self._views), self._items))


class Recent(OrderedDict[Any, Any]):
    """What was found, by what it was found of; the oldest is forgotten where there is more than `most`."""

    def __init__(self, most: int) -> None:
        """Nothing yet."""
        super().__init__()
        self._most = most

    def keep(self, key: Any, found: Any) -> None:
        """Keep what was found last."""
        self.pop(key, None)
        self[key] = found
        while len(self) > self._most:
            self.popitem(last=False)


class _StoredRows:
    """What C stores in a list, a deque or a set, whatever its class makes of it."""

    def __init__(self, held: Any) -> None:
        """Of `held`."""
        self._held, self._stored = held, stored_as(cast("type[Any]", type(held)))

    def __len__(self) -> int:
        return self._stored.__len__(self._held)

    def __iter__(self) -> Iterator[Any]:
        return self._stored.__iter__(self._held)


def _views(held: Iterable[Any]) -> Iterator[Any]:
    for each in held:
        stored = stored_as(cast("type[Any]", type(each)))
        if hasattr(stored, "keys"):
            yield from (stored.keys(each), stored.values(each))
        else:
            yield each if type(each) is stored else _StoredRows(each)


class _Noted:
    """What stands in some spaces, and how to put it back.

    Attributes:
        is_heavy: whether it keeps too much alive to be remembered for later compilations; see `keeps_much`.
    """

    def __init__(self, spaces: list[tuple[str, Space]], caches: Iterable[Cache] = ()) -> None:
        """Look, and remember; also what further `caches` have returned."""
        self.spaces = spaces
        self.remembered: dict[object, Any] = {}
        self.caches = [*_caches_of(spaces)]
        self.files = [space.holder for _, space in spaces if isinstance(space.holder, ModuleType)]
        self._files = frozenset(module.__name__ for module in self.files)
        self._kinds: dict[type, bool] = {}
        self._bound = [(space, self.values(space)) for _, space in self.spaces]
        self._seen: set[int] = set()
        self._stores: list[tuple[Any, list[Any] | None, list[Any]]] = []
        self._places: list[tuple[Callable[[], bool], Callable[[], object]]] = []  # is it as it was; put it back
        self._functions: list[FunctionType] = []
        self._defaults: list[Any] = []  # of each of these, by position and by name
        self._filled: list[CellType] = []  # that functions close over, with what they hold
        self._in_filled: list[Any] = []
        self._empty: list[CellType] = []
        self._objects: list[Any] = []  # with their `__dict__`
        self._dicts: list[dict[str, Any]] = []
        self.is_heavy = any("<locals>" in name for name, _ in spaces)
        self._counts: dict[int, tuple[Any, tuple[Any, ...], Any]] = {}
        self._tensors: list[tuple[Tensor, tuple[int, Tensor]]] = []
        self.large: dict[int, Tensor] = {}  # by their memory: too large to be kept, so nothing may write to them
        for _, values in self._bound:
            for held in values.values():
                self._note(held)
        self.own_functions = [function for function in self.functions() if not is_library(function.__module__)]
        self._results = [*self._cached()]
        kept = [result for cache in caches for result in cached_objects(cache)]
        for held in (*self.functions(), *self._named(), *self._results, *kept):
            self._note(held)
        self._contents = Contents(held for held, _, _ in self._stores)
        self._names = [(space, {**space.names()}) for _, space in spaces]

    @property
    def may_be_kept(self) -> bool:
        """Whether it keeps little alive."""
        return not (self.is_heavy or self.large or self._contents.are_many)

    def is_same(self) -> bool:
        """Whether everything is as it was noted."""
        return (
            all(holds_the_same(space.names(), names) for space, names in self._names)
            and self._is_back()
            and _are_same([*self._cached()], self._results)
            and all(is_same() for is_same, _ in self._places)
            and all(held._version == version and _has_numbers(held, kept) for held, (version, kept) in self._tensors)
        )

    def _is_back(self) -> bool:
        """Whether containers, functions, counts and objects are as they were noted."""
        return (
            self._contents.are_same()
            and all(map(is_, chain.from_iterable(map(DEFAULTS, self._functions)), self._defaults))
            and all(map(is_filled, self._filled))
            and all(map(is_, map(CONTENTS, self._filled), self._in_filled))
            and not any(map(is_filled, self._empty))
            and all(map(is_, map(attributes_of, self._objects), self._dicts))
            and all(counted(made) == start for _, start, made in self._counts.values())
        )

    def _cached(self) -> Iterator[object]:
        """What caches have returned that have names around the model."""
        return chain.from_iterable(map(cached_objects, self.caches))

    def _named(self) -> Iterator[object]:
        """What has names around the model, and in the user's classes there."""
        for _, space in self.spaces:
            for name, held in [*space.names().items()]:
                if not name.startswith("__"):  # the builtins are all files' own
                    yield held
                if isinstance(held, type) and not is_library(held.__module__):
                    yield from [item for leaf, item in vars(held).items() if not leaf.startswith("__")]

    def _note(self, held: Any) -> None:
        """Remember what can be written to something, and to what it holds."""
        waiting: list[Any] = [held]
        while waiting:
            item = waiting.pop()
            kind = cast("Any", type(item))
            if kind in _SCALARS or id(item) in self._seen:
                continue
            self.is_heavy = self.is_heavy or keeps_much(item)
            if issubclass(kind, (type, nn.Module, ModuleType)):
                continue
            self._seen.add(id(item))
            stored, own = stored_as(kind), attributes_of(item)
            if isinstance(item, Tensor):
                if item.is_inference():  # no run may write to it
                    continue
                if not item.is_meta and item.numel() <= _LARGEST:
                    self._tensors.append((item, (item._version, item.detach().clone())))
                elif not item.is_meta and _is_dense(item):
                    self.large[storage_key(item)] = item
                continue
            if stored is not None:
                keys, items = stored_in(item)
                if stored not in (tuple, frozenset):
                    self._stores.append((item, keys, items))
                rows = rows_in(items)
                waiting += items if rows is None else ()
                self._seen.update(map(id, rows or ()))
                self._stores += [(row, *stored_in(row)) for row in rows or () if type(row) is not tuple]
                if issubclass(kind, defaultdict):
                    made = FACTORY.__get__(item)
                    put = functools.partial(FACTORY.__set__, item, made)
                    self._places.append((functools.partial(_makes, item, made), put))
            elif kind is count:
                self._counts[id(item)] = item, counted(item), item
            else:
                waiting += self._way_back(item, kind)
            if type(own) is dict and (self._is_written(kind) or (stored is not None and kind not in _BARE)):  # pyright: ignore
                waiting.append(own)
                self._objects.append(item)
                self._dicts.append(own)

    def _is_written(self, kind: type) -> bool:
        """Whether a forward may well write to the attributes of what has this class."""
        return kind.__module__ in self._files or not is_library(kind.__module__) or issubclass(kind, _WRITTEN)

    def _way_back(self, held: Any, kind: Any) -> Sequence[Any]:
        """Remember how to put back what is written to something that is no container; returns what it holds."""
        if issubclass(kind, FunctionType):
            defaults, named = held.__defaults__, held.__kwdefaults__
            if defaults or named:
                self._functions.append(held)
                self._defaults += (defaults, named)
            cells = () if is_library(held.__module__) else held.__closure__ or ()
            filled: list[CellType] = [cell for cell in cells if is_filled(cell)]
            inner = [*map(CONTENTS, filled)]
            self._empty += [cell for cell in cells if not is_filled(cell)]
            self._filled += filled
            self._in_filled += inner
            return [defaults, named, vars(held), *inner]
        if issubclass(kind, functools.partial):
            state: tuple[Any, ...] = (held.func, held.args, held.keywords, vars(held))  # pyright: ignore
            self._places.append((lambda: _has_state(held, state), lambda: held.__setstate__(state)))
            return state
        if issubclass(kind, MethodType):
            return held.__self__, held.__func__
        if issubclass(kind, ReferenceType):
            return (held(),)
        if issubclass(kind, ContextVar):
            before: Any = held.get(_UNSET)
            self._places.append((lambda: held.get(_UNSET) is before, lambda: before is _UNSET or held.set(before)))
        elif issubclass(kind, memoryview):
            return (held.obj,)
        elif issubclass(kind, ARRAYS):
            if not is_read_only(held):
                kept = held, copy.copy(held)
                self._places.append((functools.partial(_is_array, *kept), functools.partial(_put_array, *kept)))
            return [] if is_numbers(held) else held.ravel().tolist()
        elif self._is_written(kind):
            slots = slots_of(kind)
            named = {slot: slot.get(held) for slot in slots if slot.is_set(held)}
            if slots:
                empty = [slot for slot in slots if slot not in named]
                state = held, named, empty
                self._places.append((functools.partial(_has_slots, *state), functools.partial(_put_slots, *state)))
            return [*named.values()]
        return ()

    def values(self, space: Space) -> dict[str, Any]:
        """Of the names those that a forward may write to: numbers, texts, containers, tensors, the user's objects."""
        kinds, names = self._kinds, space.names()
        for kind in {*map(type, names.values())}.difference(kinds):
            kinds[kind] = self._may_be_written(kind)  # pyright: ignore
        inner = ("_",) if isinstance(space.holder, EnumType) else ("__",)  # an Enum's tables of its members
        return {name: held for name, held in names.items() if kinds[type(held)] and not name.startswith(inner)}

    def _may_be_written(self, kind: type) -> bool:
        if kind in _SCALARS or issubclass(kind, (Tensor, tuple, *VALUES, *ARRAYS, *CONTAINERS, *_WRITTEN)):
            return True
        has_state = kind.__dictoffset__ != 0 or bool(slots_of(kind))  # pyright: ignore
        return kind.__module__ in self._files and has_state and not issubclass(kind, _CODE)

    def functions(self) -> Iterator[FunctionType]:
        """Those that have names there, and those of the user's classes there."""
        for _, space in self.spaces:
            for held in space.names().values():
                is_own = isinstance(held, type) and not is_library(held.__module__)
                for function in (held, *(vars(held).values() if is_own else ())):
                    function = unbound(function)
                    if isinstance(function, FunctionType):
                        yield function

    def put_back(self) -> None:
        """Put everything back."""
        for space, values in self._bound:
            for name in [name for name in self.values(space) if name not in values]:
                space.delete(name)
            for name, held in values.items():
                held = self._as_it_was(held)
                if space.names().get(name) is not held:
                    space.set(name, held)
        if not self._is_back():
            self._put_contents_back()
        with torch.no_grad():
            for held, (version, numbers) in self._tensors:
                if held._version != version:
                    held.copy_(numbers)
                elif not _has_numbers(held, numbers):
                    held.data.copy_(numbers)  # it was written to in this way
        for is_same, put in self._places:
            if not is_same():
                put()

    def _as_it_was(self, held: Any) -> Any:
        """What something is to be put back as: in the place of a count that has gone on, one that hasn't."""
        if id(held) not in self._counts:
            return held
        item, start, made = self._counts[id(held)]
        if counted(made) != start:
            made = count(*start)
            self._counts[id(held)] = item, start, made
        return made

    def _put_contents_back(self) -> None:
        for function, *defaults in zip(self._functions, self._defaults[::2], self._defaults[1::2], strict=True):
            _put_defaults(function, *defaults)
        for cell, held in zip(self._filled, self._in_filled, strict=True):
            cell.cell_contents = held
        for held, own in zip(self._objects, self._dicts, strict=True):
            _put_dict(held, own)
        for held, keys, stored_items in self._stores:
            items = [*map(self._as_it_was, stored_items)] if self._counts else stored_items
            now = stored_in(held)
            if _are_same(now[1], items) and _are_same(now[0] or (), keys or ()):
                continue
            _put_items(held, stored_as(cast("Any", type(held))), keys, items)


class Surroundings:
    """A record of what is around a model; see the module's docstring."""

    def __init__(self, model: nn.Module) -> None:
        """Look, and remember."""
        self._model = model
        self._noted = _looked_through(model)
        self.spaces, self.files, self.values = self._noted.spaces, self._noted.files, self._noted.values
        self.functions, self.large = self._noted.own_functions, self._noted.large
        self.remembered = self._noted.remembered  # of what was looked through once, by who has
        own = [*_caches_in(model)]
        self._kept = _Noted([], own) if own else None
        self.caches = {id(cache): cache for cache in (*self._noted.caches, *own)}
        self._entries = {key: cache.cache_info() for key, cache in self.caches.items()}
        self._environment = dict(os.environ)
        self._random = generators()

    def forget(self) -> None:
        """Have what was noted around the model forgotten at the end of the compilation."""
        self._noted.is_heavy = True

    def tables(self) -> Iterator[tuple[str, dict[Any, Any]]]:
        """The dicts around the model, and those that its modules and their objects keep, by their names there."""
        for _, space in self.spaces:
            yield from _dicts(self.values(space))
        for _, module in named_modules(self._model):
            yield from _dicts({name: held for name, held in vars(module).items() if name not in _STOCK})

    def written(self) -> tuple[set[str], set[str]]:
        """By what functions around the model do: the names of what they put anew, and of what they put entries into."""
        names, filled = set[str](), set[str]()
        for function in self._noted.functions():
            put, entered = written_by(function.__code__)
            names |= put
            filled |= entered
        return names, filled

    def repeat_draws(self) -> None:
        """Put the generators of random numbers back to where they were."""
        for restore in self._random:
            restore()

    def stale(self) -> list[Cache]:
        """Caches out of which the run was given numbers that were there before."""
        return [
            cache
            for key, cache in self.caches.items()
            if self._entries[key].currsize
            and cache.cache_info().hits > self._entries[key].hits
            and any(not tensor.is_meta for tensor in cached_tensors(cache))
        ]

    def touched(self) -> list[Cache]:
        """Caches into which the run has put something."""
        return [c for key, c in self.caches.items() if c.cache_info().misses != self._entries[key].misses]

    def restore(self) -> None:
        """Put everything back; caches that the run has put tensors into, or what may be written to, are emptied."""
        for cache in self.touched():
            if cached_tensors(cache) or cached_objects(cache):
                cache.cache_clear()
        self._noted.put_back()
        if self._kept is not None:
            self._kept.put_back()
        if dict(os.environ) != self._environment:
            os.environ.clear()
            os.environ.update(self._environment)
        self.repeat_draws()
        if _known.noted is None:
            _keep([self._noted])


@functools.lru_cache(maxsize=1 << 16)
def written_by(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Of a function: the names that it puts anew, and those that it may put entries into."""
    instructions = [*dis.get_instructions(code)]
    put = {i.argval for i in instructions if i.opname in ("STORE_GLOBAL", "STORE_ATTR")}
    enters = "setdefault" in code.co_names or any(i.opname == "STORE_SUBSCR" for i in instructions)
    names = frozenset[str]() if code.co_name == "__init__" else frozenset(put)
    return names, frozenset(code.co_names if enters else ())


class _Known(threading.local):
    """In each thread what was noted in a block of `same_files`."""

    noted: dict[object, _Noted] | None = None


_known = _Known()
_kept = Recent(_MOST)  # from one block to the next
_lock = threading.Lock()


@contextmanager
def same_files() -> Generator[None]:
    """A block in which the user's code runs in captures alone, which put back what it does: files stay as they are."""
    before = _known.noted
    _known.noted = {} if before is None else before
    try:
        yield
    finally:
        if before is None:
            _keep(_known.noted.values())
        _known.noted = before


@contextmanager
def other_files() -> Generator[None]:
    """A block, inside of one of `same_files`, with something else around the model: what is noted there is its own."""
    before = _known.noted
    _known.noted = None if before is None else {}
    try:
        yield
    finally:
        _known.noted = before


def _looked_through(model: nn.Module) -> _Noted:
    """What stands in the spaces of a model's classes and hooks; looked through once in a block of `same_files`."""
    hooks = [*global_hooks(), *(hook for _, module in named_modules(model) for hook in hooks_of(module))]
    held = [*_held_code(model)]
    classes = [each for each in held if isinstance(each, type)]
    kinds = _own_kinds([*(type(module) for _, module in named_modules(model)), *classes])
    functions = [each for each in held if isinstance(each, FunctionType)]
    called = [each for each in map(_plain_function, (*functions, *hooks)) if not _is_ours(each)]
    code: set[object] = {f.__code__ if isinstance(f, FunctionType) else type(f) for f in called}
    key = (frozenset(kinds), frozenset(code), len(sys.modules))
    known = {} if _known.noted is None else _known.noted
    if key not in known:
        spaces = [*_told_apart(sorted(_spaces(kinds, called), key=lambda space: space[0]))]  # alike for all models
        with _lock:
            kept = _kept.pop(_key(spaces), None)  # for this block alone
        known[key] = kept if kept is not None and kept.is_same() else _Noted(spaces)
    return known[key]


def _keep(noted: Iterable[_Noted]) -> None:
    """Keep what was noted for later blocks, in which it's compared."""
    with _lock:
        for held in noted:
            if held.may_be_kept:
                _kept.keep(_key(held.spaces), held)


def _key(spaces: Iterable[tuple[str, Space]]) -> frozenset[object]:
    return frozenset((name, space.holder) for name, space in spaces)


def _held_code(model: nn.Module) -> Iterator[Any]:
    """The functions, and the classes of the user's, of what modules hold, to the bottom."""
    waiting = [held for _, module in named_modules(model) for name, held in vars(module).items() if name not in _STOCK]
    seen = set[int]()
    while waiting:
        item = waiting.pop()
        kind = cast("Any", type(item))
        if kind in _PLAIN_ATTRIBUTES or id(item) in seen or issubclass(kind, (Tensor, nn.Module, ModuleType)):
            continue
        seen.add(id(item))
        if kind is FunctionType or (issubclass(kind, type) and not is_library(item.__module__)):
            yield item
        elif kind is MethodType:
            waiting += (item.__self__, item.__func__)
        elif issubclass(kind, functools.partial):
            waiting += (item.func, item.args, item.keywords)
        elif stored_as(kind) is not None:
            items = stored_in(item)[1]
            waiting += items if rows_in(items) is None else ()
        if not is_library(kind.__module__):
            yield kind
            waiting += [inner for _, inner in attributes(item)]


def _own_kinds(kinds: Iterable[type]) -> list[type]:
    """The classes, and those that they derive from, that are neither torch's nor made for a sharded model."""
    every = dict.fromkeys(base for kind in dict.fromkeys(kinds) for base in kind.__mro__)
    found = [kind for kind in every if kind.__module__.partition(".")[0] not in _OURS]
    return [kind for kind in found if not kind.__bases__[0].__module__.startswith("tpplan.runtime.")]


def _dicts(held: Mapping[str, Any]) -> Iterator[tuple[str, dict[Any, Any]]]:
    for name, item in held.items():
        own: Any = {} if isinstance(item, (nn.Module, type)) else getattr(item, "__dict__", {})
        for leaf, inner in ((name, item), *own.items()):
            if type(inner) in CONTAINERS and isinstance(inner, dict):
                yield leaf, inner  # pyright: ignore[reportUnknownVariableType]


def _told_apart(spaces: Iterable[tuple[str, Space]]) -> Iterator[tuple[str, Space]]:
    """By names of their own: classes that are made in functions may be called alike."""
    seen = Counter[str]()
    for name, space in spaces:
        seen[name] += 1
        yield name if seen[name] == 1 else f"{name} (number {seen[name]})", space


def _spaces(kinds: list[type], called: Sequence[Any]) -> Iterator[tuple[str, Space]]:
    """The classes, the files that they are written in, and further files of the user's that these take from."""
    for kind in sorted(kinds, key=lambda kind: (kind.__module__, kind.__qualname__)):
        yield f"{kind.__module__}.{kind.__qualname__}", Space(kind)
    waiting = [kind.__module__ for kind in kinds]
    packages = {name.partition(".")[0] for name in waiting}
    waiting += filter(None, map(_home, called))
    seen: dict[str, ModuleType] = {}
    inner: set[str] = set()
    while waiting or (waiting := [*_asked_for(inner, [*kinds, *called], seen)]):
        name = waiting.pop()
        inner.discard(name)
        module = sys.modules.get(name)
        if name in seen or module is None or name.partition(".")[0] in _OURS:
            continue
        seen[name] = module
        yield name, Space(module)
        own = not is_library(name)
        for kind in _classes_of(module) if own else ():
            if kind not in kinds:
                yield f"{name}.{kind.__qualname__}", Space(kind)
        for leaf, item in list(vars(module).items()):
            home: str | None = item.__name__ if isinstance(item, ModuleType) else getattr(item, "__module__", None)
            if home is None or home in seen or not isinstance(item, (FunctionType, type, ModuleType, _CACHE)):
                continue
            near = home.partition(".")[0] in packages and not isinstance(item, type)
            outside = home.partition(".")[0] not in sys.stdlib_module_names
            if near or (own and not isinstance(item, type) and outside) or not is_library(home):
                (inner.add if home == f"{name}.{leaf}" else waiting.append)(home)


def _classes_of(module: ModuleType) -> Iterator[type]:
    """The classes of a file that have a name there or in another of them, or of which something there is."""
    waiting, seen = [*vars(module).values()], set[type]()
    for item in waiting:
        kind = item if isinstance(item, type) else type(item)
        if kind not in seen and kind.__module__ == module.__name__:
            seen.add(kind)
            waiting += vars(kind).values()
            yield kind


def _asked_for(inner: Collection[str], called: Iterable[Any], files: Mapping[str, ModuleType]) -> Iterator[str]:
    """Of the files of packages, which name all that were ever imported, those that code here may ask for.

    Args:
        inner: their names.
        called: functions and classes.
        files: those whose functions and classes may be called, too.
    """
    if inner:
        written = (
            item
            for name, file in files.items()
            for item in list(vars(file).values())
            if getattr(item, "__module__", None) == name
        )
        asked = frozenset[str]().union(*map(_named_by, (*called, *written)))
        yield from (name for name in inner if name.rpartition(".")[2] in asked)


def _named_by(held: Any) -> frozenset[str]:
    """The names by which a function, or those of a class, may ask for the files of a package."""
    held = _plain_function(held)
    items = [*vars(held).values()] if isinstance(held, type) else [held]
    named = [names_in(function.__code__) for item in items for function in functions_in(item)]
    return frozenset[str]().union(
        *(names.attributes for names in named), *(name.split(".") for names in named for _, name in names.imports)
    )


def _plain_function(held: Any) -> Any:
    """What a partial function, or a method, calls."""
    while isinstance(held, functools.partial):
        held = held.func  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return unbound(held)


def _home(function: Any) -> str | None:
    """The module of Python in which a function, or the class of an object that is called, is written, if any is."""
    return (function if isinstance(function, FunctionType) else type(function)).__module__


def _is_ours(function: Any) -> bool:
    return (_home(function) or "").partition(".")[0] in _OURS


def _caches_of(spaces: Iterable[tuple[str, Space]]) -> Iterator[Cache]:
    """Those that have a name in one of the spaces, or in a class there, or are in a list or dict that has one."""
    for _, space in spaces:
        for name, held in list(space.names().items()):
            yield from _caches(held)
            if isinstance(held, (list, tuple, dict)) and not name.startswith("__"):
                for inner in stored_in(held)[1][:_MOST]:
                    yield from _caches(inner)
            if isinstance(held, type) and held.__module__ == getattr(space.holder, "__name__", None):
                for inner in list(vars(held).values()):
                    yield from _caches(inner)


def _caches_in(model: nn.Module) -> Iterator[Cache]:
    """Those that modules, or objects that these have, keep for themselves."""
    for _, module in named_modules(model):
        for held in vars(module).values():
            if type(held) in _PLAIN_ATTRIBUTES or isinstance(held, nn.Module):
                continue
            yield from _caches(held)
            own: Any = held if type(held) is dict else getattr(held, "__dict__", None)  # pyright: ignore
            kept: list[Any] = list(own.values()) if type(own) is dict else []  # pyright: ignore
            for inner in kept:
                yield from _caches(inner)


def _caches(held: Any) -> Iterator[Cache]:
    """A cache itself, as a method, or as what a function closes over."""
    held = held.func if type(held) is functools.partial else unbound(held)  # pyright: ignore
    if isinstance(held, FunctionType) and held.__closure__:
        yield from (cell for cell in _cells(held) if isinstance(cell, _CACHE) and _may_clear(cell))
    elif isinstance(held, _CACHE) and _may_clear(held):
        yield held


def _may_clear(cache: Cache) -> bool:
    return str(cache.__module__).partition(".")[0] not in _OURS


def _cells(held: FunctionType) -> Iterator[Any]:
    """What a function closes over."""
    return map(CONTENTS, filter(is_filled, held.__closure__ or ()))


def is_filled(cell: CellType) -> bool:
    """Whether a function that closes over it has put something there."""
    try:
        return (cell.cell_contents, True)[1]
    except ValueError:
        return False


def cached_tensors(cache: Cache) -> list[Tensor]:
    """The tensors that a cache holds."""
    if not cache.cache_info().currsize:
        return []
    held = [item for item in gc.get_referents(cache) if not isinstance(item, (FunctionType, type))]
    return [tensor for _, tensor in hidden_tensors(held)]


def cached_objects(cache: Cache) -> list[Any]:
    """What a cache of the user's holds that is no tensor, and may be written to."""
    if is_library(cache.__module__) or not cache.cache_info().currsize:
        return []
    held: list[Any] = gc.get_referents(cache)  # what a bounded one has returned stands before its table
    table = [item for item in held if type(item) is dict and item is not vars(cache)][-1]  # pyright: ignore
    found: list[Any] = held if cache.cache_parameters()["maxsize"] else [*table.values()]  # pyright: ignore
    known = {*map(id, (cache.__wrapped__, table, vars(cache), *table))}  # pyright: ignore
    known |= {id(item) for item in found if type(item) is object or isinstance(item, _NO_STATE) or is_value(item)}
    return [item for item in found if id(item) not in known]


def _put_defaults(function: FunctionType, defaults: Any, named: Any) -> None:
    if function.__defaults__ is not defaults:
        function.__defaults__ = defaults
    if function.__kwdefaults__ is not named:
        function.__kwdefaults__ = named


def _has_slots(held: Any, named: Mapping[MemberSlot, Any], empty: Sequence[MemberSlot]) -> bool:
    full = all(slot.is_set(held) and slot.get(held) is item for slot, item in named.items())
    return full and not any(slot.is_set(held) for slot in empty)


def _put_slots(held: Any, named: Mapping[MemberSlot, Any], empty: Sequence[MemberSlot]) -> None:
    for slot, item in named.items():
        slot.put(held, item)
    for slot in empty:
        slot.remove(held)


def _put_dict(held: Any, own: dict[str, Any]) -> None:
    if held.__dict__ is not own:
        held.__dict__ = own


def _has_state(held: Any, state: tuple[Any, ...]) -> bool:
    now: tuple[Any, ...] = (held.func, held.args, held.keywords, vars(held))  # pyright: ignore
    return _are_same(now, state)


def _has_numbers(held: Tensor, numbers: Tensor) -> bool:
    return not _is_dense(held) or torch.equal(as_bytes(held), as_bytes(numbers))


def _is_dense(held: Tensor) -> bool:
    return type(held) in (Tensor, nn.Parameter) and held.layout is torch.strided and not held.is_quantized


def _put_items(held: Any, stored: Any, keys: list[Any] | None, items: list[Any]) -> None:
    """Let a container hold these items again; a thread that reads it meanwhile never finds it empty."""
    if stored is list:
        list.__setitem__(held, slice(None), items)
    elif stored is deque:
        for place, item in enumerate(items[: deque.__len__(held)]):
            deque.__setitem__(held, place, item)
        while deque.__len__(held) > len(items):
            deque.pop(held)
        deque.extend(held, items[deque.__len__(held) :])
    elif keys is None:
        set.update(held, items)
        set.intersection_update(held, items)
        if not _are_same([*set.__iter__(held)], items):  # in another order
            set.clear(held)
            set.update(held, items)
    else:
        for key, item in zip(keys, items, strict=True):
            stored.__setitem__(held, key, item)
        for key in [*(stored.keys(held) - dict.fromkeys(keys).keys())]:
            stored.__delitem__(held, key)
        if not _are_same(stored_in(held)[0] or (), keys):  # in another order
            for key, item in zip(keys, items, strict=True):
                stored.__delitem__(held, key)
                stored.__setitem__(held, key, item)


def _is_array(held: Any, kept: Any) -> bool:
    if getattr(held, "shape", None) != getattr(kept, "shape", None):
        return False
    return bool(held.tobytes() == kept.tobytes() if hasattr(held, "tobytes") else held == kept)


def _put_array(held: Any, kept: Any) -> None:
    if getattr(held, "shape", None) != getattr(kept, "shape", None):
        held.resize(kept.shape, refcheck=False)
    held[... if isinstance(held, numpy.ndarray) else slice(None)] = kept


def _makes(held: Any, made: object) -> bool:
    """Whether a defaultdict makes entries in this way still."""
    return FACTORY.__get__(held) is made


def keeps_much(held: Any) -> bool:
    """Whether whoever remembers an object keeps much in memory, or what somebody may notice to be freed.

    That is an object of the user's, a module, a weak reference and what is called back when it's freed.
    """
    kind = cast("type[Any]", type(held))
    if issubclass(kind, (type, ModuleType)):
        return False
    if issubclass(kind, Tensor):
        return held.numel() > _LARGEST
    if kind not in _PLAIN_KINDS and _is_noticed(kind):
        return True
    return sys.getsizeof(held) > _LARGE


def _is_noticed(kind: type[Any]) -> bool:
    """Whether somebody may notice that an object of a class is freed, or that it isn't."""
    if issubclass(kind, (nn.Module, ReferenceType, *ProxyTypes)) or str(kind.__module__).startswith("torch."):
        return True
    if not is_library(kind.__module__):
        return True
    return hasattr(kind, "__del__") and not issubclass(kind, io.IOBase)  # to which loggers lead


def _are_same(held: Sequence[Any], before: Sequence[Any]) -> bool:
    return len(held) == len(before) and all(map(is_, held, before))


def holds_the_same(held: Any, before: Any) -> bool:
    """Whether a container holds the same objects in the same order as before, found in C."""
    return _are_same(held, before) and (not isinstance(before, dict) or all(map(is_, held.values(), before.values())))  # pyright: ignore


def generators() -> list[Callable[[], object]]:
    """How to put each generator of random numbers back to where it is now."""
    own = random.getstate()
    found: list[Callable[[], object]] = [lambda: random.setstate(own)]
    numbers = random_state()
    found.append(lambda: set_random_state(numbers))
    if torch.cuda.is_initialized():
        devices = torch.cuda.get_rng_state_all()
        found.append(lambda: torch.cuda.set_rng_state_all(devices))
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        drawn = numpy.random.get_state()
        found.append(lambda: numpy.random.set_state(drawn))
    return found


__all__ = [
    "CONTAINERS",
    "CONTENTS",
    "DEFAULTS",
    "Contents",
    "Recent",
    "Space",
    "Surroundings",
    "cached_objects",
    "cached_tensors",
    "generators",
    "holds_the_same",
    "is_filled",
    "keeps_much",
    "other_files",
    "same_files",
    "written_by",
]
