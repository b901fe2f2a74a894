"""Tensors of classes of their own, which keep what they show in other tensors: quantised ones, packed ones.

in:  a tensor that torch can take apart (`__tensor_flatten__`), such as what a quantised cache holds
out: what its class shows of it, as a plain tensor; a copy on `meta`, of the same sizes or of a rank's

    Quantised(codes, scale)   ->   codes * scale

Such a tensor counts as what it shows: no proof knows what its inner tensors mean.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tpplan.compat.subclasses import made_wrapper, takes_apart
from tpplan.ops.issued import CLONE

Shape = tuple[int, ...]


class WrapperError(Exception):
    """A tensor of a class of its own that can't be followed; the argument says why."""


def is_wrapper(held: object) -> bool:
    """Whether it is a tensor that keeps what it shows in other tensors."""
    return isinstance(held, Tensor) and type(held) is not Tensor and takes_apart(held)


def inner_tensors(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that it consists of at last, in order."""
    parts: list[Tensor] = [getattr(tensor, name) for name in _names(tensor)]
    return [inner for part in parts for inner in (inner_tensors(part) if is_wrapper(part) else [part])]


def shown(tensor: Tensor) -> Tensor:
    """What its class shows of a tensor: a plain one of its shape and dtype.

    Raises:
        WrapperError: the class shows nothing like that.
    """
    kind: Any = type(tensor)
    made: Any = None
    with torch.no_grad():
        try:
            made = kind.__torch_dispatch__(CLONE, (kind,), (tensor,), {})
        except Exception as error:  # whatever a class says of being read
            raise WrapperError(f"a `{kind.__name__}` can't be read as a plain tensor: {error}") from error
    if type(made) is not Tensor or made.shape != tensor.shape or made.dtype != tensor.dtype:
        raise WrapperError(f"a `{kind.__name__}` doesn't show what it holds as a plain tensor of its shape and dtype")
    return made


def wrapper_on_meta(tensor: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """A copy of a tensor of a class of its own, without numbers.

    Args:
        tensor: of such a class.
        shape: the copy's, with one dim of another size; its inner tensors are then of such sizes that it shows it.

    Raises:
        WrapperError: no copy of that shape is found.
    """
    size = tuple(tensor.shape)
    wanted = size if shape is None else tuple(shape)
    if wanted == size:
        parts = {name: _on_meta(getattr(tensor, name)) for name in _names(tensor)}
        return _made(tensor, size, tuple(tensor.stride()), parts)
    (dim,) = (d for d, (a, b) in enumerate(zip(size, wanted, strict=True)) if a != b)
    names = _names(tensor)
    choices = [[*_resized(getattr(tensor, name), dim, size[dim], wanted[dim])] for name in names]
    for parts in itertools.product(*choices):
        made = _made(tensor, wanted, contiguous(wanted), dict(zip(names, parts, strict=True)))
        try:
            shown(made)
        except WrapperError:
            continue
        return made
    kind = type(tensor).__name__
    raise WrapperError(f"what a `{kind}` of {size} would keep for {wanted} isn't known")


def _names(tensor: Tensor) -> list[str]:
    flatten: Any = getattr(tensor, "__tensor_flatten__")  # noqa: B009 -- torch's protocol, unknown to its stubs
    return list(flatten()[0])


def _on_meta(tensor: Tensor) -> Tensor:
    if is_wrapper(tensor):
        return wrapper_on_meta(tensor)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _resized(tensor: Tensor, dim: int, count: int, wanted: int) -> Iterator[Tensor]:
    """Copies of an inner tensor in which a dim has grown as `wanted` has over `count`, likeliest first."""
    sizes = tuple(tensor.shape)
    for other in sorted(range(len(sizes)), key=lambda d: d != dim):
        grown = -(-sizes[other] * wanted // count)
        if grown == sizes[other]:
            continue
        resized = (*sizes[:other], grown, *sizes[other + 1 :])
        if not is_wrapper(tensor):
            yield torch.empty(resized, dtype=tensor.dtype, device="meta")
            continue
        try:
            yield wrapper_on_meta(tensor, resized)
        except WrapperError:
            continue
    yield _on_meta(tensor)


def _made(like: Tensor, shape: Shape, stride: Shape, parts: dict[str, Tensor]) -> Tensor:
    """A tensor of the class of another one, made without its constructor, with other inner tensors."""
    made = made_wrapper(type(like), shape, like.dtype, torch.device("meta"), stride)
    state = {name: parts.get(name, held) for name, held in vars(like).items()}
    vars(made).update(state)
    if any(getattr(made, name, None) is not part for name, part in parts.items()):
        raise WrapperError(f"a `{type(like).__name__}` keeps its tensors elsewhere than in its attributes")
    return made


def contiguous(shape: Shape) -> Shape:
    """The strides of a tensor of that shape whose entries lie one after the other."""
    return tuple(torch.empty(shape, device="meta").stride())


__all__ = ["Shape", "WrapperError", "contiguous", "inner_tensors", "is_wrapper", "shown", "wrapper_on_meta"]
