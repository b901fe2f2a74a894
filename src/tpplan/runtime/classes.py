"""Functions over classes that are split over the ranks: losses of which no rank needs all logits.

in:  this rank's logits, rows in all other dims; what it knows of the axis
out: what the stock function makes of the logits of all ranks, with this rank's part of their gradient

    loss = lse - z_t,  lse = m + log Σ_ranks exp(m_r - m) Σ_v exp(z_v - m_r),  m = max_r m_r

Each rank sends its largest logit m_r, its sum, and the logit of the target if it has it: three numbers a row, gathered
at once, so that all ranks compute the same loss to the last bit. The backward sends nothing: softmax is exp(z - lse).
Sources: Shoeybi et al., "Megatron-LM", 2019, for the split vocabulary; Milakov and Gimelshein, "Online normalizer
calculation for softmax", 2018, for putting sums together; Szegedy et al., 2016, for the smoothing. Rows are worked on
in chunks, so that beside the logits and their gradient there is never more than one chunk in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from tpplan.compiler.ir.layout import Pack
from tpplan.runtime.communicator import Communicator

CHUNK = 1 << 22
"""How many logits of a rank are worked on at once."""


@dataclass(frozen=True, slots=True)
class ClassPart:
    """The classes of this rank, of all.

    Attributes:
        axis: the ranks.
        classes: how many there are on all ranks; they are shared out as `torch.chunk` does.
        chunk: how many rows are worked on at once; None for as many as have `CHUNK` logits.
    """

    axis: Communicator
    classes: int
    chunk: int | None = None

    @property
    def first(self) -> int:
        """The first class of this rank."""
        return Pack(self.classes).part(self.axis.size, self.axis.rank)[0]

    @property
    def count(self) -> int:
        """How many classes this rank has."""
        return Pack(self.classes).part(self.axis.size, self.axis.rank)[1]

    def chunks(self, rows: int) -> Iterator[slice]:
        """Rows, some at a time."""
        step = self.chunk or max(1, CHUNK // max(self.count, 1))
        return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


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
    labels = target.reshape(-1)
    kept = _checked(labels, loss.ignore_index, part)
    rows = _in_rows(input, dim)
    weighed = None if weight is None else weight.detach().to(_wide(input.dtype))
    made, logsum = cast("tuple[Tensor, Tensor]", _Rows.apply(rows, labels, kept, weighed, loss.label_smoothing, part))
    if loss.z_loss:
        made = made + loss.z_loss * torch.where(kept, logsum, 0).square()
    return _reduced(made, labels, kept, weighed, target.shape, loss.reduction)


def nll_loss(input: Tensor, target: Tensor, weight: Tensor | None, loss: Loss, part: ClassPart, dim: int) -> Tensor:
    """As `torch.nn.functional.nll_loss`; the arguments are those of `cross_entropy`."""
    labels = target.reshape(-1)
    kept = _checked(labels, loss.ignore_index, part)
    weighed = None if weight is None else weight.detach().to(_wide(input.dtype))
    picked = cast(Tensor, _Picked.apply(_in_rows(input, dim), labels, kept, part))
    rows = -picked if weighed is None else -picked * _of_labels(weighed, labels, kept)
    return _reduced(rows, labels, kept, weighed, target.shape, loss.reduction)


def logsumexp(input: Tensor, part: ClassPart, dim: int, keepdim: bool) -> Tensor:
    """As `torch.logsumexp` along the class dim."""
    _, logsum = cast("tuple[Tensor, Tensor]", _Rows.apply(_in_rows(input, dim), None, None, None, 0.0, part))
    made = logsum.reshape((*input.shape[:dim], *input.shape[dim + 1 :]))
    return made.unsqueeze(dim) if keepdim else made


def log_softmax(input: Tensor, part: ClassPart, dim: int) -> Tensor:
    """As `torch.log_softmax` along the class dim: this rank's part."""
    made = cast(Tensor, _LogSoftmax.apply(_in_rows(input, dim), part))
    return made.reshape(input.movedim(dim, -1).shape).movedim(-1, dim)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


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


def _of_labels(weight: Tensor, labels: Tensor, kept: Tensor) -> Tensor:
    """The weight of each row's label; 0 for a row that doesn't count."""
    return torch.where(kept, weight[torch.where(kept, labels, 0)], 0)


def _reduced(
    rows: Tensor, labels: Tensor, kept: Tensor, weight: Tensor | None, shape: torch.Size, reduction: str
) -> Tensor:
    rows = torch.where(kept, rows, 0)
    if reduction == "none":
        return rows.reshape(shape)
    if reduction == "sum":
        return rows.sum()
    return rows.sum() / (kept.sum() if weight is None else _of_labels(weight, labels, kept).sum())


def _local(labels: Tensor, kept: Tensor, part: ClassPart) -> tuple[Tensor, Tensor]:
    """The labels by this rank's classes, and which rows have one of these."""
    local = labels - part.first
    own = kept & (local >= 0) & (local < part.count)
    return torch.where(own, local, 0), own


def _maxima(wide: Tensor) -> tuple[Tensor, Tensor]:
    """The largest number of each row and the sum of exponentials over it; -inf and 0 of no numbers."""
    if not wide.shape[1]:
        return wide.new_full((len(wide),), -torch.inf), wide.new_zeros(len(wide))
    highest = wide.amax(1)
    base = torch.where(highest == -torch.inf, 0, highest)
    return highest, (wide - base[:, None]).exp_().sum(1)


def _joined(highest: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Of the ranks' maxima and sums, (ranks, rows): the maximum, and the logarithm of the sum over it."""
    overall = highest.amax(0)
    overall = torch.where(overall == -torch.inf, 0, overall)
    return overall, (sums * (highest - overall).exp()).sum(0).log()


class _Rows(torch.autograd.Function):
    """The loss of each row before its reduction, and the logarithm of its sum of exponentials."""

    @staticmethod
    def forward(  # pyright: ignore
        ctx: Any,
        logits: Tensor,
        labels: Tensor | None,
        kept: Tensor | None,
        weight: Tensor | None,
        smoothing: float,
        part: ClassPart,
    ) -> tuple[Tensor, Tensor]:
        dtype = _wide(logits.dtype)
        numbers = 2 if labels is None else 4 if smoothing else 3
        own = logits.new_empty((numbers, len(logits)), dtype=dtype)
        weights = None if weight is None else weight[part.first : part.first + part.count]
        for rows in part.chunks(len(logits)):
            wide = logits[rows].to(dtype)
            own[0, rows], own[1, rows] = _maxima(wide)
            if labels is not None and kept is not None:
                own[2, rows] = _at_labels(wide, labels[rows], kept[rows], part)
                if smoothing:
                    own[3, rows] = (wide if weights is None else wide * weights).sum(1)
        every = part.axis.all_gather(own, 0).reshape(part.axis.size, numbers, len(logits))
        highest, logsum = _joined(every[:, 0], every[:, 1])
        ctx.save_for_backward(logits, labels, kept, weight, highest, logsum)
        ctx.smoothing, ctx.part = smoothing, part
        if labels is None or kept is None:
            return logsum.new_zeros(()), highest + logsum
        # The maximum is taken from the logit first: the difference of two large numbers would have few digits.
        loss = logsum - (every[:, 2].sum(0) - highest)
        if weight is not None:
            loss = loss * _of_labels(weight, labels, kept)
        if smoothing:
            share, whole = smoothing / part.classes, part.classes if weight is None else weight.sum()
            total = every[:, 3].sum(0)
            loss = (1 - smoothing) * loss + share * (whole * logsum - (total - whole * highest))
        if labels.device.type != "cpu":
            loss = torch.where((labels < 0) | (labels >= part.classes), torch.nan, loss)
        return torch.where(kept, loss, 0), highest + logsum

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        logits, labels, kept, weight, highest, logsum = ctx.saved_tensors
        part, smoothing, (dloss, dlogsum) = ctx.part, ctx.smoothing, gradients
        made = torch.empty_like(logits)
        at_label = at_all = None
        share = dlogsum
        if labels is not None:
            dloss = torch.where(kept, dloss, 0)
            at_label = dloss * (1 - smoothing)
            if weight is not None:
                at_label = at_label * _of_labels(weight, labels, kept)
            at_all = dloss * (smoothing / part.classes)
            share = dlogsum + at_label + at_all * (part.classes if weight is None else weight.sum())
            local, own = _local(labels, kept, part)
            at_label = torch.where(own, -at_label, 0)
        weights = None if weight is None else weight[part.first : part.first + part.count]
        for rows in part.chunks(len(logits)) if part.count else ():
            wide = logits[rows].to(logsum.dtype) - highest[rows, None]
            wide = wide.sub_(logsum[rows, None]).exp_().mul_(share[rows, None])
            if smoothing and at_all is not None:
                wide -= at_all[rows, None] if weights is None else at_all[rows, None] * weights
            if at_label is not None:
                wide.scatter_add_(1, local[rows, None], at_label[rows, None])  # pyright: ignore
            made[rows] = wide
        return made, None, None, None, None, None


class _Picked(torch.autograd.Function):
    """Each row's number at its label, from the rank that has it."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, labels: Tensor, kept: Tensor, part: ClassPart) -> Tensor:  # pyright: ignore
        ctx.save_for_backward(labels, kept)
        ctx.shape, ctx.dtype, ctx.part = input.shape, input.dtype, part
        return part.axis.all_reduce(_at_labels(input.to(_wide(input.dtype)), labels, kept, part).contiguous())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        labels, kept = ctx.saved_tensors
        made = gradient.new_zeros(ctx.shape, dtype=ctx.dtype)
        if ctx.part.count:
            local, own = _local(labels, kept, ctx.part)
            made.scatter_(1, local[:, None], torch.where(own, gradient, 0).to(ctx.dtype)[:, None])
        return made, None, None, None


class _LogSoftmax(torch.autograd.Function):
    """This rank's part of the logarithm of a softmax."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, part: ClassPart) -> Tensor:  # pyright: ignore
        dtype = _wide(logits.dtype)
        own = logits.new_empty((2, len(logits)), dtype=dtype)
        for rows in part.chunks(len(logits)):
            own[0, rows], own[1, rows] = _maxima(logits[rows].to(dtype))
        every = part.axis.all_gather(own, 0).reshape(part.axis.size, 2, len(logits))
        highest, logsum = _joined(every[:, 0], every[:, 1])
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
        dtype = _wide(made.dtype)
        total = ctx.part.axis.all_reduce(gradient.sum(1, dtype=dtype))
        result = torch.empty_like(made)
        for rows in ctx.part.chunks(len(made)):
            result[rows] = gradient[rows].to(dtype) - made[rows].to(dtype).exp_() * total[rows, None]
        return result, None


def _at_labels(wide: Tensor, labels: Tensor, kept: Tensor, part: ClassPart) -> Tensor:
    """Each row's number at its label; 0 where another rank has it."""
    if not part.count:
        return wide.new_zeros(len(wide))
    local, own = _local(labels, kept, part)
    return torch.where(own, wide.gather(1, local[:, None])[:, 0], 0)


__all__ = ["CHUNK", "ClassPart", "Loss", "cross_entropy", "log_softmax", "logsumexp", "nll_loss"]
