"""A branch on data whose one side is an error goes by the other; calls that aren't as the model wants them raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.compiler.checks import asserted, checked, if_raise, or_long, unless_raise
from tests.compiler.toys import HIDDEN, MLP, compiled
from tests.runtime.simulated import on_ranks, watched, worst
from tpplan.calls.guard import CallGuard
from tpplan.compiler.ir.observations import CaptureSettings
from tpplan.compiler.trace.branches import record_model
from tpplan.plan import CompileError

WIDTH = 24


class Checks(nn.Module):
    """A column and a row, behind a check of the input."""

    def __init__(self, check: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, WIDTH), nn.Linear(WIDTH, HIDDEN)
        self.check = check

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        return self.down(self.up(x).relu())


def x(length: int = 12, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(3, length, HIDDEN, dtype=torch.float64, generator=generator).mul_(scale).requires_grad_()


def model(check: Callable[[Tensor], None]) -> Checks:
    torch.manual_seed(0)
    return Checks(check).double()


@pytest.mark.parametrize("check", [if_raise, unless_raise, asserted, checked])
def test_the_side_without_an_error_is_captured(check: Any) -> None:
    trace, _ = record_model(model(check), (x(),), {}, CaptureSettings(training=True))
    assert [assumption.taken for assumption in trace.branches.assumptions] == [check is not if_raise]


def test_an_error_that_follows_from_no_branch_is_the_finding() -> None:
    class Odd(Checks):
        def forward(self, x: Tensor) -> Tensor:
            if (x > 100).any():
                x = x * 2
            result = super().forward(x)
            if x.shape[1] == 12:
                raise ValueError("twelve")
            return result

    with pytest.raises(CompileError, match="twelve"):
        compiled(Odd(if_raise).double(), MLP, x())


@pytest.mark.one_in(3)
@pytest.mark.parametrize("check", [if_raise, unless_raise, asserted, checked])
def test_a_call_that_the_model_refuses_raises_and_the_others_are_not_watched(check: Any) -> None:
    bad = x(scale=float("nan") if check is if_raise else 1000.0)

    def work(own: nn.Module, guard: CallGuard) -> list[bool]:
        found = watched(own, guard, x)
        with pytest.raises((ValueError, AssertionError, RuntimeError)):
            own(bad)
        own(x())
        return found

    assert on_ranks(model(check), MLP, 2, ((x(),), {}), work) == [[True, False, False]] * 2
    assert max(worst(model(check), MLP, 2, ((x(),), {}), [((x(n),), {}) for n in (12, 12, 20, 20, 7)])) < 1e-12


def test_an_error_on_a_further_condition_is_watched() -> None:
    def work(own: nn.Module, guard: CallGuard) -> list[bool]:
        return watched(own, guard, x)

    assert on_ranks(model(or_long), MLP, 2, ((x(),), {}), work) == [[True, True, True]] * 2
    calls = [((x(length, scale),), {}) for length, scale in ((12, 1.0), (20, 1.0), (20, 1000.0), (20, 1000.0))]
    assert max(worst(model(or_long), MLP, 2, ((x(),), {}), calls)) < 1e-12


class Departs(Checks):
    """A check that torch carries out, and a branch of which the capture takes the other side."""

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        h = self.up(x)
        return self.down(h.relu() if (x < 100).all() else h.tanh())


def test_a_call_that_departs_elsewhere_is_proved_with_the_check_passed() -> None:
    torch.manual_seed(0)
    calls = [((x(),), {}), ((x(20),), {}), ((x(),), {})]
    assert max(worst(Departs(checked).double(), MLP, 2, ((x(),), {}), calls)) < 1e-12
