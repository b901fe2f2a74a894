"""Dims of tensors by their names: what a term stands for in a tensor of so many dims, and how large each name is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from tpplan.plan.operator_rule import ELLIPSIS, Dim, Term


def dims_of(term: Term, rank: int) -> tuple[Dim, ...]:
    """The dims of a tensor of `rank` dims, with a name for each that `...` stands for, counted from its end.

    Raises:
        ValueError: it has another number of dims than its term.
    """
    assert term.dims is not None
    place = next((i for i, dim in enumerate(term.dims) if dim.names == (ELLIPSIS,)), None)
    count = rank - len(term.dims) + (place is not None)
    if count < 0 or (place is None and count):
        raise ValueError(f"a tensor has {rank} dims, its term {len(term.dims)}")
    if place is None:
        return term.dims
    leading = tuple(Dim((f"{ELLIPSIS}{count - i}",)) for i in range(count))
    return (*term.dims[:place], *leading, *term.dims[place + 1 :])


def sizes_of(
    tensors: Sequence[tuple[tuple[Dim, ...], tuple[int, ...]]], told: Mapping[str, int] = MappingProxyType({})
) -> dict[str, int]:
    """How many entries each name has, where the shapes tell, or arguments have `told`.

    Raises:
        ValueError: they contradict each other.
    """
    found = dict(told)
    for _ in range(1 + sum(len(dims) for dims, _ in tensors)):
        for dims, shape in tensors:
            for dim, size in zip(dims, shape, strict=True):
                unknown = [name for name in dim.names if name not in found]
                known = math.prod(found[name] for name in dim.names if name in found)
                if len(unknown) == 1 and known and size % known == 0:
                    found[unknown[0]] = size // known
                elif not unknown and known != size:
                    names = " ".join(dim.names) or "1"
                    raise ValueError(f"a dim `{names}` of {known} entries has {size} in another argument")
    return found


def shape_of(term: Term, counts: Mapping[str, Any], leading: int) -> tuple[Any, ...]:
    """The shape of a result, whose `...` are the `leading` dims of that kind that `counts` has."""
    assert term.dims is not None
    dims = dims_of(term, len(term.dims) - 1 + leading) if any(d.names == (ELLIPSIS,) for d in term.dims) else term.dims
    return tuple(math.prod(counts[name] for name in dim.names) for dim in dims)


def leading_dims(counts: Mapping[str, Any]) -> int:
    """How many dims `...` stands for."""
    return sum(name.startswith(ELLIPSIS) for name in counts)


__all__ = ["dims_of", "leading_dims", "shape_of", "sizes_of"]
