"""Functions of torch that are recorded as what they consist of: a gated unit by halves, counts, different numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.runtime.simulated import Call, worst
from tpplan.api import suggest_text

WIDTH, INNER, EXPERTS = 16, 48, 4


class Halves(nn.Module):
    """A gated unit between two layers."""

    def __init__(self, gate: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * INNER), nn.Linear(INNER, WIDTH)
        self.gate = gate

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.gate(self.up(x)))


class Sorted(nn.Module):
    """Tokens in the order of their experts, cut by how many each has."""

    def __init__(self, method: bool) -> None:
        super().__init__()
        self.router, self.method = nn.Linear(WIDTH, EXPERTS), method
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, INNER), nn.ReLU(), nn.Linear(INNER, WIDTH)) for _ in range(EXPERTS)
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(2, -1)
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        counts = flat.bincount(minlength=EXPERTS) if self.method else torch.bincount(flat, minlength=EXPERTS)
        parts = tokens[order // 2].split(counts.tolist())
        made = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        weighed = made * weights.flatten()[order].unsqueeze(-1)
        return torch.zeros_like(tokens).index_add(0, order // 2, weighed).view_as(x)


def stream(batch: int, length: int) -> Call:
    return (torch.randn(batch, length, WIDTH, dtype=torch.float64, requires_grad=True),), {}


class Distinct(nn.Module):
    """A loop over the experts that any token goes to."""

    def __init__(self, chosen: Callable[[Tensor], tuple[Tensor, Tensor]], listed: bool) -> None:
        super().__init__()
        self.router, self.chosen, self.listed = nn.Linear(WIDTH, EXPERTS), chosen, listed
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, INNER), nn.ReLU(), nn.Linear(INNER, WIDTH)) for _ in range(EXPERTS)
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.chosen(self.router(tokens).softmax(-1))
        made = torch.zeros_like(tokens)
        for number in chosen.unique().tolist() if self.listed else torch.unique(chosen):
            mask = chosen == number
            rows = mask if mask.dim() == 1 else mask.any(-1)
            share = (weights * mask).view(len(tokens), -1).sum(-1, keepdim=True)
            made[rows] += self.experts[number](tokens[rows]) * share[rows]
        return made.view_as(x)


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("gate", [functional.glu, nn.GLU(), lambda x: functional.glu(x.transpose(1, 2), 1).mT])
@pytest.mark.one_in(5)
def test_a_gated_unit_is_split_by_halves(gate: Callable[[Tensor], Tensor], tp: int) -> None:
    model, calls = nn.Sequential(Halves(gate), Halves(gate)).double(), [stream(2, 6), stream(3, 5)]
    plan = suggest_text(model, tp, inputs=calls[0][0])
    assert "packed: [gate, up]" in plan
    assert max(worst(model, plan, tp, calls[0], calls)) < 1e-12


@pytest.mark.parametrize("method", [True, False])
def test_experts_whose_tokens_are_counted_are_split(method: bool) -> None:
    model, calls = nn.Sequential(Sorted(method)).double(), [stream(2, 6), stream(3, 5), stream(1, 1)]
    plan = suggest_text(model, 2, inputs=calls[0][0])
    assert "experts.*.0" in plan
    assert max(worst(model, plan, 2, calls[0], calls)) < 1e-12


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("chosen", [lambda p: p.max(-1), lambda p: p.topk(2, -1)])
@pytest.mark.one_in(3)
def test_experts_whose_numbers_are_found_once_each_are_split(
    chosen: Callable[[Tensor], tuple[Tensor, Tensor]], listed: bool
) -> None:
    model, calls = nn.Sequential(Distinct(chosen, listed)).double(), [stream(2, 6), stream(3, 5), stream(1, 1)]
    plan = suggest_text(model, 2, inputs=calls[0][0])
    assert "experts.*.0" in plan
    assert max(worst(model, plan, 2, calls[0], calls)) < 1e-12
