"""Modules of which a call picks one by a number among its arguments: those left out are split like that one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.runtime.simulated import Call, worst
from tpplan.plan import CompileError
from tpplan.suggest import search, write_plan
from tpplan.suggest.sharded_share import model_share

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
@pytest.mark.one_in(3)
def test_what_a_call_leaves_out_is_split_like_what_it_picks(tp: int) -> None:
    model, calls = Picking().double(), [call(1), call(0), call(2, 5), call(1)]
    found = search(model, tp, calls[0][0], {}, False)
    assert model_share(found.program).percent > 99
    assert max(worst(model, write_plan(found, "plan"), tp, calls[0], calls)) < 1e-12


class Stacked(nn.Module):
    """Experts one below the other, of which those that are hit are picked by number; one class stands for none."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.up, self.down = nn.Parameter(torch.randn(4 * 16, WIDTH) / 8), nn.Parameter(torch.randn(4 * 16, WIDTH) / 8)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, best = self.gate(flat).softmax(-1).topk(1)
        mask = functional.one_hot(best, 5).permute(2, 1, 0)
        made = torch.zeros_like(flat)
        for number in mask.sum((-1, -2)).gt(0).nonzero():
            place, token = torch.where(mask[number[0]])
            up, down = (held.view(4, 16, WIDTH)[number[0]] for held in (self.up, self.down))
            made.index_add_(0, token, (flat[token] @ up.t()).relu() @ down * weights[token, place, None])
        return made.view_as(x)


class WithStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.stack = Expert(), Stacked()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return x + self.stack(x)


@pytest.mark.slow
def test_rows_of_a_matrix_are_picked_by_what_is_found() -> None:
    torch.manual_seed(0)
    model = WithStack().double()
    calls = [((torch.randn(2, n, WIDTH, dtype=torch.float64, requires_grad=True),), {}) for n in (6, 1, 5)]
    found = search(model, 2, calls[0][0], {}, False)
    assert model_share(found.program).percent > 50
    assert max(worst(model, write_plan(found, "plan"), 2, calls[0], calls)) < 1e-12


class Measured(WithStack):
    """What is found steers more than a choice."""

    def forward(self, x: Tensor) -> Tensor:
        made = super().forward(x)
        return made * made[0, 0].gt(0).nonzero()[0].item()


def test_a_number_that_picks_nothing_is_refused_where_it_is_read() -> None:
    with pytest.raises(CompileError) as raised:
        search(Measured(), 2, (torch.randn(2, 6, WIDTH),), {}, False)
    (finding,) = raised.value.diagnostics
    assert finding.code == "TP110" and "reads a tensor's values" in finding.message
