"""Liger's fused modules, whose autograd functions have rules: sharded they are equal to themselves.

The kernels are Liger's own, run by Triton's interpreter: `tests/ops/test_fused.py` starts this file.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from liger_kernel.ops import (
    LigerCrossEntropyFunction,
    LigerGELUMulFunction,
    LigerLayerNormFunction,
    LigerRMSNormFunction,
    LigerRopeFunction,
    LigerSiLUMulFunction,
)
from liger_kernel.transformers import LigerGEGLUMLP, LigerLayerNorm, LigerRMSNorm
from liger_kernel.transformers.swiglu import LigerSwiGLUMLP
from torch import Tensor, nn
from torch.nn import functional

import tpplan
from tests.runtime.simulated import worst

WIDTH, INNER = 8, 12
TOLERANCE = 64 * torch.finfo(torch.float32).eps  # in which kernels compute, relative

tpplan.register_operator(LigerRMSNormFunction, "... f!, f! -> ... f!")
tpplan.register_operator(LigerLayerNormFunction, "... f!, f!, f! -> ... f!")
tpplan.register_operator(LigerSiLUMulFunction, "..., ... -> ...")
tpplan.register_operator(LigerGELUMulFunction, "..., ... -> ...")
tpplan.register_operator(LigerRopeFunction, "b (k g!) s! d!, b k s! d!, 1 s! d!, 1 s! d! -> b (k g!) s! d!, b k s! d!")
tpplan.register_operator(LigerCrossEntropyFunction, "n+ v!, n+ -> (), _, _, _")


def settings(**more: Any) -> Any:
    return SimpleNamespace(hidden_size=WIDTH, intermediate_size=INNER, **more)


class Block(nn.Module):
    """A norm and an MLP around a stream."""

    def __init__(self, norm: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.norm, self.mlp = norm, mlp

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class LayerNorm(LigerLayerNorm):
    """Without the choice of a backend, of which there is none for a CPU."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return LigerLayerNormFunction.apply(hidden_states, self.weight, self.bias, self.variance_epsilon)


class Attention(nn.Module):
    """Heads, turned by their positions."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 2)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        angles = torch.arange(x.shape[1], device=x.device)[None, :, None].float().expand(1, -1, 2)
        q, k = LigerRopeFunction.apply(q, k, angles.cos(), angles.sin())
        return x + self.o(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Loss(nn.Module):
    """A model of language, whose head is gathered for the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.head(self.down(self.up(x).tanh()))
        targets = torch.arange(x.shape[0] * x.shape[1], device=x.device) % 10
        options = (None, -100, 0.0, 0.0, "sum")
        loss, *_ = LigerCrossEntropyFunction.apply(logits.flatten(0, 1), targets, *options)
        return loss


MLP = {"mlp.gate_proj": "colwise", "mlp.up_proj": "colwise", "mlp.down_proj": "rowwise"}
BARE = {name.removeprefix("mlp."): style for name, style in MLP.items()}
HEADS = {"q": "colwise", "k": "colwise", "v": "colwise", "o": "rowwise"}
CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], dict[str, int]]] = {
    "swiglu": (lambda: LigerSwiGLUMLP(settings(hidden_act="silu")), BARE, {"all-reduce": 1}),
    "rms norm": (
        lambda: Block(LigerRMSNorm(WIDTH), LigerSwiGLUMLP(settings(hidden_act="silu"))), MLP, {"all-reduce": 2},
    ),
    "layer norm": (
        lambda: Block(LayerNorm(WIDTH), LigerGEGLUMLP(settings(hidden_act="gelu_pytorch_tanh"))), MLP,
        {"all-reduce": 2},
    ),
    "rotary positions": (Attention, HEADS, {"all-reduce": 1}),
    "cross entropy": (Loss, {"up": "colwise", "down": "rowwise"}, {"all-reduce": 1}),
}  # fmt: skip


def call(batch: int, length: int) -> Any:
    return (torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(length)),), {}


@pytest.mark.parametrize("name", CASES)
def test_fused_modules_compute_the_same(name: str) -> None:
    torch.manual_seed(0)
    make, rules, collectives = CASES[name]
    model = make()
    program = tpplan.compile_plan(model, {"version": 1, "modules": rules}, 2, call(2, 3)[0])
    assert program.count_collectives() == collectives and not program.assumed
    assert max(worst(model, rules, 2, call(2, 3), [call(2, 3)])) < TOLERANCE
