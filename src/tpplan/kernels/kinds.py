"""The kinds of kernels that a plan can name, a row each: what they take the place of, what runs, with which threshold.

in:  a kind, and what a program says of one use of it
out: a call of a function of `tpplan.kernels`

    KINDS[KernelKind.RMS_NORM].launch(use, x, weight)     ->  kernels.rms_norm(x, (4096,), weight, 1e-6, cast="before")

Along what its tensors may be split over the ranks is in the operators' sharding rules (`registration.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from tpplan import kernels
from tpplan.plan import KernelKind

if TYPE_CHECKING:
    from tpplan.compiler.ir.program import KernelUse
    from tpplan.kernels.backend import Choice
    from tpplan.kernels.thresholds import Kernel


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of kernel.

    Attributes:
        replaces: what it takes the place of, in words.
        guesses: its functions, by the names of their thresholds, and from how many elements on each is guessed to pay.
        launch: the function's call, of a use and the tensors; None for the loss, of which the rows of a rank are
            computed (`runtime/classes/class_rows.py`).
        joins: whether it takes a bias or a sum from the body around, which may turn out not to be there.
        asked: whether it is taken only where a plan says `triton`.
        function: which of the functions a use takes; None if there is one.
    """

    replaces: str
    guesses: Mapping[Kernel, int]
    launch: Callable[..., Any] | None
    joins: bool = False
    asked: bool = False
    function: Callable[[KernelUse], Kernel] | None = None

    def threshold(self, use: KernelUse) -> Kernel:
        """Which threshold holds for a use."""
        return next(iter(self.guesses)) if self.function is None else self.function(use)


def _layer_norm(use: KernelUse, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    return kernels.layer_norm(x, x.shape[-use.dims :], weight, bias, use.eps, backend=_backend(use))


def _rms_norm(use: KernelUse, x: Tensor, weight: Tensor | None = None, bias: None = None) -> Tensor:
    shape, backend = x.shape[-use.dims :], _backend(use)
    return kernels.rms_norm(x, shape, weight, use.eps, offset=use.offset, cast=_cast(use), backend=backend)


def _residual_norm(
    use: KernelUse, x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    given, backend = (x, residual, x.shape[-use.dims :], weight), _backend(use)
    if use.centred:
        return kernels.residual_layer_norm(*given, bias, use.eps, backend=backend)
    return kernels.residual_rms_norm(*given, use.eps, offset=use.offset, cast=_cast(use), backend=backend)


def _gelu(use: KernelUse, x: Tensor) -> Tensor:
    return kernels.gelu(x, _approximate(use), backend=_backend(use))


def _bias_gelu(use: KernelUse, x: Tensor, bias: Tensor) -> Tensor:
    return kernels.bias_gelu(x, bias, _approximate(use), backend=_backend(use))


def _swiglu(use: KernelUse, gate: Tensor, up: Tensor) -> Tensor:
    return kernels.swiglu(gate, up, backend=_backend(use))


def _geglu(use: KernelUse, gate: Tensor, up: Tensor) -> Tensor:
    return kernels.geglu(gate, up, _approximate(use), backend=_backend(use))


def _rms_function(use: KernelUse) -> Kernel:
    return "rms_norm_variant" if use.offset != 0.0 or use.cast == "before" else "rms_norm"


def _residual_function(use: KernelUse) -> Kernel:
    return "residual_layer_norm" if use.centred else "residual_rms_norm"


def _backend(use: KernelUse) -> Choice:
    return "triton" if use.choice == "triton" else "auto"


def _cast(use: KernelUse) -> Literal["before", "after"]:
    return "before" if use.cast == "before" else "after"


def _approximate(use: KernelUse) -> Literal["none", "tanh"]:
    return "tanh" if use.approximate == "tanh" else "none"


_RESIDUAL: Mapping[Kernel, int] = {"residual_layer_norm": 0, "residual_rms_norm": 0}
KINDS: Mapping[KernelKind, Kind] = {
    KernelKind.LAYER_NORM: Kind("a LayerNorm", {"layer_norm": 1 << 20}, _layer_norm),
    KernelKind.RMS_NORM: Kind("an RMSNorm", {"rms_norm": 0, "rms_norm_variant": 0}, _rms_norm, function=_rms_function),
    KernelKind.GELU: Kind("a GeLU alone", {"gelu": 1 << 20}, _gelu),
    KernelKind.BIAS_GELU: Kind("a GeLU with the bias before it", {"bias_gelu": 0}, _bias_gelu, joins=True),
    KernelKind.SWIGLU: Kind("an MLP that is gated by SiLU", {"swiglu": 0}, _swiglu),
    KernelKind.GEGLU: Kind("an MLP that is gated by GeLU", {"geglu": 0}, _geglu),
    KernelKind.RESIDUAL_NORM: Kind(
        "a norm with the sum before it", _RESIDUAL, _residual_norm, True, True, _residual_function
    ),
    KernelKind.CROSS_ENTROPY: Kind("a cross entropy over split classes", {"cross_entropy": 0}, None),
}
"""Every kind."""

__all__ = ["KINDS", "Kind"]
