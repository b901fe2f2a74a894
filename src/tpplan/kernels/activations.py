"""GeLU, bias + GeLU, SwiGLU and GeGLU."""

from __future__ import annotations

from typing import Literal

from torch import Tensor
from torch.nn import functional

from tpplan.kernels.activation_ops import BIAS_GELU, GATED, GELU
from tpplan.kernels.argument_checks import check_approximate, check_bias, check_floating, check_same_shape
from tpplan.kernels.backend import Choice, takes_kernel

Approximate = Literal["none", "tanh"]


def gelu(input: Tensor, approximate: Approximate = "none", *, backend: Choice = "auto") -> Tensor:
    """GeLU: x·Φ(x), or with approximate="tanh" x·(1 + tanh(√(2/π)·(x + 0.044715·x³)))/2, computed in float32.

    Source: Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016; the arguments are those of
    `torch.nn.functional.gelu`.

    Args:
        input: any shape and strides; float32, bfloat16 or float16 for the kernel, any dtype that torch takes otherwise.
        approximate: "none" for the exact form, by erf, or "tanh".
        backend: "auto", "triton" or "torch"; see `tpplan.kernels.backend.choose`.

    Returns:
        A tensor of the input's shape and dtype.

    Raises:
        KernelArgumentError: no such approximation or backend.
    """
    check_approximate("gelu", approximate)
    if not takes_kernel("gelu", input, backend):
        return functional.gelu(input, approximate=approximate)
    return GELU(input, approximate)


def bias_gelu(input: Tensor, bias: Tensor, approximate: Approximate = "none", *, backend: Choice = "auto") -> Tensor:
    """gelu(x + b), for a linear whose product comes without its bias; the bias's gradient is summed in the same pass.

    The formula and its source are those of `gelu`. The sum of x and b isn't rounded.

    Args:
        input: (*leading, columns), any strides; float32, bfloat16 or float16 for the kernel.
        bias: (columns), of any of these dtypes, not necessarily the input's.
        approximate: "none" for the exact form, by erf, or "tanh".
        backend: "auto", "triton" or "torch"; see `tpplan.kernels.backend.choose`.

    Returns:
        A tensor of the input's shape and dtype.

    Raises:
        KernelArgumentError: a bias of another shape, tensors that aren't floating, no such approximation or backend.
    """
    check_approximate("bias_gelu", approximate)
    check_floating("bias_gelu", input, bias)
    check_bias("bias_gelu", input, bias)
    if not takes_kernel("bias_gelu", input, backend):
        return functional.gelu(input + bias, approximate=approximate).to(input.dtype)
    return BIAS_GELU(input, bias, approximate)


def swiglu(gate: Tensor, up: Tensor, *, backend: Choice = "auto") -> Tensor:
    """SwiGLU: silu(gate)·up with silu(x) = x/(1 + e^-x), in float32 and rounded once.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020. Both gradients come from one pass.

    Args:
        gate, up: one shape, any strides (halves of one projection are fine); float32, bfloat16 or float16 for the
            kernel, each its own.
        backend: "auto", "triton" or "torch"; see `tpplan.kernels.backend.choose`.

    Returns:
        A tensor of that shape, of the dtype that both promote to.

    Raises:
        KernelArgumentError: two shapes, tensors that aren't floating, no such backend.
    """
    _check_gated("swiglu", gate, up)
    if not (takes_kernel("swiglu", gate, backend) and takes_kernel("swiglu", up, backend)):
        return functional.silu(gate) * up
    return GATED(gate, up, "silu")


def geglu(gate: Tensor, up: Tensor, approximate: Approximate = "none", *, backend: Choice = "auto") -> Tensor:
    """GeGLU: gelu(gate)·up, in float32 and rounded once.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020; the forms of GeLU are those of `gelu`. Both gradients
    come from one pass.

    Args:
        gate, up: one shape, any strides; float32, bfloat16 or float16 for the kernel, each its own.
        approximate: "none" for the exact form, by erf, or "tanh".
        backend: "auto", "triton" or "torch"; see `tpplan.kernels.backend.choose`.

    Returns:
        A tensor of that shape, of the dtype that both promote to.

    Raises:
        KernelArgumentError: two shapes, tensors that aren't floating, no such approximation or backend.
    """
    check_approximate("geglu", approximate)
    _check_gated("geglu", gate, up)
    if not (takes_kernel("geglu", gate, backend) and takes_kernel("geglu", up, backend)):
        return functional.gelu(gate, approximate=approximate) * up
    return GATED(gate, up, approximate)


def _check_gated(function: str, gate: Tensor, up: Tensor) -> None:
    check_floating(function, gate, up)
    check_same_shape(function, ("gate", gate), ("up", up))
