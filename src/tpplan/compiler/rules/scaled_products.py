"""Scaled products: matrices of float8 with scales, which ranks multiply as `mm` does.

`torch._scaled_mm`, and `torch.nn.functional.scaled_mm` (`_scaled_mm_v2`), with lists of scales.

in:  the operands of one, and how they lie
out: why each rank's product isn't a part or a term of the whole one, though the matrices' would be; "" if it is

    a: S(0), a scale for each row: S(0)             ->   ""
    a: S(1), b: S(0), a scale for each row: R       ->   ""
    a: S(1), b: S(0), a bias: P                     ->   ""
    a: S(1), b: S(0), a bias: R                     ->   each rank would add it

DTensor's own rule wants scales of rows to be cut along the dim that is summed, and refuses a bias.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tpplan.compat.propagator import OperatorMeta
from tpplan.compat.schemas import OpOverload, schema_defaults
from tpplan.compiler.ir.layout import PARTIAL, REPLICATED, Layout, layout_of, sharded

BIAS = 4
"""Its first place among the arguments; before it, of `_scaled_mm_v2`, are lists that say how matrices are scaled."""
_ELSEWHERE = "needs values that other ranks hold"


def misfit(target: OpOverload, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> str:
    """Why a scaled product of parts isn't what the product of the same matrices without scales is.

    Args:
        target: the operator.
        arguments, keywords: of its call; tensors are `OperatorMeta`.
    """
    names = [name for name, _ in schema_defaults(target)]
    given = dict(zip(names, arguments, strict=False)) | dict(keywords)
    one, other, bias = given["self"], given["mat2"], given.get("bias")
    if given.get("contraction_dim") or any((*given.get("swizzle_a", ()), *given.get("swizzle_b", ()))):
        return "has scales in an order of their own, or says which dims it sums, for which there is no rule"
    reason = _of_scales(one, given["scale_a"]) or _of_scales(other, given["scale_b"])
    split = _lies(other).dim
    if split == 0 and (given.get("out_dtype") or one.dtype).itemsize == 1:
        return reason or "rounds each rank's term of a sum to one byte: ask for a wider `out_dtype`"
    if bias is not None and _lies(bias) != {None: REPLICATED, 0: PARTIAL, 1: sharded(0)}[split]:
        return reason or ("adds its bias to each rank's term of a sum" if split == 0 else _ELSEWHERE)
    return reason


def _of_scales(factor: OperatorMeta, scales: OperatorMeta | Sequence[OperatorMeta]) -> str:
    """Why scales aren't those of a rank's part of a matrix: one for all, or one for each row or column."""
    if not isinstance(scales, OperatorMeta):
        return next((reason for held in scales if (reason := _of_scales(factor, held))), "")
    expected, dim = REPLICATED, _lies(factor).dim
    if dim is not None and math.prod(scales.shape) != 1:
        if len(scales.shape) != 2 or scales.shape[dim] not in (1, factor.shape[dim]):
            return "has scales of blocks, which may reach over several ranks"
        expected = _lies(factor) if scales.shape[dim] != 1 else REPLICATED
    return "" if _lies(scales) == expected and _lies(factor) != PARTIAL else _ELSEWHERE


def _lies(operand: OperatorMeta) -> Layout:
    held = layout_of(operand.placement)
    assert held is not None
    return held


__all__ = ["misfit"]
