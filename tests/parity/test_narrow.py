"""Models that have no numbers in float64, though they have in float32, are compared in float32."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import tpplan


class Masked(nn.Module):
    """Hides all of a row, in float64 by what adds up to -inf."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        lowest = -3e38 if x.dtype == torch.float32 else -1e308
        scores = (x @ x.transpose(1, 2) + lowest) + (lowest if x.dtype == torch.float64 else 0.0)
        return self.down(self.up(scores.softmax(-1) @ x).relu())


def test_a_model_without_numbers_in_float64_is_compared_in_float32() -> None:
    plan = {"version": 1, "modules": {"up": "colwise", "down": "rowwise"}}
    report = tpplan.verify(Masked(), plan, tp=2, inputs=torch.randn(2, 6, 16))
    assert report.ok, report.problems
    assert report.dtype == "float32"
