"""Parameters that a body multiplies by itself: experts in stacked weights, and projections that nobody calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tpplan
from tpplan import load_plan
from tpplan.api import suggest_text
from tpplan.plan import CompileError
from tpplan.runtime.parameters.handed_out import OnceReader

WIDTH, INNER, EXPERTS = 16, 24, 4
ACTIVATIONS = (torch.randn(3, 5, WIDTH, requires_grad=True),)


class StackedExperts(nn.Module):
    """Every expert sees every token; a router weighs their results."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.randn(EXPERTS, WIDTH))
        self.gate_up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * INNER) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) / 4)
        self.gate_up_bias = nn.Parameter(torch.randn(EXPERTS, 1, 2 * INNER)) if bias else None
        self.down_bias = nn.Parameter(torch.randn(EXPERTS, 1, WIDTH)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        weights = functional.linear(tokens, self.router).softmax(-1)
        made = torch.bmm(tokens.unsqueeze(0).expand(EXPERTS, -1, -1), self.gate_up)
        made = made if self.gate_up_bias is None else made + self.gate_up_bias
        gate, up = made.chunk(2, dim=-1)
        made = torch.bmm(functional.silu(gate) * up, self.down)
        made = made if self.down_bias is None else made + self.down_bias
        return (made * weights.t().unsqueeze(-1)).sum(0).view_as(x)


class Block(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.experts = StackedExperts(bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.experts(self.norm(x))


class Uncalled(nn.Module):
    """Its layers only hold parameters: the body multiplies by them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.linear(x, self.up.weight, self.up.bias).relu()
        return functional.linear(inner, self.down.weight, self.down.bias)


class Thrice(nn.Module):
    """One block in three places, whose layers only hold parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.ModuleList([Uncalled()] * 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.places:
            x = x + block(x)
        return x


EXPERT_RULES: dict[str, Any] = {
    "experts.gate_up": {"style": "colwise", "packed": ["gate", "up"]},
    "experts.down": "rowwise",
    "experts.gate_up_bias": {"style": "colwise", "packed": ["gate", "up"]},
    "experts.down_bias": "rowwise",
}
PLANS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "experts": (Block, EXPERT_RULES),
    "experts without biases": (
        lambda: Block(bias=False),
        {name: rule for name, rule in EXPERT_RULES.items() if "bias" not in name},
    ),
    "layers that aren't called": (Uncalled, {"up": "colwise", "down": "rowwise"}),
    "layers that aren't called, in several places": (Thrice, {"places.0.up": "colwise", "places.0.down": "rowwise"}),
}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", PLANS)
def test_it_computes_the_same(name: str, size: int) -> None:
    make, rules = PLANS[name]
    report = tpplan.verify(make(), {"version": 1, "modules": rules}, size, ACTIVATIONS)
    assert report.ok, report.problems


@pytest.mark.processes
def test_on_processes() -> None:
    report = tpplan.verify(Block(), {"version": 1, "modules": EXPERT_RULES}, 2, ACTIVATIONS, processes=True)
    assert report.ok, report.problems


def test_experts_take_one_reduction_each_way() -> None:
    program = tpplan.compile_plan(Block(bias=False), {"version": 1, "modules": PLANS["experts without biases"][1]}, 2,
                                  ACTIVATIONS)  # fmt: skip
    assert program.count_collectives() == {"all-reduce": 3}  # forward, backward, and once for the router's gradient
    shapes = {p.name: p.local_shape for p in program.parameters}
    assert shapes["experts.gate_up"] == (EXPERTS, WIDTH, INNER)
    assert shapes["experts.down"] == (EXPERTS, INNER // 2, WIDTH)


def test_a_bias_that_every_rank_adds_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OnceReader, "__call__", lambda self, parameter: self._read(parameter))
    for name in ("experts", "layers that aren't called"):
        make, rules = PLANS[name]
        assert not tpplan.verify(make(), {"version": 1, "modules": rules}, 2, ACTIVATIONS).ok


@pytest.mark.parametrize("make", [Block, Uncalled])
def test_a_plan_writes_itself(make: Callable[[], nn.Module]) -> None:
    model = make()
    text = suggest_text(model, 2, False, ACTIVATIONS)
    program = tpplan.compile_plan(model, load_plan(text), 2, ACTIVATIONS)
    whole = sorted(p.name for p in program.parameters if not p.layout.is_sharded)
    assert whole == (
        ["experts.down_bias", "experts.router", "norm.bias", "norm.weight"] if make is Block else ["down.bias"]
    )
    assert tpplan.verify(model, load_plan(text), 2, ACTIVATIONS).ok


def test_a_parameter_that_no_product_reads_is_refused() -> None:
    with pytest.raises(CompileError, match=r"TP101 .* `norm` reads `norm\.weight` by aten\.native_layer_norm"):
        tpplan.compile_plan(Block(), {"version": 1, "modules": {"norm.weight": "rowwise"}}, 2, ACTIVATIONS)
    with pytest.raises(CompileError, match=r"TP101 .* `experts\.down` is a parameter"):
        tpplan.compile_plan(Block(), {"version": 1, "modules": {"experts.down": "sequence"}}, 2, ACTIVATIONS)
