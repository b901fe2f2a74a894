"""State: what a forward leaves in attributes and globals, and whether the next call sees it.

in:  a model that was recorded once, and its surroundings
out: what is held where, and what a call has changed; numbers to watch in the places of those that each call changes

    self.calls += 1                                   ->   counted up and read by nobody: nothing to prove
    if self.table is None: self.table = build(x)      ->   later calls read it: they are proved as well
    if self.calls > 3: ...                            ->   StateError

A number that each call changes is watched in one more run: arithmetic on it gives a watched number, and whatever else
is done with it steers the model.
"""

from __future__ import annotations

import functools
import operator
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import CellType, FunctionType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from tpplan.compat.dtensors import local_of
from tpplan.compat.hooks import hooks_of
from tpplan.compat.modules import named_modules, own_buffers
from tpplan.compiler.ir.hidden import is_plain, members
from tpplan.compiler.trace.surroundings import CONTAINERS, Space, Surroundings

_STOCK = frozenset(vars(nn.Module())) | {"forward"}
_FEW = 1000  # items of a container that are told apart
_LAST = 8  # of a longer list
LENGTH = " (its length)"

State = dict[str, Any]
Setter = Callable[[Any, Any, Any], object]


class LeftStateError(Exception):
    """What a model computes depends on its earlier calls; the argument says how, `name` names the attribute."""

    def __init__(self, message: str, name: str) -> None:
        """Say how."""
        super().__init__(message)
        self.name = name


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


def slots_of(model: nn.Module, around: Surroundings) -> dict[str, Slot]:
    """The places of a model, its hooks and its surroundings that hold numbers, tensors and containers, by name."""
    collector = _Collector()
    modules = list(named_modules(model))
    for prefix, module in modules:
        own = vars(module)
        for leaf, held in own.items():
            if leaf not in _STOCK:
                collector.collect(f"{prefix}.{leaf}" if prefix else leaf, held, own, leaf, operator.setitem)
        for leaf, buffer in own_buffers(module).items():
            if buffer is not None:
                collector.found[f"{prefix}.{leaf}" if prefix else leaf] = Slot(buffer)
    collector.outside = True
    for prefix, module in modules:
        for number, hook in enumerate(hooks_of(module)):
            collector.collect(hook_name(prefix, number), hook)
    for name, space in around.spaces:
        for leaf, held in around.values(space).items():
            collector.collect(f"{name}.{leaf}", held, space, leaf, Space.set)
    for cache in around.caches.values():
        collector.found[f"the cache of {cache.__qualname__}"] = Slot(cache.cache_info().currsize, cached=True)
    return collector.found


def hook_name(module: str, number: int) -> str:
    """How a module's hook of this number is called."""
    return f"a hook of {module or 'the model'}" + (f" (number {number + 1})" if number else "")


class _Collector:
    """Finds slots; each object is looked into once."""

    def __init__(self) -> None:
        self.found: dict[str, Slot] = {}
        self.outside = False
        self._seen: set[int] = set()

    def collect(
        self, name: str, item: object, holder: object = None, key: object = None, setter: Setter | None = None
    ) -> None:
        """Note what `item`, which `holder` has at `key`, is or holds."""
        held = cast("Any", item)
        if is_plain(held) or isinstance(held, (Tensor, WatchedNumber)):
            self.found[name] = Slot(held, holder, key, setter, None, self.outside)
            return
        if id(held) in self._seen or isinstance(held, (nn.Module, type)):
            return
        kind: Any = type(item)
        stored = issubclass(kind, (list, dict, set, deque))
        if stored and kind not in CONTAINERS and kind not in (WatchedList, WatchedDeque):
            return  # its class may make anything of what it stores
        if str(getattr(held if kind is FunctionType else kind, "__module__", "")).partition(".")[0] == "torch":
            return  # what torch keeps is no state of the model
        self._seen.add(id(held))
        if stored:
            counted = held if kind in (list, deque) else None
            self.found[f"{name}{LENGTH}"] = Slot(len(held), holder, key, setter, counted, self.outside)
            if len(held) > _FEW and not issubclass(kind, (list, deque)):
                return
        self._look_into(name, held, kind)

    def _look_into(self, name: str, held: Any, kind: Any) -> None:
        if issubclass(kind, (list, deque)):
            for i in range(max(0, len(held) - _LAST) if len(held) > _FEW else 0, len(held)):
                self.collect(f"{name}[{i}]", held[i], held, i, operator.setitem)
        elif kind is FunctionType:
            for leaf, cell in zip(held.__code__.co_freevars, held.__closure__ or (), strict=False):
                self._collect_cell(f"{name}.{leaf}", cell)
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


def described(slots: Mapping[str, Slot]) -> State:
    """What can be told of the state: numbers and texts, and the geometry of tensors."""
    return {name: _described(slot.value) for name, slot in slots.items()}


def _described(held: Any) -> tuple[object, object]:
    if isinstance(held, WatchedNumber):
        return (type(held.number).__name__, held.number)
    if not isinstance(held, Tensor):
        return (type(held).__name__, held)
    if held.is_meta or held.numel() > _FEW or held.layout is not torch.strided or held.is_quantized:
        return (tuple(held.shape), held.dtype)
    return ("Tensor", cast("object", local_of(held).tolist()))  # pyright: ignore[reportUnknownMemberType]


def is_same(one: object, other: object) -> bool:
    """Whether two places hold the same numbers or text."""
    return one == other or repr(one) == repr(other)  # NaN is not equal to itself


def changes(before: State, after: State) -> Iterator[str]:
    """The names of what differs."""
    for name in (*after, *(name for name in before if name not in after)):
        if name not in before or name not in after or not is_same(before[name], after[name]):
            yield name


def told(slots: Mapping[str, Slot]) -> State:
    """The numbers and texts in each place; of what can't be told so, None. What is cached is nobody's result."""
    return {name: _told(slot.value) for name, slot in slots.items() if not slot.cached}


def _told(held: Any) -> object:
    kind, content = _described(held)
    return content if isinstance(kind, str) else None


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


def _watched(stored: list[Any] | deque[Any], note: Callable[[], None]) -> WatchedList | WatchedDeque:
    made = WatchedDeque(stored, stored.maxlen) if isinstance(stored, deque) else WatchedList(stored)
    made.note = note
    return made


def watch(model: nn.Module, around: Surroundings, names: set[str], note: Callable[[str], None]) -> set[int]:
    """Put watched numbers and lists in the places of these names; returns the ids of real tensors to be watched.

    Raises:
        StateError: what changes is no number, so that it can't be watched.
    """
    slots = slots_of(model, around)
    tensors: set[int] = set()
    counted = {name.removesuffix(LENGTH): slot.counted for name, slot in slots.items() if slot.counted is not None}
    numbers = [n for n in names & slots.keys() if not isinstance(slots[n].value, Tensor)]
    full = {n for n, held in counted.items() if type(held) is deque and any(m.startswith(f"{n}[") for m in numbers)}
    lists = full.union(name for name in counted if f"{name}{LENGTH}" in names)
    changed = (names & slots.keys()).union(f"{name}{LENGTH}" for name in full)
    for name in sorted(changed, key=len, reverse=True):  # what a list holds before the list
        slot = slots[name]
        if isinstance(slot.value, Tensor):
            tensors.add(id(slot.value))
        elif slot.counted is not None and slot.setter is not None:
            slot.put(_watched(slot.counted, functools.partial(note, name.removesuffix(LENGTH))))
        elif type(slot.value) in (int, float) and slot.setter is not None and not name.endswith(LENGTH):
            slot.put(WatchedNumber(slot.value, name, note))
        elif not any(name.startswith(f"{grown}[") for grown in lists):  # whoever reads that reads the list
            raise LeftStateError(f"`{name}` changes with each call, and later calls may depend on it", name)
    return tensors


__all__ = [
    "LENGTH",
    "LeftStateError",
    "State",
    "WatchedNumber",
    "changes",
    "described",
    "hook_name",
    "is_same",
    "slots_of",
    "told",
    "watch",
]
