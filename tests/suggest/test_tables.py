"""Large tables are split, whether their rows are named by the call, by positions that the model makes, or by bags."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tpplan
from tests.runtime.simulated import Call, worst
from tpplan.api import suggest_text
from tpplan.plan import CompileError

WIDTH, ROWS = 16, 600


class Shifted(nn.Embedding):
    """A table whose first rows are for something else."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input + 2)


class Positions(nn.Module):
    """A stream of tokens and positions, and a pair of linear layers."""

    def __init__(self, kind: type[nn.Embedding] = nn.Embedding, rows: int = ROWS) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(64, WIDTH), kind(rows, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        return x + self.down(self.up(x).relu())


class Bags(nn.Module):
    """Dense features and two tables of categories, whose products by pairs a second network reads."""

    def __init__(self, mode: Any) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, WIDTH))
        self.tables = nn.ModuleList(nn.EmbeddingBag(ROWS, WIDTH, mode=mode) for _ in range(2))
        self.top = nn.Sequential(nn.Linear(WIDTH + 9, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x: Tensor, one: Tensor, other: Tensor) -> Tensor:
        dense = self.bottom(x)
        rows = torch.stack([dense, self.tables[0](one), self.tables[1](other)], 1)
        return self.top(torch.cat([dense, (rows @ rows.transpose(1, 2)).flatten(1)], -1))


class Weighted(nn.Module):
    """Bags by their starts, whose rows are weighted by the call."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(ROWS, WIDTH, mode="sum", **options)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, ids: Tensor, starts: Tensor, weights: Tensor) -> Tensor:
        return self.down(self.up(self.table(ids, starts, weights)).relu())


def tokens(batch: int, length: int) -> Call:
    return (torch.randint(0, 64, (batch, length)),), {}


def categories(batch: int, length: int) -> Call:
    x = torch.randn(batch, 5, dtype=torch.float64, requires_grad=True)
    return (x, torch.randint(0, ROWS, (batch, length)), torch.randint(0, ROWS, (batch, 2 * length))), {}


def weighted(count: int) -> Call:
    weights = torch.randn(count, dtype=torch.float64, requires_grad=True)
    return (torch.randint(0, ROWS, (count,)), torch.tensor([0, 2, 2, 5]), weights), {}


@pytest.mark.parametrize("tp", [2, 4])
def test_a_table_of_positions_is_split_by_rows_if_it_is_large(tp: int) -> None:
    model, calls = Positions().double(), [tokens(3, 6), tokens(2, 9)]
    plan = suggest_text(model, tp, inputs=calls[0][0])
    assert '"{tokens,places}": vocab' in plan
    program = tpplan.compile_plan(model, plan, tp, calls[0][0])
    assert program.count_collectives() == {"all-reduce": 3}  # both tables share one reduction
    assert max(worst(model, plan, tp, calls[0], calls)) < 1e-12


def test_a_small_one_stays_whole() -> None:
    text = suggest_text(Positions(rows=32).double(), 2, inputs=tokens(3, 6)[0])
    assert "places: vocab" not in text and "it is small" in text


def test_a_table_that_does_more_than_look_up_is_split_by_columns() -> None:
    model, calls = Positions(Shifted).double(), [tokens(3, 6), tokens(2, 9)]
    plan = suggest_text(model, 2, inputs=calls[0][0])
    assert "places: {style: colwise, output: replicate}" in plan
    assert max(worst(model, plan, 2, calls[0], calls)) < 1e-12


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.one_in(5)
def test_tables_of_bags_are_split_by_columns(mode: str, tp: int) -> None:
    model, calls = Bags(mode).double(), [categories(3, 4), categories(5, 1)]
    plan = suggest_text(model, tp, inputs=calls[0][0])
    assert "tables.*: {style: colwise, output: replicate}" in plan
    assert max(worst(model, plan, tp, calls[0], calls)) < 1e-12


@pytest.mark.parametrize("options", [{}, {"padding_idx": 3}, {"include_last_offset": True}])
def test_weights_of_rows_get_their_whole_gradient(options: dict[str, Any]) -> None:
    model, calls = Weighted(**options).double(), [weighted(9), weighted(7)]
    plan = {"table": {"style": "colwise", "output": "replicate"}, "up": "colwise", "down": "rowwise"}
    assert max(worst(model, plan, 2, calls[0], calls)) < 1e-12


@pytest.mark.parametrize("options", [{"max_norm": 1.0}, {"sparse": True}])
def test_what_needs_whole_rows_is_refused_and_suggested_whole(options: dict[str, Any]) -> None:
    model, (inputs, _) = Weighted(**options).double(), weighted(9)
    with pytest.raises(CompileError, match="TP112"):
        tpplan.compile_plan(model, {"version": 1, "modules": {"table": "colwise"}}, 2, inputs)
    assert "table:" not in suggest_text(model, 2, inputs=inputs)


class Padded(nn.Module):
    """A row of the table stands in for tokens that have none, and is read without a call."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(64, 16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.where((ids == 7)[..., None], self.table.weight[0], self.table(ids))
        return self.down(self.up(x).relu())


def test_a_row_that_is_read_without_a_call_is_told() -> None:
    ids = torch.arange(12).reshape(2, 6)
    rules = {"table": "vocab", "up": "colwise", "down": "rowwise"}
    with pytest.raises(CompileError, match="reads entries of the weight of `table` itself"):
        tpplan.compile_plan(Padded(), {"version": 1, "modules": rules}, 2, (ids,))
    del rules["table"]  # as the help says
    tpplan.compile_plan(Padded(), {"version": 1, "modules": rules}, 2, (ids,))
