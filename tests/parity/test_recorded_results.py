"""Bodies that run from their records, and hand out tensors in objects of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import tpplan

WIDTH, HEADS = 16, 4


@dataclass
class Scores:
    before: Tensor | None = None
    after: Tensor | None = None
    heads: int = 0


class Made(NamedTuple):
    out: Tensor
    scores: Scores


class Attend(nn.Module):
    """With one head it goes another way: on as many ranks as heads it has to run from its record."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Made:
        if k.shape[1] == 1:
            k, v = k[:, 0].unsqueeze(1).expand_as(q), v[:, 0].unsqueeze(1).expand_as(q)
        before = torch.einsum("bhid,bhjd->bhij", q, k)
        after = before.softmax(-1)
        return Made(torch.einsum("bhij,bhjd->bhid", after, v), Scores(before, after, 7))


class Attention(nn.Module):
    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.attend, self.reads = Attend(), reads

    def forward(self, x: Tensor) -> tuple[Tensor, Scores]:
        q, k, v = (layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        out, scores = self.attend(q, k, v)
        if self.reads:
            assert scores.after is not None
            out = out * scores.after.sum(-1, keepdim=True) * scores.heads
        return self.out(out.transpose(1, 2).flatten(2)), scores


class Net(nn.Module):
    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.attention = Attention(reads)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        made, scores = self.attention(x)
        return x + made, scores.before if self.attention.reads else None


@pytest.mark.parametrize("reads", [False, True])
def test_records_make_objects_like_those_of_the_body(reads: bool) -> None:
    torch.manual_seed(0)
    plan = {"version": 1, "modules": {"attention.{q,k,v}": "colwise", "attention.out": "rowwise"}}
    x = torch.randn(2, 6, WIDTH, dtype=torch.float64)
    model = Net(reads).double()
    program = tpplan.compile_plan(model, plan, HEADS, (x,))
    assert program.count_collectives(backward=False) == {"all-reduce": 1} | ({"all-gather": 1} if reads else {})
    report = tpplan.verify(model, plan, HEADS, (x,))
    assert report.ok
    assert report.collectives == report.predicted
