"""Masks that a model makes of Python's numbers, and hands to a body that has to run from its record."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tpplan
from tests.runtime.simulated import Call, worst

WIDTH, HEADS = 32, 4
PLAN = {"attention.{q,k,v}": "colwise", "attention.o": "rowwise"}


def causal(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


MASKS: dict[str, Callable[[int], Tensor]] = {
    "made anew": causal,
    "kept": functools.lru_cache(causal),
    "of three dims": lambda length: causal(length)[None],
}


class Attention(nn.Module):
    """Attention whose number of heads no attribute holds."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (part(x).view(*x.shape[:2], HEADS, -1).transpose(1, 2) for part in (self.q, self.k, self.v))
        made = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o(made.transpose(1, 2).reshape(x.shape))


class Masked(nn.Module):
    """Attention under a mask that the model makes; with padding, if there is any."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.attention, self.kind = Attention(), kind

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        mask = MASKS[self.kind](x.shape[1])
        if padding is not None and not padding.all():
            mask = mask & padding[:, None, None]
        return x + self.attention(x, mask)


def x_of(batch: int, length: int) -> Tensor:
    return torch.randn(batch, length, WIDTH, dtype=torch.float64, requires_grad=True)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("kind", MASKS)
def test_a_mask_of_pythons_numbers_is_no_obstacle_to_a_record(kind: str, tp: int) -> None:
    model, calls = Masked(kind).double(), [((x_of(3, 6),), {}), ((x_of(2, 5),), {})]
    program = tpplan.compile_plan(model, {"version": 1, "modules": PLAN}, tp, calls[0][0])
    assert program.count_collectives() == {"all-reduce": 2}
    assert max(worst(model, PLAN, tp, calls[0], calls)) < 1e-12


def test_the_side_of_a_branch_that_takes_such_a_mask_is_proved() -> None:
    some, every = torch.tensor([[True] * 6, [True] * 4 + [False] * 2]), torch.ones(2, 6, dtype=torch.bool)
    calls: list[Call] = [((x_of(2, 6), some), {}), ((x_of(2, 6), every), {}), ((x_of(2, 6), some), {})]
    assert max(worst(Masked("made anew").double(), PLAN, 2, calls[0], calls)) < 1e-12
