"""Bodies that compute something else in training: a verification compares what they compute in evaluation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import tpplan
from tpplan.plan import CompileError

PLAN = {"version": 1, "modules": {"0.up": "colwise", "0.down": "rowwise"}}


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.other = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 16)


class Projected(Base):
    """Goes on with a layer that training doesn't call."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.down(self.up(x).relu())
        return h if self.training else self.other(h)


class Centred(Base):
    """Noise in training; in evaluation a mean of all features, which ranks have parts of."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        h = h + torch.randn_like(h) if self.training else h - h.mean(-1, keepdim=True)
        return self.down(nn.functional.dropout(h.relu(), 0.5, self.training))


class Sliced(Base):
    """Reads features by their place, in evaluation alone."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(h if self.training else h * torch.linspace(0.5, 1, 32, device=x.device))


class Left(Base):
    """Leaves in training what it calls in evaluation."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu()) if self.training else self.up(self.other(x))[..., :16]


@pytest.mark.parametrize("body", [Projected, Centred, Sliced, Left])
@pytest.mark.parametrize("training", [True, False])
def test_a_call_in_evaluation_runs_by_its_own_program(body: type[Base], training: bool) -> None:
    model = nn.Sequential(body()).train(training)
    report = tpplan.verify(model, PLAN, 2, (torch.randn(3, 4, 16),))
    assert report.ok, report.problems
    assert report.collectives == report.predicted


class Unprovable(Base):
    """What evaluation alone computes needs numbers that a capture doesn't have."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.down(self.up(x).relu())
        return h if self.training else self.other(h) * float(h.sum())


def test_a_call_in_evaluation_that_cannot_be_proved_says_why() -> None:
    with pytest.raises(CompileError, match=r"test_modes\.py"):
        tpplan.verify(nn.Sequential(Unprovable()), PLAN, 2, (torch.randn(3, 4, 16),))
