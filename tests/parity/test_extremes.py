"""The largest entries of split features, as of rounded activations: each rank finds its own, and they are compared."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tpplan
from tests.marking import in_turns, slow_but
from tests.runtime.simulated import Call, worst
from tpplan.api import suggest_text
from tpplan.plan import CompileError

WIDTH, INNER = 16, 32
RULES = {"inner.up": "colwise", "inner.down": "rowwise"}


def straight(x: Tensor, rounded: Tensor) -> Tensor:
    """`rounded`, with the gradient of `x`."""
    return x + (rounded - x).detach()


def by_token(x: Tensor) -> Tensor:
    scale = 127 / x.abs().max(-1, keepdim=True).values.clamp(min=1e-5)
    return straight(x, (x * scale).round() / scale)


def by_tensor(x: Tensor) -> Tensor:
    scale = x.abs().max() / 127
    return straight(x, (x / scale).round() * scale)


def without_gradient(x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x.abs().amax(-1, keepdim=True).float()
    return x / scale.add(1)


def from_the_least(x: Tensor) -> Tensor:
    least = x.amin((1, 2), keepdim=True)
    return straight(x, (x - least.double()).round())


def joined(x: Tensor) -> Tensor:
    """Viewed before anything else is done with it."""
    largest = x.detach().abs().amax(-1)
    return x / largest.reshape(*x.shape[:2], 1)


class Rounded(nn.Module):
    """Features that are rounded before they are contracted."""

    def __init__(self, rounds: Callable[[Tensor], Tensor], inner: int = INNER) -> None:
        super().__init__()
        self.up, self.down, self.rounds = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH), rounds

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.rounds(functional.gelu(self.up(x))))


class Around(nn.Module):
    """A stream, and a body of its own for what is done with features."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.norm = inner, nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.inner(x))


class OneBit(nn.Linear):
    """Rounds its weight and its input itself."""

    def forward(self, input: Tensor) -> Tensor:
        scale = self.weight.abs().mean().clamp(min=1e-5)
        weight = straight(self.weight, (self.weight / scale).round().clamp(-1, 1) * scale)
        return functional.linear(by_token(input), weight, self.bias)


def tokens(batch: int, length: int) -> Call:
    return (torch.randn(batch, length, WIDTH, dtype=torch.float64, requires_grad=True),), {}


@pytest.mark.parametrize(
    ("rounds", "tp"), in_turns([by_token, by_tensor, without_gradient, from_the_least, joined], [2, 4])
)
@pytest.mark.one_in(2)
def test_a_number_for_each_row_is_exchanged(rounds: Callable[[Tensor], Tensor], tp: int) -> None:
    model, calls = Around(Rounded(rounds)).double(), [tokens(3, 4), tokens(2, 6)]
    program = tpplan.compile_plan(model, {"version": 1, "modules": RULES}, tp, calls[0][0])
    assert program.count_collectives() == {"all-gather": 1, "all-reduce": 2}
    assert max(worst(model, RULES, tp, calls[0], calls)) < 1e-12


@pytest.mark.parametrize("tp", slow_but([2], [2, 4]))
def test_layers_that_round_what_they_get_are_rows(tp: int) -> None:
    inner = nn.Sequential(OneBit(WIDTH, INNER), nn.GELU(), OneBit(INNER, WIDTH, bias=False))
    model, call = Around(inner).double(), tokens(3, 4)
    plan = suggest_text(model, tp, inputs=call[0])
    assert "inner.0: colwise" in plan and "inner.2: rowwise" in plan
    report = tpplan.verify(model, plan, tp, call[0])
    assert report.ok, report.problems


@pytest.mark.parametrize("inner", slow_but([6], [5, 6]))
def test_each_rank_has_a_feature_that_may_be_the_largest(inner: int) -> None:
    """Of 5 or 6 features each of four ranks has one or two, where chunks would leave the last without any."""
    model, call = Around(Rounded(by_token, inner)).double(), tokens(3, 4)
    plan = {"version": 1, "modules": RULES}
    for tp in (2, 4):
        report = tpplan.verify(model, plan, tp, call[0])
        assert report.ok, report.problems
        assert tpplan.compile_plan(model, plan, tp, call[0]).count_collectives()["reduce-scatter"] == 0


def scaled(x: Tensor) -> Tensor:
    return x / x.abs().amax(-1, keepdim=True)


def test_where_the_gradient_is_needed_the_layers_stay_whole() -> None:
    model, call = Around(Rounded(scaled)).double(), tokens(3, 4)
    with pytest.raises(CompileError, match="TP123"):
        suggest_text(model, 2, inputs=call[0])
    assert max(worst(model, RULES, 2, call, [call])) < 1e-12


def where_it_is(x: Tensor) -> Tensor:
    return x + x.detach().max(-1, keepdim=True).indices


def test_where_it_is_no_rank_knows() -> None:
    model, call = Around(Rounded(where_it_is)).double(), tokens(3, 4)
    assert "rowwise" not in suggest_text(model, 2, inputs=call[0])
    assert max(worst(model, RULES, 2, call, [call])) < 1e-12


class Noting(Rounded):
    """Leaves the largest entry in an attribute."""

    largest: Tensor

    def forward(self, x: Tensor) -> Tensor:
        made = functional.gelu(self.up(x))
        self.largest = made.detach().amax()
        return self.down(made)


def test_what_is_left_behind_is_the_largest_of_all() -> None:
    model, call = Around(Noting(by_token)).double(), tokens(3, 4)
    try:
        program = tpplan.compile_plan(model, {"version": 1, "modules": RULES}, 2, call[0])
    except CompileError as error:
        assert error.diagnostics[0].code == "TP107"
    else:
        assert program.count_collectives()["all-gather"]
