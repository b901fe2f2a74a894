"""Layouts of results that are chosen where these are read."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tpplan
from tpplan.compiler.ir.layout import REPLICATED, sharded
from tpplan.compiler.ir.program import Program
from tpplan.compiler.place.place import Placer
from tpplan.compiler.rules.propagate import Propagator
from tpplan.cost.communication import NVLINK

WIDTH, MODULATIONS = 16, 5


class Modulation(nn.Module):
    """A norm and its modulations, as many as results."""

    def __init__(self, count: int = MODULATIONS) -> None:
        super().__init__()
        self.norm, self.linear, self.count = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, count * WIDTH), count

    def forward(self, x: Tensor, given: Tensor) -> tuple[Tensor, ...]:
        first, *others = self.linear(given)[:, None].chunk(self.count, -1)
        return self.norm(x) * (1 + first), *others, given * 2


class Block(nn.Module):
    """Two streams, of which each is modulated; not all results are read."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Modulation(), Modulation()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor, given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        normed, gate, shift, scale, _, twice = self.one(x, given)
        its, *held, _ = self.other(y, given)
        x = x + gate * self.down(self.up(normed + shift).relu() * 2) * scale
        y = y + held[0] * self.down(self.up(its * held[1]).relu()) + held[2]
        return x, y, twice


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor, y: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            x, y, given = block(x, y, given)
        return x, y


PLANS: dict[str, dict[str, Any]] = {
    "by features": {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"},
    "gathered": {"blocks.*.up": "colwise", "blocks.*.down": "rowwise",
                 "blocks.*.{one,other}.linear": {"style": "colwise", "output": "replicate"}},
    "by sequence": {"blocks.*.up": "colwise", "blocks.*.down": "rowwise", "blocks.*.{one,other}.norm": "sequence"},
}  # fmt: skip


def call() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((2, 8, WIDTH), (2, 8, WIDTH), (2, WIDTH))
    return tuple(torch.randn(*shape, dtype=torch.float64, generator=generator, requires_grad=True) for shape in sizes)


def made() -> nn.Module:
    torch.manual_seed(0)
    return Net().double()


def compiled(rules: dict[str, Any], monkeypatch: pytest.MonkeyPatch, many: int) -> Program:
    monkeypatch.setattr(importlib.import_module("tpplan.compiler.place.place"), "MANY", many)
    return tpplan.compile_plan(made(), {"version": 1, "modules": rules}, 2, call())


@pytest.mark.parametrize("rules", PLANS.values(), ids=PLANS)
def test_what_is_chosen_is_the_same_wherever_it_is_chosen(
    rules: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    early, late = (compiled(rules, monkeypatch, many) for many in (1_000, 1))
    assert late.digest == early.digest
    report = tpplan.verify(made(), {"version": 1, "modules": rules}, 2, call())
    assert report.ok and report.collectives == report.predicted


def test_many_results_take_no_longer() -> None:
    """Of 30 results with two layouts each there are a thousand million combinations."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.modulation = Modulation(30)
            self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, given: Tensor) -> Tensor:
            x, *held = self.modulation(x, given)
            x = self.down(self.up(x))
            for each in held[:-1]:
                x = x * each
            return x

    x, _, given = call()
    program = tpplan.compile_plan(
        Wide().double(), {"version": 1, "modules": {"up": "colwise", "down": "rowwise"}}, 2, (x, given)
    )
    assert program.count_collectives(backward=False) == {"all-reduce": 1}


def test_of_two_ways_to_a_layout_the_cheaper_one_is_kept() -> None:
    placer = Placer(Propagator(2, 1), NVLINK)
    split, whole = placer._numbering.code(sharded(1)), placer._numbering.code(REPLICATED)
    undecided = placer._open.code(((split, (0, 0)), (whole, (5, 0))))
    region, body = SimpleNamespace(example=("attend", 0)), SimpleNamespace(read=[(0,)], names=[(7,)])
    states = {(undecided,): ((1, 0), None), (split,): ((9, 0), None), (whole,): ((3, 0), None)}
    for given in (states, dict(reversed(states.items()))):
        found = placer._decided(region, body, 0, given)  # pyright: ignore
        assert {state: cost for state, (cost, _) in found.items()} == {(split,): (1, 0), (whole,): (3, 0)}
