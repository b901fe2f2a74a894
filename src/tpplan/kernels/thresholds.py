"""Below which size torch's own operator is taken, when the choice is left to `auto`.

in:  a kernel, a dtype, whether gradients are recorded, a device
out: a number of elements of the first argument, from which on `auto` takes the kernel

A small tensor is done before the host has launched the next operator, so that a call costs what its launch costs, and
aten's is shorter. From which size on a kernel gains depends on the device, its host, torch and triton: `tpplan bench
kernels --tune` measures it, and `measured.py` keeps it. Until then the sizes are guesses, from a launch of about 10 µs
and 3 TB/s (`kinds.py`): what torch does by several operators saves launches at any size.
"""

from __future__ import annotations

from functools import cache
from typing import Literal, cast, get_args

from tpplan.compat.dynamo import take_as_constant
from tpplan.kernels.kinds import KINDS
from tpplan.kernels.measured import Measured, measured_on

Kernel = Literal[
    "layer_norm",
    "rms_norm",
    "rms_norm_variant",
    "gelu",
    "bias_gelu",
    "swiglu",
    "geglu",
    "residual_layer_norm",
    "residual_rms_norm",
    "cross_entropy",
]
"""The functions; `rms_norm_variant` is an RMSNorm with an offset or another cast, which torch composes of operators."""

KERNELS = cast(tuple[Kernel, ...], get_args(Kernel))
CASES = ("16-bit forward", "16-bit step", "32-bit forward", "32-bit step")
"""What is measured of each kernel: by the width of the dtype, a forward without gradients and one with its backward."""

_GUESSES = {name: elements for kind in KINDS.values() for name, elements in kind.guesses.items()}
_NEVER = 1 << 62


def minimum_elements(kernel: Kernel, wide: bool, gradients: bool, device: int | None) -> int:
    """The number of elements of the first argument from which on `auto` takes the kernel.

    Args:
        kernel: which.
        wide: whether the tensor is float32, rather than of 16 bits.
        gradients: whether a backward follows.
        device: the number of the GPU; None for the current one.
    """
    return _minimum_elements(kernel, wide, gradients, device)


take_as_constant(minimum_elements)  # it may read a file


@cache
def _minimum_elements(kernel: Kernel, wide: bool, gradients: bool, device: int | None) -> int:
    found = _found(kernel, device)
    if found is None:
        return _GUESSES[kernel]
    elements = found.elements[kernel][CASES[2 * wide + gradients]]
    return _NEVER if elements is None else elements


def origin(kernel: Kernel, device: int | None = None) -> str:
    """Where a kernel's thresholds come from: "a guess", or "measured on NVIDIA H100 80GB HBM3, 2026-11-27"."""
    found = _found(kernel, device)
    return "a guess" if found is None else f"measured on {found.setting.device}, {found.date}"


def elements_text(elements: int) -> str:
    """A threshold in words: "from 65,536 elements on", "at any size", "never"."""
    return "never" if elements >= _NEVER else f"from {elements:,} elements on" if elements else "at any size"


def forget_measured() -> None:
    """Read the file again at the next question."""
    _minimum_elements.cache_clear()
    _measured.cache_clear()


def _found(kernel: Kernel, device: int | None) -> Measured | None:
    found = _measured(device)
    return found if found is not None and kernel in found.elements else None


@cache
def _measured(device: int | None) -> Measured | None:
    return measured_on(device, KERNELS, CASES)
