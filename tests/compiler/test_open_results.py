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
from tpplan.compiler.place.apart import apart
from tpplan.compiler.place.entry_layouts import States
from tpplan.compiler.place.open_results import OpenResults, Option
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
@pytest.mark.one_in(3)
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


def test_many_results_of_the_model_take_no_longer() -> None:
    """They leave it without being read: of 30 with two layouts each there are a thousand million combinations."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.modulation = Modulation(30)
            self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, given: Tensor) -> list[Tensor]:
            x, *held = self.modulation(x, given)
            return [self.down(self.up(x)), *held]

    x, _, given = call()
    rules = {"up": "colwise", "down": "rowwise"}
    program = tpplan.compile_plan(Outer().double(), {"version": 1, "modules": rules}, 2, (x, given))
    assert program.count_collectives(backward=False) == {"all-reduce": 1}


def test_of_two_ways_to_a_layout_the_cheaper_one_is_kept() -> None:
    placer = Placer(Propagator(2, 1), NVLINK)
    split, whole = placer._numbering.code(sharded(1)), placer._numbering.code(REPLICATED)
    undecided = placer._open.code((Option(split, (0, 0)), Option(whole, (5, 0))))
    region, body = SimpleNamespace(example=("attend", 0), depth=1), SimpleNamespace(read=[(0,)], names=[(7,)])
    states = {(undecided,): ((1, 0), None), (split,): ((9, 0), None), (whole,): ((3, 0), None)}
    for given in (states, dict(reversed(states.items()))):
        found = placer._decided(region, body, 0, given, None)  # pyright: ignore
        assert {state: cost for state, (cost, _) in found.items()} == {(split,): (1, 0), (whole,): (3, 0)}


class Joint(nn.Module):
    """Attention of two streams, of which each has its projections, views and norms before they meet."""

    def __init__(self, streams: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)) for _ in range(streams))
        self.q_norm, self.k_norm = nn.LayerNorm(WIDTH // 4), nn.LayerNorm(WIDTH // 4)

    def forward(self, streams: list[Tensor], angles: Tensor) -> list[Tensor]:
        parts: list[list[Tensor]] = [[], [], []]
        for stream, layers in zip(streams, self.layers, strict=True):
            for held, layer in zip(parts, layers, strict=False):  # pyright: ignore[reportArgumentType]
                held.append(layer(stream).unflatten(-1, (-1, WIDTH // 4)).transpose(1, 2))
        q, k, v = parts
        one = torch.cat([self.q_norm(held) for held in q], 2)
        other = torch.cat([self.k_norm(held) for held in k], 2)
        mixed = nn.functional.scaled_dot_product_attention(one * angles, other * angles, torch.cat(v, 2))
        lengths = [stream.shape[1] for stream in streams]
        outs = mixed.transpose(1, 2).flatten(2).split(lengths, 1)
        return [layers[3](held) for layers, held in zip(self.layers, outs, strict=True)]  # pyright: ignore


class Joints(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.blocks = nn.ModuleList(Joint() for _ in range(2))

    def forward(self, x: Tensor, y: Tensor, angles: Tensor) -> tuple[Tensor, ...]:
        streams = [x, y]
        for block in self.blocks:
            made = block([norm(held) for norm, held in zip(self.norms, streams, strict=True)], angles)
            streams = [held + its for held, its in zip(streams, made, strict=True)]
        return tuple(streams)


JOINT: dict[str, Any] = {"blocks.*.layers.*.{0,1,2}": "colwise", "blocks.*.layers.*.3": "rowwise"}


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.one_in(3)
def test_a_crowd_of_layouts_has_the_same_least_cost(sequence: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that leave their results open, and bodies whose ways from a state on are remembered, prune nothing."""
    rules = JOINT | ({"norms.*": "sequence"} if sequence else {})
    x, y, _ = call()
    example = (x, y.detach().requires_grad_(), torch.randn(16, WIDTH // 4, dtype=torch.float64))
    plan = {"version": 1, "modules": rules}
    digests: set[str] = set()
    for crowded in (1, 32, 10**9):
        monkeypatch.setattr(importlib.import_module("tpplan.compiler.place.place"), "CROWDED", crowded)
        torch.manual_seed(0)
        model = Joints().double()
        program = tpplan.compile_plan(model, plan, 2, example)
        digests.add(program.digest)
        parity = tpplan.verify(model, plan, 2, example)
        assert parity.ok and parity.collectives == parity.predicted
    assert len(digests) == 1


class Scales(nn.Module):
    """What it returns of each input has nothing to do with the other inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2)), nn.LayerNorm(WIDTH)

    def forward(self, held: list[Tensor]) -> list[Tensor]:
        held = [self.inner[number % 2](each) for number, each in enumerate(held)]
        return [self.norm(each.relu() * 2).sigmoid() for each in held]


class Pyramid(nn.Module):
    """Scales that a layer each works on before they meet."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.scales = Scales()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.into = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))

    def forward(self, held: list[Tensor]) -> Tensor:
        scales = [into(each) for into, each in zip(self.into, self.scales(held), strict=True)]
        met = scales[0].mean(1)
        for each in scales[1:]:
            met = met + each.mean(1)
        return self.down(self.up(met).relu())


def scaled(count: int) -> tuple[nn.Module, dict[str, Any], tuple[list[Tensor]]]:
    torch.manual_seed(0)
    held = [torch.randn(2, 2 * (number + 1), WIDTH, dtype=torch.float64, requires_grad=True) for number in range(count)]
    rules = {"up": "colwise", "down": "rowwise", "scales.norm": "sequence", "into.*": "sequence"}
    return Pyramid(count).double(), {"version": 1, "modules": rules}, (held,)


@pytest.mark.one_in(3)
def test_values_that_go_their_own_ways_get_the_layouts_that_they_got_together(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plan, example = scaled(3)
    digests: set[str] = set()
    for crowded in (1, 10**9):
        monkeypatch.setattr(importlib.import_module("tpplan.compiler.place.place"), "CROWDED", crowded)
        digests.add(tpplan.compile_plan(model, plan, 2, example).digest)
        parity = tpplan.verify(model, plan, 2, example)
        assert parity.ok and parity.collectives == parity.predicted
    assert len(digests) == 1


def test_many_values_that_go_their_own_ways_take_no_longer() -> None:
    model, plan, example = scaled(12)
    parity = tpplan.verify(model, plan, 2, example)
    assert parity.ok and parity.collectives == parity.predicted


def test_a_value_goes_its_own_way_if_its_layouts_cost_the_same_beside_all_others() -> None:
    together: States = {(x, y, z): ((10 * x + y * z, x), None) for x in (0, 1) for y in (0, 1) for z in (0, 1)}
    results = OpenResults()
    states = apart(together, results)
    assert len(states) == 4
    (opened,) = {state[0] for state in states}
    assert [(option.code, option.cost) for option in results.options(opened)] == [(0, (0, 0)), (1, (10, 1))]
    assert {state[1:]: cost for state, (cost, _) in states.items()} == {
        (0, 0): (0, 0), (0, 1): (0, 0), (1, 0): (0, 0), (1, 1): (1, 0),
    }  # fmt: skip
    del together[1, 0, 0]
    assert apart(together, results) == together


@pytest.mark.one_in(3)
def test_what_is_given_up_where_there_are_too_many_ways_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plan, example = scaled(4)
    exact = tpplan.compile_plan(model, plan, 2, example)
    assert "TP137" not in [finding.code for finding in exact.diagnostics]
    place = importlib.import_module("tpplan.compiler.place.place")
    monkeypatch.setattr(place, "CROWDED", 10**9)
    monkeypatch.setattr(place, "MOST", 24)
    cut = tpplan.compile_plan(model, plan, 2, example)
    (finding, *_) = [finding for finding in cut.diagnostics if finding.code == "TP137"]
    assert "ways to lay out its values" in finding.message and "weren't followed" in finding.message
    parity = tpplan.verify(model, plan, 2, example)
    assert parity.ok and parity.collectives == parity.predicted
    monkeypatch.setattr(place, "MOST", 2)
    monkeypatch.setattr(place, "TOO_MANY", 2)
    with pytest.raises(tpplan.CompileError) as error:
        tpplan.compile_plan(model, plan, 2, example)
    assert {"TP137"} < {finding.code for finding in error.value.diagnostics}
