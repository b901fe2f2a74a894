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
from collections import ChainMap, deque
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, cast

import torch
from torch import Tensor, nn

from tpplan.compat.dtensors import local_of
from tpplan.compiler.ir.hidden import is_numbers, rows_in
from tpplan.compiler.trace.slots import FEW, ITEMS, LENGTH, Slots, slots_of
from tpplan.compiler.trace.surroundings import Surroundings
from tpplan.compiler.trace.watched_state import WatchedArray, WatchedCount, WatchedDeque, WatchedList, WatchedNumber
from tpplan.state.parts import counted, parts, stored_as, stored_in

State = ChainMap[str, Any]


class LeftStateError(Exception):
    """What a model computes depends on its earlier calls; the argument says how, `name` names the attribute."""

    def __init__(self, message: str, name: str) -> None:
        """Say how."""
        super().__init__(message)
        self.name = name


def described(slots: Slots) -> State:
    """What can be told of the state: numbers and texts, and the geometry of tensors."""
    return _state(slots, _described)


def _described(held: Any) -> tuple[object, object]:
    if isinstance(held, WatchedArray):
        return _described(held.array)
    if isinstance(held, WatchedNumber):
        return (type(held.number).__name__, held.number)
    if isinstance(held, count):
        return ("count", counted(held))
    if is_numbers(held):
        return (type(held).__name__, parts(held))
    if not isinstance(held, Tensor):
        return (type(held).__name__, held)
    if held.is_meta or held.numel() > FEW or held.layout is not torch.strided or held.is_quantized:
        return (tuple(held.shape), held.dtype)
    return ("Tensor", cast("object", local_of(held).tolist()))  # pyright: ignore[reportUnknownMemberType]


def is_same(one: object, other: object) -> bool:
    """Whether two places hold the same numbers or text."""
    return one == other or repr(one) == repr(other)  # NaN is not equal to itself


def changes(before: State, after: State) -> Iterator[str]:
    """The names of what differs."""
    absent = object()
    shared = len(before.maps) == len(after.maps) == 2 and before.maps[1] is after.maps[1]
    was, held = (state.maps[0] if shared else dict(state) for state in (before, after))
    for name, item in held.items():
        known = was.get(name, absent)
        if known is not item and not is_same(known, item):
            yield name
    yield from (name for name in was if name not in held)


def told(slots: Slots) -> State:
    """The numbers and texts in each place; of what can't be told so, None. What is cached is nobody's result."""
    return _state(slots, _told, cached=False)


def _state(slots: Slots, tell: Callable[[Any], object], cached: bool = True) -> State:
    """What is told of each place; of those around models that hold the same still, it is what was told before."""
    own, around = slots.own, slots.around
    moved = (around.moving, own if cached else {name: slot for name, slot in own.items() if not slot.cached})
    return ChainMap({name: tell(slot.value) for held in moved for name, slot in held.items()}, around.told(tell))


def _told(held: Any) -> object:
    if not (isinstance(held, (Tensor, WatchedNumber, WatchedArray, count)) or is_numbers(held)):
        return held
    kind, content = _described(held)
    return content if isinstance(kind, str) else None


def _watched(stored: list[Any] | deque[Any], note: Callable[[], None]) -> WatchedList | WatchedDeque:
    made = WatchedDeque(stored, stored.maxlen) if isinstance(stored, deque) else WatchedList(stored)
    made.note = note
    return made


def _watch_items(held: Any, name: str, note: Callable[[str], None]) -> bool:
    """Put watched numbers in the place of a container's, and of its rows'; whether all that they store are numbers."""
    rows = rows_in(stored_in(held)[1])
    if rows is None:
        return False
    inner = frozenset(map(type, rows))
    for each in (held, *rows):
        keys, items = stored_in(each)
        if isinstance(each, (set, frozenset, tuple)) or not {int, float, *inner}.issuperset(map(type, items)):
            return False
        for key, item in zip(keys or range(len(items)), items, strict=True):
            if type(item) not in inner:
                stored_as(cast("Any", type(each))).__setitem__(each, key, WatchedNumber(item, f"{name}[{key!r}]", note))
    return True


def watch(model: nn.Module, around: Surroundings, names: set[str], note: Callable[[str], None]) -> set[int]:
    """Put watched numbers and lists in the places of these names; returns the ids of real tensors to be watched.

    Raises:
        StateError: what changes is no number, so that it can't be watched.
    """
    slots = slots_of(model, around)
    tensors: set[int] = set()
    lengths = {name.removesuffix(LENGTH): slot.counted for name, slot in slots.items() if slot.counted is not None}
    numbers = [n for n in names & slots.keys() if not isinstance(slots[n].value, Tensor)]
    full = {n for n, held in lengths.items() if type(held) is deque and any(m.startswith(f"{n}[") for m in numbers)}
    lists = full.union(name for name in lengths if f"{name}{LENGTH}" in names)
    changed = (names & slots.keys()).union(f"{name}{LENGTH}" for name in full)
    for name in sorted(changed, key=len, reverse=True):  # what a list holds before the list
        slot = slots[name]
        if isinstance(slot.value, Tensor):
            tensors.add(id(slot.value))
        elif slot.counted is not None and slot.setter is not None:
            slot.put(_watched(slot.counted, functools.partial(note, name.removesuffix(LENGTH))))
        elif type(slot.value) in (int, float) and slot.setter is not None and not name.endswith(LENGTH):
            slot.put(WatchedNumber(slot.value, name, note))
        elif is_numbers(slot.value) and slot.setter is not None:
            slot.put(WatchedArray(slot.value, name, note))
        elif type(slot.value) is count and slot.setter is not None:
            start, *step = counted(slot.value)
            slot.put(WatchedCount(WatchedNumber(start, name, note), *step))
        elif any(name.startswith((f"{grown}[", f"{grown}{ITEMS}")) for grown in lists):
            continue  # whoever reads that reads the list
        elif not (name.endswith(ITEMS) and _watch_items(slot.holder, name.removesuffix(ITEMS), note)):
            raise LeftStateError(f"`{name}` changes with each call, and later calls may depend on it", name)
    return tensors


__all__ = [
    "LeftStateError",
    "State",
    "changes",
    "described",
    "is_same",
    "told",
    "watch",
]
