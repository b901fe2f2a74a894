"""Fused kernels of others as operators with rules: Liger's in a session with Triton's interpreter, Apex' by stand-ins.

Apex isn't built for a CPU. Its autograd functions are written here anew, with the signatures of apex 0.1 and backwards
of their own, in torch's operators; what is tried is that functions of these forms take rules.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tpplan
from tests.kernels.test_interpreted import needs_interpreter
from tests.runtime.simulated import worst

ROOT = Path(__file__).parents[2]
TOLERANCE = 1e-12  # of float64, relative


@pytest.mark.slow
@needs_interpreter
def test_liger_interpreted() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__).parent / "fused")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and " passed" in done.stdout, f"{done.stdout}\n{done.stderr}"


class FusedRMSNormAffineFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, normalized_shape: Any, eps: float, memory_efficient: bool = False
    ) -> Tensor:
        assert input.data_ptr(), "a kernel needs numbers"
        scale = (input.square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(input, weight, scale)
        return input * scale * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        input, weight, scale = ctx.saved_tensors
        normed, inner = input * scale, gradients[0] * weight
        own = (inner - normed * (inner * normed).mean(-1, keepdim=True)) * scale
        return own, (gradients[0] * normed).flatten(0, -2).sum(0), None, None, None


def softmax_backward(ctx: Any, gradient: Tensor) -> Tensor:
    """The gradient of scores, by what a forward has saved."""
    (made,) = ctx.saved_tensors
    inner = gradient * made
    return ctx.scale * (inner - made * inner.sum(-1, keepdim=True))


class ScaledMaskedSoftmax(torch.autograd.Function):
    """Scores (b, np, sq, sk), and a mask (b, 1, sq, sk) of those that don't count."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, mask: Tensor, scale: float) -> Tensor:
        assert inputs.data_ptr(), "a kernel needs numbers"
        made = (inputs * scale).masked_fill(mask, -10000.0).softmax(-1)
        ctx.save_for_backward(made)
        ctx.scale = scale
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return softmax_backward(ctx, gradients[0]), None, None


class ScaledUpperTriangMaskedSoftmax(torch.autograd.Function):
    """Causal scores (b * np, sq, sk)."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, scale: float) -> Tensor:
        assert inputs.data_ptr(), "a kernel needs numbers"
        later = torch.ones(inputs.shape[-2:], dtype=torch.bool).triu(1)
        made = (inputs * scale).masked_fill(later, float("-inf")).softmax(-1)
        ctx.save_for_backward(made)
        ctx.scale = scale
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return softmax_backward(ctx, gradients[0]), None


tpplan.register_operator(FusedRMSNormAffineFunction, "... f!, f! -> ... f!")
tpplan.register_operator(ScaledMaskedSoftmax, "b h s! t!, b 1 s! t! -> b h s! t!")
tpplan.register_operator(ScaledUpperTriangMaskedSoftmax, "bh s! t! -> bh s! t!")


class Layer(nn.Module):
    """A norm and heads, as Megatron calls Apex'."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.weight = nn.Parameter(torch.rand(16) + 0.5)
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        held = FusedRMSNormAffineFunction.apply(x, self.weight, (16,), 1e-6)
        q, k, v = (layer(held).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        scores = q @ k.transpose(-1, -2)
        if self.causal:
            made = ScaledUpperTriangMaskedSoftmax.apply(scores.flatten(0, 1), 0.5).unflatten(0, scores.shape[:2])
        else:
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
            made = ScaledMaskedSoftmax.apply(scores, mask.expand(x.shape[0], 1, -1, -1), 0.5)
        return x + self.o((made @ v).transpose(1, 2).flatten(2))


def call(batch: int, length: int) -> Any:
    return (torch.randn(batch, length, 16, generator=torch.Generator().manual_seed(length)).double(),), {}


RULES: dict[str, Any] = {"q": "colwise", "k": "colwise", "v": "colwise", "o": "rowwise"}
CASES: dict[str, Callable[[], nn.Module]] = {"masked": lambda: Layer(False), "causal": lambda: Layer(True)}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_functions_as_those_of_apex(name: str, tp: int) -> None:
    torch.manual_seed(0)
    model = CASES[name]().double()
    program = tpplan.compile_plan(model, {"version": 1, "modules": RULES}, tp, call(2, 6)[0])
    assert program.count_collectives() == {"all-reduce": 2} and not program.assumed  # of the norm's gradient, too
    assert max(worst(model, RULES, tp, call(2, 6), [call(2, 6), call(3, 9)])) < TOLERANCE
