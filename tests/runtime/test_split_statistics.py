"""Batch norms of split channels: each rank keeps statistics of its own, and every rank has the whole after a call."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tpplan
from tests.runtime.simulated import Call, on_ranks, worst
from tests.runtime.world import Member, world
from tpplan.calls.guard import CallGuard
from tpplan.plan import CompileError

NORM = "{weight,bias,running_mean,running_var}"
PLAN: dict[str, Any] = {
    "first.{weight,bias}": "colwise",
    f"norm.{NORM}": "colwise",
    "second.{weight,bias}": "rowwise",
}


class Normed(nn.Module):
    """Two convolutions with a batch norm between them, which may be called several times."""

    def __init__(self, times: int = 1, channels: int = 16, **options: Any) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, channels, 3), nn.Conv2d(channels, 4, 3)
        self.norm, self.times = nn.BatchNorm2d(channels, **options), times

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(self.times):
            x = self.norm(x).sin()
        return self.second(x)


def images(batch: int, size: int) -> Call:
    return (torch.randn(batch, 4, size, size, dtype=torch.float64, requires_grad=True),), {}


def statistics(model: nn.Module) -> dict[str, Tensor]:
    return {name: held.clone() for name, held in model.state_dict().items() if "running" in name or "num" in name}


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize(("tp", "channels"), [(2, 16), (4, 16), (4, 10)])
def test_every_rank_has_the_statistics_of_all_channels(tp: int, channels: int, times: int) -> None:
    model, calls = Normed(times, channels).double(), [images(3, 8), images(2, 11)]

    def train(own: nn.Module, guard: CallGuard | None = None) -> list[dict[str, Tensor]]:
        found: list[dict[str, Tensor]] = []
        for arguments, _ in calls:
            own.train()(*arguments)
            found.append(statistics(own))
            own.eval()(*arguments)
            found.append(statistics(own))
        return found

    expected = train(copy.deepcopy(model))
    for rank in on_ranks(model, PLAN, tp, calls[0], train):
        for ours, theirs in zip(rank, expected, strict=True):
            assert ours.keys() == theirs.keys()
            assert all(torch.allclose(ours[n], theirs[n], rtol=1e-12, atol=1e-14) for n in theirs)


@pytest.mark.parametrize("tp", [2, 4])
def test_calls_in_both_modes_are_those_of_the_unsharded_model(tp: int) -> None:
    calls = [images(3, 8), nn.Module.eval, images(2, 11), nn.Module.train, images(3, 8), images(2, 11)]
    assert max(worst(Normed().double(), PLAN, tp, images(3, 8), calls)) < 1e-12


def test_what_is_gathered_is_in_the_program_of_training_alone() -> None:
    model, call = Normed().double(), images(3, 8)[0]
    program = tpplan.compile_plan(model, {"version": 1, "modules": PLAN}, 2, call)
    assert program.count_collectives() == Counter({"all-reduce": 2, "all-gather": 2})
    assert tpplan.Program.from_dict(program.to_dict()) == program
    program = tpplan.compile_plan(model.eval(), {"version": 1, "modules": PLAN}, 2, call)
    assert program.count_collectives()["all-reduce"] == 2


@pytest.mark.parametrize("leaves", ["weight,bias", "weight,bias,running_mean", "running_mean,running_var"])
def test_statistics_that_are_split_otherwise_than_their_channels_are_refused(leaves: str) -> None:
    plan = {name: rule for name, rule in PLAN.items() if not name.startswith("norm")} | {
        f"norm.{{{leaves}}}": "colwise"
    }
    with pytest.raises(CompileError) as caught:
        tpplan.compile_plan(Normed().double(), {"version": 1, "modules": plan}, 2, images(3, 8)[0])
    assert all(finding.code != "TP199" for finding in caught.value.diagnostics)


class Watching(Normed):
    """Reads the statistics that its norm keeps."""

    def forward(self, x: Tensor) -> Tensor:
        made = super().forward(x)
        return made + self.norm.running_mean.mean()  # pyright: ignore


class Lending(Normed):
    """Passes its norm's statistics on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Borrowing()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.inner(self.first(x), self.norm.running_mean, self.norm.running_var))


class Borrowing(nn.Module):
    def forward(self, x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        return nn.functional.batch_norm(x, mean, variance, training=True)


@pytest.mark.parametrize("kind", [Watching, Lending])
def test_statistics_that_are_read_elsewhere_are_refused_or_equal(kind: type[Normed]) -> None:
    model, call = kind().double(), images(3, 8)
    try:
        found = worst(model, PLAN, 2, call, [call])
    except CompileError:
        return
    assert max(found) < 1e-12


def train_on(member: Member) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = tpplan.parallelize(Normed(), {"version": 1, "modules": PLAN}, member.mesh(), (torch.randn(2, 4, 8, 8),))
    for step in range(2):
        model(torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(step))).sum().backward()
    return statistics(model)


def test_processes_have_them_as_well() -> None:
    torch.manual_seed(0)
    stock = Normed()
    for step in range(2):
        stock(torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(step)))
    expected = statistics(stock)
    for found in world(2).run(train_on):
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, expected[name])
