"""Cross entropy, of all classes or of a vocabulary that is split over a process group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from tpplan.kernels.backend import Choice, takes_kernel
from tpplan.kernels.cross_entropy_ops import PARTS
from tpplan.kernels.kernel_errors import KernelArgumentError

Reduction = Literal["mean", "sum", "none"]


def cross_entropy(
    input: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    group: dist.ProcessGroup | None = None,
    backend: Choice = "auto",
) -> Tensor:
    """The negative log-likelihood of class targets, computed in float32: mean of log Σ_v exp(z_v) - z_t.

    The formula, with label smoothing, and its sources are in `tpplan.kernels.cross_entropy_formulas`; the arguments are
    those of `torch.nn.functional.cross_entropy`. With a group, rank r of n holds the classes from r·columns to
    (r + 1)·columns, and the loss and its gradient are those of the whole vocabulary, for one MAX and one SUM
    all-reduce of numbers a row. All that is kept for the backward are the logits, the targets and a number a row.

    Args:
        input: (*rows, columns), this rank's logits; float32, bfloat16 or float16 for the kernel. Any strides.
        target: (*rows), integers, counted over the whole vocabulary; on every rank of the group the same.
        ignore_index: a target whose row counts for nothing.
        reduction: "mean" over the rows that count, "sum", or "none".
        label_smoothing: the share of the target that is spread over all classes, 0 to 1.
        group: the ranks that hold the vocabulary, in order, in equal parts; None if `input` holds all of it.
        backend: "auto", "triton" or "torch"; see `tpplan.kernels.backend.choose`.

    Returns:
        A scalar, or (*rows) without a reduction; float32 (float64 for such logits), also for narrower logits, where
        torch rounds the loss. Not a number where a target is no class.

    Raises:
        KernelArgumentError: shapes that don't fit, targets that aren't integers, no such reduction or backend, a label
            smoothing beyond 0 to 1.
    """
    _check(input, target, reduction, label_smoothing)
    kernel = takes_kernel("cross_entropy", input, backend)
    if group is None and not kernel:
        return _whole(input, target, ignore_index, reduction, label_smoothing)
    columns = input.shape[-1]
    first, classes = 0, columns
    if group is not None:
        first, classes = dist.get_rank(group) * columns, dist.get_world_size(group) * columns
    rows, labels = input.reshape(-1, columns), target.reshape(-1).long()
    smooth = label_smoothing > 0
    parts = PARTS(rows, labels, first, classes, ignore_index, smooth)
    highest, logsum, picked, total = parts if group is None else _combine(parts, labels != ignore_index, smooth, group)
    loss = logsum - (picked - highest)
    if smooth:
        loss = (1 - label_smoothing) * loss + label_smoothing * (logsum + (highest - total / classes))
    return _reduce(loss, labels, target.shape, ignore_index, reduction)


def _whole(input: Tensor, target: Tensor, ignore_index: int, reduction: Reduction, label_smoothing: float) -> Tensor:
    """All classes here, in torch's operators."""
    wide = input if input.dtype == torch.float64 else input.float()
    labels = target.reshape(-1).long()
    loss = functional.cross_entropy(
        wide.reshape(-1, input.shape[-1]),
        labels,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )
    return loss.reshape(target.shape) if reduction == "none" else loss


def _reduce(loss: Tensor, labels: Tensor, shape: torch.Size, ignore_index: int, reduction: Reduction) -> Tensor:
    if reduction == "none":
        return loss.reshape(shape)
    return loss.sum() / (labels != ignore_index).sum() if reduction == "mean" else loss.sum()


def _combine(parts: Sequence[Tensor], kept: Tensor, smooth: bool, group: dist.ProcessGroup) -> Sequence[Tensor]:
    """The parts of all ranks put together: m, log Σ exp(z - m), the target's logit and the sum of logits."""
    highest, logsum, picked, total = parts
    # A rank whose logits are all -inf has no say in the maximum.
    overall = torch.where(logsum.detach() == -torch.inf, logsum.detach(), highest)
    dist.all_reduce(overall, dist.ReduceOp.MAX, group=group)
    overall = torch.where(overall == -torch.inf, torch.zeros_like(overall), overall)
    weight = torch.exp(logsum + (highest - overall))
    summed = cast(Tensor, _SumOverRanks.apply(torch.stack([weight, picked, *([total] if smooth else [])]), group))
    # log 1 in ignored rows, whose sum would be the number of ranks.
    joined = torch.log(torch.where(kept, summed[0], torch.ones_like(weight)))
    return overall, joined, summed[1], summed[2] if smooth else total


class _SumOverRanks(torch.autograd.Function):
    """The sum over a group, equal on all ranks; so is its gradient, and every rank's part gets it as it is."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:  # pyright: ignore
        summed = part.clone()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore
        return gradient, None


def _check(input: Tensor, target: Tensor, reduction: str, label_smoothing: float) -> None:
    if (
        not input.is_floating_point()
        or not input.dim()
        or not input.shape[-1]
        or tuple(input.shape[:-1]) != tuple(target.shape)
    ):
        raise KernelArgumentError(
            f"cross_entropy: needs floating-point logits (*rows, classes) and a target for each row, not {input.dtype} "
            f"{list(input.shape)} and {list(target.shape)}"
        )
    if target.is_floating_point() or target.is_complex():
        raise KernelArgumentError(
            f"cross_entropy: the targets are {target.dtype}; pass class numbers, as integers. For probabilities of "
            "classes there is torch.nn.functional.cross_entropy"
        )
    if reduction not in ("mean", "sum", "none"):
        raise KernelArgumentError(f"cross_entropy: there is no reduction {reduction!r}; choose mean, sum or none")
    if not 0.0 <= label_smoothing <= 1.0:
        raise KernelArgumentError(f"cross_entropy: label_smoothing is {label_smoothing}; it needs to be within 0 to 1")
