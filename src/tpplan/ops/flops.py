"""FLOPs: how many multiplications and additions an operator makes, by the shapes of a call.

in:  a product by name, the shapes of its tensors and of its result
out: its sizes (batch, rows, columns, summed); it makes 2 · batch · rows · columns · summed of them

    mm          (m, k) · (k, n)               ->   1, m, n, k
    bmm         (b, m, k) · (b, k, n)         ->   b, m, n, k
    convolution (b, c, h, w) * (o, c, p, q)   ->   1, b · h' · w', o, c · p · q

Operators that aren't products are bound by memory, and count as none, as in `torch.utils.flop_counter`, whose table is
the cross-check.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tpplan.ops.registry import UNSET, has_role

Shape = Sequence[int]
ProductSizes = tuple[int, int, int, int]


def product_sizes(name: str, operands: Sequence[Shape], result: Shape, wanted: int = 1) -> tuple[ProductSizes, ...]:
    """The sizes of the products of a call; none for an operator that is none.

    Args:
        name: the operator's full name.
        operands: the shapes of its tensors, in order.
        result: the shape of its first result.
        wanted: of a convolution's backward, how many of the two gradients are.
    """
    if has_role(name, "product", "vector product"):
        left, right = operands[:2] if has_role(name, "scaled product") else operands[-2:]
        columns = right[-1] if len(right) > 1 else 1
        rows = left[-2] if len(left) > 1 else 1
        return ((left[0] if len(left) > 2 else 1, rows, columns, left[-1]),)
    if has_role(name, "grouped product"):
        return (_grouped(operands[0], operands[1]),)
    if has_role(name, "convolution"):
        return (_convolved(operands[1], result),)
    if has_role(name, "gradients of convolution"):
        return (_convolved(operands[2], operands[0]),) * wanted
    return ()


def runs_no_kernel(name: str) -> bool:
    """Whether an operator only reserves memory."""
    return name.replace(".", "::", 1).startswith(UNSET) or has_role(name, "empty like")


def flops_of(sizes: ProductSizes) -> int:
    """How many multiplications and additions a product of such sizes makes."""
    return 2 * math.prod(sizes)


def attention_flops(query: Shape, key: Shape, value: Shape, causal: bool, backward: bool = False) -> int:
    """Of an attention in one kernel: two products forward, and five backward, one of which makes the scores again.

    Of a causal one half of the scores are made. (Dao, "FlashAttention-2", 2023, section 4.1.)
    """
    scores = math.prod(query[:-1]) * key[-2] // (2 if causal else 1)
    return 2 * scores * ((3 * query[-1] + 2 * value[-1]) if backward else (query[-1] + value[-1]))


def _grouped(left: Shape, right: Shape) -> ProductSizes:
    """Each row takes part in the product of one group."""
    if len(left) == 2 and len(right) == 2:  # the rows of either are summed, group by group
        return 1, left[0], right[1], left[1]
    if len(left) == 3 and len(right) == 3:
        return left[0], left[1], right[2], left[2]
    return 1, left[-2] * (left[0] if len(left) == 3 else 1), right[-1], left[-1]


def _convolved(weight: Shape, result: Shape) -> ProductSizes:
    return 1, math.prod(result) // result[1], weight[0], math.prod(weight[1:])


__all__ = ["ProductSizes", "attention_flops", "flops_of", "product_sizes", "runs_no_kernel"]
