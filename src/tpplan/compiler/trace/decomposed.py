"""Functions of torch that a record has as what they consist of.

in:  a function of torch, as a body calls it
out: one that computes the same step by step; the function itself if there is none

    _weight_norm(v, g, 0)       ->   v * (g / sqrt(sum(v * v)))
    glu(x, -1)                  ->   a * sigmoid(b), of the halves a, b of x
    bincount(x, minlength=n)    ->   n zeros, with a one added at each number of x
    fake_quantize_per_channel_affine(w, s, z, 0, -128, 127)
                                ->   (clamp(round(w / s) + z, -128, 127) - z) * s; inside of these w has the gradient

A fused operation takes whole vectors. Of its steps each has rules of its own, so that a rank may have a part of every
vector, or of each half. Where it has whole ones, the body goes on calling what it calls. Of `bincount` torch can't tell
what shape it makes: that no number is beyond `minlength` is assumed, as of how many entries `nonzero` finds.

Statistics of what follows from parameters alone are recorded as sums, of which ranks may have their parts:

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
from torch.nn import functional

from tpplan.compat.modules import FUSED_WEIGHT_NORM
from tpplan.compat.schemas import OpOverload
from tpplan.compiler.trace.unfollowed import UnfollowedError

_NARROW = (torch.float16, torch.bfloat16)
_aten = torch.ops.aten
Dims = Sequence[int] | None


def decomposed(func: Callable[..., Any]) -> Callable[..., Any]:
    """What is recorded in place of a function."""
    return _STEPS.get(func, func)


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """Vectors along `dim`, or with -1 a single one, of directions v and lengths g. Sums are in float32 at least."""
    wide = v.float() if v.dtype in _NARROW else v
    along = [d for d in range(v.dim()) if d != dim]
    squares = wide * wide
    total = squares.sum() if dim == -1 else squares.sum(along, keepdim=True) if along else squares
    return (wide * (g.to(wide.dtype) / total.sqrt())).to(v.dtype)


def _glu(input: Tensor, dim: int = -1) -> Tensor:
    value, gate = input.chunk(2, dim)
    return value * gate.sigmoid()


def _bincount(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    if not input.is_meta or weights is not None or not minlength:
        try:
            return torch.bincount(input, weights, minlength)
        except NotImplementedError:  # of numbers that nobody knows
            found = "it calls `bincount`, which makes as many counts as its numbers say, or sums weights"
            raise UnfollowedError(found, "give it a `minlength` and no weights") from None
    zeros = torch.zeros(minlength, dtype=torch.int64, device=input.device)
    return zeros.scatter_add(0, input.to(torch.int64), torch.ones_like(input, dtype=torch.int64))


def _fake_quantized(x: Tensor, places: Tensor, zero: Tensor | int, scale: Tensor, low: int, high: int) -> Tensor:
    """What the nearest codes from `low` to `high` stand for; there is no gradient beyond these."""
    kept = torch.where((places >= low) & (places <= high), x, 0)
    return ((places.clamp(low, high) - zero) * scale).to(x.dtype) + (kept - kept.detach())


def _fake_quantize_tensor(
    input: Tensor, scale: Tensor | float, zero_point: Tensor | int, quant_min: int, quant_max: int
) -> Tensor:
    if not isinstance(scale, Tensor):
        scale = torch.full((), scale, dtype=torch.float32, device=input.device)
    scale = scale.detach().reshape(())
    zero = zero_point.detach().reshape(()).to(torch.int64) if isinstance(zero_point, Tensor) else zero_point
    places = (_wide(input.detach()) * (1 / scale)).round() + zero
    return _fake_quantized(input, places.float(), zero, scale, quant_min, quant_max)


def _fake_quantize_channels(
    input: Tensor, scale: Tensor, zero_point: Tensor, axis: int, quant_min: int, quant_max: int
) -> Tensor:
    shape = [-1 if d == axis else 1 for d in range(input.dim())]
    scale, zero = scale.detach().view(shape), zero_point.detach().view(shape)
    scaled = _wide(input.detach()) * (1 / scale)
    places = (scaled + zero).round() if zero.is_floating_point() else scaled.round() + zero
    return _fake_quantized(input, places, zero, scale, quant_min, quant_max)


_STEPS: dict[Any, Callable[..., Any]] = {
    FUSED_WEIGHT_NORM: _weight_norm,
    functional.glu: _glu,
    torch.bincount: _bincount,
    Tensor.bincount: _bincount,
    torch.fake_quantize_per_tensor_affine: _fake_quantize_tensor,
    torch.fake_quantize_per_channel_affine: _fake_quantize_channels,
}


def statistic_of(func: OpOverload, args: Sequence[Any], keywords: dict[str, Any]) -> Callable[[], Any] | None:
    """What makes the results of an operation step by step; None for an operation that is no such statistic."""
    steps = _STATISTICS.get(func)
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


_STATISTICS: dict[Any, Callable[..., Callable[[], Any] | None]] = {
    _aten.linalg_vector_norm.default: _norm,
    _aten.std.correction: _std,
    _aten.var.correction: _var,
    _aten.var_mean.correction: _var_mean,
    _aten.native_batch_norm.default: _batch_norm,
}

__all__ = ["decomposed", "statistic_of"]
