"""Below which size torch's own operator is taken, when the choice is left to `auto`.

A small tensor is done before the host has launched the next operator, so that a call costs what its launch costs, and
aten's is shorter. NOT YET MEASURED ON A GPU: these are estimates, from a launch of about 10 µs and 3 TB/s. What the
kernels take is measured (docs/kernels.md), but not from which size on a model gains.
"""

from __future__ import annotations

from typing import Literal

Kernel = Literal[
    "layer_norm",
    "rms_norm",
    "gelu",
    "bias_gelu",
    "swiglu",
    "geglu",
    "residual_layer_norm",
    "residual_rms_norm",
    "cross_entropy",
]

MEASURED = False
"""Whether the sizes below come from measurements."""

MINIMUM_ELEMENTS: dict[Kernel, int] = {
    "layer_norm": 1 << 20,
    # aten composes them of several operators, so that the kernel saves launches at any size.
    "rms_norm": 0,
    "bias_gelu": 0,
    "swiglu": 0,
    "geglu": 0,
    "residual_layer_norm": 0,
    "residual_rms_norm": 0,
    "cross_entropy": 0,
    "gelu": 1 << 20,
}
"""The number of elements of the first argument from which on `auto` takes the kernel."""
