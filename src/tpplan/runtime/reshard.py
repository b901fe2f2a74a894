"""Reshards as autograd functions on plain local tensors.

Each pairs a forward with its adjoint: Megatron's f, f*, g and g* (Shoeybi et al., 2019; Korthikanti et al., 2022), and
the slices and all-to-alls between them. See `tpplan.compiler.layout` for the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tpplan.compiler.layout import Collective, Layout
from tpplan.plan import TpplanError
from tpplan.runtime.communicator import Communicator

Move = Callable[[Tensor], Tensor]


class UnevenShardError(TpplanError):
    """A call's tensor can't be split evenly over the axis."""


@dataclass(frozen=True, slots=True)
class ReshardStep:
    """A change of layout, bound to an axis: a function on local tensors with its adjoint."""

    forward: Move
    backward: Move

    def __call__(self, tensor: Tensor) -> Tensor:
        """The tensor in its new layout; differentiable."""
        if tensor.requires_grad and torch.is_grad_enabled():
            return _Reshard.apply(tensor, self)  # pyright: ignore
        return self.forward(tensor)


class _Reshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, step: ReshardStep) -> Tensor:
        ctx.step = step
        moved = step.forward(tensor)
        return moved.view_as(moved) if moved is tensor else moved

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.step.backward(gradients[0]), None


def make_reshard(
    source: Layout, target: Layout, forward: Collective, backward: Collective, axis: Communicator, fresh: bool
) -> ReshardStep:
    """Bind a reshard to an axis.

    Args:
        source, target: the layouts.
        forward, backward: the collectives, as the program has them.
        axis: the ranks.
        fresh: whether the tensor that arrives is nobody else's, so that an all-reduce may write to it.
    """
    return ReshardStep(
        _move(forward, source, target, axis, fresh), _move(backward, target, source, axis, fresh=False, adjoint=True)
    )


def _move(
    collective: Collective, source: Layout, target: Layout, axis: Communicator, fresh: bool, adjoint: bool = False
) -> Move:
    if collective is Collective.NONE:
        return _identity
    if collective is Collective.ALL_REDUCE:
        return axis.all_reduce if fresh else lambda tensor: axis.all_reduce(tensor.clone())
    if collective is Collective.ALL_TO_ALL:
        split, joined = _dim(target), _dim(source)
        return lambda tensor: axis.all_to_all(_even(tensor, split, axis), split, joined)
    dim = _dim(source if source.is_sharded else target)
    if collective is Collective.ALL_GATHER:
        return lambda tensor: axis.all_gather(tensor, dim)
    if collective is Collective.REDUCE_SCATTER:
        return lambda tensor: axis.reduce_scatter(_even(tensor, dim, axis), dim)
    if collective is Collective.SLICE:
        return lambda tensor: _slice(_even(tensor, dim, axis), dim, axis)
    assert collective is Collective.PAD and adjoint
    return lambda tensor: _pad(tensor, dim, axis)


def _identity(tensor: Tensor) -> Tensor:
    return tensor


def _dim(layout: Layout) -> int:
    assert layout.dim is not None
    return layout.dim


def _even(tensor: Tensor, dim: int, axis: Communicator) -> Tensor:
    if tensor.shape[dim] % axis.size:
        raise UnevenShardError(
            f"TP118 uneven-sequence: dim {dim} of a tensor of shape {tuple(tensor.shape)} can't be split over "
            f"{axis.size} ranks\n  help: pad the sequence to a multiple of {axis.size}, or use a plan without "
            "`sequence` styles for such calls"
        )
    return tensor


def _slice(tensor: Tensor, dim: int, axis: Communicator) -> Tensor:
    count = tensor.shape[dim] // axis.size
    return tensor.narrow(dim, axis.rank * count, count)


def _pad(tensor: Tensor, dim: int, axis: Communicator) -> Tensor:
    count = tensor.shape[dim]
    whole = tensor.new_zeros((*tensor.shape[:dim], count * axis.size, *tensor.shape[dim + 1 :]))
    whole.narrow(dim, axis.rank * count, count).copy_(tensor)
    return whole
