"""A residual connection and the norm that follows it, in one pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tpplan.kernels.argument_checks import autocast_dtype, check_floating, check_normalized, check_same_shape
from tpplan.kernels.backend import Choice, takes_kernel
from tpplan.kernels.norm_register import OPERATORS
from tpplan.kernels.norms import Cast, check_rms, layer_norm, rms_dtype, rms_eps, rms_norm
from tpplan.kernels.thresholds import Kernel


def residual_layer_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    backend: Choice = "auto",
) -> tuple[Tensor, Tensor]:
    """S = input + residual and y = LayerNorm(s), with one read of each; statistics are those of the rounded s.

    So y is what `layer_norm(input + residual, …)` gives. The formula and its source are there; the gradient of s that
    comes from y is added to the one that comes from s's other users without another pass.

    Args:
        input, residual: (*leading, *normalized_shape), float32, bfloat16 or float16 each.
        normalized_shape, weight, bias, eps, backend: as for `layer_norm`.

    Returns:
        y, of the dtype that `layer_norm` gives s; s, of the dtype that input and residual promote to.

    Raises:
        KernelArgumentError: shapes that don't fit, tensors that aren't floating, no such backend.
    """
    dims = check_normalized("residual_layer_norm", input, normalized_shape, weight, bias)
    check_same_shape("residual_layer_norm", ("input", input), ("residual", residual))
    check_floating("residual_layer_norm", input, residual)
    if not _takes_kernel("residual_layer_norm", input, residual, backend):
        total = input + residual
        return layer_norm(total, normalized_shape, weight, bias, eps, backend="torch"), total
    dtype = autocast_dtype("layer_norm", input, torch.promote_types(input.dtype, residual.dtype))
    return OPERATORS["residual_layer_norm"](input, residual, weight, bias, dims, eps, dtype)[:2]


def residual_rms_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    offset: float = 0.0,
    cast: Cast = "after",
    backend: Choice = "auto",
) -> tuple[Tensor, Tensor]:
    """S = input + residual and y = RMSNorm(s), with one read of each; statistics are those of the rounded s.

    So y is what `rms_norm(input + residual, …)` gives; the formula, its source and the variants are there.

    Args:
        input, residual: (*leading, *normalized_shape), float32, bfloat16 or float16 each.
        normalized_shape, weight, eps, offset, cast, backend: as for `rms_norm`.

    Returns:
        y, of the dtype that `rms_norm` gives s; s, of the dtype that input and residual promote to.

    Raises:
        KernelArgumentError: shapes that don't fit, tensors that aren't floating, no such cast or backend.
    """
    dims = check_normalized("residual_rms_norm", input, normalized_shape, weight)
    check_same_shape("residual_rms_norm", ("input", input), ("residual", residual))
    check_rms("residual_rms_norm", input, weight, cast)
    check_floating("residual_rms_norm", residual)
    if not _takes_kernel("residual_rms_norm", input, residual, backend):
        total = input + residual
        return rms_norm(total, normalized_shape, weight, eps, offset=offset, cast=cast, backend="torch"), total
    sum_dtype = torch.promote_types(input.dtype, residual.dtype)
    dtype = rms_dtype(input, sum_dtype, weight, offset, cast)
    wide_eps = rms_eps(sum_dtype, eps)
    run = OPERATORS["residual_rms_norm"]
    return run(input, residual, weight, dims, wide_eps, offset, cast == "before", dtype)[:2]


def _takes_kernel(kernel: Kernel, input: Tensor, residual: Tensor, backend: Choice) -> bool:
    return takes_kernel(kernel, input, backend) and takes_kernel(kernel, residual, backend)
