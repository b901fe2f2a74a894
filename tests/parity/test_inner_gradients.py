"""Gradients that a forward takes itself, and their derivatives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tpplan
from tests.parity.test_backward import Bare, function
from tpplan.parity import verify_program
from tpplan.parity.materialise import copy_structure
from tpplan.parity.rank import SimulatedDistributor
from tpplan.parity.threads import ThreadCommunicator, run_ranks
from tpplan.runtime.lower import lower
from tpplan.runtime.ranks.reshard import SecondDerivativeError

WIDTH, INNER = 8, 16
RULES: dict[str, Any] = {"net.*.up": "colwise", "net.*.down": "rowwise"}


def positions(differentiable: bool = False) -> tuple[Tensor]:
    torch.manual_seed(1)
    return (torch.randn(2, 4, WIDTH, dtype=torch.float64, requires_grad=differentiable),)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Energy(nn.Module):
    """Forces are the gradient of an energy, and a loss of them is differentiated again."""

    def __init__(self, create_graph: bool = True, blocks: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(Block() for _ in range(blocks)))
        self.head = nn.Linear(WIDTH, 1)
        self.create_graph = create_graph

    def forward(self, x: Tensor) -> Any:
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            energy = self.head(self.net(x)).sum((1, 2))
            (gradient,) = torch.autograd.grad(energy.sum(), x, retain_graph=True, create_graph=self.create_graph)
        return energy, -gradient


class Weighted(Energy):
    """With weights for the outputs, an input that nothing depends on, and an inner value as a second input."""

    def forward(self, x: Tensor) -> Any:
        x = x if x.requires_grad else x.detach().requires_grad_()
        other = (x * 2).sum()
        h = self.net[0](x)
        y = self.head(self.net[1](h))
        found = torch.autograd.grad(y, [x, h, other], torch.ones_like(y) / 3, create_graph=True, allow_unused=True)
        assert found[2] is None
        return y, found[0] * 2 + found[1], (found[0] ** 2).sum()


def prove(model: nn.Module, rules: dict[str, Any], size: int, differentiable: bool = False) -> tpplan.Program:
    inputs = positions(differentiable)
    program = tpplan.compile_plan(model.double(), {"version": 1, "modules": rules}, size, inputs)
    report = verify_program(model, program, (inputs, {}))
    assert report.ok, report.problems
    return program


SEQUENCE = RULES | {"net.*.norm": "sequence"}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("differentiable", [False, True])
@pytest.mark.parametrize(
    "rules", [RULES, SEQUENCE, {"net.*.up": "colwise"}, {"net.0.up": "colwise", "net.0.down": "rowwise"}]
)
@pytest.mark.parametrize("kind", [Energy, Weighted])
@pytest.mark.one_in(5)
def test_forces(kind: type[Energy], rules: dict[str, Any], differentiable: bool, size: int) -> None:
    program = prove(kind(), rules, size, differentiable)
    assert program.takes_gradients and next(program.reshards(), None) is not None
    assert tpplan.Program.from_dict(program.to_dict()) == program


def test_forces_without_a_second_derivative() -> None:
    prove(Energy(create_graph=False), RULES, 2)


@pytest.mark.processes
def test_forces_on_processes() -> None:
    model = Energy().double()
    report = tpplan.verify(model, {"version": 1, "modules": RULES}, 2, positions(), processes=True)
    assert report.ok, report.problems


def test_a_gradient_by_a_parameter_is_refused() -> None:
    class ByParameter(Energy):
        def forward(self, x: Tensor) -> Any:
            y = self.net(x)
            (gradient,) = torch.autograd.grad(y.sum(), self.net[0].up.weight, create_graph=True)  # pyright: ignore
            return y * gradient.pow(2).sum()

    with pytest.raises(tpplan.CompileError, match="differentiates by a parameter"):
        prove(ByParameter(), RULES, 2)


def test_a_function_that_is_differentiated_twice_stays_whole() -> None:
    tripled = function(lambda x, g: g * x)
    model = Energy()
    model.net[0].up.register_forward_hook(lambda module, args, result: tripled(result))  # pyright: ignore
    program = prove(model, RULES, 2)
    assert "TP104" in {finding.code for finding in program.diagnostics}
    model = Energy()
    model.net[0] = Bare(tripled)
    with pytest.raises(tpplan.CompileError, match=r"TP128.*no derivative"):
        prove(model, {"net.0.weight": "colwise", "net.0.back": "rowwise"}, 2)


def test_a_second_derivative_outside_of_the_forward_raises() -> None:
    model = nn.Sequential(Block(), Block()).double()
    program = tpplan.compile_plan(
        model, {"version": 1, "modules": {"*.up": "colwise", "*.down": "rowwise"}}, 2, positions()
    )

    def caught(axis: ThreadCommunicator) -> list[str]:
        sharded = lower(copy_structure(model), program, SimulatedDistributor(axis))
        found: list[str] = []
        for by_input in (True, False):
            (x,) = positions(True)
            with pytest.raises(SecondDerivativeError) as raised:
                sources = [x] if by_input else list(sharded.parameters())
                torch.autograd.grad(sharded(x).sum(), sources, create_graph=True)
            found.append(str(raised.value))
        return found

    for messages in run_ranks(2, caught):
        assert all(message.startswith("TP138 second-derivative") for message in messages)
