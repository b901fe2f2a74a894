"""Operators with rules in models: equal to the stock ones, with the collectives of what torch's own would take."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tpplan
from tests.ops.operators import Attention, Between, attention, define, with_backward
from tests.runtime.simulated import worst

HEADS: dict[str, Any] = {"q": "colwise", "k": "colwise", "v": "colwise", "o": "rowwise"}
PAIR: dict[str, Any] = {"up": "colwise", "down": "rowwise"}
TOLERANCE = 1e-12  # of float64, relative

attend = define(
    "attend",
    "(Tensor q, Tensor k, Tensor v, bool causal=False) -> Tensor",
    attention,
    fake=lambda q, *_: torch.empty_like(q),
)
with_backward(attend, attention, 3)
tpplan.register_operator(attend, "b (k g) s! d!, b k t! d!, b k t! d! -> b (k g) s! d!")


def scale(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight.tanh()


scaled = define("scaled", "(Tensor x, Tensor weight) -> Tensor", scale)
with_backward(scaled, scale, 2)
tpplan.register_operator("tests::scaled", "... f, f -> ... f")


def mean_scale(x: Tensor, weight: Tensor) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], weight)


normed = define("normed", "(Tensor x, Tensor weight) -> Tensor", mean_scale)
with_backward(normed, mean_scale, 2)
tpplan.register_operator("tests::normed", "... f!, f! -> ... f!")


def product(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.t()


projected = define("projected", "(Tensor x, Tensor weight) -> Tensor", product)
with_backward(projected, product, 2)
tpplan.register_operator("tests::projected", "... i+, o i+ -> ... o")


class Projects(nn.Module):
    """A row whose product is an operator."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 24), Row(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Row(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / 5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.tests.projected(x, self.weight)


SCALED = {**PAIR, "scale": "colwise"}


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x**3 * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return 3 * x**2 * weight * gradients[0], (gradients[0] * x**3).flatten(0, -2).sum(0)


class Hidden(torch.autograd.Function):
    """One that can't run without numbers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        assert x.data_ptr()
        ctx.save_for_backward(x, weight)
        return torch.from_numpy(numpy.tanh(x.detach().numpy())) * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        made = torch.from_numpy(numpy.tanh(x.detach().numpy()))
        return (1 - made**2) * weight * gradients[0], (gradients[0] * made).flatten(0, -2).sum(0)


tpplan.register_operator(Cube, "... f, f -> ... f")
tpplan.register_operator(Hidden, "... f, f -> ... f")


@tpplan.operator("b (k g) s! d!, b k t! d!, b k t! d! -> b (k g) s! d!")
def flash(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    assert q.data_ptr(), "it can't run without numbers"
    return attention(q, k, v, causal)


@tpplan.operator("... i+, o i+ -> ... o")
def multiply(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.t()


CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], list[int], dict[str, int]]] = {
    "heads": (lambda: Attention(attend), HEADS, [2], {"all-reduce": 1}),
    "fewer keys": (lambda: Attention(attend, 8, 4), HEADS, [2, 4], {"all-reduce": 1}),
    "features": (lambda: Between(torch.ops.tests.scaled), SCALED, [2, 4], {"all-reduce": 1}),
    "a norm of all": (lambda: Between(torch.ops.tests.normed), PAIR, [2], {"all-gather": 2, "all-reduce": 1}),
    "an autograd function": (lambda: Between(lambda *held: Cube.apply(*held)), SCALED, [2, 5], {"all-reduce": 1}),
    "without meta": (lambda: Between(lambda *held: Hidden.apply(*held)), SCALED, [2], {"all-reduce": 1}),
    "a function of heads": (lambda: Attention(flash), HEADS, [2, 3, 4], {"all-reduce": 1}),
    "causal": (lambda: Attention(functools.partial(flash, causal=True), 8, 4), HEADS, [2, 4], {"all-reduce": 1}),
}


def call(batch: int, length: int) -> Any:
    return (torch.randn(batch, length, 16, generator=torch.Generator().manual_seed(length)).double(),), {}


@pytest.mark.parametrize(("name", "tp"), [(name, tp) for name, case in CASES.items() for tp in case[2]])
def test_parts_are_computed_by_the_rule(name: str, tp: int) -> None:
    torch.manual_seed(0)
    make, rules, _, collectives = CASES[name]
    model = make().double()
    program = tpplan.compile_plan(model, {"version": 1, "modules": rules}, tp, call(2, 6)[0])
    assert program.count_collectives() == collectives and not program.assumed
    assert max(worst(model, rules, tp, call(2, 6), [call(2, 6), call(3, 9)])) < TOLERANCE
