"""Reductions over classes that are split over the ranks, as a loss written by hand makes them.

in:  this rank's part of the classes, whole in all other dims; what it knows of the axis
out: what torch's function makes of the classes of all ranks, alike on all of them; each gets the gradient of its part

    sum, mean:  Σ_ranks Σ_v z_v                     one number a row, by an all-reduce
    gather:     z_i, from the rank that has it      likewise
    max:        max_ranks (max_v z_v, its index)    two numbers a row, by an all-gather
    softmax:    exp(log_softmax(z))                 see `classes`

The gradient of a result is alike on all ranks, so that none of the backwards sends anything, but that of a softmax.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from tpplan.runtime.classes.class_losses import log_softmax
from tpplan.runtime.classes.class_rows import ClassPart, wide_dtype


def softmax(input: Tensor, part: ClassPart, dim: int) -> Tensor:
    """As `torch.softmax` along the class dim: this rank's part, in float32 at least."""
    return log_softmax(input.to(wide_dtype(input.dtype)), part, dim).exp()


def total(input: Tensor, part: ClassPart, dim: int, keepdim: bool) -> Tensor:
    """As `torch.sum` along the class dim, in float32 at least."""
    return cast(Tensor, _Summed.apply(input.sum(dim, keepdim, dtype=wide_dtype(input.dtype)), part))


def picked(input: Tensor, index: Tensor, part: ClassPart, dim: int) -> Tensor:
    """As `torch.gather` along the class dim, of class numbers among those of all ranks."""
    if index.device.type == "cpu" and bool(((index < 0) | (index >= part.classes)).any()):
        raise IndexError(f"index out of bounds for dimension {dim} with size {part.classes}")
    local = index - part.first
    own = (local >= 0) & (local < part.count)
    if part.count:
        mine = torch.where(own, input.gather(dim, torch.where(own, local, 0)), 0)
    else:
        mine = input.new_zeros(index.shape) + input.sum()  # nothing, but a part of the graph
    return cast(Tensor, _Summed.apply(mine, part))


def summed(term: Tensor, part: ClassPart) -> Tensor:
    """The sum of all ranks' terms, whose gradient is alike on all of them."""
    return cast(Tensor, _Summed.apply(term, part))


def extremes(input: Tensor, part: ClassPart, dim: int, keepdim: bool, least: bool) -> tuple[Tensor, Tensor]:
    """As `torch.max` along the class dim, or `torch.min`: the numbers, and the class of each, the first of equal ones.

    The gradient of a number goes to the class that is found.
    """
    wide = _wide(input, dim, least)
    highest, index = wide.max(-1) if part.count else _nothing(wide)
    own = torch.stack((highest, (index + part.first).to(wide.dtype)))
    every = part.axis.all_gather(own, 0).reshape(part.axis.size, *own.shape)
    rank = every[:, 0].argmax(0, keepdim=True)
    number = every[:, 1].gather(0, rank)[0].to(torch.int64).unsqueeze(dim)
    value = _value(every[:, 0].gather(0, rank)[0], input, dim, least)
    if input.requires_grad and torch.is_grad_enabled():
        value = cast(Tensor, _FoundSum.apply(input, value, number, part, dim))
    return (value, number) if keepdim else (value.squeeze(dim), number.squeeze(dim))


def shared_extremes(input: Tensor, part: ClassPart, dim: int, keepdim: bool, least: bool) -> Tensor:
    """As `torch.amax` along the class dim, or `torch.amin`: the gradient is shared by all classes that are equal."""
    wide = _wide(input, dim, least)
    highest = wide.amax(-1) if part.count else _nothing(wide)[0]
    own = torch.stack((highest, (wide == highest[..., None]).sum(-1).to(wide.dtype)))
    every = part.axis.all_gather(own, 0).reshape(part.axis.size, *own.shape)
    overall = every[:, 0].amax(0)
    value = _value(overall, input, dim, least)
    if input.requires_grad and torch.is_grad_enabled():
        equal = (every[:, 1] * (every[:, 0] == overall)).sum(0).unsqueeze(dim)
        value = cast(Tensor, _Shared.apply(input, value, equal, dim))
    return value if keepdim else value.squeeze(dim)


def _wide(input: Tensor, dim: int, least: bool) -> Tensor:
    """The classes last, in float32 at least, such that the largest is wanted."""
    return (-input if least else input).detach().to(wide_dtype(input.dtype)).movedim(dim, -1)


def _nothing(wide: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of no classes, and which it is."""
    highest = wide.new_full(wide.shape[:-1], -torch.inf)
    return highest, torch.zeros_like(highest, dtype=torch.int64)


def _value(found: Tensor, input: Tensor, dim: int, least: bool) -> Tensor:
    return (-found if least else found).to(input.dtype).unsqueeze(dim)


class _Summed(torch.autograd.Function):
    """A sum over the ranks, whose gradient is alike on all of them."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, part: ClassPart) -> Tensor:  # pyright: ignore
        return part.axis.all_reduce(tensor.contiguous().clone())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore
        return gradient, None


class _FoundSum(torch.autograd.Function):
    """Numbers of all classes, each of which one rank has."""

    @staticmethod
    def forward(  # pyright: ignore
        ctx: Any, input: Tensor, value: Tensor, number: Tensor, part: ClassPart, dim: int
    ) -> Tensor:
        ctx.save_for_backward(number)
        ctx.shape, ctx.part, ctx.dim = input.shape, part, dim
        return value.view_as(value)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        (number,) = ctx.saved_tensors
        made, local = gradient.new_zeros(ctx.shape), number - ctx.part.first
        if ctx.part.count:
            own = (local >= 0) & (local < ctx.part.count)
            made.scatter_(ctx.dim, torch.where(own, local, 0), torch.where(own, gradient, 0))
        return made, None, None, None, None


class _Shared(torch.autograd.Function):
    """Numbers of all classes, each of which so many classes may have, on any ranks."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, value: Tensor, count: Tensor, dim: int) -> Tensor:  # pyright: ignore
        ctx.save_for_backward(input == value, count)
        return value.view_as(value)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        equal, count = ctx.saved_tensors
        return (equal * (gradient / count)).to(gradient.dtype), None, None, None


__all__ = ["extremes", "picked", "shared_extremes", "softmax", "summed", "total"]
