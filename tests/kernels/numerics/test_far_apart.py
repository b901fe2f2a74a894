"""Rows that lie more than 2³¹ elements apart; a kernel that counts in 32 bits takes the process with it.

On the CPU the memory is a sparse file of which three pages exist.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.kernels.numerics.harness import DEVICE, differentiate
from tests.kernels.numerics.test_activations import bias_gelu, gelu, swiglu
from tests.kernels.numerics.test_norms import layer, residual_rms, rms
from tpplan import kernels

STRIDE, ROWS, COLUMNS = 1 << 30, 3, 96


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory) -> Tensor:
    """Three rows of which the last begins 2³¹ elements after the first."""
    size = (ROWS - 1) * STRIDE + COLUMNS
    if DEVICE == "cuda":
        memory = torch.empty(size, dtype=torch.bfloat16, device=DEVICE)
    else:
        file = Path(tmp_path_factory.mktemp("far")) / "memory"
        with file.open("wb") as stream:
            stream.truncate(size * 2)
        memory = torch.from_file(str(file), shared=True, size=size, dtype=torch.bfloat16)
    rows = memory.as_strided((ROWS, COLUMNS), (STRIDE, 1))
    rows.copy_(torch.randn(ROWS, COLUMNS))
    return rows


def near(x: Tensor) -> Tensor:
    return x.detach().clone(memory_format=torch.contiguous_format).requires_grad_()


FUNCTIONS = {
    "layer_norm": lambda x: layer(x),
    "rms_norm": lambda x: rms(x),
    "residual_rms_norm": lambda x: residual_rms(x, x),
    "gelu": gelu("tanh"),
    "bias_gelu": lambda x: bias_gelu("none")(x, torch.ones(COLUMNS, device=DEVICE)),
    "swiglu": lambda x: swiglu(x, x),
    "cross_entropy": lambda x: kernels.cross_entropy(x, torch.arange(ROWS, device=DEVICE), backend="triton"),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_offsets_are_counted_in_64_bits(name: str, far: Tensor) -> None:
    function = FUNCTIONS[name]
    outputs, gradients, given = differentiate(function, [far.detach().requires_grad_()])
    spread = [far.detach() if g.shape == far.shape else g for g in given]
    _, far_gradients, _ = differentiate(function, [far.detach().requires_grad_()], spread)
    wanted, wanted_gradients, _ = differentiate(function, [near(far)], given)
    _, wanted_far, _ = differentiate(function, [near(far)], [g.contiguous() for g in spread])
    for ours, its in zip(outputs + gradients + far_gradients, wanted + wanted_gradients + wanted_far, strict=True):
        assert torch.equal(ours, its)


def test_the_rows_are_as_far_apart_as_they_should_be(far: Tensor) -> None:
    assert far.stride(0) * (ROWS - 1) >= 2**31
