"""Tables that a body reads by itself, without a module that looks up in them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.runtime.simulated import Call, worst
from tpplan.api import suggest_text

ROWS, WIDTH = 90, 16


class Read(nn.Module):
    """A stream of rows of a bare table, and a pair of linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(ROWS, WIDTH))
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def look_up(self, ids: Tensor) -> Tensor:
        return self.table[ids]

    def forward(self, ids: Tensor) -> Tensor:
        x = self.look_up(ids)
        return x + self.down(self.up(x).relu())


def tokens(*shape: int) -> Call:
    return (torch.randint(0, ROWS, shape),), {}


def test_rows_may_be_picked_by_numbers_of_several_dims() -> None:
    model, calls = Read().double(), [tokens(3, 4), tokens(2, 5)]
    assert max(worst(model, suggest_text(model, 2, inputs=calls[0][0]), 2, calls[0], calls)) < 1e-12
