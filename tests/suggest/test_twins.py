"""What holds of a layer in one block is told of its twins."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tpplan.suggest import roles, search
from tpplan.suggest.flow import flow

WIDTH = 16


class Mixed(nn.Module):
    """A pair, and a layer that needs all of its own features."""

    def __init__(self, bare: bool = False) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.down, self.out, self.bare = nn.Linear(4 * WIDTH, WIDTH), nn.Linear(4 * WIDTH, WIDTH), bare

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        gate = gate.relu() if self.bare else gate.sort(-1).values
        return x + self.down(self.up(x).relu()) + self.out(gate)


class Stack(nn.Module):
    def __init__(self, layers: int, bare: int = -1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mixed(number == bare) for number in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def walks(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> tuple[int, dict[str, str], set[str]]:
    """How often the trace is walked, what stays whole and why, and what is split."""
    count = 0

    def counted(*arguments: object) -> object:
        nonlocal count
        count += 1
        return flow(*arguments)  # pyright: ignore

    monkeypatch.setattr(roles, "flow", counted)
    found = search(model, 2, (torch.randn(2, 4, WIDTH),), {}, sequence_parallel=False)
    return count, dict(found.reasons), set(found.settings)


def test_equal_blocks_take_no_more_walks_than_two(monkeypatch: pytest.MonkeyPatch) -> None:
    few, _, _ = walks(Stack(2), monkeypatch)
    many, reasons, split = walks(Stack(6), monkeypatch)
    assert many == few
    assert {f"layers.{number}.gate" for number in range(6)} <= reasons.keys()
    for number in range(6):
        assert f"`layers.{number}` needs its result whole: `aten.sort.default`" in reasons[f"layers.{number}.gate"]
        assert f"layers.{number}.up" in split


def test_a_block_that_differs_is_no_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    _, reasons, split = walks(Stack(6, bare=4), monkeypatch)
    assert {"layers.4.gate", "layers.4.out"} <= split
    assert {name for name in reasons if name.endswith("gate")} == {f"layers.{n}.gate" for n in (0, 1, 2, 3, 5)}


class Normed(nn.Module):
    """A pair, and one with a norm over all of its features between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.low, self.norm, self.high = nn.Linear(WIDTH, 8), nn.LayerNorm(8), nn.Linear(8, 4 * WIDTH)
        self.out = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu()) + self.out(self.high(self.norm(self.low(x))).relu())


def test_a_column_before_a_norm_has_twins_too(monkeypatch: pytest.MonkeyPatch) -> None:
    few, _, _ = walks(nn.Sequential(*(Normed() for _ in range(2))), monkeypatch)
    many, reasons, split = walks(nn.Sequential(*(Normed() for _ in range(6))), monkeypatch)
    assert many == few
    for number in range(6):
        assert reasons[f"{number}.low"] == f"a norm stands between it and `{number}.high`"
        assert {f"{number}.high", f"{number}.out"} <= split
