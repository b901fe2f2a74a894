"""GeLU, bias + GeLU, SwiGLU and GeGLU against float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.kernels.numerics.harness import DEVICE, DTYPES, assert_exact, differentiate, draw, relative_error
from tpplan import kernels

FORMS = ("none", "tanh")
SHAPES = ((1,), (7, 1), (3, 1000), (2, 3, 1001), (2, 4097))

swiglu = partial(kernels.swiglu, backend="triton")


def gelu(approximate: str) -> Callable[[Tensor], Tensor]:
    return partial(kernels.gelu, approximate=approximate, backend="triton")  # type: ignore[arg-type]


def exact_gelu(approximate: str) -> Callable[[Tensor], Tensor]:
    return partial(functional.gelu, approximate=approximate)


def bias_gelu(approximate: str) -> Callable[[Tensor, Tensor], Tensor]:
    return partial(kernels.bias_gelu, approximate=approximate, backend="triton")  # type: ignore[arg-type]


def exact_bias_gelu(approximate: str) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, bias: functional.gelu(x + bias, approximate=approximate)


def geglu(approximate: str) -> Callable[[Tensor, Tensor], Tensor]:
    return partial(kernels.geglu, approximate=approximate, backend="triton")  # type: ignore[arg-type]


def exact_geglu(approximate: str) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda gate, up: functional.gelu(gate, approximate=approximate) * up


def exact_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate) * up


def several(shape: tuple[int, ...], count: int, dtype: torch.dtype) -> list[Tensor]:
    """Enough rows of `shape` that the error of the mean counts and not that of one element."""
    return [draw(max(1, 64 // shape[0]) * shape[0], *shape[1:], dtype=dtype) for _ in range(count)]


@pytest.mark.parametrize("approximate", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gelu_is_exact_in_both_forms(dtype: torch.dtype, approximate: str) -> None:
    for shape in SHAPES:
        assert_exact(gelu(approximate), exact_gelu(approximate), several(shape[:1], 1, dtype))
    assert_exact(gelu(approximate), exact_gelu(approximate), [draw(3, 1001, dtype=dtype)])


def test_the_forms_of_gelu_differ_by_what_they_should() -> None:
    x = draw(4000, grad=False)
    difference = relative_error(gelu("none")(x), exact_gelu("tanh")(x.double()))
    assert 1e-4 < difference < 1e-3


@pytest.mark.parametrize("approximate", FORMS)
@pytest.mark.parametrize("shape", [(7, 1), (9, 1000), (2, 5, 1001), (3, 4097), (70, 24)], ids=str)
def test_bias_gelu_is_exact(shape: tuple[int, ...], approximate: str) -> None:
    assert_exact(bias_gelu(approximate), exact_bias_gelu(approximate), [draw(*shape), draw(shape[-1])])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_bias_gradient_is_summed_in_float32(dtype: torch.dtype) -> None:
    inputs = [draw(200, 40, dtype=dtype), draw(40)]
    _, gradients, _ = differentiate(bias_gelu("tanh"), inputs)
    assert [g.dtype for g in gradients] == [dtype, torch.float32]
    assert_exact(bias_gelu("tanh"), exact_bias_gelu("tanh"), inputs)
    assert_exact(bias_gelu("none"), exact_bias_gelu("none"), [inputs[0], draw(40, dtype=dtype)])


def test_a_frozen_bias_gets_no_gradient_and_the_input_the_same_one() -> None:
    x, bias = draw(9, 50), draw(50)
    _, (dx, _), given = differentiate(bias_gelu("none"), [x, bias])
    _, (alone,), _ = differentiate(bias_gelu("none"), [x, bias.detach()], given)
    assert torch.equal(dx, alone)


GATED: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "swiglu": (swiglu, exact_swiglu),
    "geglu": (geglu("none"), exact_geglu("none")),
    "geglu tanh": (geglu("tanh"), exact_geglu("tanh")),
}


@pytest.mark.parametrize("form", GATED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gated_activations_are_exact(form: str, dtype: torch.dtype) -> None:
    for shape in ((64,), (3, 1000), (2, 3, 1001), (64, 1)):
        assert_exact(*GATED[form], [draw(*shape, dtype=dtype), draw(*shape, dtype=dtype)])


def test_gate_and_up_may_be_halves_of_one_projection() -> None:
    whole = draw(6, 2 * 333)
    assert_exact(lambda both: swiglu(*both.chunk(2, -1)), lambda both: exact_swiglu(*both.chunk(2, -1)), [whole])


def test_gate_and_up_may_differ_in_dtype() -> None:
    inputs = [draw(5, 100, dtype=torch.bfloat16), draw(5, 100)]
    (y,), gradients, _ = differentiate(swiglu, inputs)
    assert y.dtype == torch.float32
    assert [g.dtype for g in gradients] == [torch.bfloat16, torch.float32]
    assert_exact(swiglu, exact_swiglu, inputs)


ALL: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], int]] = {
    "gelu": (gelu("tanh"), exact_gelu("tanh"), 0),
    "bias_gelu": (bias_gelu("none"), exact_bias_gelu("none"), 1),
    "swiglu": (swiglu, exact_swiglu, 2),
}


def _inputs(x: Tensor, kind: int) -> list[Any]:
    return [x, *([draw(x.shape[-1])] if kind == 1 else [draw(*x.shape)] if kind == 2 else [])]


@pytest.mark.parametrize("name", ALL)
def test_any_strides_are_taken(name: str) -> None:
    ours, exact, kind = ALL[name]
    for x in (
        draw(90, 6, grad=False).t(),
        draw(6, 300, grad=False)[:, 100:190],
        draw(12, 180, grad=False)[::2, ::2],
        draw(1, 90, grad=False).expand(6, 90),
    ):
        assert_exact(ours, exact, _inputs(x.requires_grad_(), kind), [torch.ones((), device=DEVICE).expand(x.shape)])
        assert_exact(ours, exact, _inputs(x, kind), [draw(90, 6, grad=False).t()])


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("shape", [(0, 8), (3, 0)])
def test_an_empty_input_gives_empty_results(name: str, shape: tuple[int, ...]) -> None:
    ours, _, kind = ALL[name]
    inputs = _inputs(draw(*shape), kind)
    (y,), gradients, _ = differentiate(ours, inputs)
    assert y.shape == torch.Size(shape)
    assert [g.shape for g in gradients] == [x.shape for x in inputs]
    assert not any(g.any() for g in gradients)


@pytest.mark.parametrize("name", ALL)
def test_two_runs_are_equal_in_every_bit(name: str) -> None:
    ours, _, kind = ALL[name]
    inputs = _inputs(draw(6, 1001, dtype=torch.bfloat16), kind)
    outputs, gradients, given = differentiate(ours, inputs)
    again, again_gradients, _ = differentiate(ours, inputs, given)
    assert all(torch.equal(a, b) for a, b in zip(outputs + gradients, again + again_gradients, strict=True))


@pytest.mark.parametrize("kind", ["none", "tanh"])
def test_far_from_zero_gelu_is_the_identity_or_nothing(kind: str) -> None:
    x = torch.tensor([-1e4, -40.0, -0.0, 0.0, 40.0, 1e4], device=DEVICE).requires_grad_()
    y = gelu(kind)(x)
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert y.tolist() == [0.0, 0.0, 0.0, 0.0, 40.0, 1e4]
    assert dx.tolist() == [0.0, 0.0, 0.5, 0.5, 1.0, 1.0]


def test_the_input_is_left_as_it_was() -> None:
    x, up = draw(5, 70), draw(5, 70)
    before = x.detach().clone(), up.detach().clone()
    differentiate(swiglu, [x, up])
    differentiate(gelu("tanh"), [x])
    assert torch.equal(x, before[0])
    assert torch.equal(up, before[1])
