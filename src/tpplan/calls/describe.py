"""Describe: how a call differs from the example, for people.

`wide` is True, which the example doesn't pass; `settings['scale']` is 3, and 2 in the example
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from tpplan.compiler.ir.program import dtype_name
from tpplan.state.content import ContentValue, Node, Reader, difference, place_of, shown
from tpplan.state.parts import UnseenError

_SHOWN = 4
_LISTED = 12


class _Kind(NamedTuple):
    """What counts of a tensor that is passed, but its sizes."""

    dtype: torch.dtype
    layout: torch.layout
    dims: int
    wanted: bool

    def __repr__(self) -> str:
        sparse = "" if self.layout is torch.strided else f" of layout {self.layout}"
        name, gradient = dtype_name(self.dtype), f"{sparse} that requires grad" if self.wanted else sparse
        dims = f"{self.dims} {'dim' if self.dims == 1 else 'dims'}"
        return f"{'an' if name.startswith('i') else 'a'} {name} tensor of {dims}{gradient}"


def contents(arguments: Sequence[Any], keywords: Mapping[str, Any], names: Sequence[str]) -> dict[str, object]:
    """The content of each argument of a call, but for sizes of tensors; those that are None are left out."""
    named = {names[i] if i < len(names) else f"*{i}": held for i, held in enumerate(arguments)} | dict(keywords)
    read = Reader({}, _kind)
    return {name: _content(read, held) for name, held in named.items() if held is not None}


def _kind(held: Tensor) -> ContentValue:
    return ContentValue(type(held), _Kind(held.dtype, held.layout, held.dim(), held.requires_grad))


def _content(read: Reader, held: object) -> object:
    try:
        return read(held)
    except UnseenError:
        return ContentValue(cast("type[Any]", type(held)), "")


def listed(name: str, content: object) -> Iterator[str]:
    """What stands in each place of an argument, in words; of many places the first."""
    found = [*islice(_leaves(name, content), _LISTED + 1)]
    yield from (f"{place} is {text}" for place, text in found[:_LISTED])
    if len(found) > _LISTED:
        yield f"whatever else {name} holds is the same"


def _leaves(place: str, content: object) -> Iterator[tuple[str, str]]:
    if not isinstance(content, Node) or isinstance(content.parts, frozenset) or not content.parts:
        yield place, shown(content)
        return
    for step, inner in content.parts:
        yield from _leaves(place_of(place, step), inner)


def call_difference(example: Mapping[str, object], call: Mapping[str, object], modes: tuple[bool, bool]) -> str:
    """How a call differs from the example; empty if it shows no difference.

    Args:
        example, call: see `contents`.
        modes: whether the example and the call are in training.
    """
    found: list[str] = []
    for name, content in call.items():
        if name not in example:
            found.append(f"`{name}` is {shown(content)}, which the example doesn't pass")
        elif example[name] != content:
            first = difference(name, example[name], content)
            found.append(f"`{first.place}` is {first.now}, and {first.before} in the example")
    found += [f"`{name}` isn't passed" for name in example if name not in call]
    if len(found) > _SHOWN:
        found[_SHOWN:] = ["and more"]
    if modes[0] != modes[1]:
        found.append(f"the call is in {'training' if modes[1] else 'evaluation'}")
    return "; ".join(found)


__all__ = ["call_difference", "contents", "listed"]
