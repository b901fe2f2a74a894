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

from tpplan.compat import native_apply
from tpplan.compiler.layout import Collective, Layout, Pack
from tpplan.plan import TpplanError
from tpplan.runtime.communicator import Communicator
from tpplan.runtime.stretches import in_packs, in_ranks, taken

Move = Callable[[Tensor], Tensor]


class UnevenShardError(TpplanError):
    """A call's tensor can't be split evenly over the axis."""


@dataclass(frozen=True, slots=True)
class ReshardStep:
    """A change of layout, bound to an axis: a function on local tensors with its adjoint.

    Attributes:
        forward, backward: the moves.
        context: where the moves look for the batch size; None if they need none.
    """

    forward: Move
    backward: Move
    context: CallContext | None = None

    def __call__(self, tensor: Tensor) -> Tensor:
        """The tensor in its new layout; differentiable."""
        if torch.is_grad_enabled() and tensor.requires_grad:
            return _apply_reshard(tensor, self)
        return self.forward(tensor)


class _Reshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, step: ReshardStep) -> Tensor:
        ctx.step = step
        if step.context is not None:
            ctx.batch = step.context.batch
        moved = step.forward(tensor)
        return moved.detach() if moved is tensor else moved

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        step: ReshardStep = ctx.step
        if step.context is None:
            return step.backward(gradients[0]), None
        latest = step.context.batch
        step.context.batch = ctx.batch  # other calls may have come between this one's forward and its backward
        try:
            return step.backward(gradients[0]), None
        finally:
            step.context.batch = latest


_apply_reshard = native_apply(_Reshard)


@dataclass(frozen=True, slots=True)
class SumInPlace:
    """The sum over the ranks, written over a tensor that nobody else holds, nor any autograd node.

    A gradient passes such a sum as it is, so that autograd needn't know of it.
    """

    axis: Communicator

    def __call__(self, tensor: Tensor) -> Tensor:
        """`tensor` itself, with other numbers."""
        written = tensor.detach()
        summed = self.axis.all_reduce(written)
        if summed is not written:
            written.copy_(summed)
        return tensor


@dataclass(slots=True)
class CallContext:
    """What the reshards of a model know of the call under way.

    Attributes:
        batch: the first size of the latest call's first tensor; None before the first call.
    """

    batch: int | None = None

    def __deepcopy__(self, memo: object) -> CallContext:
        return self  # the reshards of a copied model are functions, which still look here


def make_reshard(
    source: Layout,
    target: Layout,
    forward: Collective,
    backward: Collective,
    axis: Communicator,
    fresh: bool,
    context: CallContext,
) -> Move:
    """Bind a reshard to an axis: a function on local tensors, differentiable.

    Args:
        source, target: the layouts.
        forward, backward: the collectives, as the program has them.
        axis: the ranks.
        fresh: whether the tensor that arrives is nobody else's and not saved for a backward, so that an all-reduce may
            write to it.
        context: tells the batch size of a call, for sequences flattened with their batch.
    """
    if fresh and forward is Collective.ALL_REDUCE and backward is Collective.NONE:
        return SumInPlace(axis)
    there, back = _move(forward, source, target, axis), _move(backward, target, source, axis)
    packs = source.packs or target.packs
    if packs:
        dim = _dim(source if source.is_sharded else target)
        return ReshardStep(_stretched(forward, dim, packs, axis), _stretched(backward, dim, packs, axis))
    if source.interleave == 1 and target.interleave == 1:
        return ReshardStep(there, back)
    return ReshardStep(_flattened(there, context), _flattened(back, context), context)


def _stretched(collective: Collective, dim: int, packs: tuple[Pack, ...], axis: Communicator) -> Move:
    """The move along a dim of several packs, each of which is shared out by itself."""
    if collective is Collective.NONE:
        return _identity
    if collective is Collective.ALL_GATHER:
        return lambda tensor: in_packs(axis.all_gather(tensor, dim), dim, packs, axis.size)
    if collective is Collective.REDUCE_SCATTER:
        return lambda tensor: axis.reduce_scatter(in_ranks(tensor, dim, packs, axis.size), dim)
    if collective is Collective.SLICE:
        held = Layout("S", "S", dim, packs=packs).intervals(sum(p.size for p in packs), axis.size, axis.rank)
        return lambda tensor: taken(tensor, dim, held)
    assert collective is Collective.PAD, collective
    return lambda tensor: in_packs(_pad(tensor, dim, axis), dim, packs, axis.size)


def _flattened(move: Move, context: CallContext) -> Move:
    """`move` along the sequence of a (batch · sequence, hidden) tensor, whose shards are interleaved by batch."""

    def moved(tensor: Tensor) -> Tensor:
        if context.batch is None:
            raise UnevenShardError(
                "TP118 uneven-sequence: a module whose sequence is flattened with the batch was called by itself\n"
                "  help: call the whole model, whose inputs tell the batch size"
            )
        if tensor.shape[0] % context.batch:
            raise UnevenShardError(
                f"TP118 uneven-sequence: {tensor.shape[0]} rows are no whole number of sequences for a batch of "
                f"{context.batch}\n  help: call the model with its batch as the first dim of its first tensor"
            )
        return move(tensor.reshape(context.batch, -1, *tensor.shape[1:])).flatten(0, 1)

    return moved


def _move(collective: Collective, source: Layout, target: Layout, axis: Communicator) -> Move:
    if collective is Collective.NONE:
        return _identity
    if collective is Collective.ALL_REDUCE:
        return lambda tensor: axis.all_reduce(tensor.clone())
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
    return lambda tensor: _pad(tensor, dim, axis)


def _identity(tensor: Tensor) -> Tensor:
    return tensor


def _dim(layout: Layout) -> int:
    """The dim to move along; of a flattened sequence, the sequence's own once it is unflattened."""
    assert layout.dim is not None
    return layout.dim if layout.interleave == 1 else layout.dim + 1


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
