"""Launching the norm kernels: one launch forward, two backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tpplan.kernels.launch import (
    MAX_BACKWARD_COLUMNS,
    MAX_FORWARD_COLUMNS,
    blocks,
    on_device,
    resident_programs,
    row_tile,
    triton_dtype,
)
from tpplan.kernels.norm_formulas import NormFormula
from tpplan.kernels.rows import as_rows, row_shape


def forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    norm: NormFormula,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """As `norm_formulas.forward`, on a GPU or interpreted."""
    from tpplan.kernels.norm_forward_kernel import norm_forward_kernel, norm_forward_looped_kernel

    rows, hidden = row_shape(x.shape, norm.dims)
    leading = x.shape[: x.dim() - norm.dims]
    s_dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    s = None if residual is None else torch.empty(x.shape, dtype=s_dtype, device=x.device)
    mean = torch.empty(leading, dtype=torch.float32, device=x.device) if norm.centred else None
    rstd = torch.empty(leading, dtype=torch.float32, device=x.device)
    if y.numel():
        x_rows = as_rows(x, norm.dims)
        residual_rows = None if residual is None else as_rows(residual, norm.dims)
        tile = row_tile(hidden, MAX_FORWARD_COLUMNS)
        kernel: Any = norm_forward_looped_kernel if tile.looped else norm_forward_kernel
        with on_device(x):
            kernel[(blocks(rows, tile.rows),)](
                x_rows,
                residual_rows,
                s,
                y,
                mean,
                rstd,
                None if weight is None else weight.contiguous(),
                None if bias is None else bias.contiguous(),
                x_rows.stride(0),
                0 if residual_rows is None else residual_rows.stride(0),
                rows,
                norm.eps,
                norm.offset,
                HIDDEN=hidden,
                CENTRED=norm.centred,
                ROUND_DTYPE=triton_dtype(s_dtype) if norm.round_first else None,
                BLOCK_ROWS=tile.rows,
                BLOCK_COLUMNS=tile.columns,
                num_warps=tile.warps,
            )
    return y, x if s is None else s, mean, rstd


def backward(
    dy: Tensor,
    dsum: Tensor | None,
    s: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    norm: NormFormula,
    sums: int,
) -> tuple[Tensor, Tensor | None]:
    """The gradient of s as in `norm_formulas.backward`, and the programs' shares of those of weight and bias.

    Args:
        dy, dsum, s, weight, mean, rstd, norm: as there.
        sums: 0 for no shares, 1 for the weight's, 2 for those of weight and bias.

    Returns:
        ds; the shares (sums, programs, *normalized), float32, or None.
    """
    from tpplan.kernels.norm_backward_kernel import norm_backward_kernel, norm_backward_looped_kernel

    rows, hidden = row_shape(s.shape, norm.dims)
    ds = torch.empty(s.shape, dtype=s.dtype, device=s.device)
    if not ds.numel():
        return ds, None
    tile = row_tile(hidden, MAX_BACKWARD_COLUMNS)
    programs = min(resident_programs(s.device, tile.warps), blocks(rows, tile.rows))
    shares = torch.empty((sums, programs, hidden), dtype=torch.float32, device=s.device) if sums else None
    dots = torch.empty((2, rows), dtype=torch.float32, device=s.device) if tile.looped else None
    dy_rows, s_rows = as_rows(dy, norm.dims), as_rows(s, norm.dims)
    dsum_rows = None if dsum is None else as_rows(dsum, norm.dims)
    kernel: Any = norm_backward_looped_kernel if tile.looped else norm_backward_kernel
    with on_device(s):
        kernel[(programs,)](
            dy_rows,
            dsum_rows,
            s_rows,
            None if weight is None else weight.contiguous(),
            mean,
            rstd,
            ds,
            shares,
            dots,
            dy_rows.stride(0),
            0 if dsum_rows is None else dsum_rows.stride(0),
            s_rows.stride(0),
            rows,
            norm.offset,
            HIDDEN=hidden,
            CENTRED=norm.centred,
            ROUND_DTYPE=triton_dtype(s.dtype) if norm.round_first else None,
            SUMS=sums,
            BLOCK_ROWS=tile.rows,
            BLOCK_COLUMNS=tile.columns,
            num_warps=tile.warps,
        )
    return ds, shares
