"""LayerNorm and RMSNorm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from tpplan.kernels.argument_checks import autocast_dtype, check_floating, check_normalized
from tpplan.kernels.backend import Choice, takes_kernel
from tpplan.kernels.kernel_errors import KernelArgumentError
from tpplan.kernels.norm_register import OPERATORS

Cast = Literal["before", "after"]


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    backend: Choice = "auto",
) -> Tensor:
    """LayerNorm: y = (x - μ)·(σ² + eps)^-½·w + b, with mean and variance over the last dims, computed in float32.

    Source: Ba, Kiros and Hinton, "Layer Normalization", 2016; the arguments are those of
    `torch.nn.functional.layer_norm`.

    Args:
        input: (*leading, *normalized_shape); float32, bfloat16 or float16 for the kernel, any dtype that torch takes
            otherwise. May be non-contiguous, and a DTensor.
        normalized_shape: the trailing dims to normalize over.
        weight, bias: normalized_shape; any of these dtypes, not necessarily the input's. None stands for 1 and 0.
        eps: added to the variance.
        backend: "auto", "triton" or "torch"; see `tpplan.kernels.backend.choose`.

    Returns:
        A tensor of the input's shape and dtype; float32 under CUDA's autocast, as torch has it.

    Raises:
        KernelArgumentError: shapes that don't fit, no such backend.
    """
    dims = check_normalized("layer_norm", input, normalized_shape, weight, bias)
    if not takes_kernel("layer_norm", input, backend):
        return functional.layer_norm(input, list(normalized_shape), weight, bias, eps)
    return OPERATORS["layer_norm"](input, weight, bias, dims, eps, autocast_dtype("layer_norm", input, input.dtype))[0]


def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    offset: float = 0.0,
    cast: Cast = "after",
    backend: Choice = "auto",
) -> Tensor:
    """RMSNorm: y = x·(mean(x²) + eps)^-½·(offset + w), with the mean over the last dims, computed in float32.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019. The arguments are those of
    `torch.nn.functional.rms_norm`, which is the default variant. The variants of transformers' models:

    | model | offset | cast | result |
    |---|---|---|---|
    | `torch.nn.RMSNorm` | 0 | after | (x̂·w).to(x.dtype) |
    | Gemma | 1 | after | (x̂·(1 + w)).to(x.dtype) |
    | Llama, Mistral, Qwen, T5 | 0 | before | w·x̂.to(x.dtype) |

    Args:
        input: (*leading, *normalized_shape); float32, bfloat16 or float16 for the kernel, any floating dtype otherwise.
            May be non-contiguous, and a DTensor.
        normalized_shape: the trailing dims to normalize over.
        weight: normalized_shape, of any of these dtypes; None stands for no factor at all.
        eps: added to the mean square; None takes the machine epsilon of the input's dtype.
        offset: added to the weight.
        cast: whether x̂ is rounded to the input's dtype "before" it meets the weight, or the product "after".
        backend: "auto", "triton" or "torch"; see `tpplan.kernels.backend.choose`.

    Returns:
        A tensor of the input's shape. Its dtype is the input's; with cast="before", what input and weight promote to;
        with the arguments that torch has alone, float32 under CUDA's autocast, as torch has it.

    Raises:
        KernelArgumentError: shapes that don't fit, tensors that aren't floating, no such cast or backend.
    """
    dims = check_normalized("rms_norm", input, normalized_shape, weight)
    check_rms("rms_norm", input, weight, cast)
    plain = offset == 0.0 and cast == "after"
    if not takes_kernel("rms_norm" if plain else "rms_norm_variant", input, backend):
        if plain:
            return functional.rms_norm(input, list(normalized_shape), weight, eps)
        return rms_norm_reference(input, normalized_shape, weight, eps, offset=offset, cast=cast)
    dtype = rms_dtype(input, input.dtype, weight, offset, cast)
    return OPERATORS["rms_norm"](input, weight, dims, rms_eps(input.dtype, eps), offset, cast == "before", dtype)[0]


def rms_norm_reference(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    offset: float = 0.0,
    cast: Cast = "after",
) -> Tensor:
    """`rms_norm` in torch's operators, with torch's autograd; float64 stays float64."""
    wide = input if input.dtype == torch.float64 else input.float()
    over = tuple(range(-len(normalized_shape), 0))
    normal = wide * torch.rsqrt(wide.square().mean(over, keepdim=True) + rms_eps(input.dtype, eps))
    if cast == "before":
        normal = normal.to(input.dtype)
        return normal if weight is None else normal * (weight + offset if offset else weight)
    return (normal if weight is None else normal * (weight.to(wide.dtype) + offset)).to(input.dtype)


def rms_eps(dtype: torch.dtype, eps: float | None) -> float:
    """What is added to the mean square of a tensor of `dtype`."""
    return torch.finfo(dtype).eps if eps is None else eps


def rms_dtype(input: Tensor, dtype: torch.dtype, weight: Tensor | None, offset: float, cast: Cast) -> torch.dtype:
    """The dtype of the result, if what is normalized has `dtype`; `input` says where it lies."""
    if cast == "before":
        return dtype if weight is None else torch.promote_types(dtype, weight.dtype)
    return autocast_dtype("rms_norm", input, dtype) if offset == 0.0 else dtype


def check_rms(function: str, input: Tensor, weight: Tensor | None, cast: str) -> None:
    """Raise `KernelArgumentError` for a cast that doesn't exist or a tensor that isn't floating."""
    check_floating(function, input, weight)
    if cast not in ("before", "after"):
        raise KernelArgumentError(f"{function}: there is no cast {cast!r}; pass 'before' or 'after' the weight")
