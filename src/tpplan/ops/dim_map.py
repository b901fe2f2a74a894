"""Dim maps: which dim of an operator's result is which dim of its first operand.

in:  an operator, its arguments, the shapes of its first operand and of its result
out: for each dim of the result the operand's dim whose entries it has, all of them, in their order; None for another

    transpose(x, 0, 2)      (b, s, h) -> (h, s, b)      ->   2, 1, 0
    select(x, 1, 0)         (b, s, h) -> (b, h)         ->   0, 2
    slice(x, 1, 0, 4)       (b, s, h) -> (b, 4, h)      ->   0, None, 2
    max_pool2d(x, 2)        (b, c, 8, 8) -> (b, c, 4, 4)   ->   0, 1, None, None

Which arguments are dims and sizes is read off the schemas. Of a view no dim need be one of the operand: `dim_map` has
none, and who follows dims through views says how.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tpplan.compat.schemas import OpOverload, schema_defaults, schema_keywords, schema_lists, schema_mutates
from tpplan.ops.registry import has_role, image_dims

DIMS = frozenset(("dim", "dims", "dim0", "dim1", "dim2", "dimension"))
_SIZES = ("size", "split_sizes")
Shape = tuple[int, ...]
DimMap = tuple[int | None, ...]


@functools.cache
def _name(target: OpOverload) -> str:
    return str(target)


def dim_of(target: OpOverload, arguments: Sequence[Any], rank: int) -> int:
    """The dim, counted from the front of `rank` dims, that an operator splits, joins, takes from or reads along."""
    ((position, _, default), *_) = _dims_of(target)
    dim: int = arguments[position] if len(arguments) > position else default
    return dim % rank


def dims_of(target: OpOverload, arguments: Sequence[Any], rank: int) -> list[int]:
    """The dims that an operator reads together, or drops; all of them where none is named."""
    found = _dims_of(target)
    position, _, default = found[0] if found else (len(arguments), "", None)
    dims: Any = arguments[position] if len(arguments) > position else default
    dims = (dims,) if isinstance(dims, int) else dims
    return [dim % rank for dim in dims] if dims else [*range(rank)]


@functools.cache
def size_argument(target: OpOverload) -> int | None:
    """The place of the argument that is a shape or a row of sizes; None if there is none."""
    names, lists = [name for name, _ in schema_defaults(target)], schema_lists(target)
    return next((names.index(name) for name in _SIZES if name in lists), None)


@functools.cache
def is_sized(target: OpOverload) -> bool:
    """Whether a tuple that an operator is called with is the shape of what it makes, or the sizes of its parts.

    Not where strides go with them, or where the operator changes what was there.
    """
    names = [name for name, _ in schema_defaults(target)]
    strided = "stride" in names or bool(schema_mutates(target))
    return size_argument(target) is not None and not strided


def order_of(target: OpOverload, arguments: Sequence[Any], rank: int) -> list[int]:
    """The dims, of so many, in the order in which a transposition leaves them."""
    given: list[Any] = [a for a in arguments[1:] if isinstance(a, (int, tuple, list))]
    if given and not isinstance(given[0], int):
        return [dim % rank for dim in given[0]]
    order = [*range(rank)]
    if rank < 2:  # `t`
        return order
    one, other = (dim % rank for dim in given) if given else (max(rank - 2, 0), rank - 1)
    order[one], order[other] = order[other], order[one]
    return order


def picked_dim(arguments: Sequence[Any], rank: int) -> int | None:
    """The dim, of so many, of which a single row of numbers picks entries."""
    if isinstance(arguments[1], int):
        return arguments[1] % rank
    rows = [dim for dim, index in enumerate(arguments[1]) if index is not None]
    return rows[0] if len(rows) == 1 else None


def dim_map(target: OpOverload, arguments: Sequence[Any], before: Shape, after: Shape) -> DimMap | None:
    """The dim map of an operator's first result that keeps dims of its first operand.

    Args:
        target: the operator.
        arguments: of its call; tensors may be anything.
        before, after: the shapes of the first operand and of the first result.

    Returns:
        None for an operator that keeps none, or of which it isn't known.
    """
    found = _map_of(target)
    return None if found is None else found(target, arguments, before, after)


def _same(target: OpOverload, arguments: Sequence[Any], before: Shape, after: Shape) -> DimMap | None:
    return tuple(range(len(before)))


def _ordered(target: OpOverload, arguments: Sequence[Any], before: Shape, after: Shape) -> DimMap | None:
    return tuple(order_of(target, arguments, len(before)))


def _unsqueezed(target: OpOverload, arguments: Sequence[Any], before: Shape, after: Shape) -> DimMap | None:
    place = dim_of(target, arguments, len(after))
    return (*range(place), None, *range(place, len(before)))


def _squeezed(target: OpOverload, arguments: Sequence[Any], before: Shape, after: Shape) -> DimMap | None:
    dropped = {dim for dim in dims_of(target, arguments, len(before)) if before[dim] == 1}
    return tuple(dim for dim in range(len(before)) if dim not in dropped)


def _selected(target: OpOverload, arguments: Sequence[Any], before: Shape, after: Shape) -> DimMap | None:
    dropped = dim_of(target, arguments, len(before))
    return tuple(dim for dim in range(len(before)) if dim != dropped)


def _of_equal_sizes(target: OpOverload, arguments: Sequence[Any], before: Shape, after: Shape) -> DimMap | None:
    """What cuts or repeats leaves the dims whole whose sizes don't change; new ones stand first."""
    new = len(after) - len(before)
    return (None,) * new + tuple(d if n == after[d + new] else None for d, n in enumerate(before))


def _padded(target: OpOverload, arguments: Sequence[Any], before: Shape, after: Shape) -> DimMap | None:
    """The numbers stand in pairs, those of the last dim first; a dim that loses as many as it gains is shifted."""
    pads: Sequence[int] = arguments[1]
    rank = len(before)
    padded = {rank - 1 - place // 2 for place, count in enumerate(pads) if count}
    return tuple(None if dim in padded else dim for dim in range(rank))


def _beside(target: OpOverload, arguments: Sequence[Any], before: Shape, after: Shape) -> DimMap | None:
    """What reads or joins along some dims leaves the others."""
    along = dims_of(target, arguments, len(before))
    if len(after) < len(before) or (len(after) > len(before) and has_role(_name(target), "join")):
        return None  # a vector of nothing may be joined to anything
    return tuple(None if d in along else d for d in range(len(before))) + (None,) * (len(after) - len(before))


def _paired(target: OpOverload, arguments: Sequence[Any], before: Shape, after: Shape) -> DimMap | None:
    """The pairs stand in a last dim, of the operand or of the result."""
    return tuple(range(len(before)))[: len(after)] + (None,) * (len(after) - len(before))


def _picked(target: OpOverload, arguments: Sequence[Any], before: Shape, after: Shape) -> DimMap | None:
    """The numbers may stand in any number of dims, which are those of the picked one then."""
    picked = picked_dim(arguments, len(before))
    between = len(after) - len(before) + 1
    if picked is None or between < 0:
        return None
    if (*after[:picked], *after[picked + between :]) != (*before[:picked], *before[picked + 1 :]):
        return None
    return (*range(picked), *(None,) * between, *range(picked + 1, len(before)))


def _of_images(target: OpOverload, arguments: Sequence[Any], before: Shape, after: Shape) -> DimMap | None:
    kept = len(before) - image_dims(_name(target))
    return (*range(kept), *(None,) * (len(after) - kept))


def _folded(target: OpOverload, arguments: Sequence[Any], before: Shape, after: Shape) -> DimMap | None:
    kept = len(before) - 1 - image_dims(_name(target))
    return (*range(kept), *(None,) * (len(after) - kept))


def _sampled(target: OpOverload, arguments: Sequence[Any], before: Shape, after: Shape) -> DimMap | None:
    return (0, 1, *(None,) * (len(after) - 2))


def _of_matrices(target: OpOverload, arguments: Sequence[Any], before: Shape, after: Shape) -> DimMap | None:
    return (*range(len(before) - 2), None, None)


def _convolved(target: OpOverload, arguments: Sequence[Any], before: Shape, after: Shape) -> DimMap | None:
    """The rows, and the channels where each is convolved by itself."""
    each = arguments[8] == before[1] == after[1]
    return (0, 1 if each else None, *(None,) * (len(after) - 2))


_Map = Callable[[OpOverload, Sequence[Any], Shape, Shape], "DimMap | None"]
_MAPS: Mapping[str, _Map] = {
    **dict.fromkeys(("alias", "copy", "detach", "cast", "batch norm"), _same),
    **dict.fromkeys(("transposition", "transposition in place"), _ordered),
    "unsqueeze": _unsqueezed,
    "squeeze": _squeezed,
    **dict.fromkeys(("select", "unbind"), _selected),
    **dict.fromkeys(("expand", "slice", "repeat"), _of_equal_sizes),
    "pad": _padded,
    "pairs": _paired,
    **dict.fromkeys(("along", "join", "split"), _beside),
    "pick": _picked,
    "pool": _of_images,
    "fold": _folded,
    "sampling": _sampled,
    "matrices": _of_matrices,
    "convolution": _convolved,
}


@functools.cache
def _map_of(target: OpOverload) -> _Map | None:
    return next((found for role, found in _MAPS.items() if has_role(_name(target), role)), None)


@functools.cache
def _dims_of(target: OpOverload) -> tuple[tuple[int, str, Any], ...]:
    """The arguments that are dims: their places (-1 if passed by name), names and defaults."""
    arguments, keywords = enumerate(schema_defaults(target)), schema_keywords(target)
    return tuple((-1 if name in keywords else i, name, default) for i, (name, default) in arguments if name in DIMS)


def with_dims_from_the_front(
    target: OpOverload, arguments: tuple[Any, ...], keywords: tuple[tuple[str, Any], ...], rank: int
) -> tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]:
    """A call's arguments with each dim, the ones left out too, counted from the front of `rank` dims."""
    for position, name, default in _dims_of(target):
        if position < 0:
            dim = dict(keywords).get(name, default)
            if _is_negative(dim):
                keywords = (*(k for k in keywords if k[0] != name), (name, _from_the_front(dim, rank)))
            continue
        if position >= len(arguments):
            if not _is_negative(default):
                continue
            missing = schema_defaults(target)[len(arguments) : position + 1]
            arguments = (*arguments, *(value for _, value in missing))
        if _is_negative(arguments[position]):
            arguments = (*arguments[:position], _from_the_front(arguments[position], rank), *arguments[position + 1 :])
    return arguments, keywords


def _is_negative(dim: Any) -> bool:
    if isinstance(dim, (tuple, list)):
        return any(map(_is_negative, dim))  # pyright: ignore[reportUnknownArgumentType]
    return type(dim) is int and dim < 0


def _from_the_front(dim: Any, rank: int) -> Any:
    return tuple(d % max(rank, 1) for d in dim) if isinstance(dim, (tuple, list)) else dim % max(rank, 1)  # pyright: ignore


__all__ = [
    "DIMS", "DimMap", "dim_map", "dim_of", "dims_of", "is_sized", "order_of", "picked_dim", "size_argument",
    "with_dims_from_the_front",
]  # fmt: skip
