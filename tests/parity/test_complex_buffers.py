"""Buffers of complex numbers, as rotary embeddings are often kept, of a model that has no numbers yet."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import tpplan


class Turned(nn.Module):
    turns: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("turns", torch.ones(4, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * self.turns
        return self.down(self.up(torch.view_as_real(turned).flatten(-2)).relu())


def test_a_model_on_meta_is_verified() -> None:
    with torch.device("meta"):
        model = Turned()
    plan = {"version": 1, "modules": {"up": "colwise", "down": "rowwise"}}
    report = tpplan.verify(model, plan, 2, (torch.randn(2, 3, 8),))
    assert report.ok, report.problems
