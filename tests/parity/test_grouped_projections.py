"""One projection of groups, each of them some queries with their key and value, on more ranks than there are groups."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tpplan
from tpplan.api import suggest_text
from tpplan.suggest.sharded_share import block_share

WIDTH, HEADS, GROUPS = 64, 8, 2
SIZE, QUERIES = WIDTH // HEADS, HEADS // GROUPS
ACTIVATIONS = (torch.randn(3, 5, WIDTH, requires_grad=True),)
PLAN = "version: 1\nmodules:\n  all: colwise\n  out: rowwise\n"
Parts = tuple[Tensor, Tensor, Tensor]


class Attention(nn.Module):
    """Takes its projection apart in one of several ways, and gives each query its group's key and value."""

    def __init__(self, take: Callable[[Attention, Tensor], Parts], queries: int = QUERIES) -> None:
        super().__init__()
        self.heads, self.groups, self.take = GROUPS * queries, GROUPS, take
        self.all = nn.Linear(WIDTH, GROUPS * (queries + 2) * SIZE)
        self.out = nn.Linear(GROUPS * queries * SIZE, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.take(self, self.all(x))
        repeats = self.heads // self.groups
        if k.shape[2] != q.shape[2]:
            k, v = (t[:, :, :, None].expand(-1, -1, -1, repeats, -1).flatten(2, 3) for t in (k, v))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


def by_numbers(module: Attention, made: Tensor) -> Parts:
    made = made.view(*made.shape[:2], -1, module.heads // module.groups + 2, SIZE)
    q, k, v = made[:, :, :, :-2], made[:, :, :, [-2]], made[:, :, :, [-1]]
    q, k, v = (t.flatten(2, 3) for t in (q, k.broadcast_to(q.shape), v.broadcast_to(q.shape)))
    return q, k, v


def by_place(module: Attention, made: Tensor) -> Parts:
    queries = module.heads // module.groups
    made = made.unflatten(-1, (module.groups, queries + 2, SIZE))
    return made[..., :queries, :].flatten(2, 3), made[..., -2, :], made[..., -1, :]


def by_parts(module: Attention, made: Tensor) -> Parts:
    queries = module.heads // module.groups
    made = made.view(*made.shape[:2], module.groups, (queries + 2) * SIZE)
    q, k, v = made.split([queries * SIZE, SIZE, SIZE], dim=3)
    return q.reshape(*made.shape[:2], -1, SIZE), k, v


def value_first(module: Attention, made: Tensor) -> Parts:
    queries = module.heads // module.groups
    made = made.view(*made.shape[:2], module.groups, queries + 2, SIZE)
    v, q, k = made.split([1, queries, 1], dim=3)
    return q.flatten(2, 3), k.flatten(2, 3), v.flatten(2, 3)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("take", [by_numbers, by_place, by_parts, value_first])
def test_each_group_is_shared_out_among_some_of_the_ranks(take: Callable[..., Parts], ranks: int) -> None:
    report = tpplan.verify(Attention(take), tpplan.load_plan(PLAN), ranks, inputs=ACTIVATIONS)
    assert report.ok, report.problems


def test_three_queries_for_a_rank() -> None:
    report = tpplan.verify(Attention(by_place, 6), tpplan.load_plan(PLAN), 4, inputs=ACTIVATIONS)
    assert report.ok, report.problems


def test_queries_that_their_ranks_cannot_share_are_refused() -> None:
    with pytest.raises(tpplan.CompileError) as caught:
        tpplan.compile_plan(Attention(by_numbers, 3), tpplan.load_plan(PLAN), 4, ACTIVATIONS)
    (found,) = caught.value.diagnostics
    assert (found.code, found.span is not None) == ("TP103", True)
    assert "viewed as 2 groups of 3 + 1 + 1 heads" in found.message


def test_the_plan_writes_itself_and_shards_the_projection() -> None:
    model = nn.Sequential(*(Attention(by_place) for _ in range(2)))
    plan = tpplan.load_plan(suggest_text(model, 4, False, ACTIVATIONS))
    program = tpplan.compile_plan(model, plan, 4, ACTIVATIONS)
    assert block_share(program).percent > 95
