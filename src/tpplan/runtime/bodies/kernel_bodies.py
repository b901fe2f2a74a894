"""Kernels in the model: forwards that take the place of bodies, as the program says.

in:  a `KernelUse` and the modules
out: a function with the body's arguments and result

Each takes the model's own forward for what the proof doesn't speak of: another dtype than the example's, and calls
with more arguments.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from tpplan import kernels
from tpplan.compiler.ir.program import KernelUse, Program, dtype_name
from tpplan.kernels.backend import Choice
from tpplan.kernels.kinds import KINDS
from tpplan.plan import KernelKind

Stock = Callable[..., Any]
Body = Callable[[Stock, tuple[Any, ...], dict[str, Any]], Any]


def active_uses(program: Program, device: torch.device) -> dict[str, KernelUse]:
    """The uses that are carried out on `device`, by module; warns where the plan asks for a kernel in vain."""
    there = kernels.available(device)
    wanted = [use for use in program.kernels if not use.refused]
    if there.name == "triton":
        return {use.module: use for use in wanted}
    kinds = sorted({use.kind for use in wanted if use.choice == "triton"})
    if kinds:
        warnings.warn(
            f"the plan asks for Triton kernels ({', '.join(kinds)}), but the model's own operations are used: "
            f"{there.reason}",
            stacklevel=2,
        )
    return {}


def body_of(use: KernelUse, module: nn.Module, modules: Mapping[str, nn.Module]) -> Body:
    """The function that takes the place of `module`'s forward.

    Args:
        use: what to do.
        module: the module whose body it is; its parameters are local while the body runs.
        modules: the model's modules by qualified name.
    """
    gated = use.kind in (KernelKind.SWIGLU, KernelKind.GEGLU)
    compute = _gated(use, modules) if gated else _single(use, module, modules)

    def body(stock: Stock, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = (*args, *kwargs.values())
        proved = len(given) == 1 and isinstance(given[0], Tensor) and dtype_name(given[0].dtype) == use.dtype
        # A bias that the linear layer has left out must be added whatever comes.
        return compute(given[0]) if proved or use.kind == "bias_gelu" else stock(*args, **kwargs)

    return body


def _single(use: KernelUse, module: nn.Module, modules: Mapping[str, nn.Module]) -> Callable[[Tensor], Tensor]:
    """A kernel of one tensor and a module's parameters."""
    launch = KINDS[KernelKind(use.kind)].launch
    assert launch is not None
    owner, *names = (modules[use.parts[0]], "bias") if use.parts else (module, use.weight, use.bias)
    if use.kind == KernelKind.GELU:
        return lambda x: launch(use, x)
    return lambda x: launch(use, x, *(None if name is None else getattr(owner, name) for name in names))


def _gated(use: KernelUse, modules: Mapping[str, nn.Module]) -> Callable[[Tensor], Tensor]:
    launch = KINDS[KernelKind(use.kind)].launch
    assert launch is not None
    prefix = f"{use.module}." if use.module else ""
    first, *others = (modules[f"{prefix}{part}"] for part in use.parts)

    def compute(x: Tensor) -> Tensor:
        if use.halves is None:
            product, after = launch(use, first(x), others[0](x)), others[1:]
        else:
            halves = first(x).chunk(2, -1)
            product, after = launch(use, halves[use.halves], halves[1 - use.halves]), others
        for module in after:
            product = module(product)
        return product

    return compute


class Fused(NamedTuple):
    """An RMSNorm that torch computes by one operation: the name and dtype of its weight, and what is added to it."""

    weight: str
    dtype: torch.dtype
    offset: float
    eps: float


def fused_norms(program: Program, device: torch.device) -> dict[str, Fused]:
    """The RMSNorms that torch computes by one operation on `device`, where there are no kernels of ours; by module.

    Only in float32, of which torch's operation is the stock formula step by step.
    """
    if kernels.available(device).name == "triton":
        return {}
    return {
        use.module: Fused(use.weight, torch.float32, use.offset, use.eps)
        for use in program.kernels
        if use.kind == "rms_norm" and not use.refused and use.weight is not None and use.dtype == "float32"
    }


def without_bias(transposed: bool, module: nn.Module) -> Body:
    """The body of a linear layer that leaves its bias to a kernel."""

    def body(stock: Stock, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        (x,) = (*args, *kwargs.values())
        weight: Tensor = module.weight  # pyright: ignore[reportAssignmentType]
        return x @ weight if transposed else functional.linear(x, weight)

    return body


def choice_of(use: KernelUse | None) -> Choice:
    """What the plan says of a use; "auto" without one."""
    return "auto" if use is None else cast(Choice, use.choice)


__all__ = ["Body", "Fused", "active_uses", "body_of", "choice_of", "fused_norms", "without_bias"]
