"""What placement chooses is the cheapest of all: of every combination of pins, each placed around them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import tpplan
from tpplan.compiler.pipeline import compile_call
from tpplan.compiler.request import Request
from tpplan.cost.communication import NVLINK, Topology
from tpplan.cost.traffic import placement_time
from tpplan.forecast.runner_up import runners_up
from tpplan.plan import Pattern, load_plan
from tpplan.served import served


class Block(nn.Module):
    """Two readers of one value, and a sum with what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate, self.up, self.down = nn.LayerNorm(16), *(nn.Linear(16, 16, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        held = self.norm(x)
        return x + self.down(self.gate(held) * self.up(held))


STYLES = {"norm": "sequence", "gate": "colwise", "up": "colwise", "down": "rowwise"}
ENDS = {"norm": ("output",), "gate": ("input",), "up": ("input",), "down": ("output",)}


def compiled(pins: dict[tuple[str, str], str], styles: dict[str, str], tp: int) -> tpplan.Program | None:
    rules = {name: {"style": style, **{end: pin for (of, end), pin in pins.items() if of == name}}
             for name, style in styles.items()}  # fmt: skip
    torch.manual_seed(0)
    call = ((torch.empty(2, 8, 16),), dict[str, object]())
    plan = load_plan({"version": 1, "modules": rules})
    try:
        return compile_call(Request(Block(), plan, tp, *call)).program
    except tpplan.CompileError:
        return None


def times(styles: dict[str, str], tp: int, topology: Topology, ends: dict[str, tuple[str, ...]]) -> list[int]:
    """Of all combinations of pins that compile."""
    places = [(name, end) for name in styles for end in ends.get(name, ())]
    found = [
        compiled(dict(zip(places, pins, strict=True)), styles, tp)
        for pins in itertools.product(("replicate", "shard", "sequence"), repeat=len(places))
    ]
    return [placement_time(program, topology) for program in found if program is not None]


@pytest.mark.parametrize(
    ("topology", "ends"),
    [
        (NVLINK, {"norm": ("output",), "down": ("output",)}),
        *(pytest.param(topology, ENDS, marks=pytest.mark.slow)
          for topology in (NVLINK, Topology(0, 10**9), Topology(10**7, 10**15))),
    ],
)  # fmt: skip
def test_no_combination_of_pins_is_cheaper(
    topology: Topology, ends: dict[str, tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tpplan.compiler.search.NVLINK", topology)
    chosen = compiled({}, STYLES, 2)
    assert chosen is not None
    everything = times(STYLES, 2, topology, ends)
    assert len(set(everything)) > 1
    assert placement_time(chosen, topology) == min(everything)
    assert chosen.topology == topology


def test_the_topology_is_in_the_digest() -> None:
    program = compiled({}, STYLES, 2)
    assert program is not None and program.topology == NVLINK
    assert program.to_dict()["topology"] == {"latency": 3_000_000, "bandwidth": 450_000_000_000}
    assert replace(program, topology=Topology(0, 10**9)).digest != program.digest
    assert tpplan.Program.from_dict(program.to_dict()) == program


def test_the_runner_up_is_the_next_of_all_and_has_its_price() -> None:
    plan = load_plan({"version": 1, "modules": STYLES})
    inner = served(Block(), plan, 2, torch.empty(2, 8, 16))
    found = {held.end: held for held in runners_up(inner, 2, Pattern.parse("down"))}
    chosen, pinned = (compiled(pins, STYLES, 2) for pins in ({}, {("down", "output"): "sequence"}))
    assert chosen is not None and pinned is not None
    held = found["output"]
    assert (held.rule, held.chosen, held.pin) == ("down", ("replicate",), "sequence")
    assert held.seconds == (placement_time(pinned) - placement_time(chosen)) / 1e12 > 0
    assert held.collectives == pinned.count_collectives()
    assert found["input"].pin is None and found["input"].refused["replicate"].startswith("TP114")
