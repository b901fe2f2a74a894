"""Modules of which a call picks one by a number among its arguments: those left out are split like that one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.runtime.simulated import Call, worst
from tpplan.suggest import search, write_plan
from tpplan.suggest.share import model_share

WIDTH, HEADS = 32, 4


class Expert(nn.Module):
    """Attention and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        x = x + self.o(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(self.up(x).relu())


class Picking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(3))

    def forward(self, x: Tensor, number: Tensor) -> Tensor:
        return self.experts[int(number)](x)


def call(number: int, length: int = 6) -> Call:
    return (torch.randn(2, length, WIDTH, dtype=torch.float64, requires_grad=True), torch.tensor(number)), {}


@pytest.mark.parametrize("tp", [2, 3])
def test_what_a_call_leaves_out_is_split_like_what_it_picks(tp: int) -> None:
    model, calls = Picking().double(), [call(1), call(0), call(2, 5), call(1)]
    found = search(model, tp, calls[0][0], {}, False)
    assert model_share(found.program).percent > 99
    assert max(worst(model, write_plan(found, "plan"), tp, calls[0], calls)) < 1e-12
