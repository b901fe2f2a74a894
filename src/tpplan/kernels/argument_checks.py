"""Checks of what users pass, before any kernel runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from tpplan.compat.schemas import is_autocast_on_cuda
from tpplan.kernels.kernel_errors import KernelArgumentError


def check_normalized(
    function: str, x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None = None
) -> int:
    """How many trailing dims are normalized over.

    Raises:
        KernelArgumentError: they aren't the trailing dims of `x`, or weight or bias have another shape.
    """
    wanted = tuple(normalized_shape)
    if not wanted or tuple(x.shape[max(0, x.dim() - len(wanted)) :]) != wanted:
        raise KernelArgumentError(
            f"{function}: normalized_shape {list(wanted)} has to be the last dims of the input, which has the shape "
            f"{list(x.shape)}"
        )
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tuple(tensor.shape) != wanted:
            raise KernelArgumentError(
                f"{function}: {name} has the shape {list(tensor.shape)}; it needs normalized_shape, {list(wanted)}"
            )
    return len(wanted)


def check_same_shape(function: str, first: tuple[str, Tensor], second: tuple[str, Tensor]) -> None:
    """Raise `KernelArgumentError` unless both tensors have one shape; nothing is broadcast."""
    if first[1].shape != second[1].shape:
        raise KernelArgumentError(
            f"{function}: {first[0]} and {second[0]} need one shape, not {list(first[1].shape)} and "
            f"{list(second[1].shape)}; expand the smaller one"
        )


def check_approximate(function: str, approximate: str) -> None:
    """Raise `KernelArgumentError` unless `approximate` is a form of GeLU."""
    if approximate not in ("none", "tanh"):
        raise KernelArgumentError(
            f"{function}: there is no approximation {approximate!r}; pass 'none' for erf, or 'tanh'"
        )


def check_floating(function: str, *tensors: Tensor | None) -> None:
    """Raise `KernelArgumentError` unless all tensors have a floating dtype."""
    for tensor in tensors:
        if tensor is not None and not tensor.is_floating_point():
            raise KernelArgumentError(f"{function}: needs floating-point tensors, not {tensor.dtype}; call .float()")


def autocast_dtype(norm: Literal["layer_norm", "rms_norm"], tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a norm's result: `dtype`, and float32 under CUDA's autocast where torch's own norm has it so."""
    widens = tensor.is_cuda and torch.is_autocast_enabled("cuda") and is_autocast_on_cuda(norm)
    return torch.float32 if widens else dtype


def check_bias(function: str, input: Tensor, bias: Tensor) -> None:
    """Raise `KernelArgumentError` unless the bias has an element for each column."""
    if not input.dim() or tuple(bias.shape) != tuple(input.shape[-1:]):
        raise KernelArgumentError(
            f"{function}: bias has the shape {list(bias.shape)}; it needs that of the input's last dim, "
            f"{list(input.shape[-1:])}"
        )
