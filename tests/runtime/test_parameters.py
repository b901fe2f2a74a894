"""Distributed parameters behave like parameters: gradients of their own, frozen and thawed as users please."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import tpplan
from tests.marking import slow_but
from tests.models.tiny import tiny_model
from tests.plans.parity import PLANS, assert_same_run, run, tolerance, whole
from tests.runtime.world import Member, world

pytestmark = pytest.mark.processes


class TwoOffsets(nn.Module):
    """Both offsets get one and the same tensor as gradient from autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(16, dtype=torch.float64)) for _ in range(2))
        self.up = nn.Linear(16, 32, dtype=torch.float64)
        self.down = nn.Linear(32, 16, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x + (self.first + self.second)).relu())


def test_parameters_whose_gradients_are_equal_do_not_share_them() -> None:
    world(2).run(_two_offsets)


def _two_offsets(member: Member) -> None:
    stock = TwoOffsets()
    x = torch.randn(3, 4, 16, dtype=torch.float64)
    sharded = tpplan.parallelize(
        copy.deepcopy(stock), {"version": 1, "modules": {"up": "colwise", "down": "rowwise"}}, member.mesh(), (x,)
    )
    for held in (stock, sharded):
        held(x).square().sum().backward()
        torch.nn.utils.clip_grad_norm_(held.parameters(), 0.1)
    for name, parameter in stock.named_parameters():
        ours = whole(sharded.get_parameter(name).grad)
        assert ours is not None and parameter.grad is not None
        torch.testing.assert_close(ours, parameter.grad, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("plan", slow_but(["torch_transformer"], ["torch_transformer", "torch_transformer-sequence"]))
def test_parameters_frozen_when_the_plan_was_compiled_are_refused_or_right_once_thawed(plan: str) -> None:
    world(2).run(_thawed, plan)


def _thawed(member: Member, plan: str) -> None:
    stock, keywords = tiny_model("torch_transformer")
    stock.requires_grad_(False)
    stock.head.requires_grad_(True)  # pyright: ignore
    sharded = tpplan.parallelize(copy.deepcopy(stock), PLANS / f"{plan}.yaml", member.mesh(), keywords)
    for held in (stock, sharded):
        held.requires_grad_(True)
    try:
        ours = run(sharded, keywords)
    except tpplan.TpplanError:
        return
    assert_same_run(ours, run(stock, keywords), tolerance(torch.float64))


def test_parameters_frozen_after_the_plan_was_compiled_get_no_gradient() -> None:
    world(2).run(_frozen_later)


def _frozen_later(member: Member) -> None:
    stock, keywords = tiny_model("torch_transformer")
    sharded = tpplan.parallelize(
        copy.deepcopy(stock), PLANS / "torch_transformer-sequence.yaml", member.mesh(), keywords
    )
    for held in (stock, sharded):
        for name, parameter in held.named_parameters():
            parameter.requires_grad_("blocks.1" in name)
    assert_same_run(run(sharded, keywords), run(stock, keywords), tolerance(torch.float64))


def test_a_gradient_lies_as_its_parameter_does() -> None:
    world(2).run(_placements)


def _placements(member: Member) -> None:
    model, keywords = tiny_model("torch_transformer")
    tpplan.parallelize(model, PLANS / "torch_transformer-sequence.yaml", member.mesh(), keywords)
    run(model, keywords)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor), name
        assert parameter.grad.placements == parameter.placements, name
        assert parameter.grad.to_local().shape == parameter.to_local().shape, name


def test_gradients_lie_as_their_parameters_and_may_be_looked_at_on_their_way() -> None:
    world(2).run(_gradients_on_their_way)


def _gradients_on_their_way(member: Member) -> None:
    stock = TwoOffsets()
    x = torch.randn(3, 4, 16, dtype=torch.float64)
    sharded = tpplan.parallelize(
        copy.deepcopy(stock), {"version": 1, "modules": {"up": "colwise", "down": "rowwise"}}, member.mesh(), (x,)
    )
    parameters = dict(sharded.named_parameters())
    wanted = dict(zip(parameters, torch.autograd.grad(stock(x).square().sum(), list(stock.parameters())), strict=True))
    for name, gradient in zip(
        parameters, torch.autograd.grad(sharded(x).square().sum(), list(parameters.values())), strict=True
    ):
        torch.testing.assert_close(whole(gradient), wanted[name])
        torch.testing.assert_close(whole(gradient + gradient), 2 * wanted[name])
        assert gradient.__reduce_ex__(2)[0] is parameters[name].detach().__reduce_ex__(2)[0]

    seen: list[Tensor] = []
    parameters["up.weight"].register_hook(lambda gradient: gradient * 3)
    parameters["down.weight"].register_hook(seen.append)
    for _ in range(2):  # the second is added to the first
        sharded(x).square().sum().backward()
    for name, parameter in parameters.items():
        assert type(parameter.grad) is type(parameter.detach()), name
        torch.testing.assert_close(whole(parameter.grad), (6 if name == "up.weight" else 2) * wanted[name])
    assert len(seen) == 2
    assert all(isinstance(gradient, DTensor) for gradient in seen)
