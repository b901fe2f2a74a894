"""Slots: the places of a model and its surroundings that hold state, by name.

in:  a model, and what is around it
out: for each number, text and tensor, for each container's length, and for each table's order, where it is

    self.calls                ->   "calls"
    TABLES = {"sin": …}       ->   "my_file.TABLES['sin']"
    lambda x: x * self.k      ->   "a hook of up.self.k"

What is around models, such as the tables of a library's files, has thousands of places and hardly ever changes: it is
looked through once, and again where a container in it no longer holds the same objects.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections import ChainMap, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from operator import is_
from types import CellType, FunctionType, MethodType
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from tpplan.compat.hooks import hooks_of
from tpplan.compat.modules import named_modules, own_buffers
from tpplan.compiler.ir.hidden import is_plain, members, shown_items
from tpplan.compiler.trace.surroundings import CONTAINERS, Contents, Space, Surroundings, holds_the_same
from tpplan.compiler.trace.watched_state import WatchedDeque, WatchedList, WatchedNumber
from tpplan.state.parts import has_attributes
from tpplan.state.parts import slots_of as slot_names

FEW = 1000  # items of a container that are told apart
LENGTH = " (its length)"
ORDER = " (its order)"
_LAST = 8  # of a longer list
_UNSET = object()
_STOCK = frozenset(vars(nn.Module())) | {"forward"}
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


class AroundSlots(dict[str, Slot]):
    """Places around models, the same object for as long as their containers hold the same objects.

    Attributes:
        moving: those whose numbers may be others all the same.
        told: what was told of the rest, by who has.
    """

    def __init__(self, groups: Collection[dict[str, Slot]]) -> None:
        """Of all groups."""
        super().__init__({name: slot for group in groups for name, slot in group.items()})
        self.moving = {name: slot for name, slot in self.items() if isinstance(slot.value, (Tensor, WatchedNumber))}
        self.told: dict[object, dict[str, Any]] = {}


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
    found = own.slots()
    for cache in around.caches.values():
        found[f"the cache of {cache.__qualname__}"] = Slot(cache.cache_info().currsize, cached=True)
    return Slots(found, _outside(around).without(own.groups.keys()))


def hook_name(module: str, number: int) -> str:
    """How a module's hook of this number is called."""
    return f"a hook of {module or 'the model'}" + (f" (number {number + 1})" if number else "")


def _outside(around: Surroundings) -> _Outside:
    """The places around a model."""
    values = [around.values(space) for _, space in around.spaces]
    known = around.remembered.get(_outside)
    if known is None or not known.is_same(values):
        collector = _Collector(outside=True)
        for (name, space), held in zip(around.spaces, values, strict=True):
            for leaf, item in held.items():
                collector.collect(f"{name}.{leaf}", item, space, leaf, Space.set)
        for function in around.functions:
            collector.collect(f"{function.__module__}.{function.__qualname__}", function)
        known = around.remembered[_outside] = _Outside(values, collector)
    return known


class _Outside:
    """What was found around a model, and the containers that were looked through, with what they held."""

    def __init__(self, values: Sequence[dict[str, Any]], collector: _Collector) -> None:
        """What names stand for, and what was found of it."""
        self._groups = collector.groups
        self._values = values
        self._objects, self._looks = collector.objects, collector.looks
        self._dicts = [*map(vars, self._objects)]
        self._contents = Contents((*collector.containers, *self._dicts))
        self._looked = [look() for look in self._looks]
        self._found: dict[frozenset[int], AroundSlots] = {}

    def without(self, own: Collection[int]) -> AroundSlots:
        """The places but for those in a model's own containers: what it holds goes by its names there."""
        left = frozenset(self._groups.keys() & own) - {0}
        if left not in self._found:
            self._found[left] = AroundSlots([slots for held, slots in self._groups.items() if held not in left])
        return self._found[left]

    def is_same(self, values: Sequence[dict[str, Any]]) -> bool:
        """Whether all holds the same objects still."""
        named = (holds_the_same(held, before) for held, before in zip(values, self._values, strict=True))
        return (
            all(map(is_, map(vars, self._objects), self._dicts))  # an object may be given another `__dict__`
            and self._contents.are_same()
            and all(named)
            and all(holds_the_same(look(), before) for look, before in zip(self._looks, self._looked, strict=True))
        )


class _Collector:
    """Finds slots, by the containers that they are in; each object is looked into once."""

    def __init__(self, outside: bool = False) -> None:
        """Begin with the slots that are in no container.

        Args:
            outside: whether the places are around a model, and what was looked into is kept.
        """
        self.found: dict[str, Slot] = {}
        self.groups: dict[int, dict[str, Slot]] = {0: self.found}
        self.containers: list[Any] = []
        self.objects: list[Any] = []
        self.looks: list[Callable[[], list[Any]]] = []
        self.outside = self._keeps = outside

    def slots(self) -> dict[str, Slot]:
        """All that were found."""
        return {name: slot for group in self.groups.values() for name, slot in group.items()}

    def collect(
        self, name: str, item: object, holder: object = None, key: object = None, setter: Setter | None = None
    ) -> None:
        """Note what `item`, which `holder` has at `key`, is or holds."""
        held = cast("Any", item)
        if is_plain(held) or isinstance(held, (Tensor, WatchedNumber)):
            self.found[name] = Slot(held, holder, key, setter, None, self.outside)
            return
        if id(held) in self.groups or isinstance(held, (nn.Module, type)):
            return
        kind: Any = type(item)
        stored = issubclass(kind, (list, dict, set, deque))
        if stored and kind not in CONTAINERS and kind not in (WatchedList, WatchedDeque):
            return  # its class may make anything of what it stores
        if str(getattr(held if kind is FunctionType else kind, "__module__", "")).partition(".")[0] == "torch":
            return  # what torch keeps is no state of the model
        outer, self.found = self.found, self.groups.setdefault(id(held), {})
        if stored:
            counted = held if kind in (list, deque) else None
            self.found[f"{name}{LENGTH}"] = Slot(len(held), holder, key, setter, counted, self.outside)
            if issubclass(kind, dict) and 1 < len(held) <= FEW:
                keys = tuple(each if type(each) is str else repr(each) for each in held)
                self.found[f"{name}{ORDER}"] = Slot(keys, outside=self.outside)
        if not stored or len(held) <= FEW or issubclass(kind, (list, deque)):
            self._look_into(name, held, kind)
        if self._keeps:
            self._keep(held, kind)
        self.found = outer

    def _keep(self, held: Any, kind: Any) -> None:
        """Keep what was looked into, if it may hold other objects later."""
        names, has_dict = slot_names(kind), has_attributes(held)
        if issubclass(kind, (list, deque, set, dict)):
            self.containers.append(held)
        elif kind is FunctionType:
            self.containers += [vars(held), held.__kwdefaults__ or {}]
            if held.__closure__:
                self.looks.append(functools.partial(_members, held))
        elif issubclass(kind, (tuple, frozenset)) or not (names or has_dict):
            return
        elif issubclass(kind, (MethodType, functools.partial)) or shown_items(held) is not None:
            self.looks.append(functools.partial(_members, held))
        elif names:
            self.looks.append(functools.partial(_in_slots, held, names, has_dict))
        elif has_dict:
            self.objects.append(held)

    def _look_into(self, name: str, held: Any, kind: Any) -> None:
        if issubclass(kind, (list, deque)):
            for i in range(max(0, len(held) - _LAST) if len(held) > FEW else 0, len(held)):
                self.collect(f"{name}[{i}]", held[i], held, i, operator.setitem)
        elif kind is FunctionType:
            for leaf, cell in zip(held.__code__.co_freevars, held.__closure__ or (), strict=False):
                self._collect_cell(f"{name}.{leaf}", cell)
            for i, inner in enumerate(held.__defaults__ or ()):
                self.collect(f"{name}.__defaults__[{i}]", inner)
            tables: Any = (held.__kwdefaults__ or {}, vars(held))  # pyright: ignore
            for own in tables:
                for leaf, inner in own.items():
                    self.collect(f"{name}.{leaf}", inner, own, leaf, operator.setitem)
        elif issubclass(kind, dict):
            for key, inner in held.items():
                self.collect(f"{name}[{key!r}]", inner, held, key, operator.setitem)
        elif issubclass(kind, tuple):
            for i, inner in enumerate(held):
                self.collect(f"{name}[{i}]", inner)
        elif issubclass(kind, (set, frozenset)):  # a copy may have another order
            for inner in held:
                self.collect(f"{name}{{{inner!r}}}" if is_plain(inner) else name, inner)
        else:
            for leaf, inner in list(members(held)):
                self.collect(f"{name}.{leaf}", inner, held, leaf, object.__setattr__)

    def _collect_cell(self, name: str, cell: CellType) -> None:
        """What a function closes over."""
        try:
            self.collect(name, cell.cell_contents, cell, "cell_contents", setattr)
        except ValueError:  # not filled yet
            return


def _members(held: Any) -> list[Any]:
    return [part for name, inner in members(held) for part in (sys.intern(name), inner)]


def _in_slots(held: Any, names: tuple[str, ...], has_dict: bool) -> list[Any]:
    found = [getattr(held, name, _UNSET) for name in names]
    return [*found, *vars(held), *vars(held).values()] if has_dict else found


__all__ = ["FEW", "LENGTH", "ORDER", "AroundSlots", "Slot", "Slots", "hook_name", "slots_of"]
