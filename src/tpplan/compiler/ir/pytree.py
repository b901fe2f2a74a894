"""Containers: the tensors of a call's arguments, in tuples, lists, dicts and dataclasses, each by its path.

in:  the arguments of a call
out: their tensors by path; copies of the arguments with other tensors in them

    forward(ids, caches=[[k, v]])   ->   ("ids",), ("caches", 0, 0), ("caches", 0, 1)

What a body writes into a list, a dict or a dataclass of its caller's is there after the call, such as keys and values
that the next call reads.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from tpplan.compat import is_registered_container, rebuild_container
from tpplan.compiler.ir.trace import Path

Change = Callable[[Path, Tensor], Tensor]


def is_record(held: object) -> bool:
    """Whether it is an instance of a dataclass."""
    return is_dataclass(held) and not isinstance(held, type)


def tensors_of(
    arguments: Sequence[Any], keywords: Mapping[str, Any], names: Sequence[str]
) -> list[tuple[Path, Tensor]]:
    """Every tensor of a call with its path, in order.

    Args:
        arguments, keywords: the call.
        names: of the positional arguments; `*0` and so on stand for those that have none.
    """
    held = [(_name(names, i), argument) for i, argument in enumerate(arguments)]
    return [found for name, item in (*held, *keywords.items()) for found in _tensors_in(item, (name,))]


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
    copied = _Copier(lambda path, held: change(path, held) if isinstance(held, Tensor) else other(held))
    positional = tuple(copied(argument, (_name(names, i),)) for i, argument in enumerate(arguments))
    return positional, {name: copied(argument, (name,)) for name, argument in keywords.items()}


def with_items(held: Any, change: Callable[[Any], Any]) -> Any:
    """A copy of nested containers with `change` applied to all that they hold."""
    return _Copier(lambda _, item: change(item))(held, ())


def _name(names: Sequence[str], position: int) -> str:
    return names[position] if position < len(names) else f"*{position}"


def _tensors_in(held: Any, path: Path) -> Iterator[tuple[Path, Tensor]]:
    if isinstance(held, Tensor):
        yield path, held
    elif isinstance(held, (tuple, list)):
        for i, item in enumerate(held):  # pyright: ignore
            yield from _tensors_in(item, (*path, i))
    elif isinstance(held, dict):
        for key, item in held.items():  # pyright: ignore[reportUnknownVariableType]
            yield from _tensors_in(item, (*path, key))  # pyright: ignore[reportUnknownArgumentType]
    elif is_record(held):
        for field in fields(held):
            yield from _tensors_in(getattr(held, field.name, None), (*path, field.name))


class _Copier:
    """Copies containers, and has something else in place of what they hold."""

    def __init__(self, change: Callable[[Path, Any], Any]) -> None:
        self._change = change
        self._memo: dict[int, Any] = {}

    def __call__(self, held: Any, path: Path) -> Any:
        if id(held) not in self._memo:
            self._memo[id(held)] = self._copy(held, path)
        return self._memo[id(held)]

    def _copy(self, held: Any, path: Path) -> Any:
        if isinstance(held, tuple):
            items = [self(item, (*path, i)) for i, item in enumerate(held)]  # pyright: ignore
            return type(held)(*items) if hasattr(held, "_fields") else tuple(items)  # pyright: ignore
        if isinstance(held, list):
            return [self(item, (*path, i)) for i, item in enumerate(held)]  # pyright: ignore
        if isinstance(held, dict) and is_registered_container(held):  # pyright: ignore[reportUnknownArgumentType]
            keys: Iterator[str] = iter(list(held))  # pyright: ignore
            return rebuild_container(held, lambda item: self(item, (*path, next(keys))))
        if isinstance(held, dict):
            return {key: self(item, (*path, key)) for key, item in held.items()}  # pyright: ignore
        if not is_record(held):
            return self._change(path, held)
        made = copy.copy(held)
        for field in fields(held):
            if hasattr(held, field.name):
                object.__setattr__(made, field.name, self(getattr(held, field.name), (*path, field.name)))
        return made


__all__ = ["is_record", "tensors_of", "with_items", "with_tensors"]
