"""Functions over all classes, such as a loss: the calls of torch whose class dim may be split over the ranks.

in:  a call of torch, as a function mode sees it
out: a `ClassCall`, the same whatever way it was written; and the operation that stands for it in a trace

    cross_entropy(logits, labels, ignore_index=0)   ->   ClassCall(CROSS_ENTROPY, logits, 1, labels, …)
    logits.logsumexp(-1)                            ->   ClassCall(LOGSUMEXP, logits, 1)

A capture records such a call as one operation, and the runtime meets the very same calls: what was proved of one runs.
The operations themselves are never run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tpplan.compat.schemas import OpOverload, schema_argument_names

CLASS_LIBRARY = torch.library.Library("tpplan_classes", "DEF")
CLASS_LIBRARY.define(
    "cross_entropy(Tensor input, Tensor target, Tensor? weight, int dim, str reduction, int ignore_index, "
    "float label_smoothing) -> Tensor"
)
CLASS_LIBRARY.define(
    "nll_loss(Tensor input, Tensor target, Tensor? weight, int dim, str reduction, int ignore_index) -> Tensor"
)
CLASS_LIBRARY.define("logsumexp(Tensor input, int dim, bool keepdim) -> Tensor")
CLASS_LIBRARY.define("log_softmax(Tensor input, int dim, ScalarType? dtype) -> Tensor")

CROSS_ENTROPY: OpOverload = torch.ops.tpplan_classes.cross_entropy.default
NLL_LOSS: OpOverload = torch.ops.tpplan_classes.nll_loss.default
LOGSUMEXP: OpOverload = torch.ops.tpplan_classes.logsumexp.default
LOG_SOFTMAX: OpOverload = torch.ops.tpplan_classes.log_softmax.default
LOSSES = frozenset((CROSS_ENTROPY, NLL_LOSS))
LOSS_OPERATIONS = LOSSES | {LOGSUMEXP, LOG_SOFTMAX}


@dataclass(frozen=True, slots=True, eq=False)
class ClassCall:
    """A call of a function over all classes.

    Attributes:
        operation: which function it is.
        input: the logits, or for `nll_loss` their log-probabilities.
        dim: the class dim, counted from the front.
        target, weight: of a loss: the labels, as class numbers; a weight for each class. Of `gather`, the index. Of a
            look-up: the rows' numbers; of bags, a weight for each of these.
        reduction, ignore_index, label_smoothing: of a loss, as torch names them; the first of bags, too.
        keepdim: of a sum.
        dtype: what the input is converted to first.
        padding, offsets, last_offset: of a look-up, as torch names them.
        from_the_end: whether numbers below zero count from the last row.
    """

    operation: OpOverload
    input: Tensor
    dim: int
    target: Tensor | None = None
    weight: Tensor | None = None
    reduction: str = "mean"
    ignore_index: int = -100
    label_smoothing: float = 0.0
    keepdim: bool = False
    dtype: torch.dtype | None = None
    padding: int | None = None
    offsets: Tensor | None = None
    last_offset: bool = False
    from_the_end: bool = False

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The operation's arguments, in order."""
        if self.operation not in LOSSES:
            known = {
                "keepdim": self.keepdim, "dtype": self.dtype, "index": self.target, "target": self.target,
                "weight": self.weight, "reduction": self.reduction, "padding": self.padding, "offsets": self.offsets,
                "last_offset": self.last_offset, "from_the_end": self.from_the_end,
            }  # fmt: skip
            names = schema_argument_names(self.operation)[2:]
            return (self.input, self.dim, *(known[name] for name in names))
        loss = (self.input, self.target, self.weight, self.dim, self.reduction, self.ignore_index)
        return loss if self.operation is NLL_LOSS else (*loss, self.label_smoothing)


def loss_call(func: Callable[..., Any], args: tuple[Any, ...], keywords: Mapping[str, Any]) -> ClassCall | None:
    """What a call of torch computes over classes; None for any other call, or one that torch itself would refuse."""
    read = _READERS.get(func)
    if read is None:
        return None
    try:
        return read(*args, **keywords)
    except (TypeError, IndexError):
        return None


def _cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> ClassCall | None:
    call = _nll_loss(input, target, weight, size_average, ignore_index, reduce, reduction)
    if call is None:
        return None
    loss = (call.input, call.dim, call.target, call.weight, reduction, ignore_index)
    return ClassCall(CROSS_ENTROPY, *loss, float(label_smoothing))


def _nll_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> ClassCall | None:
    old = size_average is not None or reduce is not None
    if old or target.is_floating_point() or not input.dim() or reduction not in ("mean", "sum", "none"):
        return None
    dim = 1 if input.dim() > 1 else 0
    rows = (*input.shape[:dim], *input.shape[dim + 1 :])
    if tuple(target.shape) != rows:
        return None
    return ClassCall(NLL_LOSS, input, dim, target, weight, reduction, ignore_index)


def _logsumexp(input: Tensor, dim: Any, keepdim: bool = False) -> ClassCall | None:
    if isinstance(dim, (tuple, list)):
        (dim,) = dim if len(dim) == 1 else (None,)  # pyright: ignore
    if not isinstance(dim, int) or not input.dim() or not input.is_floating_point():
        return None
    return ClassCall(LOGSUMEXP, input, range(input.dim())[dim], keepdim=keepdim)


def _log_softmax(
    input: Tensor, dim: Any = None, _stacklevel: Any = 3, dtype: torch.dtype | None = None
) -> ClassCall | None:
    if not isinstance(dim, int) or not input.dim() or not input.is_floating_point():
        return None
    return ClassCall(LOG_SOFTMAX, input, range(input.dim())[dim], dtype=dtype)


def _log_softmax_method(input: Tensor, dim: Any, dtype: torch.dtype | None = None) -> ClassCall | None:
    return _log_softmax(input, dim, dtype=dtype)


_READERS: dict[Any, Callable[..., ClassCall | None]] = {
    functional.cross_entropy: _cross_entropy,
    functional.nll_loss: _nll_loss,
    torch.logsumexp: _logsumexp,
    torch.special.logsumexp: _logsumexp,
    Tensor.logsumexp: _logsumexp,
    functional.log_softmax: _log_softmax,
    torch.log_softmax: _log_softmax_method,
    torch.special.log_softmax: _log_softmax_method,
    Tensor.log_softmax: _log_softmax_method,
}
LOSS_FUNCTIONS = frozenset(_READERS)


def stock_loss(operation: OpOverload) -> Callable[..., Tensor]:
    """The function of torch that an operation stands for, to be called with its arguments."""
    written = {CROSS_ENTROPY: _call_loss, NLL_LOSS: _call_nll, LOG_SOFTMAX: _call_log_softmax}
    return written.get(operation, torch.logsumexp)


def _call_loss(z: Tensor, t: Tensor, weight: Tensor | None, dim: int, reduction: str, ignored: int, s: float) -> Tensor:
    return functional.cross_entropy(z, t, weight, ignore_index=ignored, reduction=reduction, label_smoothing=s)


def _call_nll(z: Tensor, t: Tensor, weight: Tensor | None, dim: int, reduction: str, ignored: int) -> Tensor:
    return functional.nll_loss(z, t, weight, ignore_index=ignored, reduction=reduction)


def _call_log_softmax(input: Tensor, dim: int, dtype: torch.dtype | None) -> Tensor:
    return torch.log_softmax(input, dim, dtype=dtype)


__all__ = [
    "CLASS_LIBRARY",
    "CROSS_ENTROPY",
    "LOGSUMEXP",
    "LOG_SOFTMAX",
    "LOSSES",
    "LOSS_FUNCTIONS",
    "LOSS_OPERATIONS",
    "NLL_LOSS",
    "ClassCall",
    "loss_call",
    "stock_loss",
]
