"""Functions of torch that a record has as what they consist of.

in:  a function of torch, as a body calls it
out: one that computes the same step by step; the function itself if there is none

    _weight_norm(v, g, 0)   ->   v * (g / sqrt(sum(v * v)))

A fused operation takes whole vectors. Of its steps each has rules of its own, so that a rank may have a part of every
vector. Where it has whole ones, the body goes on calling what it calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tpplan.compat import FUSED_WEIGHT_NORM

_NARROW = (torch.float16, torch.bfloat16)


def decomposed(func: Callable[..., Any]) -> Callable[..., Any]:
    """What is recorded in place of a function."""
    return _weight_norm if func is FUSED_WEIGHT_NORM else func


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """Vectors along `dim`, or with -1 a single one, of directions v and lengths g. Sums are in float32 at least."""
    wide = v.float() if v.dtype in _NARROW else v
    along = [d for d in range(v.dim()) if d != dim]
    squares = wide * wide
    total = squares.sum() if dim == -1 else squares.sum(along, keepdim=True) if along else squares
    return (wide * (g.to(wide.dtype) / total.sqrt())).to(v.dtype)


__all__ = ["decomposed"]
