"""Launching the activations' kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tpplan.kernels.activation_formulas import Kind
from tpplan.kernels.launch import blocks, on_device, pointwise_tile, resident_programs
from tpplan.kernels.rows import as_flat_rows, as_rows


def forward(x: Tensor, up: Tensor | None, bias: Tensor | None, kind: Kind, dtype: torch.dtype) -> Tensor:
    """As `activation_formulas.forward`, on a GPU or interpreted, in one launch."""
    from tpplan.kernels.activation_kernel import activation_forward_kernel

    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    if not y.numel():
        return y
    given = [x] if up is None else [x, up]
    # A bias belongs to columns, which one long row wouldn't have.
    rows_of = as_flat_rows(*given) if bias is None else [as_rows(tensor) for tensor in given]
    rows, columns = rows_of[0].shape
    tile = pointwise_tile(columns)
    kernel: Any = activation_forward_kernel
    with on_device(x):
        kernel[(blocks(rows, tile.rows) * blocks(columns, tile.columns),)](
            rows_of[0],
            None if up is None else rows_of[1],
            None if bias is None else bias.contiguous(),
            y,
            rows_of[0].stride(0),
            0 if up is None else rows_of[1].stride(0),
            rows,
            columns,
            KIND=kind,
            BLOCK_ROWS=tile.rows,
            BLOCK_COLUMNS=tile.columns,
            num_warps=tile.warps,
        )
    return y


def backward(dy: Tensor, x: Tensor, up: Tensor | None, kind: Kind) -> tuple[Tensor, Tensor | None]:
    """As `activation_formulas.backward`, in one launch; without `up` the gradient of x alone."""
    from tpplan.kernels.activation_kernel import activation_backward_kernel

    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dup = None if up is None else torch.empty(up.shape, dtype=up.dtype, device=up.device)
    if not dx.numel():
        return dx, dup
    rows_of = as_flat_rows(*([dy, x] if up is None else [dy, x, up]))
    rows, columns = rows_of[0].shape
    tile = pointwise_tile(columns)
    kernel: Any = activation_backward_kernel
    with on_device(x):
        kernel[(blocks(rows, tile.rows) * blocks(columns, tile.columns),)](
            rows_of[0],
            rows_of[1],
            None if up is None else rows_of[2],
            dx,
            dup,
            rows_of[0].stride(0),
            rows_of[1].stride(0),
            0 if up is None else rows_of[2].stride(0),
            rows,
            columns,
            KIND=kind,
            BLOCK_ROWS=tile.rows,
            BLOCK_COLUMNS=tile.columns,
            num_warps=tile.warps,
        )
    return dx, dup


def bias_backward(dy: Tensor, x: Tensor, bias: Tensor, kind: Kind, bias_grad: bool) -> tuple[Tensor, Tensor | None]:
    """The gradient dx as in `activation_formulas.bias_backward`, and the programs' shares of the bias's.

    Returns:
        dx; the shares (1, programs, columns), float32, None unless `bias_grad`.
    """
    from tpplan.kernels.activation_kernel import bias_activation_backward_kernel

    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not dx.numel():
        return dx, None
    dy_rows, x_rows = as_rows(dy), as_rows(x)
    rows, columns = x_rows.shape
    tile = pointwise_tile(columns)
    across = blocks(columns, tile.columns)
    programs = min(blocks(resident_programs(x.device, tile.warps), across), blocks(rows, tile.rows))
    shares = torch.empty((1, programs, columns), dtype=torch.float32, device=x.device) if bias_grad else None
    kernel: Any = bias_activation_backward_kernel
    with on_device(x):
        kernel[(programs, across)](
            dy_rows,
            x_rows,
            bias.contiguous(),
            dx,
            shares,
            dy_rows.stride(0),
            x_rows.stride(0),
            rows,
            columns,
            KIND=kind,
            BLOCK_ROWS=tile.rows,
            BLOCK_COLUMNS=tile.columns,
            num_warps=tile.warps,
        )
    return dx, shares
