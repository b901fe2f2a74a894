"""Statistics of weights, which a record has as what they consist of.

in:  an operation on what follows from parameters alone, as a body calls it
out: a function that computes the same by sums; None for any other operation

    linalg_vector_norm(w, 2, [1])   ->   sqrt(sum(w * w))
    std(w, [1, 2, 3])               ->   sqrt(sum((w - mean(w)) ** 2) / (n - 1))
    native_batch_norm(w, …)         ->   (w - mean(w)) * rsqrt(mean((w - mean(w)) ** 2) + eps)

Of its steps each has rules of its own, so that ranks may have parts of what a statistic is of, and exchange the sums.
Where each rank has all of it, the body goes on calling what it calls. The gradient of a root at 0 is 0, as torch's
statistics have it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tpplan.compat.schemas import OpOverload

_NARROW = (torch.float16, torch.bfloat16)
_aten = torch.ops.aten
Dims = Sequence[int] | None


def statistic_of(func: OpOverload, args: Sequence[Any], keywords: dict[str, Any]) -> Callable[[], Any] | None:
    """What makes the results of an operation step by step; None for an operation that is no such statistic."""
    steps = _STEPS.get(func)
    if steps is None or not args[0].is_floating_point() or not args[0].numel() or not args[0].dim():
        return None
    return steps(*args, **keywords)


def _norm(
    x: Tensor, order: float = 2, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Callable[[], Tensor] | None:
    if order not in (1, 2) or dtype is not None:
        return None

    def steps() -> Tensor:
        wide = _wide(x)
        terms = _aten.abs.default(wide) if order == 1 else _square(wide)
        total = _aten.sum.dim_IntList(terms, _dims(x, dim), keepdim)
        return _as(x, total if order == 1 else _root(total))

    return steps


def _variance(x: Tensor, dim: Dims, correction: float | None, keepdim: bool) -> tuple[Tensor, Tensor]:
    """The variance, and the mean, of numbers that aren't narrow."""
    dims, freedom = _dims(x, dim), 1 if correction is None else correction
    count = math.prod(x.shape[d] for d in dims)
    mean = _aten.mean.dim(x, dims, True)
    squares = _aten.sum.dim_IntList(_square(_aten.sub.Tensor(x, mean)), dims, keepdim)
    return _aten.div.Scalar(squares, max(count - freedom, 0)), mean


def _std(
    x: Tensor, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False
) -> Callable[[], Tensor]:
    return lambda: _as(x, _root(_variance(_wide(x), dim, correction, keepdim)[0]))


def _var(
    x: Tensor, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False
) -> Callable[[], Tensor]:
    return lambda: _as(x, _variance(_wide(x), dim, correction, keepdim)[0])


def _var_mean(
    x: Tensor, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False
) -> Callable[[], tuple[Tensor, Tensor]]:
    def steps() -> tuple[Tensor, Tensor]:
        wide = _wide(x)
        mean = _aten.mean.dim(wide, _dims(x, dim), keepdim)
        return _as(x, _variance(wide, dim, correction, keepdim)[0]), _as(x, mean)

    return steps


def _batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    variance: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Callable[[], tuple[Tensor, Tensor, Tensor]] | None:
    if not training or mean is not None or variance is not None:
        return None
    shape = [1, -1, *([1] * (x.dim() - 2))]

    def steps() -> tuple[Tensor, Tensor, Tensor]:
        wide, dims = _wide(x), [d for d in range(x.dim()) if d != 1]
        variance, mean = _variance(wide, dims, 0, True)
        scale = _aten.rsqrt.default(_aten.add.Scalar(variance, eps))
        normed = _aten.mul.Tensor(_aten.sub.Tensor(wide, mean), scale)
        if weight is not None:
            normed = _aten.mul.Tensor(normed, _aten.view.default(_wide(weight), shape))
        if bias is not None:
            normed = _aten.add.Tensor(normed, _aten.view.default(_wide(bias), shape))
        return _as(x, normed), _aten.view.default(mean, [x.shape[1]]), _aten.view.default(scale, [x.shape[1]])

    return steps


def _dims(x: Tensor, dim: Dims) -> list[int]:
    return [d % x.dim() for d in dim] if dim else [*range(x.dim())]


def _square(x: Tensor) -> Tensor:
    return _aten.mul.Tensor(x, x)


def _root(x: Tensor) -> Tensor:
    x = _aten.clamp_min.default(x, 0)  # the one that needs a sum over the ranks
    zero = _aten.eq.Scalar(x, 0)
    root = _aten.sqrt.default(_aten.masked_fill.Scalar(x, zero, 1))
    return _aten.masked_fill.Scalar(root, zero, 0)


def _wide(x: Tensor) -> Tensor:
    return _aten._to_copy.default(x, dtype=torch.float32) if x.dtype in _NARROW else x


def _as(x: Tensor, made: Tensor) -> Tensor:
    return made if made.dtype == x.dtype else _aten._to_copy.default(made, dtype=x.dtype)


_STEPS: dict[Any, Callable[..., Callable[[], Any] | None]] = {
    _aten.linalg_vector_norm.default: _norm,
    _aten.std.correction: _std,
    _aten.var.correction: _var,
    _aten.var_mean.correction: _var_mean,
    _aten.native_batch_norm.default: _batch_norm,
}

__all__ = ["statistic_of"]
