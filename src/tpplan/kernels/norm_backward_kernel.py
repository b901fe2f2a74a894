# pyright: reportUnnecessaryComparison=false
"""The backward of LayerNorm and RMSNorm, with or without a residual, in Triton.

The torch reference with the formulas is `norm_formulas.backward`. Each of a fixed number of programs takes every n-th
tile of rows and keeps its share of the gradients of weight and bias in registers; `column_sum_kernel` adds the shares
up. No atomics: the order of all sums depends on the shape and the device alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tpplan.kernels.norm_forward_kernel import load_weight, normalized


@triton.jit
def load_gradients(dy_ptr, x_ptr, weight_ptr, dy_at, x_at, columns, mask, offset, HIDDEN: tl.constexpr):
    """The result's gradient, that gradient times the weight, and the input, all in float32."""
    dy = tl.load(dy_ptr + dy_at, mask, other=0.0).to(tl.float32)
    scaled = dy
    if weight_ptr is not None:
        scaled = dy * load_weight(weight_ptr, columns, columns < HIDDEN, offset)
    return dy, scaled, tl.load(x_ptr + x_at, mask, other=0.0).to(tl.float32)


@triton.jit
def store_input_gradient(dx, dx_ptr, dsum_ptr, at, dsum_at, mask):
    """The input's gradient, with what arrives for the residual added."""
    if dsum_ptr is not None:
        dx += tl.load(dsum_ptr + dsum_at, mask, other=0.0).to(tl.float32)
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask)


@triton.jit
def weight_share(dy, normal, ROUND_DTYPE: tl.constexpr):
    """What a tile adds to the weight's gradient: dy·x̂, with x̂ as the weight met it."""
    if ROUND_DTYPE is not None:
        normal = normal.to(ROUND_DTYPE).to(tl.float32)
    return dy * normal


@triton.jit
def store_shares(
    dweight,
    dbias,
    partial_ptr,  # pointer to the shares, shape (SUMS, programs, HIDDEN), float32
    columns,
    HIDDEN: tl.constexpr,
    SUMS: tl.constexpr,
):
    """This program's share of the gradients of weight and bias."""
    at = tl.program_id(0).to(tl.int64) * HIDDEN + columns
    if SUMS >= 1:
        tl.store(partial_ptr + at, tl.sum(dweight, axis=0), columns < HIDDEN)
    if SUMS == 2:
        after = tl.num_programs(0).to(tl.int64) * HIDDEN
        tl.store(partial_ptr + after + at, tl.sum(dbias, axis=0), columns < HIDDEN)


@triton.jit(do_not_specialize=["rows"])
def norm_backward_kernel(
    dy_ptr,  # pointer to the result's gradient, shape (rows, HIDDEN), rows dy_stride apart
    dsum_ptr,  # pointer to the new residual's gradient, shape (rows, HIDDEN), rows dsum_stride apart, or None
    x_ptr,  # pointer to what was normalized, shape (rows, HIDDEN), rows x_stride apart
    weight_ptr,  # pointer to the weight, shape (HIDDEN,), or None
    mean_ptr,  # pointer to the means, shape (rows,), float32; None unless CENTRED
    rstd_ptr,  # pointer to the reciprocal deviations, shape (rows,), float32
    dx_ptr,  # pointer to the input's gradient, written, shape (rows, HIDDEN), contiguous
    partial_ptr,  # pointer to the shares of weight and bias, written, shape (SUMS, programs, HIDDEN), float32
    dots_ptr,  # None: rows fit into registers
    dy_stride,
    dsum_stride,
    x_stride,
    rows,
    offset,
    HIDDEN: tl.constexpr,
    CENTRED: tl.constexpr,
    ROUND_DTYPE: tl.constexpr,
    SUMS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Rows that fit into registers: each is read once."""
    columns = tl.arange(0, BLOCK_COLUMNS)
    dweight = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    dbias = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    for first in range(tl.program_id(0) * BLOCK_ROWS, rows, tl.num_programs(0) * BLOCK_ROWS):
        row = tl.cast(first, tl.int64) + tl.arange(0, BLOCK_ROWS)
        mask = (row < rows)[:, None] & (columns < HIDDEN)[None, :]
        dy_at = row[:, None] * dy_stride + columns[None, :]
        x_at = row[:, None] * x_stride + columns[None, :]
        dy, scaled, x = load_gradients(dy_ptr, x_ptr, weight_ptr, dy_at, x_at, columns, mask, offset, HIDDEN)
        rstd = tl.load(rstd_ptr + row, row < rows, other=0.0)
        mean = rstd
        if CENTRED:
            mean = tl.load(mean_ptr + row, row < rows, other=0.0)
        normal = normalized(x, mean, rstd, mask, CENTRED)
        dx = scaled - normal * (tl.sum(scaled * normal, axis=1) / HIDDEN)[:, None]
        if CENTRED:
            dx -= (tl.sum(scaled, axis=1) / HIDDEN)[:, None]
        at = row[:, None] * HIDDEN + columns[None, :]
        dsum_at = row[:, None] * dsum_stride + columns[None, :]
        store_input_gradient(dx * rstd[:, None], dx_ptr, dsum_ptr, at, dsum_at, mask)
        if SUMS >= 1:
            dweight += weight_share(dy, normal, ROUND_DTYPE)
        if SUMS == 2:
            dbias += dy
    store_shares(dweight, dbias, partial_ptr, columns, HIDDEN, SUMS)


@triton.jit
def row_dots(
    dy_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    row,
    dy_stride,
    x_stride,
    rows,
    offset,
    HIDDEN: tl.constexpr,
    CENTRED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """The means over each row of dy·w·x̂ and of dy·w, for rows wider than the registers."""
    along_normal = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    along_one = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    rstd = tl.load(rstd_ptr + row, row < rows, other=0.0)
    mean = rstd
    if CENTRED:
        mean = tl.load(mean_ptr + row, row < rows, other=0.0)
    for start in range(0, HIDDEN, BLOCK_COLUMNS):
        columns = start + tl.arange(0, BLOCK_COLUMNS)
        mask = (row < rows)[:, None] & (columns < HIDDEN)[None, :]
        dy_at = row[:, None] * dy_stride + columns[None, :]
        x_at = row[:, None] * x_stride + columns[None, :]
        _, scaled, x = load_gradients(dy_ptr, x_ptr, weight_ptr, dy_at, x_at, columns, mask, offset, HIDDEN)
        along_normal += scaled * normalized(x, mean, rstd, mask, CENTRED)
        along_one += scaled
    return tl.sum(along_normal, axis=1) / HIDDEN, tl.sum(along_one, axis=1) / HIDDEN


@triton.jit(do_not_specialize=["rows"])
def norm_backward_looped_kernel(
    dy_ptr,  # pointer to the result's gradient, shape (rows, HIDDEN), rows dy_stride apart
    dsum_ptr,  # pointer to the new residual's gradient, shape (rows, HIDDEN), rows dsum_stride apart, or None
    x_ptr,  # pointer to what was normalized, shape (rows, HIDDEN), rows x_stride apart
    weight_ptr,  # pointer to the weight, shape (HIDDEN,), or None
    mean_ptr,  # pointer to the means, shape (rows,), float32; None unless CENTRED
    rstd_ptr,  # pointer to the reciprocal deviations, shape (rows,), float32
    dx_ptr,  # pointer to the input's gradient, written, shape (rows, HIDDEN), contiguous
    partial_ptr,  # pointer to the shares of weight and bias, written, shape (SUMS, programs, HIDDEN), float32
    dots_ptr,  # pointer to scratch for the means over rows, shape (2, rows), float32
    dy_stride,
    dsum_stride,
    x_stride,
    rows,
    offset,
    HIDDEN: tl.constexpr,
    CENTRED: tl.constexpr,
    ROUND_DTYPE: tl.constexpr,
    SUMS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Rows wider than the registers: first the means over each row, then all rows a tile of columns at a time."""
    row_step = tl.num_programs(0) * BLOCK_ROWS
    second = tl.cast(rows, tl.int64)
    for first in range(tl.program_id(0) * BLOCK_ROWS, rows, row_step):
        row = tl.cast(first, tl.int64) + tl.arange(0, BLOCK_ROWS)
        along_normal, along_one = row_dots(
            dy_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, row, dy_stride, x_stride, rows, offset,
            HIDDEN, CENTRED, BLOCK_ROWS, BLOCK_COLUMNS,
        )  # fmt: skip
        tl.store(dots_ptr + row, along_normal, row < rows)
        tl.store(dots_ptr + second + row, along_one, row < rows)
    tl.debug_barrier()  # the scratch is read by other threads of this program than wrote it

    for start in range(0, HIDDEN, BLOCK_COLUMNS):
        columns = start + tl.arange(0, BLOCK_COLUMNS)
        dweight = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
        dbias = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
        for first in range(tl.program_id(0) * BLOCK_ROWS, rows, row_step):
            row = tl.cast(first, tl.int64) + tl.arange(0, BLOCK_ROWS)
            mask = (row < rows)[:, None] & (columns < HIDDEN)[None, :]
            dy_at = row[:, None] * dy_stride + columns[None, :]
            x_at = row[:, None] * x_stride + columns[None, :]
            dy, scaled, x = load_gradients(dy_ptr, x_ptr, weight_ptr, dy_at, x_at, columns, mask, offset, HIDDEN)
            rstd = tl.load(rstd_ptr + row, row < rows, other=0.0)
            mean = rstd
            if CENTRED:
                mean = tl.load(mean_ptr + row, row < rows, other=0.0)
            normal = normalized(x, mean, rstd, mask, CENTRED)
            dx = scaled - normal * tl.load(dots_ptr + row, row < rows, other=0.0)[:, None]
            if CENTRED:
                dx -= tl.load(dots_ptr + second + row, row < rows, other=0.0)[:, None]
            at = row[:, None] * HIDDEN + columns[None, :]
            dsum_at = row[:, None] * dsum_stride + columns[None, :]
            store_input_gradient(dx * rstd[:, None], dx_ptr, dsum_ptr, at, dsum_at, mask)
            if SUMS >= 1:
                dweight += weight_share(dy, normal, ROUND_DTYPE)
            if SUMS == 2:
                dbias += dy
        store_shares(dweight, dbias, partial_ptr, columns, HIDDEN, SUMS)
