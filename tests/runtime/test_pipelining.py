"""Stages of torch's pipelining, which learns shapes from calls on memory that holds something else on each rank."""

from __future__ import annotations

import copy
import os
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import tpplan
from tests.runtime.world import Member, world
from tpplan.calls.alike import DifferentInputsError

HIDDEN, WIDTH, MICRO = 8, 16, 2
PLANS: dict[str, Any] = {
    "plain": {"up": "colwise", "down": "rowwise"},
    "sequence": {"norm": "sequence", "up": "colwise", "down": "rowwise"},
}


class Stage(nn.Module):
    """A block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, WIDTH), nn.Linear(WIDTH, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def images(seed: int) -> Tensor:
    return torch.randn(4, 4, HIDDEN, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def loss(made: Tensor, target: Tensor) -> Tensor:
    return (made - target).square().sum()


def anything(member: Member) -> Any:
    """Memory that holds what it holds: another number on each rank."""
    from torch.distributed.pipelining import _utils

    make = _utils._make_tensor_from_meta
    return mock.patch.object(_utils, "_make_tensor_from_meta", lambda *held: make(*held).fill_(0.1 + member.rank))


def scheduled(member: Member, rules: dict[str, Any]) -> tuple[Any, nn.Module, nn.Sequential, bool]:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    mesh = member.mesh(2, 2, names=("pp", "tp"))
    place = mesh["pp"].get_local_rank()
    torch.manual_seed(0)
    stock = nn.Sequential(Stage(), Stage()).double()
    example = (torch.zeros(MICRO, 4, HIDDEN, dtype=torch.float64),)
    plan = {"version": 1, "modules": rules}
    own = tpplan.parallelize(copy.deepcopy(stock[place]), plan, mesh["tp"], example)
    stage = PipelineStage(own, place, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    return ScheduleGPipe(stage, 4 // MICRO, loss_fn=loss, scale_grads=False), own, stock, place == 0


def worst_gradient(member: Member, rules: dict[str, Any]) -> float:
    schedule, own, stock, is_first = scheduled(member, rules)
    errors: list[float] = []
    with anything(member):
        for seed in range(2):
            own.zero_grad()
            stock.zero_grad()
            schedule.step(images(seed)) if is_first else schedule.step(target=images(7))
            loss(stock(images(seed)), images(7)).backward()
            pairs = zip(own.parameters(), stock[0 if is_first else 1].parameters(), strict=True)
            errors += [float((p.grad.full_tensor() - q.grad).abs().max()) for p, q in pairs]  # pyright: ignore
    return max(errors)


@pytest.mark.processes
@pytest.mark.parametrize("rules", PLANS.values(), ids=PLANS)
def test_a_stage_is_trained_after_its_shapes_were_inferred(rules: dict[str, Any]) -> None:
    assert max(world(4).run(worst_gradient, rules)) < 1e-10


def worst_watched(member: Member) -> float:
    with mock.patch.dict(os.environ, {"TPPLAN_DEBUG": "1"}):
        return worst_gradient(member, PLANS["sequence"])


@pytest.mark.processes
def test_so_is_one_that_is_watched() -> None:
    assert max(world(4).run(worst_watched)) < 1e-10


def different_batches(member: Member) -> list[str]:
    """What a stage says of other numbers: where torch infers shapes, and in the first real call."""
    mesh = member.mesh(2, 2, names=("pp", "tp"))
    torch.manual_seed(0)
    example = (torch.zeros(MICRO, 4, HIDDEN, dtype=torch.float64),)
    own = tpplan.parallelize(Stage().double(), {"version": 1, "modules": PLANS["plain"]}, mesh["tp"], example)
    found: list[str] = []
    for name in ("torch.distributed.pipelining.stage", __name__, "torch.distributed.pipelining.stage"):
        space: dict[str, Any] = {"__name__": name}
        exec("def _forward_metadata_inference(own, x): return own(x)", space)
        try:
            space["_forward_metadata_inference"](own, images(member.rank))
            found.append("")
        except DifferentInputsError as error:
            found.append(str(error))
    return found


@pytest.mark.processes
def test_the_first_real_call_on_other_batches_is_refused_all_the_same() -> None:
    for inferred, real, again in world(4).run(different_batches):
        assert inferred == again == ""
        assert "TP192 different-inputs" in real and "`x` has different numbers" in real
