"""Functions of torch that a record has as what they consist of.

in:  a function of torch, as a body calls it
out: one that computes the same step by step; the function itself if there is none

    _weight_norm(v, g, 0)       ->   v * (g / sqrt(sum(v * v)))
    glu(x, -1)                  ->   a * sigmoid(b), of the halves a, b of x
    bincount(x, minlength=n)    ->   n zeros, with a one added at each number of x

A fused operation takes whole vectors. Of its steps each has rules of its own, so that a rank may have a part of every
vector, or of each half. Where it has whole ones, the body goes on calling what it calls. Of `bincount` torch can't tell
what shape it makes: that no number is beyond `minlength` is assumed, as of how many entries `nonzero` finds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tpplan.compat.modules import FUSED_WEIGHT_NORM

_NARROW = (torch.float16, torch.bfloat16)


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
        return torch.bincount(input, weights, minlength)
    zeros = torch.zeros(minlength, dtype=torch.int64, device=input.device)
    return zeros.scatter_add(0, input.to(torch.int64), torch.ones_like(input, dtype=torch.int64))


_STEPS: dict[Any, Callable[..., Any]] = {
    FUSED_WEIGHT_NORM: _weight_norm,
    functional.glu: _glu,
    torch.bincount: _bincount,
    Tensor.bincount: _bincount,
}

__all__ = ["decomposed"]
