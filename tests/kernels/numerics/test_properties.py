"""Any shape, strides and dtypes: the kernels agree with float64."""

from __future__ import annotations

from functools import partial

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.numerics.harness import DEVICE, DTYPES, assert_exact
from tests.kernels.numerics.test_activations import bias_gelu, exact_bias_gelu, exact_swiglu, swiglu
from tests.kernels.numerics.test_norms import exact_layer, exact_residual_rms, layer, residual_rms

few = settings(max_examples=6, deadline=None, derandomize=True, database=None)


@st.composite
def strided(draw: st.DrawFn, rows: int, columns: int) -> Tensor:
    """A matrix of random numbers, laid out in one of several ways."""
    dtype = draw(st.sampled_from(DTYPES))
    layout = draw(st.sampled_from(["plain", "transposed", "rows apart", "elements apart", "offset"]))
    shape = {
        "plain": (rows, columns),
        "transposed": (columns, rows),
        "rows apart": (rows, columns + 3),
        "elements apart": (rows, 2 * columns),
        "offset": (rows + 1, columns),
    }[layout]
    whole = torch.randn(shape).to(dtype).to(DEVICE)
    view = {
        "plain": lambda: whole,
        "transposed": whole.t,
        "rows apart": lambda: whole[:, :columns],
        "elements apart": lambda: whole[:, ::2],
        "offset": lambda: whole[1:],
    }[layout]()
    return view.requires_grad_()


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Two matrices and a gradient, and a weight and a bias for their columns."""
    # One row of two columns normalizes to ±1 whatever it was: its gradient is all rounding.
    rows, columns = draw(st.integers(1, 20)), draw(st.integers(30, 2100))
    matrices = [draw(strided(rows, columns)) for _ in range(3)]
    vectors = [torch.randn(columns).to(draw(st.sampled_from(DTYPES))).to(DEVICE).requires_grad_() for _ in range(2)]
    return (*matrices, *vectors)  # type: ignore[return-value]


@few
@given(cases())
def test_layer_norm_for_any_layout(case: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]) -> None:
    x, _, dy, weight, bias = case
    assert_exact(layer, exact_layer, [x, weight, bias], [dy.detach().to(x.dtype)])


@few
@given(cases(), st.floats(0, 1))
def test_residual_rms_norm_for_any_layout(case: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], offset: float) -> None:
    x, residual, dy, weight, _ = case
    dtype = torch.promote_types(x.dtype, residual.dtype)
    gradients = [dy.detach().to(dtype)] * 2
    # The sum of two 16-bit tensors is rounded, and all that follows is a function of the rounded one.
    gate = None if dtype == torch.float32 else 2e-2
    ours, exact = partial(residual_rms, offset=offset), partial(exact_residual_rms, offset=offset)
    assert_exact(ours, exact, [x, residual, weight], gradients, gate=gate)


@few
@given(cases())
def test_activations_for_any_layout(case: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]) -> None:
    x, up, dy, _, bias = case
    assert_exact(swiglu, exact_swiglu, [x, up], [dy.detach().to(torch.promote_types(x.dtype, up.dtype))])
    assert_exact(bias_gelu("tanh"), exact_bias_gelu("tanh"), [x, bias], [dy.detach().to(x.dtype)])
