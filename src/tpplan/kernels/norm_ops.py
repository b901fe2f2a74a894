"""What the operators of the norms do: the kernels where Triton reaches the tensors, the formulas elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor

from tpplan.kernels import norm_formulas, norm_launch
from tpplan.kernels.backend import runs_kernels
from tpplan.kernels.column_sum import sum_shares
from tpplan.kernels.norm_formulas import NormFormula

Gradients = tuple[Tensor, Tensor, Tensor]


def _forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    norm: NormFormula,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    run = norm_launch.forward if runs_kernels(x) else norm_formulas.forward
    return run(x, residual, weight, bias, norm, dtype)


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, dims: int, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None, Tensor]:
    """`tpplan::layer_norm`: y, μ, r."""
    y, _, mean, rstd = _forward(x, None, weight, bias, NormFormula(dims, True, eps), dtype)
    return y, mean, rstd


def residual_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, dims: int, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """`tpplan::residual_layer_norm`: y, s, μ, r."""
    return _forward(x, residual, weight, bias, NormFormula(dims, True, eps), dtype)


def rms_norm(
    x: Tensor, weight: Tensor | None, dims: int, eps: float, offset: float, round_first: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """`tpplan::rms_norm`: y, r."""
    y, _, _, rstd = _forward(x, None, weight, None, NormFormula(dims, False, eps, offset, round_first), dtype)
    return y, rstd


def residual_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    dims: int,
    eps: float,
    offset: float,
    round_first: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """`tpplan::residual_rms_norm`: y, s, r."""
    y, s, _, rstd = _forward(x, residual, weight, None, NormFormula(dims, False, eps, offset, round_first), dtype)
    return y, s, rstd


def _backward(
    dy: Tensor,
    s: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    dsum: Tensor | None,
    norm: NormFormula,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
) -> Gradients:
    """The gradients of s, weight and bias; an empty tensor for one that isn't asked for by a dtype."""
    normalized = s.shape[s.dim() - norm.dims :]
    wanted = [dtype for dtype in (weight_dtype, bias_dtype) if dtype is not None]
    if runs_kernels(s):
        sums = 2 if bias_dtype is not None else len(wanted)
        ds, shares = norm_launch.backward(dy, dsum, s, weight, mean, rstd, norm, sums)
        of_what = (weight_dtype or torch.float32, bias_dtype or torch.float32)
        if shares is not None:
            summed = [total.view(normalized) for total in sum_shares(shares, of_what[:sums])]
        else:
            summed = [s.new_zeros(normalized, dtype=dtype) for dtype in of_what[:sums]]
    else:
        ds, *summed = norm_formulas.backward(dy, dsum, s, weight, mean, rstd, norm)
    return ds, _given(summed, 0, weight_dtype, s), _given(summed, 1, bias_dtype, s)


def _given(summed: list[Tensor], position: int, dtype: torch.dtype | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if dtype is None else summed[position].to(dtype)


def layer_norm_backward(
    dy: Tensor,
    s: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    dsum: Tensor | None,
    dims: int,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
) -> Gradients:
    """`tpplan::layer_norm_backward`: ds, dw, db; those without a dtype are empty."""
    return _backward(dy, s, weight, mean, rstd, dsum, NormFormula(dims, True), weight_dtype, bias_dtype)


def rms_norm_backward(
    dy: Tensor,
    s: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    dsum: Tensor | None,
    dims: int,
    offset: float,
    round_first: bool,
    weight_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """`tpplan::rms_norm_backward`: ds, dw; dw is empty without a dtype."""
    norm = NormFormula(dims, False, offset=offset, round_first=round_first)
    ds, dweight, _ = _backward(dy, s, weight, None, rstd, dsum, norm, weight_dtype, None)
    return ds, dweight
