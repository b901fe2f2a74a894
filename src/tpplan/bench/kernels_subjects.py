"""What the benchmark of kernels compares: each kernel, torch eager, torch.compile and Liger, on the same tensors."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tpplan import kernels
from tpplan.kernels.thresholds import Kernel

OURS, EAGER, COMPILED, LIGER = "tpplan", "torch eager", "torch.compile", "liger"


@dataclass(frozen=True, slots=True)
class KernelSubject:
    """A kernel and what it is held against.

    Attributes:
        ours, eager: the same function in both implementations.
        liger: the name of Liger's function, if it has one, and what comes after the tensors in a call of it.
        forward, backward: how many tensors of the input's size are read and written at least.
        matrices, vectors: how many tensors (rows, columns) and how many (columns,) it takes, in this order.
        loss: whether it takes targets and gives a scalar.
    """

    ours: Callable[..., Any]
    eager: Callable[..., Any]
    liger: tuple[str, tuple[Any, ...]] | None
    forward: int
    backward: int
    matrices: int = 1
    vectors: int = 0
    loss: bool = False


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], weight, bias)


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], weight, 1e-6)


def _rms_norm_variant(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def _residual_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return _layer_norm(total, weight, bias), total


def _residual_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return _rms_norm(total, weight), total


def _bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return functional.gelu(x + bias, approximate="tanh")


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate) * up


def _geglu(gate: Tensor, up: Tensor) -> Tensor:
    return functional.gelu(gate, approximate="tanh") * up


def _normalized(function: Callable[..., Any], matrices: int, *settings: Any) -> Callable[..., Any]:
    """The kernel of a norm over the last dim, called with tensors alone."""

    def call(*tensors: Tensor) -> Any:
        return function(*tensors[:matrices], tensors[0].shape[-1:], *tensors[matrices:], *settings, backend="triton")

    return call


_TANH = {"approximate": "tanh", "backend": "triton"}
SUBJECTS: dict[Kernel, KernelSubject] = {
    "layer_norm": KernelSubject(
        _normalized(kernels.layer_norm, 1), _layer_norm, ("liger_layer_norm", (1e-5,)), 2, 3, vectors=2
    ),
    "rms_norm": KernelSubject(
        _normalized(kernels.rms_norm, 1, 1e-6), _rms_norm, ("liger_rms_norm", (1e-6, 0.0, "gemma", False)), 2, 3, 1, 1
    ),
    "rms_norm_variant": KernelSubject(
        _normalized(partial(kernels.rms_norm, cast="before"), 1, 1e-6),
        _rms_norm_variant,
        ("liger_rms_norm", (1e-6, 0.0, "llama", False)),
        2,
        3,
        vectors=1,
    ),
    "residual_layer_norm": KernelSubject(
        _normalized(kernels.residual_layer_norm, 2), _residual_layer_norm, None, 4, 4, matrices=2, vectors=2
    ),
    "residual_rms_norm": KernelSubject(
        _normalized(kernels.residual_rms_norm, 2, 1e-6),
        _residual_rms_norm,
        ("liger_fused_add_rms_norm", (1e-6, 0.0, "gemma", False)),
        4,
        4,
        matrices=2,
        vectors=1,
    ),
    "gelu": KernelSubject(partial(kernels.gelu, **_TANH), partial(functional.gelu, approximate="tanh"), None, 2, 3),
    "bias_gelu": KernelSubject(partial(kernels.bias_gelu, **_TANH), _bias_gelu, None, 2, 3, vectors=1),
    "swiglu": KernelSubject(partial(kernels.swiglu, backend="triton"), _swiglu, ("liger_swiglu", ()), 3, 5, matrices=2),
    "geglu": KernelSubject(partial(kernels.geglu, **_TANH), _geglu, ("liger_geglu", ()), 3, 5, matrices=2),
    "cross_entropy": KernelSubject(
        partial(kernels.cross_entropy, backend="triton"),
        functional.cross_entropy,
        ("liger_cross_entropy", ()),
        1,
        2,
        loss=True,
    ),
}
"""Every kernel of `tpplan.kernels`."""


def forms(subject: KernelSubject, backend: str) -> dict[str, Callable[..., Any]]:
    """The implementations to time, by name; Liger's where it is installed and has the function.

    Args:
        subject: the kernel.
        backend: of torch.compile.
    """
    torch.compiler.reset()  # which gives up on a function that it has compiled for eight sizes
    found: dict[str, Callable[..., Any]] = {OURS: subject.ours, EAGER: subject.eager}
    found[COMPILED] = torch.compile(subject.eager, backend=backend, fullgraph=True)
    library = liger()
    if library is not None and subject.liger is not None:
        name, settings = subject.liger
        function = getattr(library, name, None)
        if function is not None:
            found[LIGER] = lambda *tensors: function(*tensors, *settings)
    return found


def liger() -> Any:
    """Liger's functions, or None where they can't be imported."""
    try:
        return importlib.import_module("liger_kernel.transformers.functional")
    except ImportError:
        return None


def tensors_of(subject: KernelSubject, rows: int, columns: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Random inputs that want gradients, and targets if it is a loss."""
    inputs = [torch.randn(rows, columns, device=device, dtype=dtype) for _ in range(subject.matrices)]
    inputs += [torch.randn(columns, device=device, dtype=dtype) for _ in range(subject.vectors)]
    for tensor in inputs:
        tensor.requires_grad_()
    return [*inputs, torch.randint(0, columns, (rows,), device=device)] if subject.loss else inputs
