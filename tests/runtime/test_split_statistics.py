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


@pytest.mark.one_in(9)
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize(("tp", "channels"), [(2, 16), (4, 16), (4, 10)])
def test_every_rank_has_the_statistics_of_all_channels(
    tp: int, channels: int, times: int, momentum: float | None
) -> None:
    model, calls = Normed(times, channels, momentum=momentum).double(), [images(3, 8), images(2, 11)]

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


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.one_in(3)
def test_calls_in_both_modes_are_those_of_the_unsharded_model(tp: int, momentum: float | None) -> None:
    calls = [images(3, 8), nn.Module.eval, images(2, 11), nn.Module.train, images(3, 8), images(2, 11)]
    assert max(worst(Normed(momentum=momentum).double(), PLAN, tp, images(3, 8), calls)) < 1e-12


class Scaled(nn.BatchNorm2d):
    """A batch norm of the user's own, which calls torch's."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


class Averaging(nn.Module):
    """Layers with batch norms that average over all calls."""

    def __init__(self, dims: int, norm: type[nn.Module] | None = None) -> None:
        super().__init__()
        layer: Any = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims]
        made: Any = norm or (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims]
        more = {"kernel_size": 1} if dims else {}
        self.up, self.down = layer(4, 8, **more), layer(8, 4, **more)
        self.inner, self.outer = made(8, momentum=None), made(4, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.down(self.inner(self.up(x)).relu()))


def trained(model: nn.Module, calls: list[Tensor]) -> list[Tensor]:
    """What some steps, calls in evaluation between them, and one more step give; and the buffers after these."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.01), list[Tensor]()
    for mode in (True, True, True, False, True, False):
        model.train(mode)
        for x in calls:
            optimizer.zero_grad()
            made = model(x)
            made.sigmoid().mul(made).sum().backward()
            if mode:
                optimizer.step()
            found.append(made.detach())
    return [*found, *(held.clone() for held in model.buffers())]


@pytest.mark.parametrize("kind", [nn.Module.train, nn.Module.eval], ids=["train", "eval"])
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("dims", [0, 1, 2, 3])
@pytest.mark.one_in(5)
def test_a_norm_that_averages_over_all_calls_is_trained(dims: int, tp: int, kind: Any) -> None:
    torch.manual_seed(0)
    model = kind(Averaging(dims).double())
    calls = [torch.randn(3, 4, *[5] * dims, dtype=torch.float64) + i for i in range(2)]
    rules, expected = {"up": "colwise", "down": "rowwise"}, trained(copy.deepcopy(model), calls)
    for found in on_ranks(model, rules, tp, ((calls[0],), {}), lambda own, _: trained(own, calls)):
        for made, one in zip(found, expected, strict=True):
            torch.testing.assert_close(made, one, rtol=1e-10, atol=1e-11)


def test_so_is_one_in_a_norm_of_the_users_own() -> None:
    calls = [images(3, 8), nn.Module.eval, images(2, 11), nn.Module.train, images(3, 8), images(2, 11)]
    rules = {"up": "colwise", "down": "rowwise"}
    assert max(worst(Averaging(2, Scaled).double(), rules, 2, images(3, 8), calls)) < 1e-12


class Weighed(nn.BatchNorm2d):
    """One that reads its counter itself."""

    def forward(self, input: Tensor) -> Tensor:
        made = super().forward(input)
        return made if self.num_batches_tracked is None else made / float(self.num_batches_tracked)


def test_a_counter_that_is_read_for_something_else_is_refused() -> None:
    def work(own: nn.Module, _: CallGuard) -> None:
        with pytest.raises(tpplan.UnprovedCallError, match=r"TP129 .*reads the value of `inner\.num_batches_tracked`"):
            own.train()(*images(3, 8)[0])

    on_ranks(Averaging(2, Weighed).double(), {"up": "colwise", "down": "rowwise"}, 2, images(3, 8), work)


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
    stock, example = Normed(momentum=None), (torch.randn(2, 4, 8, 8),)
    model = tpplan.parallelize(stock, {"version": 1, "modules": PLAN}, member.mesh(), example)
    for step in range(2):
        model(torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(step))).sum().backward()
    return statistics(model)


def test_processes_have_them_as_well() -> None:
    torch.manual_seed(0)
    stock = Normed(momentum=None)
    for step in range(2):
        stock(torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(step)))
    expected = statistics(stock)
    for found in world(2).run(train_on):
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, expected[name])
