"""Bodies that read a whole value twice: beside split features, and for a result of its own, such as a balancing loss.

Its gradient is partial by the one and whole by the other. What is whole counts on the first rank alone, as it leaves.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tpplan
from tpplan.api import suggest_text
from tpplan.compiler.ir.layout import Collective

WIDTH, EXPERTS = 16, 4
PLAN: dict[str, Any] = {"version": 1, "modules": {"moe.up": "colwise", "moe.down": "rowwise"}}


class Experts(nn.Module):
    """Switch Transformer (Fedus et al., 2021): each expert takes a number of tokens, and a loss balances them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 32) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, 32, WIDTH) / 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x.flatten(0, 1)
        chances = functional.softmax(self.gate(tokens), -1)
        weight, chosen = chances.max(-1)
        hits = functional.one_hot(chosen, EXPERTS).to(x.dtype)
        place = (torch.cumsum(hits, 0) * hits).sum(-1).long()
        sent = hits[:, :, None] * functional.one_hot(place, len(tokens) + 1).to(x.dtype)[:, None]
        inner = functional.relu(torch.einsum("tec,td,edf->ecf", sent, tokens, self.up))
        made = torch.einsum("tec,ecd->td", sent * weight[:, None, None], torch.einsum("ecf,efd->ecd", inner, self.down))
        return made.view_as(x), (hits.mean(0) * chances.mean(0)).sum()


class Balanced(nn.Module):
    """The loss leaves the model, is added to another, or takes part in what follows."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.use, self.norm, self.moe = use, nn.LayerNorm(WIDTH), Experts()

    def forward(self, x: Tensor) -> Any:
        made, loss = self.moe(self.norm(x))
        if self.use == "returned":
            return x + made, loss
        return (x + made).square().mean() + 0.1 * loss if self.use == "added" else (x + made) * (1 + loss)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("use", ["returned", "added", "scaling"])
def test_a_loss_of_what_experts_are_weighed_by_is_the_unsharded_models(use: str, size: int) -> None:
    torch.manual_seed(0)
    model, inputs = Balanced(use), (torch.randn(2, 6, WIDTH),)
    report = tpplan.verify(model, PLAN, size, inputs)
    assert report.ok, report.problems
    moved = [r for _, r in tpplan.compile_plan(model, PLAN, size, inputs).reshards()]
    assert [(str(r.source), str(r.target)) for r in moved if r.backward is Collective.FIRST] == [("R·∂P", "R")]


def test_such_experts_are_split_by_themselves() -> None:
    text = suggest_text(Balanced("returned"), 2, inputs=(torch.randn(2, 6, WIDTH),))
    assert "moe.up: colwise\n" in text
    assert "moe.down: rowwise\n" in text
