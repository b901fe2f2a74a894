"""Containers: the one walker of nested arguments and results, each item by its path.

in:  the arguments of a call, or its results
out: what they hold, by path; copies with something else in its place

    forward(ids, caches=[[k, v]])   ->   ("ids",), ("caches", 0, 0), ("caches", 0, 1)

Containers are tuples, lists, mappings, records (dataclasses, namespaces, attrs classes), all their subclasses, and
what is registered with torch's pytree, such as transformers' ModelOutput. Among a call's arguments, objects are
containers as well whose state is all in their `__dict__`, such as key-value caches. All else is a leaf.

What a body writes into a list, a mapping, a record or an object of its caller's is there after the call, such as keys
and values that the next call reads.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from types import FunctionType, SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn

from tpplan.compat.symbols import SYMBOLIC
from tpplan.compat.trees import is_registered_container, rebuild_container
from tpplan.compiler.ir.trace import Path

Change = Callable[[Path, Tensor], Tensor]
Visit = Callable[[Path, Any], Any]
_LEAVES = frozenset((Tensor, nn.Parameter, int, float, bool, str, type(None), *SYMBOLIC))
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: the class was written in Python


def is_record(held: object) -> bool:
    """Whether it is an instance of a dataclass, of an attrs class, or a namespace."""
    return is_record_class(type(held))


def is_record_class(kind: type[Any]) -> bool:
    """Whether instances of a class are records."""
    return not issubclass(kind, type) and _kind_of(kind) == "record"


@functools.lru_cache(maxsize=4096)
def _kind_of(kind: type[Any]) -> str | None:
    """Which kind of container instances of a class are; None if they are leaves."""
    if issubclass(kind, (Tensor, nn.Module)):
        return None
    if issubclass(kind, (tuple, list)):
        return "tuple" if issubclass(kind, tuple) else "list"
    if issubclass(kind, MutableMapping):
        return "mapping"
    if is_dataclass(kind) or issubclass(kind, SimpleNamespace) or hasattr(kind, "__attrs_attrs__"):
        return "record"
    return None


@functools.lru_cache(maxsize=4096)
def shows_its_state(kind: type[Any]) -> bool:
    """Whether all that an object of this class is stands in its `__dict__`."""
    if issubclass(kind, (Tensor, nn.Module, torch.Generator, type, Enum, BaseException)):
        return False
    if kind.__new__ is not object.__new__ and not isinstance(kind.__new__, FunctionType):
        return False  # written in C, as `functools.partial` is
    own = kind.__mro__[:-1]
    return bool(kind.__dictoffset__) and all(b.__flags__ & _HEAP_TYPE and not b.__dict__.get("__slots__") for b in own)


@functools.lru_cache(maxsize=4096)
def has_own_state(kind: type[Any]) -> bool:
    """Whether objects of this class are no containers, and all that they are stands in their `__dict__`."""
    return shows_its_state(kind) and not is_record_class(kind)


def children(held: Any, immutable: bool = False, objects: bool = False) -> list[tuple[str | int, Any]] | None:
    """What a container holds, by key or place, in order; None of what is no container.

    Args:
        held: anything.
        immutable: whether only those are looked into that nobody can write to: tuples.
        objects: whether objects are containers that show their state.
    """
    own = cast("type[Any]", type(held))
    if own in _LEAVES:
        return None
    kind = _kind_of(own)
    if immutable and kind != "tuple":
        return None
    if kind == "tuple":
        return [*enumerate(held)]
    if kind == "list":
        return [*enumerate(held), *_attributes(held).items()]
    if kind == "mapping":
        return [*held.items(), *((k, item) for k, item in _attributes(held).items() if k not in held)]
    if kind == "record":
        return [*_attributes(held).items()]
    if is_registered_container(held):
        items: list[Any] = []
        rebuild_container(held, items.append)
        return [*enumerate(items)]
    if objects and shows_its_state(own):
        return [*vars(held).items()]
    return None


def rebuilt(held: Any, items: Sequence[Any]) -> Any:
    """A container like `held` with other items in it, in the order of `children`."""
    own = cast("Any", type(cast("object", held)))
    kind = _kind_of(own)
    if own is tuple or own is list:
        return cast("Any", own(items))
    if kind == "tuple":
        return _rebuilt_tuple(held, items)
    if own is dict:
        return dict(zip(held, items, strict=True))
    if kind is None or (kind == "mapping" and is_registered_container(held)):
        rest = iter(items)
        return rebuild_container(held, lambda _: next(rest))
    made = copy.copy(held)
    for (key, before), item in zip(children(held) or (), items, strict=True):
        if item is before:
            continue
        if kind == "record" or (kind == "list" and isinstance(key, str)):
            object.__setattr__(made, str(key), item)  # frozen ones as well
        elif kind == "mapping" and key not in held:
            object.__setattr__(made, str(key), item)
        else:
            made[key] = item
            shown: dict[Any, Any] = getattr(made, "__dict__", {})
            if kind == "mapping" and shown.get(key) is before:
                shown[key] = item  # some show their items as attributes too
    return made


def _rebuilt_tuple(held: Any, items: Sequence[Any]) -> Any:
    kind: Any = type(cast("object", held))
    if hasattr(kind, "_make"):
        return kind._make(items)
    if hasattr(kind, "n_sequence_fields") or kind.__new__ is not tuple.__new__:  # torch's own, as of `topk`
        return kind(items)
    made = tuple.__new__(kind, items)
    if hasattr(held, "__dict__"):
        vars(made).update(vars(held))
    return made


def _attributes(held: Any) -> dict[str, Any]:
    """A record's fields, and what else is set on it."""
    found: dict[str, Any] = {}
    for name in _field_names(cast("type[Any]", type(held))):
        if hasattr(held, name):
            found[name] = getattr(held, name)
    own: dict[Any, Any] = getattr(held, "__dict__", {})
    return found | ({} if own is held else own)


@functools.lru_cache(maxsize=4096)
def _field_names(kind: type[Any]) -> tuple[str, ...]:
    """The fields of a record's class."""
    own = [field.name for field in fields(kind)] if is_dataclass(kind) else []
    return (*own, *(field.name for field in getattr(kind, "__attrs_attrs__", ())))


class Walk:
    """Visits what containers hold; `visit` gets each leaf with its path, and tells what takes its place.

    A container that holds itself counts as a leaf where it comes again.
    """

    def __init__(self, visit: Visit, immutable: bool = False, once: bool = False, objects: bool = False) -> None:
        """Walk.

        Args:
            visit: called for each leaf.
            immutable: whether only tuples are looked into.
            once: whether what sits in several places is visited in the first of them only, and stays one.
            objects: whether objects are looked into that show their state; only with `once`.
        """
        self._visit = visit
        self._immutable = immutable
        self._objects = objects
        self._memo: dict[int, tuple[Any, Any]] | None = {} if once else None
        self._open: set[int] = set()

    def __call__(self, held: Any, path: Path = ()) -> Any:
        """A copy of `held` with what `visit` made of its leaves."""
        memo = self._memo
        if memo is not None and id(held) in memo:
            return memo[id(held)][1]
        made = self._copied(held, path)
        if memo is not None:
            memo[id(held)] = (held, made)
        return made

    def _copied(self, held: Any, path: Path) -> Any:
        items = None if id(held) in self._open else children(held, self._immutable, self._objects)
        if items is None:
            return self._visit(path, held)
        if self._objects and _kind_of(cast("type[Any]", type(held))) is None and not is_registered_container(held):
            return self._object(held, items, path)
        self._open.add(id(held))
        try:
            return rebuilt(held, [self(item, (*path, key)) for key, item in items])
        finally:
            self._open.discard(id(held))

    def _object(self, held: Any, items: Sequence[tuple[str | int, Any]], path: Path) -> Any:
        """A copy of an object, made without its constructor; what it holds may hold it in turn."""
        made = object.__new__(cast("type[Any]", type(held)))
        assert self._memo is not None
        self._memo[id(held)] = (held, made)
        vars(made).update({str(name): self(item, (*path, name)) for name, item in items})
        return made


def leaves(held: Any, path: Path = (), objects: bool = False) -> Iterator[tuple[Path, Any]]:
    """What nested containers hold, in order, with its path; also what objects hold if these are to be looked into.

    What an object holds comes once, by the first path to it: objects may all refer to each other.
    """
    found: list[tuple[Path, Any]] = []
    waiting: list[tuple[Path, Any, frozenset[int]]] = [(path, held, frozenset())]
    seen: set[int] = set()
    while waiting:
        at, item, outer = waiting.pop()
        if id(item) in seen:
            continue
        inner = None if id(item) in outer else children(item, objects=objects)
        if inner is None:
            found.append((at, item))
            continue
        if objects and has_own_state(cast("type[Any]", type(item))):
            seen.add(id(item))
        waiting += [((*at, key), child, outer | {id(item)}) for key, child in reversed(inner)]
    return iter(found)


class NothingThereError(LookupError):
    """A container has nothing at a path."""


def replaced_at(held: Any, path: Path, change: Callable[[Tensor], Tensor]) -> Any:
    """`held` with the tensor at `path` changed; the containers on the way are copied.

    Raises:
        NothingThereError: there is nothing at `path`.
    """
    if not path:
        return change(held) if isinstance(held, Tensor) else held
    key, rest = path[0], path[1:]
    items = children(held)
    if items is None or all(other != key for other, _ in items):
        raise NothingThereError(f"a `{type(held).__name__}` has nothing at {key!r}")
    return rebuilt(held, [replaced_at(item, rest, change) if other == key else item for other, item in items])


def tensors_of(
    arguments: Sequence[Any], keywords: Mapping[str, Any], names: Sequence[str]
) -> list[tuple[Path, Tensor]]:
    """Every tensor of a call with its path, in order.

    Args:
        arguments, keywords: the call.
        names: of the positional arguments; `*0` and so on stand for those that have none.
    """
    named = [(_name(names, i), argument) for i, argument in enumerate(arguments)]
    return [found for name, item in (*named, *keywords.items()) for found in tensors_in(item, (name,), objects=True)]


def tensors_in(held: Any, path: Path = (), objects: bool = False) -> Iterator[tuple[Path, Tensor]]:
    """Every tensor in nested containers with its path, in order; also those in objects if wanted."""
    return ((at, item) for at, item in leaves(held, path, objects) if isinstance(item, Tensor))


def with_tensors(
    arguments: Sequence[Any],
    keywords: Mapping[str, Any],
    names: Sequence[str],
    change: Change,
    other: Callable[[Any], Any] = lambda held: held,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A copy of a call's arguments with other tensors in them; what sits in several places stays one.

    Args:
        arguments, keywords, names: see `tensors_of`.
        change: gets a tensor and the first of its paths, and returns the one that takes its place.
        other: the same for what is neither a tensor nor a container.
    """

    def changed(path: Path, held: Any) -> Any:
        return change(path, held) if isinstance(held, Tensor) else other(held)

    copied = Walk(changed, once=True, objects=True)
    positional = tuple(copied(argument, (_name(names, i),)) for i, argument in enumerate(arguments))
    return positional, {name: copied(argument, (name,)) for name, argument in keywords.items()}


def with_items(held: Any, change: Callable[[Any], Any]) -> Any:
    """A copy of nested containers with `change` applied to all that they hold."""
    return Walk(lambda _, item: change(item), once=True)(held)


def _name(names: Sequence[str], position: int) -> str:
    return names[position] if position < len(names) else f"*{position}"


__all__ = [
    "NothingThereError",
    "Walk",
    "children",
    "has_own_state",
    "is_record",
    "is_record_class",
    "leaves",
    "rebuilt",
    "replaced_at",
    "shows_its_state",
    "tensors_in",
    "tensors_of",
    "with_items",
    "with_tensors",
]
