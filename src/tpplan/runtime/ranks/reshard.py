"""Reshards as autograd functions on plain local tensors.

Each pairs a forward with its adjoint: Megatron's f, f*, g and g* (Shoeybi et al., 2019; Korthikanti et al., 2022), and
the slices and all-to-alls between them. See `tpplan.compiler.ir.layout` for the table.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tpplan.compat.autograd import native_apply
from tpplan.compat.dynamo import is_traced
from tpplan.compat.modes import has_dispatch_modes, without_keeping_modes
from tpplan.compiler.ir.layout import LARGEST, Collective, Layout, Pack
from tpplan.plan import Diagnostic, TpplanError
from tpplan.runtime.ranks.communicator import Communicator, ProcessGroupCommunicator, of_backward
from tpplan.runtime.ranks.profiled import at_place, told_place
from tpplan.runtime.ranks.segments import in_packs, in_ranks, padded, taken

Move = Callable[[Tensor], Tensor]

_SUMS = (Collective.ALL_REDUCE, Collective.ONE_SHOT)
"""The communicator knows which of a call's sizes: those of the program are of the example's."""


class UnevenShardError(TpplanError):
    """A call's tensor can't be split evenly over the axis."""


class SecondDerivativeError(TpplanError):
    """A backward of a sharded model is to be differentiated, by `create_graph=True` outside of its forward."""

    def __init__(self) -> None:
        """Say what to do instead."""
        way_out = (
            "take the gradient with `torch.autograd.grad(…, create_graph=True)` in the model's forward, with respect "
            "to one of its inputs: it is then part of what is proved"
        )
        message = "the backward of a sharded model was called with `create_graph=True`"
        super().__init__([Diagnostic("TP138", message, help=way_out)])


class TailError(TpplanError):
    """A call reads more of a split sequence's end than the proof of its kind."""


@dataclass(frozen=True, slots=True)
class ReshardStep:
    """A change of layout, bound to an axis: a function on local tensors with its adjoint.

    Attributes:
        forward, backward: the moves.
        context: where the moves look for the batch size; None if they need none.
        twice: whether its backward may be differentiated: that of the backward is the forward once more.
        direct: makes the forward for calls that nobody looks at; None if it is the same.
        slices: whether the forward takes a part of the tensor, which a body may write to like to any other.
    """

    forward: Move
    backward: Move
    context: CallContext | None = None
    twice: bool = False
    direct: Callable[[], Move] | None = None
    slices: bool = False

    def __call__(self, tensor: Tensor) -> Tensor:
        """The tensor in its new layout; differentiable."""
        if not is_traced() and has_dispatch_modes():
            with without_keeping_modes():  # collectives write to tensors that operations have returned
                return self._moved(tensor)
        if torch.is_grad_enabled() and tensor.requires_grad:
            return _TracedReshard.apply(tensor, self) if is_traced() else _apply_reshard(tensor, self)  # pyright: ignore
        return self.forward(tensor)

    def _moved(self, tensor: Tensor) -> Tensor:
        differentiable = torch.is_grad_enabled() and tensor.requires_grad
        return _apply_reshard(tensor, self) if differentiable else self.forward(tensor)

    def adjoint(self, gradient: Tensor) -> Tensor:
        """The gradient in the old layout; differentiable if the backward under way is to be differentiated."""
        if not torch.is_grad_enabled():
            return self.backward(gradient)
        if not self.twice:
            raise SecondDerivativeError
        return ReshardStep(self.backward, self.forward, self.context, True)(gradient)


class _Reshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, step: ReshardStep) -> Tensor:
        ctx.step, ctx.place = step, told_place()
        if step.context is not None:
            ctx.batch = step.context.batch
        moved = step.forward(tensor)
        return moved.detach() if moved is tensor or step.slices else moved  # of views autograd allows no writes

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        step: ReshardStep = ctx.step
        if ctx.place:
            with at_place(ctx.place):
                return _Reshard._back(ctx, step, gradients[0]), None
        return _Reshard._back(ctx, step, gradients[0]), None

    @staticmethod
    def _back(ctx: Any, step: ReshardStep, gradient: Tensor) -> Tensor:
        if step.context is None:
            return step.adjoint(gradient)
        latest = step.context.batch
        step.context.batch = ctx.batch  # other calls may have come between this one's forward and its backward
        try:
            return step.adjoint(gradient)
        finally:
            step.context.batch = latest


_apply_reshard = native_apply(_Reshard)


class _TracedReshard(torch.autograd.Function):
    """As `_Reshard`, where Dynamo reads it: forward and backward in one graph, of one call."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, step: ReshardStep) -> Tensor:
        ctx.step = step
        return tensor.view_as(tensor) if step.forward is _identity else step.forward(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.step.backward(gradients[0]), None


@dataclass(frozen=True, slots=True)
class SumInPlace:
    """The sum over the ranks, written over a tensor that nobody else holds, nor any autograd node.

    A gradient passes such a sum as it is, so that autograd needn't know of it.
    """

    axis: Communicator

    def __call__(self, tensor: Tensor) -> Tensor:
        """`tensor` itself, with other numbers; another one where a mode (a selective checkpoint's) may keep it."""
        if is_traced():
            return _TracedSum.apply(tensor, self.axis)  # pyright: ignore
        if has_dispatch_modes():
            return ReshardStep(lambda tensor: self.axis.all_reduce(tensor.clone()), _identity)(tensor)
        written = tensor.detach() if torch.is_grad_enabled() else tensor
        summed = self.axis.all_reduce(written)
        if summed is not written:
            written.copy_(summed)
        return tensor


class _TracedSum(torch.autograd.Function):
    """The sum over the ranks in a graph, whose backend decides what is written in place."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Communicator) -> Tensor:
        return axis.all_reduce(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


@dataclass(slots=True)
class CallContext:
    """What the reshards of a model know of the call under way.

    Attributes:
        batch: the first size of the latest call's first tensor; None before the first call.
    """

    batch: int | None = None

    def latest(self) -> int | None:
        """The batch size to go by; in a graph, that of the region under way."""
        return _traced.batch if is_traced() else self.batch

    def __deepcopy__(self, memo: object) -> CallContext:
        return self  # the reshards of a copied model are functions, which still look here


_traced = CallContext()
"""What Dynamo reads in place of a model's own: a number in a module is one to it that never changes."""


def trace_with(context: CallContext | None) -> None:
    """Let graphs that are made or run from now on go by the batch size of `context`."""
    _traced.batch = None if context is None else context.batch


def make_reshard(
    source: Layout,
    target: Layout,
    forward: Collective,
    backward: Collective,
    axis: Communicator,
    fresh: bool,
    context: CallContext,
    shape: tuple[int, ...],
    twice: bool = False,
) -> Move:
    """Bind a reshard to an axis: a function on local tensors, differentiable.

    Args:
        source, target: the layouts.
        forward, backward: the collectives, as the program has them.
        axis: the ranks.
        fresh: whether the tensor that arrives is nobody else's and not saved for a backward, so that an all-reduce may
            write to it.
        context: tells the batch size of a call, for sequences flattened with their batch.
        shape: of the whole tensor in the example call: what the ranks can't share evenly has that size in every call.
        twice: whether its backward may be differentiated.
    """
    if source.is_extreme:
        return ReshardStep(lambda tensor: _compared(tensor, source, axis), _identity)
    if source.tail or target.tail:
        moves = _of_tails(source, target, backward, axis)
        return ReshardStep(*moves, twice=twice)
    if fresh and not twice and forward in _SUMS and backward is Collective.NONE:
        return SumInPlace(axis)
    before, after = _sharing(source, shape, axis), _sharing(target, shape, axis)
    there, back = _move(forward, before, after, axis), _move(backward, after, before, of_backward(axis))
    if source.interleave == 1 and target.interleave == 1:
        direct = None
        if isinstance(axis, ProcessGroupCommunicator) and forward is not Collective.NONE:
            direct = functools.partial(_directly, forward, before, after, axis)
        return ReshardStep(there, back, twice=twice, direct=direct, slices=forward is Collective.SLICE)
    moves = (_flattened(there, context), _flattened(back, context))
    return ReshardStep(*moves, context, twice, slices=forward is Collective.SLICE)


def _flattened(move: Move, context: CallContext) -> Move:
    """`move` along the sequence of a (batch · sequence, hidden) tensor, whose shards are interleaved by batch."""

    def moved(tensor: Tensor) -> Tensor:
        batch = context.latest()
        if batch is None:
            raise UnevenShardError.of(
                "TP118",
                "a module whose sequence is flattened with the batch was called by itself",
                help="call the whole model, whose inputs show the batch size",
            )
        if tensor.shape[0] % batch:
            raise UnevenShardError.of(
                "TP118",
                f"{tensor.shape[0]} rows aren't a whole number of sequences for a batch of {batch}",
                help="call the model with its batch as the first dim of its first tensor",
            )
        return move(tensor.reshape(batch, -1, *tensor.shape[1:])).flatten(0, 1)

    return moved


@dataclass(frozen=True, slots=True)
class _Sharing:
    """How the ranks share a dim, as what has to be done to it around a collective, which knows equal parts only.

    Attributes:
        dim: the dim.
        part: a whole tensor to this rank's part.
        parts: a whole tensor to the ranks' parts, equally long, one after the other.
        joined: the inverse.
        padded: this rank's part to one as long as all others.
        own: the inverse.
    """

    dim: int
    part: Move
    parts: Move
    joined: Move
    padded: Move
    own: Move


def _sharing(layout: Layout, shape: tuple[int, ...], axis: Communicator) -> _Sharing | None:
    """How the ranks share the sharded dim; None where none is sharded."""
    if layout.dim is None:
        return None
    count = shape[layout.dim]
    if layout.packs or not layout.is_even(count, axis.size):
        return _fixed(layout.dim, layout.stretches(count), axis)
    # Of a flattened sequence it is the sequence's own dim, once it is unflattened.
    return _equal(layout.dim if layout.interleave == 1 else layout.dim + 1, axis)


def _equal(dim: int, axis: Communicator) -> _Sharing:
    """Equal parts of a dim that may have another size in each call."""

    def even(tensor: Tensor) -> Tensor:
        if tensor.shape[dim] % axis.size:
            raise UnevenShardError.of(
                "TP118",
                f"dim {dim} of a tensor of shape {tuple(tensor.shape)} can't be split over {axis.size} ranks",
                help=f"pad the sequence to a multiple of {axis.size}, or call the whole model with tensors that show "
                "the length of the sequence",
            )
        return tensor

    def part(tensor: Tensor) -> Tensor:
        count = even(tensor).shape[dim] // axis.size
        return tensor.narrow(dim, axis.rank * count, count)

    return _Sharing(dim, part, even, _identity, _identity, _identity)


def _fixed(dim: int, packs: tuple[Pack, ...], axis: Communicator) -> _Sharing:
    """Parts of a dim that has the same size in each call: of several packs, or of one that isn't shared evenly."""
    size, layout = axis.size, Layout("S", "S", dim, packs=packs)
    whole = sum(pack.size for pack in packs)
    held, longest = layout.intervals(whole, size, axis.rank), layout.longest(whole, size)
    mine = sum(length for _, length in held)

    def expect(tensor: Tensor, count: int) -> None:
        if tensor.shape[dim] != count:
            raise UnevenShardError.of(
                "TP118",
                f"dim {dim} of a tensor of shape {tuple(tensor.shape)} must have the example's size {count} to be "
                f"split over {size} ranks",
                help="pass `inputs=` of the sizes that calls have, or remove the rule that splits this dim",
            )

    def part(tensor: Tensor) -> Tensor:
        expect(tensor, whole)
        return taken(tensor, dim, held)

    def parts(tensor: Tensor) -> Tensor:
        expect(tensor, whole)
        return in_ranks(tensor, dim, packs, size)

    def pad(tensor: Tensor) -> Tensor:
        expect(tensor, mine)
        return padded(tensor, dim, longest)

    return _Sharing(
        dim,
        part,
        parts,
        lambda tensor: in_packs(tensor, dim, packs, size),
        pad,
        _identity
        if mine == longest
        else lambda tensor: tensor.narrow(dim, 0, mine).clone(memory_format=torch.contiguous_format),
    )


def _move(collective: Collective, source: _Sharing | None, target: _Sharing | None, axis: Communicator) -> Move:
    if collective is Collective.NONE:
        return _identity
    if collective in _SUMS:
        return lambda tensor: axis.all_reduce(tensor.clone())
    if collective is Collective.FIRST:
        return _identity if axis.rank == 0 else torch.zeros_like
    if source is not None and target is not None:
        assert collective is Collective.ALL_TO_ALL, collective
        split, joined = target.dim, source.dim
        exchange: Move = lambda tensor: axis.all_to_all(tensor, split, joined)  # noqa: E731
        return _chain(source.padded, target.parts, exchange, target.own, source.joined)
    shared = source or target
    assert shared is not None
    dim = shared.dim
    if collective is Collective.ALL_GATHER:
        return _chain(shared.padded, lambda tensor: axis.all_gather(tensor, dim), shared.joined)
    if collective is Collective.REDUCE_SCATTER:
        return _chain(shared.parts, lambda tensor: axis.reduce_scatter(tensor, dim), shared.own)
    if collective is Collective.SLICE:
        return shared.part
    return _chain(shared.padded, lambda tensor: _pad(tensor, dim, axis), shared.joined)


def _compared(tensor: Tensor, held: Layout, axis: Communicator) -> Tensor:
    """The largest, or the smallest, of what the ranks have."""
    every = axis.all_gather(tensor.unsqueeze(0), 0)
    return every.amax(0) if held == LARGEST else every.amin(0)


def _directly(
    collective: Collective, source: _Sharing | None, target: _Sharing | None, axis: ProcessGroupCommunicator
) -> Move:
    return _move(collective, source, target, axis.direct())


def _of_tails(source: Layout, target: Layout, backward: Collective, axis: Communicator) -> tuple[Move, Move]:
    """The moves to and from a tensor whose last entries alone are there on each rank."""
    if target.tail:
        ours = _equal(1, axis)
        return lambda tensor: _last_entries(tensor, target.tail, axis), ours.part

    def cut(tensor: Tensor) -> Tensor:
        if tensor.shape[1] > source.tail:
            raise TailError.of(
                "TP131",
                f"the call reads the last {tensor.shape[1]} entries of a sequence that is split, where the proof of "
                f"such calls reads the last {source.tail}",
                help="let how many are read be an argument of the call or an attribute, and not follow from the sizes "
                "of tensors",
            )
        return tensor

    return cut, _move(backward, None, None, of_backward(axis))


def _last_entries(tensor: Tensor, count: int, axis: Communicator) -> Tensor:
    """A tensor of the whole's size with the last entries of the whole, which ranks hold equal parts of.

    Each rank gives those that it has, and zeros for the others.
    """
    part = tensor.shape[1]
    whole, first = part * axis.size, part * axis.rank
    start = max(whole - count, 0)
    held = max(first + part - max(first, start), 0)
    shape = (tensor.shape[0], whole - start, *tensor.shape[2:])
    if held == whole - start:
        ending = tensor.narrow(1, part - held, held).clone(memory_format=torch.contiguous_format)
    else:
        ending = tensor.new_zeros(shape)
        if held:
            ending.narrow(1, max(first - start, 0), held).copy_(tensor.narrow(1, part - held, held))
    made = tensor.new_empty((tensor.shape[0], whole, *tensor.shape[2:]))
    made.narrow(1, start, whole - start).copy_(axis.all_reduce(ending))
    return made


def _chain(*moves: Move) -> Move:
    """The moves one after the other."""
    kept = [move for move in moves if move is not _identity]
    if len(kept) == 1:
        return kept[0]

    def moved(tensor: Tensor) -> Tensor:
        for move in kept:
            tensor = move(tensor)
        return tensor

    return moved


def _identity(tensor: Tensor) -> Tensor:
    return tensor


def moves_values(move: Move) -> bool:
    """Whether a reshard does anything where no gradient is recorded."""
    return not (isinstance(move, ReshardStep) and move.forward is _identity)


def without_gradient(move: Move) -> Move:
    """What is left of a reshard in a call that records no gradient, under no dispatch mode and no compiler."""
    if isinstance(move, ReshardStep):
        return move.forward if move.direct is None else move.direct()
    if not isinstance(move, SumInPlace):
        return move
    return move.axis.direct().all_reduce if isinstance(move.axis, ProcessGroupCommunicator) else move.axis.all_reduce


def _pad(tensor: Tensor, dim: int, axis: Communicator) -> Tensor:
    count = tensor.shape[dim]
    whole = tensor.new_zeros((*tensor.shape[:dim], count * axis.size, *tensor.shape[dim + 1 :]))
    whole.narrow(dim, axis.rank * count, count).copy_(tensor)
    return whole
