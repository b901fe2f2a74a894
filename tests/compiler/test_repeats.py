"""What compilations don't do again: captures of one call, and calls that a run has shown to be right."""

from __future__ import annotations

from collections import Counter
from queue import SimpleQueue

import pytest
import torch
from torch import Tensor, nn

import tpplan
from tpplan.compiler.ir.observations import CaptureSettings
from tpplan.compiler.trace import branches as captures

WIDTH, HEADS = 16, 4
RAN: SimpleQueue[str] = SimpleQueue()  # captures put back what they leave in containers


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        RAN.put("first")
        return self.down(self.up(x).relu())


class Attention(nn.Module):
    """Its body needs two local attributes at once, among others of which each has to be tried."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.heads, self.other, self.width = HEADS, HEADS, WIDTH

    def forward(self, x: Tensor) -> Tensor:
        RAN.put("attention")
        q = self.q(x).view(*x.shape[:2], self.heads, self.width // self.other)
        return self.o(q.sin().reshape(*x.shape[:2], self.width))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.attention = First(), Attention()

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(self.first(x))


def made() -> tuple[nn.Module, tuple[Tensor]]:
    torch.manual_seed(0)
    return Model().double(), (torch.randn(2, 5, WIDTH, dtype=torch.float64),)


RULES = {"first.up": "colwise", "first.down": "rowwise", "attention.q": "colwise", "attention.o": "rowwise"}


def test_trials_of_attributes_run_no_call_again_that_they_do_not_concern() -> None:
    model, call = made()
    plan = {"version": 1, "modules": RULES}
    tpplan.compile_plan(model, plan, 2, call)
    ran = Counter(RAN.get() for _ in range(RAN.qsize()))
    trials = ran["attention"] - ran["first"]
    assert trials >= 2
    report = tpplan.verify(model, plan, 2, call)
    assert report.ok and report.collectives == report.predicted


def test_the_trial_plans_of_a_search_share_their_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: list[CaptureSettings] = []
    stock = captures.record_model

    def noted(*arguments: object) -> object:
        settings.append(arguments[-1])  # pyright: ignore[reportArgumentType]
        return stock(*arguments)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(captures, "record_model", noted)
    model, call = made()
    assert tpplan.suggest_plan(model, 2, inputs=call)
    assert settings and len(settings) == len(set(settings))
