"""Suggestions beside parameters that a body computes with, and calls whose results nobody reads."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.runtime.simulated import worst
from tpplan.api import suggest_text

WIDTH, HEADS = 24, 4


class Cosine(nn.Module):
    """Scores of unit vectors, by a factor for each head that is clamped and raised."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.heads = HEADS
        self.scale = nn.Parameter(torch.linspace(1.0, 6.0, HEADS).view(HEADS, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for m in (self.q, self.k, self.v))
        scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-1, -2)
        scores = scores * torch.clamp(self.scale, max=math.log(100)).exp()
        return x + self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Unread(nn.Module):
    """A layer and a table, called a first time for nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.table = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH), nn.Embedding(5, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.up(x)
        self.table(torch.arange(3, device=x.device))
        return x + self.down(self.up(x).relu())


def sharded(model: nn.Module) -> str:
    """The suggested plan of a model, which is right."""
    torch.manual_seed(0)
    model, x = model.double(), torch.randn(2, 6, WIDTH, dtype=torch.float64)
    plan = suggest_text(model, 2, inputs=(x,))
    assert max(worst(model, plan, 2, ((x,), {}), [((x,), {})])) < 1e-12
    return plan


def test_a_factor_by_head_is_split_whatever_is_done_to_each_entry() -> None:
    plan = sharded(Cosine())
    assert "scale}\": colwise" in plan
    assert "o: rowwise" in plan


def test_layers_whose_first_results_nobody_reads_are_a_pair() -> None:
    assert "down: rowwise" in sharded(Unread())
