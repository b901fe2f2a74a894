"""Settings: objects with flags, dicts and lists that modules hold, and that are written to behind their backs.

model.config.use_cache = False         the skeleton's config gets the flag, and calls are proved anew
model.options["causal"] = True         so does its dict

What a forward writes itself is for its proof to follow. Where each call goes on writing, it is no longer looked at.
"""

from __future__ import annotations

import functools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, cast

from torch import nn

from tpplan.compiler.ir.objects import PLAIN, is_opaque
from tpplan.compiler.ir.pytree import tensors_in
from tpplan.compiler.trace.skeleton import transplanted
from tpplan.runtime.contents import MISSING, is_same

_CONTAINERS = (dict, list, set, deque, OrderedDict, defaultdict)
_NUMBERS = frozenset((bool, int, float))
_DEPTH = 4
_MOST = 256  # entries of a container that is looked at


class _Slots:
    """The attributes of an object whose class names them in `__slots__`, as a container."""

    __hash__ = None  # pyright: ignore

    def __init__(self, owner: object, names: Sequence[str]) -> None:
        self._owner, self._names = owner, names

    def copy(self) -> dict[str, Any]:
        return {name: getattr(self._owner, name) for name in self._names if hasattr(self._owner, name)}

    def values(self) -> Iterable[Any]:
        return self.copy().values()

    def __eq__(self, other: object) -> bool:
        return self.copy() == other


@dataclass(slots=True, eq=False)
class _Table:
    """A container, what it held when it was looked at last, and how it hangs together with what a module holds.

    Attributes:
        held: a dict, also of an object's attributes, a list or a set.
        root: the object or container that a module holds, which is `held` or leads to it.
        copied: the skeleton's copy of the root.
        entry: the root's attribute that leads here; empty where the root is a container.
        before, kinds: what it held, and the types of that.
    """

    held: Any
    root: Any
    copied: Any
    entry: str
    before: Any = None
    kinds: tuple[type, ...] = ()

    def remember(self) -> None:
        """Take it as it is."""
        self.before, self.kinds = self.held.copy(), _kinds(self.held)

    def changed(self) -> bool:
        """Whether it was written to."""
        try:
            return not (self.held == self.before and _kinds(self.held) == self.kinds)
        except Exception:  # arrays compare entry by entry
            return True

    def names(self) -> Iterator[str]:
        """The names of what was set: attributes of the root, or none if that is a container."""
        if self.entry or isinstance(self.root, _CONTAINERS):
            yield self.entry
            return
        before, now = cast("dict[str, Any]", self.before), cast("dict[str, Any]", self.held.copy())
        for name in {*before, *now}:
            if not is_same(before.get(name, MISSING), now.get(name, MISSING)):
                yield name

    def follow(self, twins: Mapping[nn.Module, nn.Module]) -> None:
        """Set the same in the skeleton's copy."""
        if isinstance(self.root, _CONTAINERS):
            made: Any = transplanted(self.root, twins)
            self.copied.clear()
            (self.copied.extend if isinstance(made, (list, deque)) else self.copied.update)(made)
            return
        for name in self.names():
            if hasattr(self.copied, name):
                object.__delattr__(self.copied, name)
            if hasattr(self.root, name):
                object.__setattr__(self.copied, name, transplanted(getattr(self.root, name), twins))


class Settings:
    """The settings of one model."""

    def __init__(self, held: Mapping[nn.Module, Mapping[str, Any]], twins: Mapping[nn.Module, nn.Module]) -> None:
        """Watch the settings among the attributes `held` by modules, of which `twins` has the skeleton's."""
        self._twins = twins
        self._tables = list(_tables(dict(_roots(held, twins))))
        for table in self._tables:
            table.remember()
        self._index()

    def _index(self) -> None:
        """Lay out what is compared at each call."""
        self._held = [table.held for table in self._tables]
        self._before = [table.before for table in self._tables]
        # `True == 1`: of tables with numbers the types are compared as well.
        numbered = [table for table in self._tables if not _NUMBERS.isdisjoint(table.kinds)]
        self._numbered = [(_typed(table.held), table.held) for table in numbered]
        self._kinds = [[*map(type, get(held))] for get, held in self._numbered]

    def _is_unchanged(self) -> bool:
        try:
            return self._held == self._before and self._kinds == [
                [*map(type, get(held))] for get, held in self._numbered
            ]
        except Exception:  # arrays compare entry by entry
            return False

    def changed(self) -> list[tuple[type, str]]:
        """What was set since it was followed last, by the class of the settings."""
        if self._is_unchanged():
            return []
        written = [table for table in self._tables if table.changed()]
        return [(type(table.root), name) for table in written for name in sorted(table.names())]

    def follow(self) -> None:
        """Set the same in the skeleton."""
        for table in [table for table in self._tables if table.changed()]:
            table.follow(self._twins)
            table.remember()
        self._index()

    def settle(self, forget: bool) -> None:
        """Take what was written to since the last look as written by a forward.

        Args:
            forget: whether forwards go on writing, so that it isn't looked at any more.
        """
        if self._is_unchanged():
            return
        for table in [table for table in self._tables if table.changed()]:
            if forget:
                self._tables.remove(table)
            else:
                table.remember()
        self._index()


def _typed(held: Any) -> Callable[[Any], Iterable[Any]]:
    """What takes the entries out of a container, with as many, whose types are compared."""
    if not isinstance(held, dict):
        return _entries
    names = [name for name, item in cast("dict[str, Any]", held).items() if item is not None]
    return itemgetter(*names) if len(names) > 1 else _entries


def _entries(held: Any) -> Iterable[Any]:
    return held.values() if hasattr(held, "values") else held


def _kinds(held: Any) -> tuple[type, ...]:
    return tuple(map(type, _entries(held)))


def _roots(
    held: Mapping[nn.Module, Mapping[str, Any]], twins: Mapping[nn.Module, nn.Module]
) -> Iterator[tuple[int, tuple[Any, Any]]]:
    """What modules hold that can be written to, with the skeleton's copies, by identity."""
    for module, attributes in held.items():
        for name, item in attributes.items():
            if _has_flags(item) or type(item) in _CONTAINERS:
                copied = vars(twins[module]).get(name)
                if type(copied) is type(item) and copied is not item:
                    yield id(item), (item, copied)


def _tables(roots: Mapping[int, tuple[Any, Any]]) -> Iterator[_Table]:
    seen = set[int]()
    for root, copied in roots.values():
        if isinstance(root, _CONTAINERS):
            yield from _inside(root, root, copied, "", roots, seen, _DEPTH)
            continue
        yield from _attributes(root, root, copied, "")
        for name, item in _items(root):
            if id(item) not in roots:
                yield from _inside(item, root, copied, name, roots, seen, _DEPTH)


def _inside(
    held: Any, root: Any, copied: Any, entry: str, roots: Mapping[int, object], seen: set[int], depth: int
) -> Iterator[_Table]:
    """The containers in one entry of a root."""
    if type(held) in PLAIN or id(held) in seen or not depth or (id(held) in roots and held is not root):
        return
    items: list[Any]
    if type(held) in _CONTAINERS:
        if len(held) > _MOST:
            return
        seen.add(id(held))
        yield _Table(held, root, copied, entry)
        items = [*(held.values() if isinstance(held, dict) else held)]  # pyright: ignore[reportUnknownVariableType]
    elif isinstance(held, tuple):
        items = [*held]  # pyright: ignore[reportUnknownVariableType]
    elif _has_flags(held):
        seen.add(id(held))
        yield from _attributes(held, root, copied, entry)
        items = [item for _, item in _items(held)]
    else:
        return
    for item in items:
        yield from _inside(item, root, copied, entry, roots, seen, depth - 1)


def _attributes(held: object, root: Any, copied: Any, entry: str) -> Iterator[_Table]:
    if getattr(held, "__dict__", None):
        yield _Table(vars(held), root, copied, entry)
    if _slots(type(held)):
        yield _Table(_Slots(held, _slots(type(held))), root, copied, entry)


def _items(held: object) -> list[tuple[str, Any]]:
    slots = _Slots(held, _slots(type(held))).copy()
    return [*getattr(held, "__dict__", {}).items(), *slots.items()]


@functools.cache
def _slots(kind: type) -> tuple[str, ...]:
    """The names in the `__slots__` of a class that is written in Python."""
    found: list[str] = []
    for base in kind.__mro__:
        names: Any = vars(base).get("__slots__", ())
        found += [names] if isinstance(names, str) else names
    return tuple(name for name in found if name not in ("__dict__", "__weakref__"))


def _has_flags(held: object) -> bool:
    if type(held) in PLAIN or isinstance(held, (tuple, list, dict, set, frozenset, type, deque)) or callable(held):
        return False
    return bool(getattr(held, "__dict__", None) or _slots(type(held))) and not (
        is_opaque(held) or any(tensors_in(held, objects=True))
    )


__all__ = ["Settings"]
