"""What torch's `register_sharding` was given for an operator: read, tried, and used to place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.nn import functional

import tpplan
from tests.ops.operators import Attention, Between, attention, define, with_backward
from tests.runtime.simulated import worst

HEADS: dict[str, Any] = {"q": "colwise", "k": "colwise", "v": "colwise", "o": "rowwise"}
PAIR: dict[str, Any] = {"up": "colwise", "down": "rowwise"}
SCALED: dict[str, Any] = {**PAIR, "scale": "colwise"}
TOLERANCE = 1e-12  # of float64, relative
X = torch.zeros(2, 6, 16)


def operator(name: str, schema: str, function: Callable[..., Tensor], tensors: int, ways: Any) -> Any:
    """An operator with a backward, of which torch alone is told how to split it."""
    made = define(name, schema, function)
    with_backward(made, function, tensors)
    register_sharding(made.default)(ways)
    return made


def by_heads(q: Any, k: Any, v: Any, *others: Any) -> Any:
    whole = ([Replicate()], [Replicate()] * 3 + [None] * len(others))
    return [whole, *(([Shard(dim)], [Shard(dim)] * 3 + [None] * len(others)) for dim in (0, 1))]


ATTENTION = "(Tensor q, Tensor k, Tensor v, bool causal=False) -> Tensor"
attend = operator("placed_attend", ATTENTION, attention, 3, by_heads)


def scale(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight.tanh()


def along_all(x: Any, weight: Any) -> Any:
    last = x.ndim - 1
    return [
        ([Replicate()], [Replicate(), Replicate()]),
        *(([Shard(dim)], [Shard(dim), Replicate()]) for dim in range(last)),
        ([Shard(last)], [Shard(last), Shard(0)]),
        ([Partial()], [Partial(), Replicate()]),
    ]


scaled = operator("placed_scaled", "(Tensor x, Tensor weight) -> Tensor", scale, 2, along_all)


def weigh(x: Tensor, weight: Tensor) -> Tensor:
    return (x * weight).sum(-1, keepdim=True)


weighed = operator(
    "placed_weighed",
    "(Tensor x, Tensor weight) -> Tensor",
    weigh,
    2,
    lambda x, w: [([Partial()], [Shard(-1), Shard(0)])],
)


class Weighs(Between):
    """What an operator sums over split features is added to a stream."""

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = weighed(self.up(x), self.scale)
        return self.down(self.up(x).tanh()) + made


CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], list[int]]] = {
    "heads": (lambda: Attention(attend), HEADS, [2, 4]),
    "queries that share a key": (lambda: Attention(attend, 8, 4), HEADS, [2, 4]),
    "features": (lambda: Between(scaled), SCALED, [2, 3, 4]),
    "a sum": (lambda: Weighs(None), SCALED, [2, 3]),
}


def call(batch: int, length: int) -> Any:
    return (torch.randn(batch, length, 16, generator=torch.Generator().manual_seed(length)).double(),), {}


@pytest.mark.one_in(5)
@pytest.mark.parametrize(("name", "tp"), [(name, tp) for name, case in CASES.items() for tp in case[2]])
def test_what_torch_was_told_is_used(name: str, tp: int) -> None:
    torch.manual_seed(0)
    make, rules, _ = CASES[name]
    model = make().double()
    program = tpplan.compile_plan(model, {"version": 1, "modules": rules}, tp, call(2, 6)[0])
    assert program.count_collectives() == {"all-reduce": 1} and not program.assumed
    assert max(worst(model, rules, tp, call(2, 6), [call(2, 6), call(3, 9)])) < TOLERANCE


def told(name: str, function: Callable[..., Tensor], ways: Any, tensors: int = 2) -> Any:
    schema = f"({', '.join(('Tensor x', 'Tensor weight')[:tensors])}) -> Tensor"
    return operator(name, schema, function, tensors, ways)


def compiled(function: Any, **plan: Any) -> tpplan.Program:
    return tpplan.compile_plan(Between(function), {"version": 1, "modules": SCALED, **plan}, 2, X)


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], weight)


UNTRUE: dict[str, tuple[Callable[..., Tensor], Any, str]] = {
    "a norm of its features": (
        normed, along_all,
        "TP151.*`dim 2 of x and dim 0 of weight` can't be split: the parts' results differ",
    ),
    "a sum that isn't one": (
        lambda x, w: (x * w).relu(),
        lambda x, w: [([Shard(2)], [Shard(2), Shard(0)]), ([Partial()], [Partial(), Replicate()])],
        "TP151.*a sum can't pass through `x`",
    ),
    "a gradient": (
        lambda x, w: x * w.detach(), along_all, "",
    ),
    "a function that raises": (scale, lambda x: [], "TP022.*raises TypeError"),
    "another number": (scale, lambda x, w: [([Shard(2)], [Shard(2)])], "TP022.*tells 1 placements of 2 tensors"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNTRUE)
def test_what_torch_was_told_is_tried_first(name: str) -> None:
    function, ways, message = UNTRUE[name]
    made = told(f"told_{[*UNTRUE].index(name)}", function, ways)
    if not message:
        assert compiled(made).count_collectives() == {"all-reduce": 1}
        return
    with pytest.raises(tpplan.TpplanError, match=message):
        compiled(made)


def test_a_rule_of_tpplan_comes_first() -> None:
    made = told("told_both", scale, lambda x, w: [([Shard(0)], [Shard(0), Shard(0)])])
    assert compiled(made, operators={"tests::told_both": "... f, f -> ... f"}).count_collectives() == {"all-reduce": 1}


def test_what_cant_be_tried_is_assumed() -> None:
    made = define("told_absent", "(Tensor x, Tensor weight) -> Tensor", absent, fake=lambda x, w: torch.empty_like(x))
    with_backward(made, scale, 2)
    register_sharding(made.default)(along_all)
    program = compiled(made)
    assert program.count_collectives() == {"all-reduce": 1}
    assert len(program.assumed) == 4
    shown = "tests::told_absent: Shard(2), Shard(0) -> Shard(2) (it can't run on cpu here (no GPU here))"
    assert shown in program.assumed


def absent(x: Tensor, weight: Tensor) -> Tensor:
    raise RuntimeError("no GPU here")


@pytest.fixture
def softmax_along_its_dim() -> Any:
    """Torch is told of one of its own operators, falsely."""
    target = torch.ops.aten._softmax.default
    known = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
    before = known[target]
    register_sharding(target)(lambda x, dim, half: [([Shard(d)], [Shard(d), None, None]) for d in range(x.ndim)])
    yield
    known[target] = before


@pytest.mark.usefixtures("softmax_along_its_dim")
def test_what_torch_was_told_of_its_own_operators_is_tried_as_well() -> None:
    with pytest.raises(tpplan.OperatorRuleError, match=r"TP151.*aten::_softmax.*`dim 2 of self` can't be split"):
        compiled(lambda x, weight: x.softmax(-1) * weight)
