"""The sum of the shares that the programs of a backward have left, column by column, in Triton.

The torch reference is `partial.sum(1)`, rounded to each result's dtype.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sum_columns(share_ptr, result_ptr, programs, HIDDEN, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """The sum over the programs' shares of one block of columns."""
    columns = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    total = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    for start in range(0, programs, BLOCK_ROWS):
        row = start + tl.arange(0, BLOCK_ROWS)
        mask = (row < programs)[:, None] & (columns < HIDDEN)[None, :]
        total += tl.load(share_ptr + row[:, None].to(tl.int64) * HIDDEN + columns[None, :], mask, other=0.0)
    summed = tl.sum(total, axis=0).to(result_ptr.dtype.element_ty)
    tl.store(result_ptr + columns, summed, columns < HIDDEN)


@triton.jit(do_not_specialize=["programs"])
def column_sum_kernel(
    partial_ptr,  # pointer to the shares, shape (1 or 2, programs, HIDDEN), float32
    first_ptr,  # pointer to the sum of the first, written, shape (HIDDEN,)
    second_ptr,  # pointer to the sum of the second, written, shape (HIDDEN,), or None
    programs,
    HIDDEN,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Both sums in one launch; the grid is (blocks of columns, number of sums)."""
    if second_ptr is None or tl.program_id(1) == 0:
        sum_columns(partial_ptr, first_ptr, programs, HIDDEN, BLOCK_ROWS, BLOCK_COLUMNS)
    else:
        after = tl.cast(programs, tl.int64) * HIDDEN
        sum_columns(partial_ptr + after, second_ptr, programs, HIDDEN, BLOCK_ROWS, BLOCK_COLUMNS)
