"""A model inside of one that wraps it: the example call is followed through the wrapper's own code."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import tpplan

HIDDEN = 32
PLAN = {"version": 1, "modules": {"layers.*.0": "colwise", "layers.*.2": "rowwise"}}


class Inner(nn.Module):
    """Two feed-forward blocks, of whose result the first entries are asked for."""

    def __init__(self) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(HIDDEN, 64), nn.GELU(), nn.Linear(64, HIDDEN)) for _ in range(2))
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: Tensor, count: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x if count is None else x[:, : count.item()]


class Wrapper(nn.Module):
    """Passes on what `way` makes of its arguments."""

    def __init__(self, way: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.way = Inner(), way

    def forward(self, x: Tensor, count: Tensor) -> Tensor:
        return self.way(self.model, x, count)


def under_autocast(model: nn.Module, x: Tensor, count: Tensor) -> Tensor:
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        return model(x)


def in_its_dtype(model: nn.Module, x: Tensor, count: Tensor) -> Tensor:
    return model(x.to(torch.get_autocast_dtype(x.device.type)).to(x.dtype))


def by_number(model: nn.Module, x: Tensor, count: Tensor) -> Tensor:
    return model(x[:, : count.item()])


def with_number(model: nn.Module, x: Tensor, count: Tensor) -> Tensor:
    return model(x, count + 1)


@pytest.mark.parametrize("way", [under_autocast, in_its_dtype, by_number, with_number])
def test_a_wrapper_may_ask_for_devices_and_numbers(way: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> None:
    report = tpplan.verify(Wrapper(way), PLAN, 2, (torch.randn(2, 12, HIDDEN), torch.tensor(6)), dtype=torch.float32)
    assert report.ok, report.problems
