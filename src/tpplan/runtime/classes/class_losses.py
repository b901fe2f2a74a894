"""Functions over classes that are split over the ranks: losses of which no rank needs all logits.

in:  this rank's logits, rows in all other dims; what it knows of the axis
out: what the stock function makes of the logits of all ranks, with this rank's part of their gradient

    loss = lse - z_t,  lse = m + log Σ_ranks exp(m_r - m) Σ_v exp(z_v - m_r),  m = max_r m_r

Each rank sends its largest logit m_r, its sum, and the logit of the target if it has it: three numbers a row, gathered
at once, so that all ranks compute the same loss to the last bit. The backward sends nothing: softmax is exp(z - lse).
Sources: Shoeybi et al., "Megatron-LM", 2019, for the split vocabulary; Milakov and Gimelshein, "Online normalizer
calculation for softmax", 2018, for putting sums together; Szegedy et al., 2016, for the smoothing. On a GPU a rank's
part of a cross entropy is the kernel of `tpplan.kernels`. Elsewhere rows are worked on in chunks, so that beside the
logits and their gradient there is never more than one chunk in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from tpplan.kernels.backend import takes_kernel
from tpplan.runtime.classes.class_rows import (
    ClassPart,
    Rows,
    at_labels,
    joined,
    local_labels,
    maxima,
    of_labels,
    wide_dtype,
)


@dataclass(frozen=True, slots=True)
class Loss:
    """What a loss makes of the rows.

    Attributes:
        reduction, ignore_index, label_smoothing: as torch names them.
        z_loss: a factor of the squared logarithm of the sum of each row, which is added.
    """

    reduction: str = "mean"
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0


def cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None, loss: Loss, part: ClassPart, dim: int
) -> Tensor:
    """As `torch.nn.functional.cross_entropy`, in float32 at least; a scalar, or a number a row without a reduction.

    Args:
        input: this rank's logits, (rows, classes, …).
        target: (rows, …), class numbers of all classes, alike on all ranks.
        weight: of each class, all of them; None for ones.
        loss: what to make of the rows.
        part: this rank's classes.
        dim: the class dim of the input.
    """
    rows = _rows(input, target, weight, loss, part)
    made = cast("tuple[Tensor, Tensor]", _Rows.apply(_in_rows(input, dim), rows))
    return _finished(*made, rows, loss, target.shape)


def linear_cross_entropy(
    hidden: Tensor,
    head: tuple[Tensor, Tensor | None],
    target: Tensor,
    weight: Tensor | None,
    loss: Loss,
    part: ClassPart,
) -> Tensor:
    """As `cross_entropy` of the logits that a head makes of hidden states, without the logits.

    Args:
        hidden: (rows, …, features), alike on all ranks.
        head: the rows of weight and bias for this rank's classes.
        target, weight, loss, part: as of `cross_entropy`.
    """
    rows = _rows(hidden, target, weight, loss, part)
    flat = _in_rows(hidden, hidden.dim() - 1)
    made = cast("tuple[Tensor, Tensor]", _LinearRows.apply(flat, *head, rows))
    return _finished(*made, rows, loss, target.shape)


def _rows(input: Tensor, target: Tensor, weight: Tensor | None, loss: Loss, part: ClassPart) -> Rows:
    labels = target.reshape(-1)
    kept = _checked(labels, loss.ignore_index, part)
    weighed = None if weight is None else weight.detach().to(wide_dtype(input.dtype))
    elements = len(labels) * part.count
    kernel = weight is None and elements > 0 and takes_kernel("cross_entropy", input, part.backend, elements)
    return Rows(part, labels, kept, weighed, loss.label_smoothing, kernel)


def _finished(rows: Tensor, logsum: Tensor, known: Rows, loss: Loss, shape: torch.Size) -> Tensor:
    assert known.labels is not None and known.kept is not None
    if loss.z_loss:
        rows = rows + loss.z_loss * torch.where(known.kept, logsum, 0).square()
    return _reduced(rows, known.labels, known.kept, known.weight, shape, loss.reduction)


def nll_loss(input: Tensor, target: Tensor, weight: Tensor | None, loss: Loss, part: ClassPart, dim: int) -> Tensor:
    """As `torch.nn.functional.nll_loss`; the arguments are those of `cross_entropy`."""
    labels = target.reshape(-1)
    kept = _checked(labels, loss.ignore_index, part)
    weighed = None if weight is None else weight.detach().to(wide_dtype(input.dtype))
    picked = cast(Tensor, _Picked.apply(_in_rows(input, dim), labels, kept, part))
    rows = -picked if weighed is None else -picked * of_labels(weighed, labels, kept)
    return _reduced(rows, labels, kept, weighed, target.shape, loss.reduction)


def logsumexp(input: Tensor, part: ClassPart, dim: int, keepdim: bool) -> Tensor:
    """As `torch.logsumexp` along the class dim."""
    _, logsum = cast("tuple[Tensor, Tensor]", _Rows.apply(_in_rows(input, dim), Rows(part)))
    made = logsum.reshape((*input.shape[:dim], *input.shape[dim + 1 :]))
    return made.unsqueeze(dim) if keepdim else made


def with_partial_gradient(tensor: Tensor, part: ClassPart) -> Tensor:
    """The same tensor; of its gradient, each rank has a term, and gets the sum."""
    return cast(Tensor, _SummedGradient.apply(tensor, part))


def log_softmax(input: Tensor, part: ClassPart, dim: int) -> Tensor:
    """As `torch.log_softmax` along the class dim: this rank's part."""
    made = cast(Tensor, _LogSoftmax.apply(_in_rows(input, dim), part))
    return made.reshape(input.movedim(dim, -1).shape).movedim(-1, dim)


def _in_rows(input: Tensor, dim: int) -> Tensor:
    """(rows, classes of this rank)."""
    moved = input.movedim(dim, -1)
    rows = 1
    for count in moved.shape[:-1]:
        rows *= count
    return moved.reshape(rows, moved.shape[-1])


def _checked(labels: Tensor, ignore_index: int, part: ClassPart) -> Tensor:
    """Which rows count; a label that is no class raises on the CPU, as torch does."""
    kept = labels != ignore_index
    if labels.device.type == "cpu":
        wrong = labels[kept & ((labels < 0) | (labels >= part.classes))]
        if len(wrong):
            raise IndexError(f"Target {int(wrong[0])} is out of bounds.")
    return kept


def _reduced(
    rows: Tensor, labels: Tensor, kept: Tensor, weight: Tensor | None, shape: torch.Size, reduction: str
) -> Tensor:
    rows = torch.where(kept, rows, 0)
    if reduction == "none":
        return rows.reshape(shape)
    if reduction == "sum":
        return rows.sum()
    return rows.sum() / (kept.sum() if weight is None else of_labels(weight, labels, kept).sum())


class _Rows(torch.autograd.Function):
    """The loss of each row before its reduction, and the logarithm of its sum of exponentials."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:  # pyright: ignore
        own = rows.numbers(len(logits), wide_dtype(logits.dtype), logits.device)
        for some in rows.chunks(len(logits)):
            rows.note(own, some, logits[some])
        loss, ctx.sums = rows.losses(own)
        ctx.save_for_backward(logits)
        ctx.rows = rows
        return loss, ctx.sums.logsum

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        (logits,) = ctx.saved_tensors
        shares = ctx.rows.shares(*gradients)
        if ctx.rows.kernel:
            return ctx.rows.gradient(logits, ctx.sums, shares, slice(0, len(logits))), None
        made = torch.empty_like(logits)
        for some in ctx.rows.part.chunks(len(logits)):
            made[some] = ctx.rows.gradient(logits[some], ctx.sums, shares, some)
        return made, None


class _LinearRows(torch.autograd.Function):
    """As `_Rows`, of the product of hidden states with a head, of which there is never more than a chunk.

    The backward makes each chunk of the product once more. The gradient of the hidden states is summed over the ranks.
    """

    @staticmethod
    def forward(  # pyright: ignore
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: Rows
    ) -> tuple[Tensor, Tensor]:
        own = rows.numbers(len(hidden), wide_dtype(hidden.dtype), hidden.device)
        for some in rows.part.chunks(len(hidden)):
            rows.note(own, some, functional.linear(hidden[some], weight, bias))
        loss, ctx.sums = rows.losses(own)
        ctx.save_for_backward(hidden, weight, bias)
        ctx.rows, ctx.cast = rows, _autocast(hidden.device.type)
        return loss, ctx.sums.logsum

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        hidden, weight, bias = ctx.saved_tensors
        wide = wide_dtype(weight.dtype)
        dhidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        dweight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        dbias = torch.zeros_like(bias, dtype=wide) if ctx.needs_input_grad[2] else None
        shares = ctx.rows.shares(*gradients)
        for some in ctx.rows.part.chunks(len(hidden)):
            with ctx.cast():
                logits = functional.linear(hidden[some], weight, bias)
            dlogits = ctx.rows.gradient(logits, ctx.sums, shares, some).to(logits.dtype)
            if dhidden is not None:
                dhidden[some] = dlogits @ weight.to(dlogits.dtype)
            if dweight is not None:
                dweight += dlogits.T @ hidden[some].to(dlogits.dtype)
            if dbias is not None:
                dbias += dlogits.sum(0, dtype=wide)
        if dhidden is not None:
            dhidden = ctx.rows.part.axis.all_reduce(dhidden)
        cast = [None if d is None else d.to(like.dtype) for d, like in ((dweight, weight), (dbias, bias))]
        return dhidden, *cast, None


def _autocast(device: str) -> Callable[[], AbstractContextManager[Any]]:
    """The autocast of now, for later."""
    if device == "meta" or not torch.is_autocast_enabled(device):
        return nullcontext
    dtype = torch.get_autocast_dtype(device)
    return lambda: torch.autocast(device, dtype)


class _SummedGradient(torch.autograd.Function):
    """Megatron's f."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, part: ClassPart) -> Tensor:  # pyright: ignore
        ctx.part = part
        return tensor.view_as(tensor)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore
        return ctx.part.axis.all_reduce(gradient.clone()), None


class _Picked(torch.autograd.Function):
    """Each row's number at its label, from the rank that has it."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, labels: Tensor, kept: Tensor, part: ClassPart) -> Tensor:  # pyright: ignore
        ctx.save_for_backward(labels, kept)
        ctx.shape, ctx.dtype, ctx.part = input.shape, input.dtype, part
        return part.axis.all_reduce(at_labels(input.to(wide_dtype(input.dtype)), labels, kept, part).contiguous())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        labels, kept = ctx.saved_tensors
        made = gradient.new_zeros(ctx.shape, dtype=ctx.dtype)
        if ctx.part.count:
            local, own = local_labels(labels, kept, ctx.part)
            made.scatter_(1, local[:, None], torch.where(own, gradient, 0).to(ctx.dtype)[:, None])
        return made, None, None, None


class _LogSoftmax(torch.autograd.Function):
    """This rank's part of the logarithm of a softmax."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, part: ClassPart) -> Tensor:  # pyright: ignore
        dtype = wide_dtype(logits.dtype)
        own = logits.new_empty((2, len(logits)), dtype=dtype)
        for rows in part.chunks(len(logits)):
            own[0, rows], own[1, rows] = maxima(logits[rows].to(dtype))
        every = part.axis.all_gather(own, 0).reshape(part.axis.size, 2, len(logits))
        highest, logsum = joined(every[:, 0], every[:, 1])
        made = torch.empty_like(logits)
        for rows in part.chunks(len(logits)):
            made[rows] = (logits[rows].to(dtype) - highest[rows, None]).sub_(logsum[rows, None])
        ctx.save_for_backward(made)
        ctx.part = part
        return made

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        (made,) = ctx.saved_tensors
        dtype = wide_dtype(made.dtype)
        total = ctx.part.axis.all_reduce(gradient.sum(1, dtype=dtype))
        result = torch.empty_like(made)
        for rows in ctx.part.chunks(len(made)):
            result[rows] = gradient[rows].to(dtype) - made[rows].to(dtype).exp() * total[rows, None]
        return result, None


__all__ = [
    "ClassPart",
    "Loss",
    "cross_entropy",
    "linear_cross_entropy",
    "log_softmax",
    "logsumexp",
    "nll_loss",
    "with_partial_gradient",
]
