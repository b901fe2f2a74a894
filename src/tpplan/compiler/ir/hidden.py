"""Objects that are no containers: the tensors that they hold nevertheless.

in:  any object
out: the tensors in its attributes, its slots, its closure, and in what these hold in turn

    class Output: ...        Output().logits   ->   ("logits", tensor)

Nothing can be put in their place, as nobody knows how such an object is made.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Iterable, Iterator, Sequence
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from itertools import chain, count, repeat
from types import FunctionType, MethodType, ModuleType
from typing import Any, cast

import numpy
import torch
from torch import Tensor, nn

from tpplan.compiler.ir.pytree import children
from tpplan.state.parts import attributes, stored_as, stored_in

_PLAIN = frozenset((int, float, bool, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size))
VALUES = (Decimal, Fraction, numpy.generic)
"""Numbers of other classes, which never change."""
ARRAYS = (numpy.ndarray, bytearray, array, memoryview)
"""Rows of numbers that aren't torch's; they may be written to."""
_SETS = frozenset((set, frozenset))
_ROWS = frozenset((list, tuple, dict))
_STORES = _SETS | _ROWS
_Trail = tuple["_Trail | None", Any]  # the step before, and a key in a tuple of its own, or a name or place
_CLOSED = (type, ModuleType, nn.Module, torch.Generator)


def holds_only(kinds: frozenset[type], held: Any) -> bool:
    """Whether all that a container stores is of these types, found in C: a library's tables have thousands of texts."""
    return kinds.issuperset(map(type, held.values() if isinstance(held, dict) else held))  # pyright: ignore


def rows_in(items: Sequence[Any], stores: frozenset[type] = _ROWS) -> list[Any] | None:
    """The containers among items, and in these in turn, found in C; None if they hold what isn't plain.

    A dataset has millions of such rows, as `{"text": "a", "tokens": [3, 5]}`.

    Args:
        items: the items.
        stores: the types of containers.
    """
    found: dict[int, Any] = {}
    while kinds := set(map(type, items)) - _PLAIN:
        if not kinds <= stores:
            return None
        rows = {id(row): row for row in items if type(row) in stores and id(row) not in found}
        found |= rows
        tables, lists = by_kind(rows.values())
        items = [*chain.from_iterable(map(dict[Any, Any].values, tables)), *chain.from_iterable(lists)]
    return [*found.values()]


def by_kind(rows: Iterable[Any]) -> tuple[list[dict[Any, Any]], list[Any]]:
    """The dicts, and the lists and tuples."""
    found: tuple[list[Any], list[Any]] = [], []
    for row in rows:
        found[type(row) is not dict].append(row)
    return found


def is_of_plain(held: object) -> bool:
    """Whether it's plain, or one of Python's containers with nothing in it that isn't."""
    kind = cast("type[Any]", type(held))
    return kind in _PLAIN or (kind in _STORES and holds_only(_PLAIN, held))


def is_plain(held: object) -> bool:
    """Whether it's a number, a text or the like, which holds nothing."""
    return type(held) in _PLAIN


def is_value(held: object) -> bool:
    """Whether it's plain or another number, or a tuple or a frozen set of such."""
    if is_plain(held) or isinstance(held, VALUES):
        return True
    return type(held) in (tuple, frozenset) and all(map(is_value, cast("tuple[Any, ...]", held)))


def key_name(key: Any, place: int | None = None) -> str:
    """A key of a table, which a user's class isn't asked to show; of several alike, by the place."""
    kind = cast("type[Any]", type(key))
    if is_value(key) or kind is Tensor:
        return repr(key)
    if isinstance(key, Enum):
        return f"{kind.__name__}.{vars(key)['_name_']}"
    if isinstance(key, type):
        return type.__repr__(key)
    return f"a {kind.__name__}" + ("" if place is None else f", number {place + 1}")


@functools.lru_cache(maxsize=4096)
def _is_closed(kind: type[Any]) -> bool:
    return issubclass(kind, (Tensor, *_CLOSED))


def members(held: object) -> Iterator[tuple[str, Any]]:
    """What an object holds that is no tensor: attributes, slots, items, or what a function closes over."""
    if type(held) in _PLAIN or _is_closed(type(held)):
        return
    yield from attributes(held)
    stored = stored_as(cast("type[Any]", type(held)))
    if stored is not None:  # whatever its class makes of it
        keys, items = stored_in(held)
        names = (
            map(key_name, keys, count()) if keys is not None else repeat("") if stored in _SETS else map(str, count())
        )
        yield from zip(names, items, strict=False)
    elif isinstance(held, FunctionType):
        yield from _closed_over(held)
    elif isinstance(held, MethodType):
        yield "self", held.__self__
        yield "function", held.__func__
    elif isinstance(held, functools.partial):
        yield from (("func", held.func), ("args", held.args), ("keywords", held.keywords))  # pyright: ignore
    else:
        yield from (
            (key if isinstance(key, str) else key_name(key, i), item)
            for i, (key, item) in enumerate(shown_items(held) or ())
        )


def shown_items(held: object) -> list[tuple[str | int, Any]] | None:
    """The items of a container; None of what is none, or of a class of somebody's that doesn't show them."""
    try:
        return children(held)
    except Exception:
        return None


def _closed_over(held: FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(held.__code__.co_freevars, held.__closure__ or (), strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not filled yet
            continue
    yield from (("__defaults__", held.__defaults__), ("__kwdefaults__", held.__kwdefaults__))


def hidden_tensors(held: object, seen: set[int] | None = None) -> Iterator[tuple[str, Tensor]]:
    """The tensors behind an object, with the names that lead to them; modules aren't looked into."""
    seen = set[int]() if seen is None else seen
    waiting: list[tuple[_Trail | None, Any]] = [(None, held)]
    while waiting:
        trail, item = waiting.pop()
        kind = cast("type[Any]", type(item))
        if id(item) in seen:
            continue
        stores = kind in _STORES
        if is_of_plain(item) or (stores and rows_in([item], _STORES) is not None):
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            yield _named(trail), item
        elif stores and kind is dict:
            keys = ((key,) for key in item)
            waiting += zip(zip(repeat(trail), keys), item.values(), strict=False)
        elif stores:
            leaves = repeat("") if kind in _SETS else count()
            waiting += zip(zip(repeat(trail), leaves), item, strict=False)
        else:
            waiting += [((trail, leaf), inner) for leaf, inner in members(item)]


def _named(trail: _Trail | None) -> str:
    """The name of what a trail leads to, as `state.tables.'sin'.0`."""
    steps: list[str] = []
    while trail is not None:
        trail, leaf = trail
        steps.append(repr(leaf[0]) if isinstance(leaf, tuple) else str(leaf))  # pyright: ignore[reportUnknownArgumentType]
    name = ""
    for step in reversed(steps):
        name = f"{name}.{step}" if name else step
    return name


def is_numbers(held: object) -> bool:
    """Whether it is an array of numbers, and none of Python's objects."""
    return isinstance(held, ARRAYS) and not (isinstance(held, numpy.ndarray) and held.dtype.hasobject)


def is_read_only(held: Any) -> bool:
    """Whether nobody can write to an array through this."""
    return not held.flags.writeable if isinstance(held, numpy.ndarray) else getattr(held, "readonly", False)


__all__ = [
    "ARRAYS",
    "VALUES",
    "by_kind",
    "hidden_tensors",
    "holds_only",
    "is_numbers",
    "is_of_plain",
    "is_plain",
    "is_read_only",
    "is_value",
    "key_name",
    "members",
    "rows_in",
    "shown_items",
]
