"""Reductions over all classes: the calls of torch that a loss written by hand, or a metric, makes of logits.

in:  a call of torch, as a function mode sees it
out: a `ClassCall`, as of the losses in `class_functions`

    logits.softmax(-1)             ->   ClassCall(SOFTMAX, logits, 1)
    logits.max(-1)                 ->   ClassCall(MAX, logits, 1)
    logp.gather(-1, labels)        ->   ClassCall(GATHER, logp, 1, target=labels)

All bodies call these, such as norms and attention. So they are read as functions over classes only in bodies that can't
do without (`Freedoms.reducing`): of a plan with `output: shard`, those that fail otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from tpplan.compat.schemas import OpOverload
from tpplan.compiler.ir.class_functions import (
    CLASS_LIBRARY,
    LOSS_FUNCTIONS,
    LOSS_OPERATIONS,
    ClassCall,
    loss_call,
    stock_loss,
)
from tpplan.compiler.ir.look_ups import BAG, LOOK_UP, LOOK_UP_FUNCTIONS, LOOK_UPS, call_bag, call_look_up, look_up_call

for _name, _arguments, _result in (
    ("softmax", "int dim, ScalarType? dtype", "Tensor"),
    ("sum", "int dim, bool keepdim, ScalarType? dtype", "Tensor"),
    ("mean", "int dim, bool keepdim, ScalarType? dtype", "Tensor"),
    ("amax", "int dim, bool keepdim", "Tensor"),
    ("amin", "int dim, bool keepdim", "Tensor"),
    ("argmax", "int dim, bool keepdim", "Tensor"),
    ("argmin", "int dim, bool keepdim", "Tensor"),
    ("max", "int dim, bool keepdim", "(Tensor, Tensor)"),
    ("min", "int dim, bool keepdim", "(Tensor, Tensor)"),
    ("gather", "int dim, Tensor index", "Tensor"),
):
    CLASS_LIBRARY.define(f"{_name}(Tensor input, {_arguments}) -> {_result}")

SOFTMAX: OpOverload = torch.ops.tpplan_classes.softmax.default
SUM: OpOverload = torch.ops.tpplan_classes.sum.default
MEAN: OpOverload = torch.ops.tpplan_classes.mean.default
AMAX: OpOverload = torch.ops.tpplan_classes.amax.default
AMIN: OpOverload = torch.ops.tpplan_classes.amin.default
ARGMAX: OpOverload = torch.ops.tpplan_classes.argmax.default
ARGMIN: OpOverload = torch.ops.tpplan_classes.argmin.default
MAX: OpOverload = torch.ops.tpplan_classes.max.default
MIN: OpOverload = torch.ops.tpplan_classes.min.default
GATHER: OpOverload = torch.ops.tpplan_classes.gather.default
EXTREMES = frozenset((AMAX, AMIN, ARGMAX, ARGMIN, MAX, MIN))
SUMS = frozenset((SUM, MEAN))
REDUCTIONS = EXTREMES | SUMS | {SOFTMAX, GATHER}
CLASS_OPERATIONS = LOSS_OPERATIONS | REDUCTIONS | LOOK_UPS
REDUCTION_NAMES = frozenset(operation.name().partition("::")[2] for operation in REDUCTIONS)


def class_call(
    func: Callable[..., Any], args: tuple[Any, ...], keywords: Mapping[str, Any], reducing: bool, looking: bool
) -> ClassCall | None:
    """What a call of torch computes over classes; None for any other call, or one that torch itself would refuse.

    Args:
        func, args, keywords: the call.
        reducing, looking: whether it may be a reduction, or a look-up in a table, and not only a loss.
    """
    read = _READERS.get(func) if reducing else None
    if read is None:
        return (look_up_call(func, args, keywords) if looking else None) or loss_call(func, args, keywords)
    try:
        return read(*args, **keywords)
    except (TypeError, IndexError):
        return None


def _dim_of(input: Tensor, dim: Any) -> int:
    if isinstance(dim, (tuple, list)):
        (dim,) = cast("tuple[Any, ...]", dim) if len(cast("tuple[Any, ...]", dim)) == 1 else (None,)
    if type(dim) is not int or not input.dim() or not input.is_floating_point():
        raise TypeError
    return range(input.dim())[dim]


def _softmax(input: Tensor, dim: Any, _stacklevel: Any = 3, dtype: torch.dtype | None = None) -> ClassCall:
    return ClassCall(SOFTMAX, input, _dim_of(input, dim), dtype=dtype)


def _softmax_method(input: Tensor, dim: Any, dtype: torch.dtype | None = None) -> ClassCall:
    return ClassCall(SOFTMAX, input, _dim_of(input, dim), dtype=dtype)


def _summing(operation: OpOverload) -> Callable[..., ClassCall]:
    def read(input: Tensor, dim: Any, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> ClassCall:
        return ClassCall(operation, input, _dim_of(input, dim), keepdim=keepdim, dtype=dtype)

    return read


def _extreme(operation: OpOverload) -> Callable[..., ClassCall]:
    def read(input: Tensor, dim: Any, keepdim: bool = False) -> ClassCall:
        return ClassCall(operation, input, _dim_of(input, dim), keepdim=keepdim)

    return read


def _gather(input: Tensor, dim: Any, index: Tensor, *, sparse_grad: bool = False) -> ClassCall:
    return ClassCall(GATHER, input, _dim_of(input, dim), index)


_SUMMING = {SUM: (torch.sum, Tensor.sum), MEAN: (torch.mean, Tensor.mean)}
_READERS: dict[Any, Callable[..., ClassCall]] = {
    functional.softmax: _softmax,
    torch.softmax: _softmax_method,
    torch.special.softmax: _softmax_method,
    Tensor.softmax: _softmax_method,
    torch.gather: _gather,
    Tensor.gather: _gather,
    **{function: _summing(operation) for operation, every in _SUMMING.items() for function in every},
    **{
        getattr(owner, operation.name().partition("::")[2]): _extreme(operation)
        for operation in EXTREMES
        for owner in (torch, Tensor)
    },
}
REDUCTION_FUNCTIONS = frozenset(_READERS)
CLASS_FUNCTIONS = LOSS_FUNCTIONS | REDUCTION_FUNCTIONS | LOOK_UP_FUNCTIONS


def stock_function(operation: OpOverload) -> Callable[..., Any]:
    """The function of torch that an operation stands for, to be called with its arguments."""
    if operation in LOSS_OPERATIONS:
        return stock_loss(operation)
    written = {SUM: _call_sum, MEAN: _call_mean, SOFTMAX: _call_softmax, LOOK_UP: call_look_up, BAG: call_bag}
    if operation in written:
        return written[operation]
    return getattr(torch, operation.name().partition("::")[2])


def _call_sum(input: Tensor, dim: int, keepdim: bool, dtype: torch.dtype | None) -> Tensor:
    return torch.sum(input, dim, keepdim, dtype=dtype)


def _call_mean(input: Tensor, dim: int, keepdim: bool, dtype: torch.dtype | None) -> Tensor:
    return torch.mean(input, dim, keepdim, dtype=dtype)


def _call_softmax(input: Tensor, dim: int, dtype: torch.dtype | None) -> Tensor:
    return torch.softmax(input, dim, dtype=dtype)


__all__ = [
    "AMAX",
    "AMIN",
    "ARGMAX",
    "ARGMIN",
    "CLASS_FUNCTIONS",
    "CLASS_OPERATIONS",
    "EXTREMES",
    "GATHER",
    "MAX",
    "MEAN",
    "MIN",
    "REDUCTIONS",
    "REDUCTION_FUNCTIONS",
    "REDUCTION_NAMES",
    "SOFTMAX",
    "SUM",
    "SUMS",
    "class_call",
    "stock_function",
]
