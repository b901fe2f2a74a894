"""Where large numbers cancel, rounding errors grow: a note says so, and nothing else gets it."""

from __future__ import annotations

import copy
import inspect
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tests.parity.subjects import with_module
from tpplan.compiler.ir.program import Program
from tpplan.compiler.pipeline import compile_call
from tpplan.compiler.request import Request
from tpplan.parity import verify_program
from tpplan.parity.compare import MAY_BE_ROUNDING
from tpplan.parity.tolerance import bound_of
from tpplan.plan import load_plan

PLAN = {"version": 1, "modules": {"up": "colwise", "down": "rowwise"}}


class Cancelling(nn.Module):
    """A residual that all features have in common, and that is subtracted again."""

    def __init__(self, common: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        with torch.no_grad():
            self.down.weight.add_(common)

    def forward(self, x: Tensor) -> Tensor:
        h = self.down(self.up(x).relu())
        return h - h.mean(-1, keepdim=True)


def compiled(common: float) -> tuple[nn.Module, Program, tuple[tuple[Tensor], dict[str, object]]]:
    torch.manual_seed(0)
    model = Cancelling(common).double()
    example = ((torch.randn(8, 16, dtype=torch.float64),), dict[str, object]())
    return (
        model,
        compile_call(Request(model, load_plan(PLAN), 2, *example, device=torch.device("cpu"))).program,
        example,
    )


@pytest.mark.parametrize("common", [0.0, 1e3, 1e5])
def test_what_is_left_of_large_numbers_is_as_uncertain_as_they_were(common: float) -> None:
    model, program, example = compiled(common)
    report = verify_program(model, program, example)
    assert report.ok == (report.max_error <= report.tolerance.outputs) == (common == 0), report.problems
    assert report.notes == (() if report.ok else (MAY_BE_ROUNDING,))


@pytest.mark.parametrize("common", [0.0, 1e5])
def test_a_reduction_that_is_dropped_is_seen_all_the_same(common: float) -> None:
    model, program, example = compiled(common)
    report = verify_program(model, with_module(program, "down", lambda module: replace(module, exits=())), example)
    assert not report.ok and report.first_divergence == "down" and not report.notes


@pytest.mark.parametrize("common", [0.0, 1e4])
def test_a_weight_of_another_model_is_seen_all_the_same(common: float, monkeypatch: pytest.MonkeyPatch) -> None:
    model, program, example = compiled(common)
    other = inspect.unwrap(verify_program).__globals__["run_simulated"]

    def disturbed(whole: nn.Module, *rest: object) -> object:
        changed = copy.deepcopy(whole)
        with torch.no_grad():
            changed.get_parameter("up.weight")[0] *= 1 + 1e-7
        return other(changed, *rest)

    monkeypatch.setitem(inspect.unwrap(verify_program).__globals__, "run_simulated", disturbed)
    report = verify_program(model, program, example)
    assert not report.ok and not report.notes


def test_what_moves_further_than_half_of_the_digits_shows_nothing() -> None:
    assert bound_of(1e-14, 1.0, 2e-16) == 8e-14
    assert bound_of(1e-8, 1.0, 2e-16) == 0.0
    assert bound_of(1e-14, 0.0, 2e-16) == 0.0
