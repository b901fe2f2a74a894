"""What a right program does without being called wrong: buffers that a forward writes, other counts of collectives."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import tpplan
from tpplan.parity import observed as observe
from tpplan.parity import rank as ranks
from tpplan.parity import verify_program
from tpplan.report.parity_tables import render_parity

SAMPLE = (torch.randn(3, 4, 16, requires_grad=True),)
PLAN = {"version": 1, "modules": {"**.up": "colwise", "**.down": "rowwise"}}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class Average(nn.Module):
    """Keeps a moving average of what its layer makes, and takes it off."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("unread", torch.zeros(2, 16), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.mean.mul_(0.9).add_(y.detach().mean((0, 1)), alpha=0.1)  # pyright: ignore
        self.unread[1] += y.detach().sum((0, 1))  # pyright: ignore
        return y - self.mean


def test_a_buffer_that_a_forward_writes_is_compared():
    report = tpplan.verify(Average(), PLAN, 2, SAMPLE)
    assert report.ok, report
    assert [held.name for held in report.outputs] == ["output", "buffers.mean", "buffers.unread"]


@pytest.mark.parametrize("other", [lambda buffer: buffer + 1, lambda buffer: buffer[:1], None])
def test_a_buffer_that_a_rank_leaves_otherwise_is_off(monkeypatch, other):
    def observed(*arguments):
        seen = observe.observe(*arguments)
        buffers = {} if other is None else {name: other(buffer) for name, buffer in seen.buffers.items()}
        return replace(seen, buffers=buffers)

    monkeypatch.setattr(ranks, "observe", observed)
    report = tpplan.verify(Average(), PLAN, 2, SAMPLE)
    assert not report.ok
    assert "output `buffers.mean` is off" in str(report)


def test_running_statistics_are_compared():
    """In evaluation mode a norm of batches reads its statistics; one that tracks none takes them from the batch."""
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.InstanceNorm1d(4), nn.BatchNorm1d(4))
    plan = {"version": 1, "modules": {"0": "colwise", "2": "rowwise"}}
    report = tpplan.verify(model, plan, 2, SAMPLE)
    assert report.ok, report


@pytest.mark.parametrize("processes", [False, pytest.param(True, marks=pytest.mark.processes)])
def test_the_model_keeps_every_bit(processes):
    model = Average()
    before, attributes = copy.deepcopy(model.state_dict()), set(vars(model))
    unread, generator = model.unread.clone(), torch.get_rng_state()  # pyright: ignore
    assert tpplan.verify(model, PLAN, 2, SAMPLE, processes=processes).ok
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(model.unread, unread)  # pyright: ignore
    assert set(vars(model)) == attributes
    assert torch.equal(torch.get_rng_state(), generator)


def test_equal_runs_follow_one_another():
    """What a run writes isn't there when the next begins."""
    model = Average()
    program = tpplan.compile_plan(model, PLAN, 2, SAMPLE)
    assert verify_program(model, program, (SAMPLE, {})) == verify_program(model, program, (SAMPLE, {}))


class DefaultEps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(16, 32), nn.RMSNorm(32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x)))


@pytest.mark.parametrize("scale", [1.0, 1e-4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_norm_without_eps_takes_that_of_the_dtype(dtype, scale):
    """Over features that are split, where another body takes the norm's place."""
    program = tpplan.compile_plan(DefaultEps(), PLAN, 2, SAMPLE)
    assert any(held.split_norm is not None for held in program.modules)
    sample = (SAMPLE[0].detach() * scale,)
    report = tpplan.verify(DefaultEps(), PLAN, 2, sample, dtype=dtype)
    assert report.ok, report


class InTraining(nn.Module):
    """Calls its second layer in training only, where verification doesn't go."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(), Layer()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.first(x)
        return (y, self.second(y)) if self.training else (y,)


def test_collectives_that_this_call_does_without_are_a_note():
    report = tpplan.verify(InTraining(), PLAN, 2, SAMPLE)
    assert report.ok
    assert report.notes == (
        "rank 0 ran 2 all-reduce; the program says 4 all-reduce, but this call didn't run `second` and 1 more",
    )
    assert f"note: {report.notes[0]}" in render_parity(report, width=200)
    assert "differs" in render_parity(report)
    assert str(report).endswith(report.notes[0])
    assert report.to_dict()["notes"] == list(report.notes)


class Cancelled(nn.Module):
    """A softmax of equal numbers: gradients of the inputs are zero but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = Layer(), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return self.out(torch.stack((y, y)).softmax(0)[0] * 3)


def test_a_gradient_of_inputs_that_is_rounding_only_is_no_divergence():
    report = tpplan.verify(Cancelled(), PLAN, 2, SAMPLE)
    assert report.ok, report
