"""Bodies that the runtime writes by hand: used where the trace proves that they compute what the stock ones do.

Each case is a module that computes a little more, or a little less, than the body that would take its place. It comes
out equal, as it runs by its own code or since it is the same after all, or the plan is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tpplan
from tpplan.parity import verify_program
from tpplan.plan import CompileError

WIDTH, INNER = 16, 32
X = (torch.randn(3, 5, WIDTH, dtype=torch.float64, requires_grad=True),)

Body = Callable[[nn.Linear, Tensor], Tensor]


class Spelled(nn.Linear):
    """A linear layer whose forward is written by the test."""

    def __init__(self, inputs: int, outputs: int, body: Body, bias: bool = True) -> None:
        super().__init__(inputs, outputs, bias)
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


class Turned(nn.Module):
    """A layer whose weight is (inputs, outputs), with the bias registered first."""

    def __init__(self, inputs: int, outputs: int, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(outputs))
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / 4)
        self.body = body

    def forward(self, hidden: Tensor) -> Tensor:
        return self.body(self, hidden)


class Mlp(nn.Module):
    """Two layers, of which the second is called by keyword if the test says so."""

    def __init__(self, down: nn.Module, up: nn.Module | None = None, keyword: str = "") -> None:
        super().__init__()
        self.up, self.down = up or nn.Linear(WIDTH, INNER), down
        self.keyword = keyword

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.tanh(self.up(x))
        return x + (self.down(**{self.keyword: inner}) if self.keyword else self.down(inner))


MLP = {"up": "colwise", "down": "rowwise"}


def outcome(model: nn.Module, rules: dict[str, Any], size: int, inputs: tuple[Any, ...] = X) -> str:
    """`refused`, or `equal` if outputs and all gradients are those of the unsharded model."""
    plan = {"version": 1, "modules": rules}
    model = model.double()
    try:
        program = tpplan.compile_plan(model, plan, size, inputs)
    except CompileError as error:
        assert all(d.code != "TP110" and d.help for d in error.diagnostics), error
        return "refused"
    report = verify_program(model, program, (inputs, {}))
    assert report.ok, report.problems
    return "equal"


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


LINEARS: dict[str, tuple[Body, str]] = {
    "stock": (lambda m, x: functional.linear(x, m.weight, m.bias), "equal"),
    "one more": (lambda m, x: functional.linear(x, m.weight, m.bias) + 1, "refused"),
    "one less": (lambda m, x: functional.linear(x, m.weight, m.bias) - 1, "refused"),
    "one minus it": (lambda m, x: 1 - functional.linear(x, m.weight, m.bias), "refused"),
    "bias twice": (lambda m, x: functional.linear(x, m.weight, m.bias) + m.bias, "equal"),
    "half of the bias": (lambda m, x: torch.add(functional.linear(x, m.weight), m.bias, alpha=0.5), "equal"),
    "twice the product": (lambda m, x: torch.add(m.bias, functional.linear(x, m.weight), alpha=2), "equal"),
    "addmm": (lambda m, x: torch.addmm(m.bias, _flat(x), m.weight.t()).view(*x.shape[:2], -1), "equal"),
    "addmm with beta": (lambda m, x: torch.addmm(m.bias, _flat(x), m.weight.t(), beta=0.5).view(*x.shape[:2], -1), "equal"),
    "addmm with alpha": (lambda m, x: torch.addmm(m.bias, _flat(x), m.weight.t(), alpha=2).view(*x.shape[:2], -1), "equal"),
    "addmm without bias": (lambda m, x: torch.addmm(m.bias, _flat(x), m.weight.t(), beta=0).view(*x.shape[:2], -1), "equal"),
    "no bias": (lambda m, x: functional.linear(x, m.weight), "equal"),
    "matmul": (lambda m, x: x @ m.weight.T + m.bias, "equal"),
    "bias first": (lambda m, x: m.bias + x @ m.weight.T, "equal"),
    "turned twice": (lambda m, x: functional.linear(x, m.weight.t().t(), m.bias), "equal"),
    "minus the bias": (lambda m, x: functional.linear(x, m.weight) - m.bias, "equal"),
    "scaled": (lambda m, x: functional.linear(x, m.weight, m.bias) * 0.5, "equal"),
    "scaled weight": (lambda m, x: functional.linear(x, m.weight * 0.5, m.bias), "equal"),
    "scaled input": (lambda m, x: functional.linear(x * 2, m.weight, m.bias), "equal"),
    "input twice": (lambda m, x: functional.linear(x + x, m.weight, m.bias), "equal"),
    "product twice": (lambda m, x: functional.linear(x, m.weight, m.bias) + functional.linear(x, m.weight), "refused"),
    "clamped": (lambda m, x: functional.linear(x, m.weight, m.bias).clamp(max=1e4), "refused"),
    "relu": (lambda m, x: functional.linear(x, m.weight, m.bias).relu(), "refused"),
    "rounded weight": (lambda m, x: functional.linear(x, (m.weight * 8).round() / 8, m.bias), "refused"),
    "rounded through a cast": (lambda m, x: functional.linear(x, m.weight.float().double(), m.bias), "equal"),
    "cast bias": (lambda m, x: functional.linear(x, m.weight) + m.bias.float(), "equal"),
    "detached weight": (lambda m, x: functional.linear(x, m.weight.detach(), m.bias), "equal"),
    "dropout": (lambda m, x: functional.dropout(functional.linear(x, m.weight, m.bias), 0.5, m.training), "refused"),
    "flipped": (lambda m, x: functional.linear(x, m.weight, m.bias).flip(-1), "refused"),
    "rolled bias": (lambda m, x: functional.linear(x, m.weight, m.bias.roll(1)), "refused"),
    "reversed rows": (lambda m, x: functional.linear(x.flip(1), m.weight, m.bias), "refused"),
    "transposed rows": (lambda m, x: functional.linear(x.transpose(0, 1), m.weight, m.bias).transpose(0, 1), "equal"),
    "swapped rows": (
        lambda m, x: functional.linear(x.transpose(0, 1).reshape(x.shape), m.weight, m.bias), "equal"
    ),
    "baddbmm": (lambda m, x: torch.baddbmm(m.bias, x, m.weight.t().expand(3, -1, -1)), "refused"),
    "einsum": (lambda m, x: torch.einsum("bsi,oi->bso", x, m.weight) + m.bias, "refused"),
    "in place": (lambda m, x: functional.linear(x, m.weight, m.bias).mul_(2), "refused"),
    "bias times": (lambda m, x: functional.linear(x, m.weight) * m.bias, "refused"),
}  # fmt: skip


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", LINEARS)
def test_rows(name: str, size: int) -> None:
    body, expected = LINEARS[name]
    assert outcome(Mlp(Spelled(INNER, WIDTH, body)), MLP, size) == expected


@pytest.mark.parametrize("name", LINEARS)
def test_columns(name: str) -> None:
    body, _ = LINEARS[name]
    outcome(Mlp(nn.Linear(INNER, WIDTH), Spelled(WIDTH, INNER, body)), MLP, 2)
