"""LayerNorm and RMSNorm in plain torch, forward and backward: the reference of the norm kernels.

It is also what the operators run where there is no GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class NormFormula:
    """Which norm.

    Attributes:
        dims: how many trailing dims are normalized over.
        centred: whether the mean is subtracted: LayerNorm, otherwise RMSNorm.
        eps: added to the variance, or to the mean square.
        offset: added to the weight.
        round_first: whether the normalized input is rounded to the input's dtype before it meets the weight.
    """

    dims: int
    centred: bool
    eps: float = 0.0
    offset: float = 0.0
    round_first: bool = False


def forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    norm: NormFormula,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Normalize `s = x + residual`, which is rounded first: y = (s - μ)·r·(offset + w) + b.

    μ = mean(s) and r = (mean((s - μ)²) + eps)^-½ over the normalized dims, in float32; for RMSNorm μ = 0. Sources:
    Ba, Kiros and Hinton, "Layer Normalization", 2016; Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.

    Args:
        x, residual: (*leading, *normalized), float32, bfloat16 or float16; no residual leaves s = x.
        weight, bias: (*normalized).
        norm: which norm.
        dtype: of the result.

    Returns:
        y (*leading, *normalized) of `dtype`; s; μ and r (*leading), float32, μ None for RMSNorm.
    """
    s = x if residual is None else x + residual
    over = tuple(range(-norm.dims, 0))
    wide = s.float()
    mean = wide.mean(over, keepdim=True) if norm.centred else None
    centred = wide if mean is None else wide - mean
    rstd = torch.rsqrt(centred.square().mean(over, keepdim=True) + norm.eps)
    y = centred * rstd
    if norm.round_first:
        y = y.to(s.dtype).float()
    if weight is not None:
        y = y * (weight.float() + norm.offset)
    if bias is not None:
        y = y + bias.float()
    leading = s.shape[: s.dim() - norm.dims]
    return y.to(dtype).contiguous(), s, None if mean is None else mean.reshape(leading), rstd.reshape(leading)


def backward(
    dy: Tensor,
    dsum: Tensor | None,
    s: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    norm: NormFormula,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of s, of the weight and of the bias.

    With x̂ = (s - μ)·r and g = dy·(offset + w), both recomputed: ds = r·(g - x̂·mean(g·x̂) - mean(g)) + dsum, for RMSNorm
    without mean(g); dw = Σ dy·x̂ and db = Σ dy over the leading dims. Derived from the formula of `forward`.

    Args:
        dy: (*leading, *normalized), the result's gradient.
        dsum: what else arrives for s, the same shape, or None.
        s, mean, rstd: as `forward` returned them.
        weight: (*normalized), or None.
        norm: which norm.

    Returns:
        ds of s's dtype; dw and db (*normalized), float32.
    """
    over = tuple(range(-norm.dims, 0))
    normalized = s.shape[s.dim() - norm.dims :]
    kept = (*rstd.shape, *(1 for _ in over))
    centred = s.float() if mean is None else s.float() - mean.view(kept)
    normal = centred * rstd.view(kept)
    g = dy.float() if weight is None else dy.float() * (weight.float() + norm.offset)
    ds = g - normal * (g * normal).mean(over, keepdim=True)
    if norm.centred:
        ds = ds - g.mean(over, keepdim=True)
    ds = ds * rstd.view(kept)
    if dsum is not None:
        ds = ds + dsum.float()
    met = normal.to(s.dtype).float() if norm.round_first else normal
    dweight = (dy.float() * met).reshape(-1, *normalized).sum(0)
    return ds.to(s.dtype).contiguous(), dweight, dy.float().reshape(-1, *normalized).sum(0)
