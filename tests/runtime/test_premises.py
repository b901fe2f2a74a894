"""What the proof of a call stands on, as it is listed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.runtime.simulated import plan_of
from tpplan.calls.premises import Premise, premises_of
from tpplan.compiler.pipeline import compile_call
from tpplan.compiler.request import Request


class Scaled(nn.Module):
    """Goes by a number that settings hold, and by a size."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor, settings: Any = None) -> Tensor:
        h = self.up(x) * settings["scales"][0]
        return self.down(h.relu() if x.shape[1] <= 8 else h)


def listed(settings: Any) -> list[Premise]:
    model, call = Scaled(), (torch.zeros(2, 4, 16, requires_grad=True), settings)
    plan = plan_of({"up": "colwise", "down": "rowwise"})
    compiled = compile_call(Request(model, plan, 2, call, {}))
    return premises_of(compiled, type(model).forward, call, {})


def test_arguments_are_listed_to_the_bottom() -> None:
    told = [premise.text for premise in listed({"scales": [2.0, 3], "name": "a"}) if premise.kind == "argument"]
    assert told == [
        "x is a float32 tensor of 3 dims that requires grad",
        "settings['scales'][0] is 2.0",
        "settings['scales'][1] is 3",
        "settings['name'] is 'a'",
        "nothing else is passed, but None where that is the default",
    ]


def test_of_many_entries_the_first_are_listed_and_the_others_mentioned() -> None:
    told = [premise.text for premise in listed({"scales": [*range(100)]}) if premise.kind == "argument"]
    assert "settings['scales'][11] is 11" in told and "settings['scales'][12] is 12" not in told
    assert told[-2] == "whatever else settings holds is the same"


def test_conditions_on_sizes_have_the_line_that_makes_them() -> None:
    (found,) = [p for p in listed({"scales": [2.0]}) if p.text == "x.shape[1] <= 8"]
    assert found.kind == "size" and "test_premises.py" in found.line and "x.shape[1] <= 8" in found.line
