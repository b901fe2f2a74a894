"""Operators of others that write to an argument and don't return it: what is read afterwards is what they wrote."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tpplan
from tests.runtime.simulated import worst

LIBRARY = torch.library.Library("tests_writes", "FRAGMENT")
LIBRARY.define("add_to(Tensor(a!) x, Tensor y) -> ()")
LIBRARY.define("next_to(Tensor x, Tensor(a!) out, Tensor(b!)? other=None) -> Tensor")
TOLERANCE = 1e-12  # of float64, relative


def add_to(x: Tensor, y: Tensor) -> None:
    x.add_(y)


def next_to(x: Tensor, out: Tensor, other: Tensor | None = None) -> Tensor:
    for held in (out, other):
        if held is not None:
            held.copy_(x * 2)
    return x + 1


LIBRARY.impl("add_to", add_to, "CPU")
LIBRARY.impl("add_to", lambda x, y: None, "Meta")
LIBRARY.impl("next_to", next_to, "CPU")
LIBRARY.impl("next_to", lambda x, out, other=None: torch.empty_like(x), "Meta")


class Writes(nn.Module):
    """Numbers for each place, which operators write; in a body that runs from its record if it counts by its width."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 16)
        self.counts = counts

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        made = self.up(x).tanh()
        made = made.view(batch, length, 4, width // 4).flatten(2) if self.counts else made
        place = torch.zeros(length, dtype=x.dtype, device=x.device)
        torch.ops.tests_writes.add_to(place, torch.arange(length, dtype=x.dtype, device=x.device))
        out, other = torch.empty_like(place), torch.empty_like(place)
        view = out[:]
        following = torch.ops.tests_writes.next_to(place, out, other=other)
        return self.down(made) * (place + following + view + other)[:, None]


class Around(nn.Module):
    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.inner = Writes(counts)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def call(batch: int, length: int) -> Any:
    return (torch.randn(batch, length, 16, generator=torch.Generator().manual_seed(length)).double(),), {}


@pytest.mark.parametrize("counts", [False, True])
def test_what_they_write_is_read(counts: bool) -> None:
    torch.manual_seed(0)
    rules = {"inner.up": "colwise", "inner.down": "rowwise"}
    model = Around(counts).double()
    program = tpplan.compile_plan(model, {"version": 1, "modules": rules}, 2, call(2, 6)[0])
    assert program.count_collectives() == {"all-reduce": 1}
    assert [spec.name for spec in program.modules if spec.recorded is not None] == (["inner"] if counts else [])
    assert max(worst(model, rules, 2, call(2, 6), [call(2, 6), call(3, 9)])) < TOLERANCE
