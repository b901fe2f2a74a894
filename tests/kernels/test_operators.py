"""The operators as torch sees them, on the CPU without a kernel: what they run there are the formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck
from torch.nn import functional

import tpplan.kernels  # noqa: F401  # pyright: ignore  # registers the operators

OPS = torch.ops.tpplan
LAYER = OPS.layer_norm.default


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype).requires_grad_()


def calls(dtype: torch.dtype) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """A call of each forward, in its plainest and in its oddest form."""
    x, wide, weight, bias = draw(2, 3, 8, dtype=dtype), draw(2, 3, 8), draw(8), draw(8, dtype=dtype)
    logits, target = draw(6, 9, dtype=dtype), torch.tensor([0, 8, 4, -100, 12, 1])
    return {
        "layer_norm": (LAYER, (x, weight, bias, 1, 1e-5, dtype)),
        "layer_norm, nothing affine": (LAYER, (x, None, None, 1, 1e-5, torch.float32)),
        "layer_norm, a bias alone": (LAYER, (x, None, bias, 1, 1e-5, dtype)),
        "layer_norm, two dims": (LAYER, (x, draw(3, 8), None, 2, 1e-5, dtype)),
        "layer_norm, empty": (LAYER, (draw(0, 8, dtype=dtype), weight, bias, 1, 1e-5, dtype)),
        "layer_norm, transposed": (LAYER, (draw(8, 6, dtype=dtype).t(), weight, bias, 1, 1e-5, dtype)),
        "rms_norm": (OPS.rms_norm.default, (x, weight, 1, 1e-6, 0.0, False, dtype)),
        "rms_norm, variant": (OPS.rms_norm.default, (x, weight, 1, 1e-6, 1.0, True, torch.float32)),
        "residual_layer_norm": (OPS.residual_layer_norm.default, (x, wide, weight, bias, 1, 1e-5, torch.float32)),
        "residual_rms_norm": (OPS.residual_rms_norm.default, (x, x, weight, 1, 1e-6, 0.0, False, dtype)),
        "gelu": (OPS.gelu.default, (x, "tanh")),
        "gelu, of a scalar": (OPS.gelu.default, (draw(dtype=dtype), "none")),
        "bias_gelu": (OPS.bias_gelu.default, (x, weight, "none")),
        "swiglu": (OPS.gated.default, (x, wide, "silu")),
        "geglu": (OPS.gated.default, (x, x.detach().clone().requires_grad_(), "tanh")),
        "cross_entropy": (OPS.cross_entropy_parts.default, (logits, target, 0, 18, -100, True)),
        "cross_entropy, plain": (OPS.cross_entropy_parts.default, (logits, target, 0, 18, -100, False)),
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("name", list(calls(torch.float32)))
@pytest.mark.one_in(5)
def test_opcheck_passes(name: str, dtype: torch.dtype) -> None:
    operator, arguments = calls(dtype)[name]
    if name == "cross_entropy":  # a target that no rank holds is not a number, and so unequal to itself
        arguments[1][4] = 13
    opcheck(operator, arguments)


def test_every_operator_has_a_schema_without_keywords_or_aliases() -> None:
    names = [name for name in torch.ops.tpplan.__dir__() if hasattr(getattr(OPS, name, None), "default")]
    assert {"layer_norm", "layer_norm_backward", "gated_backward", "cross_entropy_parts"} <= set(names)
    for name in names:
        schema = getattr(OPS, name).default._schema
        assert not schema.is_mutable
        assert all(a.alias_info is None and not a.kwarg_only for a in schema.arguments)


NORMS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "layer_norm": (
        lambda x, w, b: LAYER(x, w, b, 1, 1e-5, x.dtype)[0],
        lambda x, w, b: functional.layer_norm(x, x.shape[-1:], w, b),
    ),
    "rms_norm": (
        lambda x, w, b: OPS.rms_norm.default(x, w, 1, 1e-5, 1.0, False, x.dtype)[0] * b.detach(),
        lambda x, w, b: functional.rms_norm(x, x.shape[-1:], w + 1, 1e-5) * b.detach(),
    ),
    "bias_gelu": (
        lambda x, w, b: OPS.bias_gelu.default(x * w.detach(), b, "tanh"),
        lambda x, w, b: functional.gelu(x * w.detach() + b, approximate="tanh"),
    ),
    "gelu": (
        lambda x, w, b: OPS.gelu.default(x * w + b, "none"),
        lambda x, w, b: functional.gelu(x * w + b),
    ),
    "swiglu": (
        lambda x, w, b: OPS.gated.default(x * w, x + b, "silu"),
        lambda x, w, b: functional.silu(x * w) * (x + b),
    ),
}


@pytest.mark.parametrize("name", NORMS)
def test_the_formulas_agree_with_torch_and_its_autograd(name: str) -> None:
    ours, exact = NORMS[name]
    inputs = [draw(7, 33), draw(33), draw(33)]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    dy = torch.randn(7, 33)
    y, wanted = ours(*inputs), exact(*wide)
    torch.testing.assert_close(y.double(), wanted, rtol=2e-6, atol=1e-6)
    found = torch.autograd.grad(y, inputs, dy, allow_unused=True)
    for mine, its in zip(found, torch.autograd.grad(wanted, wide, dy.double(), allow_unused=True), strict=True):
        assert (mine is None) == (its is None)
        if mine is not None and its is not None:
            torch.testing.assert_close(mine.double(), its, rtol=2e-6, atol=4e-6)


def test_a_second_derivative_is_refused_and_not_wrong() -> None:
    x = draw(3, 8)
    (dx,) = torch.autograd.grad(LAYER(x, None, None, 1, 1e-5, x.dtype)[0].square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="backend='torch'"):
        dx.sum().backward()


def test_a_statistic_has_no_gradient() -> None:
    y, mean, rstd = LAYER(draw(3, 8), None, None, 1, 1e-5, torch.float32)
    assert (y.requires_grad, mean.requires_grad, rstd.requires_grad) == (True, False, False)
