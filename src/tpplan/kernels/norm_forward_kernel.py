# pyright: reportUnnecessaryComparison=false
"""The forward of LayerNorm and RMSNorm, with or without a residual, in Triton.

The torch reference with the formulas is `norm_formulas.forward`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_input(x_ptr, residual_ptr, sum_ptr, x_at, residual_at, sum_at, mask, STORE: tl.constexpr):
    """The row to be normalized, in float32; with a residual the sum, rounded as it is handed on."""
    x = tl.load(x_ptr + x_at, mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        x += tl.load(residual_ptr + residual_at, mask, other=0.0).to(tl.float32)
        rounded = x.to(sum_ptr.dtype.element_ty)
        if STORE:
            tl.store(sum_ptr + sum_at, rounded, mask)
        x = rounded.to(tl.float32)
    return x


@triton.jit
def load_weight(weight_ptr, columns, mask, offset):
    """`offset + weight` in float32, as a row."""
    return tl.load(weight_ptr + columns, mask, other=0.0).to(tl.float32)[None, :] + tl.cast(offset, tl.float32)


@triton.jit
def normalized(x, mean, rstd, mask, CENTRED: tl.constexpr):
    """(x - mean)·rstd, and zero on lanes beyond the row: there x is 0, and 0 - mean is not."""
    if CENTRED:
        x = tl.where(mask, x - mean[:, None], 0.0)
    return x * rstd[:, None]


@triton.jit
def scale_and_store(
    normal,  # (BLOCK_ROWS, BLOCK_COLUMNS), float32
    y_ptr,  # pointer to the result, shape (rows, HIDDEN), contiguous
    weight_ptr,  # pointer to the weight, shape (HIDDEN,), or None
    bias_ptr,  # pointer to the bias, shape (HIDDEN,), or None
    y_at,
    columns,
    mask,
    offset,
    HIDDEN: tl.constexpr,
    ROUND_DTYPE: tl.constexpr,
):
    """Weight and bias, and the result rounded once; before the weight, too, where ROUND_DTYPE says to what."""
    if ROUND_DTYPE is not None:
        normal = normal.to(ROUND_DTYPE).to(tl.float32)
    if weight_ptr is not None:
        normal *= load_weight(weight_ptr, columns, columns < HIDDEN, offset)
    if bias_ptr is not None:
        normal += tl.load(bias_ptr + columns, columns < HIDDEN, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + y_at, normal.to(y_ptr.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["rows"])
def norm_forward_kernel(
    x_ptr,  # pointer to the input, shape (rows, HIDDEN), rows x_stride apart
    residual_ptr,  # pointer to the residual, shape (rows, HIDDEN), rows residual_stride apart, or None
    sum_ptr,  # pointer to input + residual, written, shape (rows, HIDDEN), contiguous, or None
    y_ptr,  # pointer to the result, written, shape (rows, HIDDEN), contiguous
    mean_ptr,  # pointer to the means, written, shape (rows,), float32; None unless CENTRED
    rstd_ptr,  # pointer to the reciprocal deviations, written, shape (rows,), float32
    weight_ptr,  # pointer to the weight, shape (HIDDEN,), or None
    bias_ptr,  # pointer to the bias, shape (HIDDEN,), or None
    x_stride,
    residual_stride,
    rows,
    eps,
    offset,
    HIDDEN: tl.constexpr,
    CENTRED: tl.constexpr,
    ROUND_DTYPE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Rows that fit into registers: read once, variance in two passes over the registers."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, BLOCK_COLUMNS)
    mask = (row < rows)[:, None] & (columns < HIDDEN)[None, :]
    x_at = row[:, None] * x_stride + columns[None, :]
    residual_at = row[:, None] * residual_stride + columns[None, :]
    y_at = row[:, None] * HIDDEN + columns[None, :]
    x = load_input(x_ptr, residual_ptr, sum_ptr, x_at, residual_at, y_at, mask, True)

    mean = tl.zeros([BLOCK_ROWS], tl.float32)
    if CENTRED:
        mean = tl.sum(x, axis=1) / HIDDEN
        x = tl.where(mask, x - mean[:, None], 0.0)
        left = tl.sum(x, axis=1) / HIDDEN  # what rounding left of a mean that is large beside the deviations
        mean += left
        x = tl.where(mask, x - left[:, None], 0.0)
        tl.store(mean_ptr + row, mean, row < rows)
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / HIDDEN + tl.cast(eps, tl.float32))
    tl.store(rstd_ptr + row, rstd, row < rows)

    normal = x * rstd[:, None]
    scale_and_store(normal, y_ptr, weight_ptr, bias_ptr, y_at, columns, mask, offset, HIDDEN, ROUND_DTYPE)


@triton.jit(do_not_specialize=["rows"])
def norm_forward_looped_kernel(
    x_ptr,  # pointer to the input, shape (rows, HIDDEN), rows x_stride apart
    residual_ptr,  # pointer to the residual, shape (rows, HIDDEN), rows residual_stride apart, or None
    sum_ptr,  # pointer to input + residual, written, shape (rows, HIDDEN), contiguous, or None
    y_ptr,  # pointer to the result, written, shape (rows, HIDDEN), contiguous
    mean_ptr,  # pointer to the means, written, shape (rows,), float32; None unless CENTRED
    rstd_ptr,  # pointer to the reciprocal deviations, written, shape (rows,), float32
    weight_ptr,  # pointer to the weight, shape (HIDDEN,), or None
    bias_ptr,  # pointer to the bias, shape (HIDDEN,), or None
    x_stride,
    residual_stride,
    rows,
    eps,
    offset,
    HIDDEN: tl.constexpr,
    CENTRED: tl.constexpr,
    ROUND_DTYPE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Rows wider than the registers: statistics tile by tile, merged as Chan, Golub and LeVeque do; read twice."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    mean = tl.zeros([BLOCK_ROWS], tl.float32)
    squares = tl.zeros([BLOCK_ROWS], tl.float32)
    for start in range(0, HIDDEN, BLOCK_COLUMNS):
        columns = start + tl.arange(0, BLOCK_COLUMNS)
        mask = (row < rows)[:, None] & (columns < HIDDEN)[None, :]
        x_at = row[:, None] * x_stride + columns[None, :]
        residual_at = row[:, None] * residual_stride + columns[None, :]
        y_at = row[:, None] * HIDDEN + columns[None, :]
        x = load_input(x_ptr, residual_ptr, sum_ptr, x_at, residual_at, y_at, mask, True)
        if CENTRED:
            count = tl.minimum(HIDDEN - start, BLOCK_COLUMNS)
            share = count / (start + count)
            tile_mean = tl.sum(x, axis=1) / count
            x = tl.where(mask, x - tile_mean[:, None], 0.0)
            squares += (tile_mean - mean) * (tile_mean - mean) * (share * start)
            mean += (tile_mean - mean) * share
        squares += tl.sum(x * x, axis=1)
    rstd = tl.rsqrt(squares / HIDDEN + tl.cast(eps, tl.float32))
    if CENTRED:
        tl.store(mean_ptr + row, mean, row < rows)
    tl.store(rstd_ptr + row, rstd, row < rows)

    for start in range(0, HIDDEN, BLOCK_COLUMNS):
        columns = start + tl.arange(0, BLOCK_COLUMNS)
        mask = (row < rows)[:, None] & (columns < HIDDEN)[None, :]
        x_at = row[:, None] * x_stride + columns[None, :]
        residual_at = row[:, None] * residual_stride + columns[None, :]
        y_at = row[:, None] * HIDDEN + columns[None, :]
        # The sum is formed again: what other threads have written of it may not be seen yet.
        x = load_input(x_ptr, residual_ptr, sum_ptr, x_at, residual_at, y_at, mask, False)
        normal = normalized(x, mean, rstd, mask, CENTRED)
        scale_and_store(normal, y_ptr, weight_ptr, bias_ptr, y_at, columns, mask, offset, HIDDEN, ROUND_DTYPE)
