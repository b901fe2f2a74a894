"""One projection of all queries, a key and a value, that the body picks apart by numbers, as Falcon does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tpplan
from tpplan.api import suggest_text
from tpplan.compiler.rules.packed import picked_stretch

WIDTH, HEADS = 32, 4
SIZE = WIDTH // HEADS
ACTIVATIONS = (torch.randn(3, 5, WIDTH, requires_grad=True),)
PLAN = {"version": 1, "modules": {"all": {"style": "colwise", "packed": {"q": WIDTH, "k": SIZE, "v": SIZE}},
                                  "out": "rowwise"}}  # fmt: skip


class Attention(nn.Module):
    """The key and the value are the two heads behind the queries', picked by lists of numbers."""

    def __init__(self, key: int = -2, value: int = -1) -> None:
        super().__init__()
        self.heads, self.key, self.value = HEADS, [key], [value]
        self.all, self.out = nn.Linear(WIDTH, WIDTH + 2 * SIZE), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made = self.all(x).view(*x.shape[:2], self.heads + 2, SIZE)
        q, k, v = (m.transpose(1, 2) for m in (made[..., :-2, :], made[..., self.key, :], made[..., self.value, :]))
        mixed = functional.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("key", "value"), [(-2, -1), (-1, -2)])
def test_heads_picked_from_the_end_are_those_of_every_rank(ranks: int, key: int, value: int) -> None:
    report = tpplan.verify(Attention(key, value), tpplan.load_plan(PLAN), ranks, inputs=ACTIVATIONS)
    assert report.ok, report.problems


def test_the_plan_writes_itself() -> None:
    text = suggest_text(Attention(), 2, False, ACTIVATIONS)
    assert f"packed: {{q: {WIDTH}, k: {SIZE}, v: {SIZE}}}" in text


def test_heads_picked_from_the_front_are_refused() -> None:
    """With half of the queries, a rank's key is another entry; meta tensors take numbers out of their bounds."""
    with pytest.raises(tpplan.CompileError) as caught:
        tpplan.compile_plan(Attention(HEADS), tpplan.load_plan(PLAN), 2, ACTIVATIONS)
    assert caught.value.diagnostics[0].code in ("TP104", "TP107")


def test_entries_that_do_not_follow_one_another_are_no_stretch() -> None:
    assert picked_stretch((-2, -1), 6) == (4, 2)
    assert picked_stretch((1, 3), 6) is None
    assert picked_stretch(None, 6) is None
