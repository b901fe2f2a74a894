"""Which implementation a call takes, and why: the kernel or torch's own operators."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tpplan.kernels.kernel_errors import KernelArgumentError
from tpplan.kernels.thresholds import KERNELS, Kernel, elements_text, minimum_elements, origin

Choice = Literal["auto", "triton", "torch"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that the kernels take. They compute in float32, so that float64 is left to torch."""

TRITON_INSTALLED = importlib.util.find_spec("triton") is not None
# Triton reads the variable when it is first imported, and never again.
INTERPRETED = TRITON_INSTALLED and os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")
"""Whether the kernels run in Triton's interpreter, on CPU tensors."""


@dataclass(frozen=True, slots=True)
class Backend:
    """What a call takes.

    Attributes:
        name: "triton" for the kernel, "torch" for torch's own operators.
        reason: why, as the end of a sentence: "no GPU", "triton isn't installed".
    """

    name: Literal["triton", "torch"]
    reason: str


def available(device: torch.device | str) -> Backend:
    """What tensors on `device` can have, and why; says nothing of whether it is worthwhile, as `choose` does."""
    kind = torch.device(device).type
    if not TRITON_INSTALLED:
        return Backend("torch", "triton isn't installed")
    if INTERPRETED:
        return Backend("triton", "interpreted, since TRITON_INTERPRET is set")
    if kind == "cuda":
        return Backend("triton", "a GPU and triton are there")
    if kind == "cpu" and not torch.cuda.is_available():
        return Backend("torch", "no GPU")
    return Backend("torch", f"the tensors are on {kind!r}, and the kernels run on a GPU")


def choose(
    kernel: Kernel,
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
    elements: int | None = None,
    backend: Choice = "auto",
    gradients: bool | None = None,
) -> Backend:
    """The implementation that a call of `kernel` takes, and why.

    Args:
        kernel: the function's name; "rms_norm_variant" for `rms_norm` with an offset or cast="before".
        device, dtype: of the first tensor.
        elements: how many it has; None leaves the size out of it.
        backend: what the caller asked for. "triton" falls back on torch where there is no kernel for the tensors.
        gradients: whether a backward follows; None for what torch does now.

    Raises:
        KernelArgumentError: no such kernel, or no such backend.
    """
    if kernel not in KERNELS:
        raise KernelArgumentError(f"there is no kernel {kernel!r}; choose from {', '.join(KERNELS)}")
    check_choice(backend)
    if backend == "torch":
        return Backend("torch", "asked for")
    there = available(device)
    if there.name == "torch":
        return there
    if dtype not in DTYPES:
        return Backend("torch", f"the kernels don't take {dtype}")
    if backend == "auto" and not INTERPRETED and elements is not None:
        index = torch.device(device).index
        wanted = torch.is_grad_enabled() if gradients is None else gradients
        least = minimum_elements(kernel, dtype == torch.float32, wanted, index)
        if elements < least:
            pays = f"it pays {elements_text(least)} ({origin(kernel, index)})"
            return Backend("torch", f"of {elements:,} elements; {pays}")
    return there


def check_choice(backend: str) -> None:
    """Raise `KernelArgumentError` unless `backend` is one."""
    if backend not in ("auto", "triton", "torch"):
        raise KernelArgumentError(f"there is no backend {backend!r}; choose from auto, triton, torch")


def takes_kernel(kernel: Kernel, tensor: Tensor, backend: Choice, elements: int | None = None) -> bool:
    """As `choose`, for a tensor at hand, quickly, and so that torch.compile can follow it."""
    if backend != "auto":
        check_choice(backend)
    if backend == "torch" or not runs_kernels(tensor) or tensor.dtype not in DTYPES:
        return False
    if backend == "triton" or INTERPRETED:
        return True
    wide, gradients = tensor.dtype == torch.float32, torch.is_grad_enabled()
    count = tensor.numel() if elements is None else elements
    return count >= minimum_elements(kernel, wide, gradients, tensor.device.index)


def runs_kernels(tensor: Tensor) -> bool:
    """Whether the tensor lies where Triton can reach it."""
    return TRITON_INSTALLED and (tensor.is_cuda or (INTERPRETED and tensor.device.type == "cpu"))
