"""LayerNorm and RMSNorm against float64, with and without a residual."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.kernels.numerics.harness import DEVICE, GATES, assert_exact, differentiate, draw, relative_error
from tpplan import kernels
from tpplan.kernels.norms import rms_norm_reference

SIZES = (1, 7, 256, 1000, 1001, 4097)
CASES = [(hidden, torch.float32) for hidden in SIZES] + [
    (hidden, dtype) for hidden in (1, 1001) for dtype in (torch.bfloat16, torch.float16)
]
# Wider than the registers: in the backward, in both.
WIDE = [(9000, torch.float32), pytest.param(17_000, torch.float32, marks=pytest.mark.slow), (17_000, torch.bfloat16)]


def layer(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, **settings: Any) -> Tensor:
    settings.setdefault("normalized_shape", x.shape[-1:])
    return kernels.layer_norm(x, weight=weight, bias=bias, backend="triton", **settings)  # type: ignore[arg-type]


def exact_layer(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, **settings: Any) -> Tensor:
    settings.setdefault("normalized_shape", x.shape[-1:])
    return functional.layer_norm(x, weight=weight, bias=bias, **settings)


def rms(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, **settings: Any) -> Tensor:
    return kernels.rms_norm(x, x.shape[-1:], weight, eps, backend="triton", **settings)


def exact_rms(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, **settings: Any) -> Tensor:
    return rms_norm_reference(x, x.shape[-1:], weight, eps, **settings)


@pytest.mark.parametrize(("hidden", "dtype"), CASES, ids=str)
def test_layer_norm_is_exact_at_any_size(hidden: int, dtype: torch.dtype) -> None:
    inputs = [draw(5, hidden, dtype=dtype, mean=0.5), draw(hidden, dtype=dtype), draw(hidden, dtype=dtype)]
    # With one element a row the input's gradient is zero, and what is left of it is the division by √eps.
    assert_exact(layer, exact_layer, inputs if hidden > 1 else [inputs[0].detach(), *inputs[1:]])


@pytest.mark.parametrize(("hidden", "dtype"), CASES, ids=str)
def test_rms_norm_is_exact_at_any_size(hidden: int, dtype: torch.dtype) -> None:
    inputs = [draw(5, hidden, dtype=dtype), draw(hidden, dtype=dtype)]
    # All of five results are the one weight: its own rounding, not the mean of many.
    gate = 8e-3 if hidden == 1 and dtype == torch.bfloat16 else None
    assert_exact(rms, exact_rms, inputs if hidden > 1 else [inputs[0].detach(), inputs[1]], gate=gate)


@pytest.mark.parametrize(("hidden", "dtype"), WIDE, ids=str)
def test_rows_wider_than_the_registers_are_exact(hidden: int, dtype: torch.dtype) -> None:
    x, weight = draw(2, hidden, dtype=dtype, mean=0.5), draw(hidden, dtype=dtype)
    assert_exact(layer, exact_layer, [x, weight, draw(hidden, dtype=dtype)])
    assert_exact(rms, exact_rms, [x, weight])


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("cast", ["before", "after"])
def test_rms_norm_has_the_variants_of_transformers(offset: float, cast: str) -> None:
    x, weight = draw(9, 300, dtype=torch.bfloat16), draw(300)
    variant = partial(rms, offset=offset, cast=cast)
    gate = GATES[torch.bfloat16] if cast == "before" else None
    assert_exact(variant, partial(exact_rms, offset=offset), [x, weight], gate=gate)
    stock = rms_norm_reference(x, (300,), weight, 1e-6, offset=offset, cast=cast)  # type: ignore[arg-type]
    assert variant(x, weight).dtype == stock.dtype
    assert (stock.dtype == torch.float32) == (cast == "before")
    # Rounded before the weight, the result is a product with a number of 8 bits.
    if cast == "before":
        rounded = variant(x, weight) / (weight + offset)
        torch.testing.assert_close(rounded, rounded.bfloat16().float(), rtol=1e-5, atol=0)


def test_the_weight_gradient_of_a_rounded_norm_is_that_of_the_rounded_values() -> None:
    x, weight = draw(64, 40, dtype=torch.bfloat16), draw(40)
    rounded = rms(x, None, cast="before").detach()
    _, (dx, dweight), (dy,) = differentiate(partial(rms, cast="before"), [x, weight])
    assert relative_error(dweight, (dy.double() * rounded.double()).sum(0)) <= GATES[torch.float32]
    assert dx.dtype == torch.bfloat16


@pytest.mark.parametrize("function", ["layer", "rms"])
def test_statistics_survive_a_mean_far_from_zero(function: str) -> None:
    x = draw(6, 1001, mean=1000.0)
    ours, exact = {"layer": (layer, exact_layer), "rms": (rms, exact_rms)}[function]
    # The input itself holds its deviations to 1000·2⁻²⁴ only; all that the kernel adds is as small.
    assert_exact(ours, exact, [x, draw(1001)], gate=6e-5)


def test_statistics_of_a_wide_row_survive_a_mean_far_from_zero() -> None:
    assert_exact(layer, exact_layer, [draw(2, 17_001, mean=1000.0)], gate=6e-5)


def test_statistics_of_a_wide_row_take_in_how_its_parts_differ() -> None:
    ramp = torch.linspace(-20, 20, 17_001, device=DEVICE)
    assert_exact(layer, exact_layer, [(draw(2, 17_001, grad=False) + ramp).requires_grad_()])


@pytest.mark.parametrize("hidden", [1000, pytest.param(9000, marks=pytest.mark.slow)])
def test_statistics_are_kept_in_float32(hidden: int) -> None:
    """In bfloat16, a mean of 30 would be off by up to 0.06 deviations."""
    inputs = [draw(8, hidden, dtype=torch.bfloat16, mean=30.0), draw(hidden), draw(hidden)]
    assert_exact(layer, exact_layer, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("parts", ["weight", "bias", "neither"])
def test_weight_and_bias_may_be_missing(parts: str, dtype: torch.dtype) -> None:
    weight = draw(129, dtype=dtype) if parts == "weight" else None
    bias = draw(129, dtype=dtype) if parts == "bias" else None
    assert_exact(layer, exact_layer, [draw(4, 129, dtype=dtype), weight, bias])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_wide_weights_on_narrow_inputs_keep_wide_gradients(dtype: torch.dtype) -> None:
    inputs = [draw(33, 77, dtype=dtype), draw(77), draw(77)]
    _, gradients, _ = differentiate(layer, inputs)
    assert [g.dtype for g in gradients] == [dtype, torch.float32, torch.float32]
    assert_exact(layer, exact_layer, inputs)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 11])
def test_any_number_of_rows_is_dealt_out(rows: int) -> None:
    assert_exact(layer, exact_layer, [draw(rows, 1100), draw(1100), draw(1100)])


@pytest.mark.parametrize("rows", [1, 7])
def test_wide_rows_are_dealt_out(rows: int) -> None:
    assert_exact(rms, exact_rms, [draw(rows, 8200), draw(8200)])


def test_several_dims_are_normalized() -> None:
    shape = (5, 7)
    both = {"normalized_shape": shape}
    assert_exact(partial(layer, **both), partial(exact_layer, **both), [draw(2, 3, 5, 7), draw(5, 7), draw(5, 7)])
    assert_exact(partial(layer, normalized_shape=(4, 6)), partial(exact_layer, normalized_shape=(4, 6)), [draw(4, 6)])


STRIDES: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: draw(90, 6, grad=False).t(),
    "permuted": lambda: draw(4, 90, 3, grad=False).permute(0, 2, 1),
    "part of wider rows": lambda: draw(6, 300, grad=False)[:, 100:190],
    "every other row": lambda: draw(12, 90, grad=False)[::2],
    "every other element": lambda: draw(6, 180, grad=False)[:, ::2],
    "expanded rows": lambda: draw(1, 90, grad=False).expand(6, 90),
    "backwards, unaligned": lambda: draw(6 * 90 + 1, grad=False)[1:].view(6, 90),
}


@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("function", ["layer", "rms"])
def test_any_strides_are_taken(strides: str, function: str) -> None:
    ours, exact = {"layer": (layer, exact_layer), "rms": (rms, exact_rms)}[function]
    x = STRIDES[strides]().requires_grad_()
    assert_exact(ours, exact, [x, draw(90)], [STRIDES[strides]()])
    assert_exact(ours, exact, [x, draw(90)], [torch.ones((), device=DEVICE).expand(x.shape)])


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8), (2, 0)])
def test_an_empty_input_gives_empty_results_and_zero_gradients(shape: tuple[int, ...]) -> None:
    x, weight, bias = draw(*shape), draw(shape[-1]), draw(shape[-1])
    y = layer(x, weight, bias)
    y.sum().backward()
    assert y.shape == x.shape
    assert all(t.grad is not None and not t.grad.any() and t.grad.shape == t.shape for t in (x, weight, bias))


def test_two_runs_are_equal_in_every_bit() -> None:
    inputs = [draw(20, 1000, dtype=torch.bfloat16), draw(1000), draw(1000)]
    outputs, gradients, given = differentiate(layer, inputs)
    again, again_gradients, _ = differentiate(layer, inputs, given)
    assert all(torch.equal(a, b) for a, b in zip(outputs + gradients, again + again_gradients, strict=True))


def test_frozen_weights_get_no_gradient_and_the_input_the_same_one() -> None:
    x, weight, bias = draw(9, 50), draw(50), draw(50)
    _, (dx, _, _), given = differentiate(layer, [x, weight, bias])
    _, gradients, _ = differentiate(layer, [x, weight.detach(), bias.detach()], given)
    assert len(gradients) == 1
    assert torch.equal(gradients[0], dx)
    _, (dx, dbias), _ = differentiate(layer, [x, weight.detach(), bias], given)
    assert relative_error(dbias, given[0].double().sum(0)) <= GATES[torch.float32]


def test_the_variance_of_a_constant_row_is_zero() -> None:
    """Lanes beyond the row hold 0, and 0 - mean isn't 0."""
    x = torch.full((3, 1001), 7.0, device=DEVICE)
    y, mean, rstd = torch.ops.tpplan.layer_norm.default(x, None, None, 1, 0.25, torch.float32)
    assert not y.any()
    assert (mean.tolist(), rstd.tolist()) == ([7.0] * 3, [2.0] * 3)


@pytest.mark.parametrize("eps", [1e-12, 1e-5, 0.5])
def test_eps_is_added_to_the_variance(eps: float) -> None:
    assert_exact(partial(layer, eps=eps), partial(exact_layer, eps=eps), [draw(3, 64)])
    assert_exact(partial(rms, eps=eps), partial(exact_rms, eps=eps), [draw(3, 64), draw(64)])


# With a residual.


def residual_layer(x: Tensor, residual: Tensor, *affine: Any) -> tuple[Tensor, Tensor]:
    return kernels.residual_layer_norm(x, residual, x.shape[-1:], *affine, backend="triton")


def exact_residual_layer(x: Tensor, residual: Tensor, *affine: Any) -> tuple[Tensor, Tensor]:
    return functional.layer_norm(x + residual, x.shape[-1:], *affine), x + residual


def residual_rms(x: Tensor, residual: Tensor, weight: Tensor | None = None, **more: Any) -> tuple[Tensor, Tensor]:
    return kernels.residual_rms_norm(x, residual, x.shape[-1:], weight, 1e-6, backend="triton", **more)


def exact_residual_rms(x: Tensor, residual: Tensor, weight: Tensor | None = None, **more: Any) -> tuple[Tensor, Tensor]:
    return rms_norm_reference(x + residual, x.shape[-1:], weight, 1e-6, **more), x + residual


@pytest.mark.parametrize("hidden", [5, 1001, pytest.param(17_000, marks=pytest.mark.slow)])
def test_a_residual_and_its_norm_are_exact(hidden: int) -> None:
    inputs = [draw(4, hidden), draw(4, hidden), draw(hidden), draw(hidden)]
    assert_exact(residual_layer, exact_residual_layer, inputs)
    assert_exact(residual_rms, exact_residual_rms, inputs[:3])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_with_a_residual_the_norm_is_that_of_the_rounded_sum(dtype: torch.dtype) -> None:
    x, residual, weight, bias = (draw(*s, dtype=dtype) for s in ((9, 300), (9, 300), (300,), (300,)))
    y, total = residual_layer(x, residual, weight, bias)
    assert torch.equal(y, layer(total, weight, bias))
    assert relative_error(total, x.double() + residual.double()) <= GATES[dtype]
    y, total = residual_rms(x, residual, weight, cast="before")
    assert torch.equal(y, rms(total, weight, cast="before"))


def test_a_residual_stream_may_be_wider_than_what_is_added() -> None:
    inputs = [draw(9, 300, dtype=torch.bfloat16), draw(9, 300), draw(300)]
    (y, total), gradients, _ = differentiate(residual_rms, inputs)
    assert (y.dtype, total.dtype) == (torch.float32, torch.float32)
    assert [g.dtype for g in gradients] == [torch.bfloat16, torch.float32, torch.float32]
    assert_exact(residual_rms, exact_residual_rms, inputs)


@pytest.mark.parametrize("used", [0, 1])
def test_one_result_of_a_residual_norm_may_go_unused(used: int) -> None:
    inputs = [draw(3, 50), draw(3, 50), draw(50)]
    outputs = residual_rms(*inputs)
    (dx,) = torch.autograd.grad(outputs[used].sum(), [inputs[0]])
    wide = [x.detach().double().requires_grad_() for x in inputs]
    (exact,) = torch.autograd.grad(exact_residual_rms(*wide)[used].sum(), [wide[0]])
    assert relative_error(dx, exact) <= 2 * GATES[torch.float32]


def test_residuals_may_have_any_strides() -> None:
    x, residual = draw(90, 6, grad=False).t().requires_grad_(), draw(6, 200, grad=False)[:, 7:97].requires_grad_()
    gradients = [draw(1, 90, grad=False).expand(6, 90), draw(90, 6, grad=False).t()]
    assert_exact(residual_layer, exact_residual_layer, [x, residual, draw(90), draw(90)], gradients)
