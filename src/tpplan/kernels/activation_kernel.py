# pyright: reportUnnecessaryComparison=false
"""GeLU, SwiGLU, GeGLU and bias + GeLU in Triton, forward and backward.

The torch references with the formulas are in `activation_formulas`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def value_and_slope(x, KIND: tl.constexpr):
    """The activation and its derivative at x, in float32; KIND is "tanh" or "none" for GeLU's forms, or "silu"."""
    if KIND == "silu":
        gate = tl.sigmoid(x)
        return x * gate, gate * (1.0 + x * (1.0 - gate))
    if KIND == "tanh":
        # (1 + tanh u)/2 is the logistic function of 2u; 1.5957691216 is 2·√(2/π).
        gate = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        inner = 1.5957691216057308 * (1.0 + 0.134145 * x * x)
        return x * gate, gate + x * gate * (1.0 - gate) * inner
    below = 0.5 * (1.0 + tl.erf(0.7071067811865476 * x))
    return x * below, below + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)


@triton.jit
def tile_of(rows, columns, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """Rows, columns and mask of this program's tile; programs count along columns first."""
    across = tl.cdiv(columns, BLOCK_COLUMNS)
    program = tl.program_id(0).to(tl.int64)
    row = program // across * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = program % across * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    return row[:, None], column[None, :], (row < rows)[:, None] & (column < columns)[None, :]


@triton.jit(do_not_specialize=["rows"])
def activation_forward_kernel(
    x_ptr,  # pointer to the activation's input, shape (rows, columns), rows x_stride apart
    up_ptr,  # pointer to the factor, shape (rows, columns), rows up_stride apart, or None
    bias_ptr,  # pointer to the bias, shape (columns,), or None
    y_ptr,  # pointer to the result, written, shape (rows, columns), contiguous
    x_stride,
    up_stride,
    rows,
    columns,
    KIND: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Compute y = act(x + bias)·up."""
    row, column, mask = tile_of(rows, columns, BLOCK_ROWS, BLOCK_COLUMNS)
    x = tl.load(x_ptr + row * x_stride + column, mask, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + column, column < columns, other=0.0).to(tl.float32)
    y, _ = value_and_slope(x, KIND)
    if up_ptr is not None:
        y *= tl.load(up_ptr + row * up_stride + column, mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * columns + column, y.to(y_ptr.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["rows"])
def activation_backward_kernel(
    dy_ptr,  # pointer to the result's gradient, shape (rows, columns), rows dy_stride apart
    x_ptr,  # pointer to the activation's input, shape (rows, columns), rows x_stride apart
    up_ptr,  # pointer to the factor, shape (rows, columns), rows up_stride apart, or None
    dx_ptr,  # pointer to the input's gradient, written, shape (rows, columns), contiguous
    dup_ptr,  # pointer to the factor's gradient, written, shape (rows, columns), contiguous, or None
    dy_stride,
    x_stride,
    up_stride,
    rows,
    columns,
    KIND: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Compute dx = dy·up·act'(x) and dup = dy·act(x), both in one pass; the activation is recomputed."""
    row, column, mask = tile_of(rows, columns, BLOCK_ROWS, BLOCK_COLUMNS)
    x = tl.load(x_ptr + row * x_stride + column, mask, other=0.0).to(tl.float32)
    dx = tl.load(dy_ptr + row * dy_stride + column, mask, other=0.0).to(tl.float32)
    value, slope = value_and_slope(x, KIND)
    at = row * columns + column
    if up_ptr is not None:
        tl.store(dup_ptr + at, (dx * value).to(dup_ptr.dtype.element_ty), mask)
        dx *= tl.load(up_ptr + row * up_stride + column, mask, other=0.0).to(tl.float32)
    tl.store(dx_ptr + at, (dx * slope).to(dx_ptr.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["rows"])
def bias_activation_backward_kernel(
    dy_ptr,  # pointer to the result's gradient, shape (rows, columns), rows dy_stride apart
    x_ptr,  # pointer to the input, shape (rows, columns), rows x_stride apart
    bias_ptr,  # pointer to the bias, shape (columns,)
    dx_ptr,  # pointer to the input's gradient, written, shape (rows, columns), contiguous
    partial_ptr,  # pointer to shares of the bias's gradient, written, (1, programs, columns), float32, or None
    dy_stride,
    x_stride,
    rows,
    columns,
    KIND: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Compute dx = dy·act'(x + bias), and this program's share of its sum; the grid is (programs, column blocks)."""
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    bias = tl.load(bias_ptr + column, column < columns, other=0.0).to(tl.float32)
    share = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    for first in range(tl.program_id(0) * BLOCK_ROWS, rows, tl.num_programs(0) * BLOCK_ROWS):
        row = tl.cast(first, tl.int64) + tl.arange(0, BLOCK_ROWS)[:, None]
        mask = (row < rows) & (column < columns)[None, :]
        x = tl.load(x_ptr + row * x_stride + column[None, :], mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * dy_stride + column[None, :], mask, other=0.0).to(tl.float32)
        _, slope = value_and_slope(x + bias[None, :], KIND)
        dx = dy * slope
        share += dx
        tl.store(dx_ptr + row * columns + column[None, :], dx.to(dx_ptr.dtype.element_ty), mask)
    if partial_ptr is not None:
        at = tl.program_id(0).to(tl.int64) * columns + column
        tl.store(partial_ptr + at, tl.sum(share, axis=0), column < columns)
