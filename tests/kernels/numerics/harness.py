"""Holding a kernel against float64: outputs and gradients, with a gate for each dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tpplan.kernels.backend import INTERPRETED

DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# The interpreter truncates to bfloat16 where hardware rounds.
GATES = {torch.float32: 1e-6, torch.float16: 4e-4, torch.bfloat16: 5e-3 if INTERPRETED else 2.5e-3}

Function = Callable[..., Tensor | Sequence[Tensor]]


def draw(*shape: int, dtype: torch.dtype = torch.float32, mean: float = 0.0, grad: bool = True) -> Tensor:
    """Normal random numbers on the device of this session."""
    return (torch.randn(shape) + mean).to(dtype).to(DEVICE).requires_grad_(grad)


def relative_error(ours: Tensor, exact: Tensor) -> float:
    """The relative Frobenius error; the error itself where the exact values are zero but for their own rounding."""
    exact = exact.detach()
    difference, size = float((ours.detach().double() - exact).norm()), float(exact.norm())
    return difference / size if size > 1e-9 else difference


def signed_error(ours: Tensor, exact: Tensor) -> float:
    """The mean of the error, with its sign, in units of the exact values' mean magnitude."""
    return float((ours.detach().double() - exact.detach()).mean() / exact.detach().abs().mean().clamp_min(1e-9))


def differentiate(
    function: Function, inputs: Sequence[Tensor | None], gradients: Sequence[Tensor] | None = None
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Call `function`; returns its outputs, the inputs' gradients, and the output gradients that were used."""
    results = function(*inputs)
    outputs = [results] if isinstance(results, Tensor) else list(results)
    if gradients is None:
        gradients = [torch.randn(y.shape).to(y.dtype).to(y.device) for y in outputs]
    wanted = [x for x in inputs if x is not None and x.requires_grad]
    return outputs, list(torch.autograd.grad(outputs, wanted, list(gradients))), list(gradients)


def assert_exact(
    ours: Function,
    exact: Function,
    inputs: Sequence[Tensor | None],
    gradients: Sequence[Tensor] | None = None,
    gate: float | None = None,
) -> None:
    """Fail unless outputs and gradients are within the gate of their dtype of what `exact` gives in float64."""
    outputs, found, gradients = differentiate(ours, inputs, gradients)
    wide = [None if x is None else x.detach().double().requires_grad_(x.requires_grad) for x in inputs]
    results, wanted, _ = differentiate(exact, wide, [g.double() for g in gradients])
    narrowest = max((x.dtype for x in inputs if x is not None), key=lambda dtype: GATES[dtype])
    names = [f"output {i}" for i in range(len(outputs))] + [f"gradient {i}" for i in range(len(found))]
    for name, mine, its in zip(names, [*outputs, *found], [*results, *wanted], strict=True):
        assert mine.shape == its.shape, name
        # A narrow output rounds once more, and what is computed from it inherits that.
        limit = gate or max(GATES[mine.dtype], GATES[narrowest] if "output" in name else 0.0)
        assert relative_error(mine, its) <= limit, f"{name} ({mine.dtype}): {relative_error(mine, its):.2e} > {limit}"
        if mine.dtype == torch.float32 and mine.numel() > 1000:
            assert abs(signed_error(mine, its)) <= limit, f"{name}: {signed_error(mine, its):.2e}"
