"""Tables split by rows that bodies look up in themselves: bare parameters, and those of bags."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tpplan
from tests.runtime.simulated import Call, worst
from tpplan.api import suggest_text
from tpplan.parity.verification import verify_program
from tpplan.plan import CompileError

ROWS, WIDTH = 90, 16


class Read(nn.Module):
    """A stream of rows of a bare table, and a pair of linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(ROWS, WIDTH))
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def look_up(self, ids: Tensor) -> Tensor:
        return self.table[ids]

    def forward(self, ids: Tensor) -> Tensor:
        x = self.look_up(ids)
        return x + self.down(self.up(x).relu())


def tokens(*shape: int) -> Call:
    return (torch.randint(0, ROWS, shape),), {}


def test_rows_may_be_picked_by_numbers_of_several_dims() -> None:
    model, calls = Read().double(), [tokens(3, 4), tokens(2, 5)]
    assert max(worst(model, suggest_text(model, 2, inputs=calls[0][0]), 2, calls[0], calls)) < 1e-12


LOOK_UPS: dict[str, Callable[[nn.Parameter, Tensor], Tensor]] = {
    "embedding": lambda table, ids: functional.embedding(ids, table),
    "padding": lambda table, ids: functional.embedding(ids, table, padding_idx=-3),
    "by name": lambda table, ids: functional.embedding(weight=table, input=ids, padding_idx=2),
    "torch's": lambda table, ids: torch.embedding(table, ids),
    "index": lambda table, ids: table[ids],
    "from the end": lambda table, ids: table[ids - 40],
    "select": lambda table, ids: table.index_select(0, ids.flatten()).view(*ids.shape, -1),
    "twice": lambda table, ids: table[ids] + functional.embedding(ids.flip(1), table),
    "bag": lambda table, ids: functional.embedding_bag(ids, table)[:, None],
    "beside a whole one": lambda table, ids: table[ids] + torch.ones(9, WIDTH, dtype=table.dtype)[ids % 9],
    "beside others": lambda table, ids: table[ids][:, [0, -1]] * table[ids[:, :1]].sigmoid(),
}


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("way", LOOK_UPS)
@pytest.mark.one_in(8)
def test_a_bare_table_is_split_by_rows(way: str, tp: int) -> None:
    class Model(Read):
        def look_up(self, ids: Tensor) -> Tensor:
            return LOOK_UPS[way](self.table, ids)

    model, calls = Model().double(), [tokens(3, 4), tokens(2, 5), tokens(1, 2)]
    plan = {"table": "vocab", "up": "colwise", "down": "rowwise"}
    program = tpplan.compile_plan(model, {"version": 1, "modules": plan}, tp, calls[0][0])
    assert [p.layout.dim for p in program.parameters if p.name == "table"] == [0]
    assert max(worst(model, plan, tp, calls[0], calls)) < 1e-12


@pytest.mark.parametrize("tp", [2, 4])
def test_a_head_may_share_a_bare_table(tp: int) -> None:
    class Tied(Read):
        def forward(self, ids: Tensor) -> Tensor:
            return functional.linear(super().forward(ids), self.table)

    model, calls = Tied().double(), [tokens(3, 4), tokens(2, 5)]
    plan = {"table": "vocab", "up": "colwise", "down": "rowwise"}
    assert max(worst(model, plan, tp, calls[0], calls)) < 1e-12


def test_a_number_that_no_rank_has_raises_on_all_as_in_the_stock_model() -> None:
    model, calls = Read().double(), [tokens(3, 4), ((torch.full((3, 4), ROWS),), {})]
    with pytest.raises(Exception, match="index out of range"):
        worst(model, {"table": "vocab"}, 2, calls[0], calls)


@pytest.mark.parametrize("name", ["up.bias", "up.weight"])
def test_a_parameter_in_which_nobody_looks_up_is_no_table(name: str) -> None:
    with pytest.raises(CompileError, match="no body of the model looks up rows"):
        tpplan.compile_plan(Read(), {"version": 1, "modules": {name: "vocab"}}, 2, tokens(3, 4)[0])


# -- bags -------------------------------------------------------------------------------------------------------------
class Bags(nn.Module):
    """Bags of a table, and what is made of them."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table, self.out = nn.EmbeddingBag(ROWS, WIDTH, **options), nn.Linear(WIDTH, 4)

    def forward(self, ids: Tensor, starts: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        return self.out(self.table(ids, starts, None if weights is None else weights.sigmoid()))


def bags(count: int, starts: list[int], weighs: bool = False) -> Call:
    weights = torch.randn(count, dtype=torch.float64, requires_grad=True) if weighs else None
    return (torch.randint(0, ROWS, (count,)), torch.tensor(starts), weights), {}


OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "mean without padding": {"padding_idx": 3},
    "sum": {"mode": "sum"},
    "sum without padding": {"mode": "sum", "padding_idx": -2},
}


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.one_in(6)
def test_bags_are_split_by_rows(options: str, tp: int) -> None:
    model, last = Bags(**OPTIONS[options]).double(), Bags(**OPTIONS[options], include_last_offset=True).double()
    calls = [bags(9, [0, 2, 2, 5]), bags(5, [0, 1]), ((torch.tensor([3, 3, ROWS - 2, 5]), torch.tensor([0, 2])), {})]
    assert max(worst(model, {"table": "vocab"}, tp, calls[0], calls)) < 1e-12
    calls = [bags(9, [0, 2, 2, 5, 9]), bags(5, [0, 5])]
    assert max(worst(last, {"table": "vocab"}, tp, calls[0], calls)) < 1e-12
    calls = [tokens(3, 4), tokens(2, 1)]
    assert max(worst(model, {"table": "vocab"}, tp, calls[0], calls)) < 1e-12


@pytest.mark.parametrize("options", ["sum", "sum without padding"])
def test_weights_of_rows_get_their_whole_gradient_from_all_ranks(options: str) -> None:
    model, calls = Bags(**OPTIONS[options]).double(), [bags(9, [0, 2, 2, 5], weighs=True), bags(5, [0, 1], weighs=True)]
    assert max(worst(model, {"table": "vocab"}, 3, calls[0], calls)) < 1e-12


def test_frozen_bags_are_split_too() -> None:
    model, calls = Bags().double(), [bags(9, [0, 2, 2, 5]), bags(5, [0, 1])]
    model.table.requires_grad_(False)
    for style in ("vocab", "colwise"):
        assert max(worst(model, {"table": style}, 2, calls[0], calls)) < 1e-12


def test_infinite_rows_of_other_ranks_stay_where_they_are() -> None:
    model = Bags(mode="sum").double()
    with torch.no_grad():
        model.table.weight[[0, 44, 45, -1]] = torch.inf
    call = ((torch.tensor([7, 50, 60, 8]), torch.tensor([0, 2])), {})
    assert max(worst(model, {"table": "vocab"}, 2, call, [call])) < 1e-12


@pytest.mark.parametrize(
    "options", [{"mode": "max"}, {"max_norm": 1.0}, {"sparse": True}, {"scale_grad_by_freq": True}]
)
def test_bags_that_need_all_rows_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(CompileError, match="TP112"):
        tpplan.compile_plan(Bags(**options), {"version": 1, "modules": {"table": "vocab"}}, 2, tokens(3, 4)[0])


@pytest.mark.parametrize("table", [{}, {"table": {"style": "replicate", "output": "sequence"}}])
def test_a_whole_table_with_sparse_gradients_has_the_same_ones_dense(table: dict[str, Any]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(ROWS, WIDTH, sparse=True)
            self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

        def forward(self, ids: Tensor) -> Tensor:
            return self.down(self.up(self.table(ids)).relu())

    model, call = Model().double(), tokens(3, 4)
    plan = {"version": 1, "modules": table | {"up": "colwise", "down": "rowwise"}}
    program = tpplan.compile_plan(model, plan, 2, call[0])
    assert verify_program(model, program, call).max_error < 1e-12
