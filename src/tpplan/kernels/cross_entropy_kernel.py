"""Cross entropy over one rank's part of the vocabulary, in Triton, forward and backward.

The torch references with the formulas are in `cross_entropy_formulas`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def cross_entropy_forward_kernel(
    logits_ptr,  # pointer to the logits, shape (rows, columns), rows stride apart
    target_ptr,  # pointer to the targets, shape (rows,), int64
    highest_ptr,  # pointer to the largest logits, written, shape (rows,), float32
    logsum_ptr,  # pointer to the logarithms of the sums of exp(logit - largest), written, shape (rows,), float32
    picked_ptr,  # pointer to the targets' logits, written, shape (rows,), float32
    total_ptr,  # pointer to the sums of logits, written, shape (rows,), float32
    stride,
    columns,
    first,
    classes,
    ignore_index,
    SUM_LOGITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row a program, read once: the running maximum rescales the running sum."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row)
    highest = tl.max(tl.full([BLOCK], float("-inf"), tl.float32), axis=0)
    weight = tl.sum(tl.zeros([BLOCK], tl.float32), axis=0)
    total = tl.sum(tl.zeros([BLOCK], tl.float32), axis=0)
    picked = tl.sum(tl.zeros([BLOCK], tl.float32), axis=0)
    if target != ignore_index:
        for start in range(0, columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            z = tl.load(logits_ptr + row * stride + column, column < columns, other=float("-inf")).to(tl.float32)
            new = tl.maximum(highest, tl.max(z, axis=0))
            # While all logits are -inf, their differences aren't numbers.
            base = tl.where(new == float("-inf"), 0.0, new)
            weight = weight * tl.exp(highest - base) + tl.sum(tl.exp(z - base), axis=0)
            highest = new
            if SUM_LOGITS:
                total += tl.sum(tl.where(column < columns, z, 0.0), axis=0)
        local = target - first
        if (local >= 0) & (local < columns):
            picked = tl.load(logits_ptr + row * stride + local).to(tl.float32)
        if (target < 0) | (target >= classes):
            picked = float("nan")
        highest = tl.where(highest == float("-inf"), 0.0, highest)
        weight = tl.log(weight)
    else:
        highest = weight
    tl.store(highest_ptr + row, highest)
    tl.store(logsum_ptr + row, weight)
    tl.store(picked_ptr + row, picked)
    tl.store(total_ptr + row, total)


@triton.jit
def cross_entropy_backward_kernel(
    logits_ptr,  # pointer to the logits, shape (rows, columns), rows stride apart
    target_ptr,  # pointer to the targets, shape (rows,), int64
    highest_ptr,  # pointer to the largest logits, shape (rows,), float32
    logsum_ptr,  # pointer to the logarithms of the sums of exp(logit - largest), shape (rows,), float32
    dlogsum_ptr,  # pointer to their gradients, shape (rows,), float32
    dpicked_ptr,  # pointer to the gradients of the targets' logits, shape (rows,), float32
    dtotal_ptr,  # pointer to the gradients of the sums of logits, shape (rows,), float32
    dlogits_ptr,  # pointer to the logits' gradients, written, shape (rows, columns), contiguous
    stride,
    columns,
    first,
    ignore_index,
    SUM_LOGITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One tile of a row a program; a row that is ignored isn't read."""
    across = tl.cdiv(columns, BLOCK)
    program = tl.program_id(0).to(tl.int64)
    row = program // across
    column = program % across * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(target_ptr + row)
    inside = column < columns
    gradient = tl.zeros([BLOCK], tl.float32)
    if target != ignore_index:
        z = tl.load(logits_ptr + row * stride + column, inside, other=float("-inf")).to(tl.float32)
        share = tl.exp(z - tl.load(highest_ptr + row) - tl.load(logsum_ptr + row))
        # Where all logits of the rank are -inf, so is the logarithm, and the difference isn't a number.
        gradient = tl.where(z == float("-inf"), 0.0, share) * tl.load(dlogsum_ptr + row)
        gradient += tl.where(column == target - first, tl.load(dpicked_ptr + row), 0.0)
        if SUM_LOGITS:
            gradient += tl.load(dtotal_ptr + row)
    tl.store(dlogits_ptr + row * columns + column, gradient.to(dlogits_ptr.dtype.element_ty), inside)
