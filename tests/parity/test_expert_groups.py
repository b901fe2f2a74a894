"""Experts that are shared out over groups of ranks, and split inside over the ranks of their group."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional

import tpplan
from tests.marking import in_turns
from tests.parity.test_expert_lists import CHOSEN, WIDTH, Expert, of_all, of_any, of_each, of_hit, of_scatter
from tpplan.compat.process_groups import fake_process_group
from tpplan.parity import verify_program
from tpplan.plan import CompileError
from tpplan.report.program_page import render_program

ACTIVATIONS = (torch.randn(3, 8, WIDTH, requires_grad=True),)
INSIDE = {"moe.experts.*.{gate,up}": "colwise", "moe.experts.*.down": "rowwise"}
RULES: dict[str, Any] = {"moe.experts": "experts", **INSIDE}
PLAN: dict[str, Any] = {"version": 1, "modules": RULES}
SEQUENCE: dict[str, Any] = {"version": 1, "modules": {**RULES, "norm": "sequence", "last": "sequence"}}


class Mixture(nn.Module):
    def __init__(self, experts: nn.ModuleList, dispatch: Callable[..., Tensor]) -> None:
        super().__init__()
        self.dispatch = dispatch
        self.router = nn.Linear(WIDTH, len(experts))
        self.experts = experts

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        weights, chosen = torch.topk(functional.softmax(self.router(tokens), -1), CHOSEN, -1)
        return self.dispatch(self.experts, tokens, weights, chosen).view_as(x)


class Block(nn.Module):
    """A mixture of as many experts as are wanted."""

    def __init__(
        self,
        count: int,
        make: Callable[[], nn.Module] = lambda: Expert(True),
        dispatch: Callable[..., Tensor] = of_each,
    ) -> None:
        super().__init__()
        self.norm, self.last = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.moe = Mixture(nn.ModuleList(make() for _ in range(count)), dispatch)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.moe(self.norm(x)))


def verified(model: nn.Module, plan: dict[str, Any], size: int) -> tpplan.Program:
    """The program, whose results and gradients are those of the model."""
    program = tpplan.compile_plan(model, plan, size, ACTIVATIONS)
    assert tpplan.Program.from_dict(program.to_dict()) == program
    report = verify_program(model, program, (ACTIVATIONS, {}))
    assert report.ok, report.problems
    return program


def held(program: tpplan.Program, name: str) -> list[tuple[int, ...]]:
    """What each rank stores of a parameter."""
    placement = next(p for p in program.parameters if name in p.names)
    return [placement.stored_shape(program.size, rank) for rank in range(program.size)]


@pytest.mark.parametrize(
    ("count", "way"), in_turns([2, 4, 6], [(4, False), (8, True), (2, True), (8, False), (4, True), (2, False)])
)
def test_a_list_takes_one_reduction_each_way(count: int, way: tuple[int, bool]) -> None:
    size, plan = way[0], SEQUENCE if way[1] else PLAN
    program = verified(Block(count), plan, size)
    counts = program.count_collectives()
    assert counts["all-reduce"] == (2 + 1 if plan is PLAN else 1)  # one is of the router's gradient
    assert counts.get("reduce-scatter", 0) == (0 if plan is PLAN else 2)


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("count", "size", "first", "last"),
    [
        (2, 4, [12, 12, 0, 0], [0, 0, 12, 12]),
        (6, 4, [12, 12, 0, 0], [0, 0, 12, 12]),
        (3, 4, [6, 6, 6, 6], [6, 6, 6, 6]),
        (4, 2, [24, 0], [0, 24]),
        (2, 6, [8, 8, 8, 0, 0, 0], [0, 0, 0, 8, 8, 8]),
        (2, 10, [5, 5, 5, 5, 4] + [0] * 5, [0] * 5 + [5, 5, 5, 5, 4]),
    ],
)
def test_who_holds_what(count: int, size: int, first: list[int], last: list[int]) -> None:
    program = verified(Block(count), PLAN, size)
    for expert, expected in ((0, first), (count - 1, last)):
        assert [math.prod(shape) for shape in held(program, f"moe.experts.{expert}.up.weight")] == [
            features * WIDTH for features in expected
        ]
        assert [math.prod(shape) for shape in held(program, f"moe.experts.{expert}.down.weight")] == [
            features * WIDTH for features in expected
        ]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dispatch", [of_hit, of_any, of_scatter, of_all])
def test_other_ways_to_call_them(dispatch: Callable[..., Tensor]) -> None:
    verified(Block(6, dispatch=dispatch), PLAN, 4)


@pytest.mark.parametrize("size", [4, 8])
def test_experts_that_nobody_chose(size: int) -> None:
    model = Block(6, dispatch=of_hit)
    with torch.no_grad():
        model.moe.router.bias.copy_(torch.arange(6) * 100.0)
    verified(model, PLAN, size)


class Fused(nn.Module):
    """Gate and up in one, a norm before and a scale behind, without rules, and a bias."""

    def __init__(self, inner: int = 24) -> None:
        super().__init__()
        self.norm, self.scale = nn.LayerNorm(WIDTH), nn.Parameter(torch.randn(WIDTH))
        self.both, self.down = nn.Linear(WIDTH, 2 * inner), nn.Linear(inner, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(self.norm(x)).chunk(2, -1)
        return self.down(functional.silu(gate) * up) * self.scale


FUSED = {
    "version": 1,
    "modules": {
        "moe.experts": "experts",
        "moe.experts.*.both": {"style": "colwise", "packed": ["gate", "up"]},
        "moe.experts.*.down": "rowwise",
    },
}


@pytest.mark.parametrize("inner", [24, 10, 7])
@pytest.mark.parametrize("size", [4, 8])
@pytest.mark.one_in(5)
def test_packs_uneven_parts_and_parameters_without_a_rule(size: int, inner: int) -> None:
    program = verified(Block(2, lambda: Fused(inner)), FUSED, size)
    assert program.count_collectives()["all-reduce"] == 3
    assert held(program, "moe.experts.1.scale") == [(WIDTH,)] * size


class Heads(nn.Module):
    """An expert that attends: its features are heads, of which keys have fewer."""

    def __init__(self, keys: int = 2) -> None:
        super().__init__()
        self.keys = keys
        self.q, self.k = nn.Linear(WIDTH, 4 * 4), nn.Linear(WIDTH, keys * 4)
        self.out = nn.Linear(4 * 4, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).view(x.shape[0], -1, 4)
        k = self.k(x).view(x.shape[0], -1, 4).repeat_interleave(4 // self.keys, 1)
        return self.out((q * torch.tanh(k)).flatten(1))


@pytest.mark.parametrize("keys", [1, 2, 4])
@pytest.mark.parametrize("size", [4, 8])
@pytest.mark.one_in(5)
def test_experts_with_heads(size: int, keys: int) -> None:
    rules = {"moe.experts": "experts", "moe.experts.*.{q,k}": "colwise", "moe.experts.*.out": "rowwise"}
    verified(Block(2, lambda: Heads(keys), of_all), {"version": 1, "modules": rules}, size)


class Odd(Expert):
    """It does something else where it has half of its features."""

    def forward(self, x: Tensor) -> Tensor:
        made = functional.silu(self.gate(x)) * self.up(x)
        return self.down(made * 2 if made.shape[-1] == 12 else made)


@pytest.mark.parametrize("place", [0, 1])
def test_the_ranks_of_each_group_are_checked(place: int) -> None:
    model = Block(2)
    model.moe.experts[place] = Odd(True)
    program = verified(model, PLAN, 4)
    assert "TP124" in {finding.code for finding in program.diagnostics}  # it runs from its record


def test_a_mapping_of_experts_and_a_list_of_layers() -> None:
    class Named(Block):
        def __init__(self) -> None:
            super().__init__(2, lambda: nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH)), of_named)
            self.moe.experts = nn.ModuleDict({"a": self.moe.experts[0], "b": self.moe.experts[1]})  # pyright: ignore

    def of_named(experts: nn.ModuleDict, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        return of_each(nn.ModuleList(experts.values()), x, weights, chosen)

    rules = {"moe.experts": "experts", "moe.experts.*.0": "colwise", "moe.experts.*.2": "rowwise"}
    program = verified(Named(), {"version": 1, "modules": rules}, 4)
    assert [shape[0] for shape in held(program, "moe.experts.b.0.weight")] == [0, 0, 12, 12]


def test_on_as_many_ranks_as_experts_each_is_whole_on_one() -> None:
    program = verified(Block(4), PLAN, 4)
    assert [finding.code for finding in program.diagnostics] == ["TP148"]
    alone = verified(Block(4), {"version": 1, "modules": {"moe.experts": "experts"}}, 4)
    assert [p.layout for p in program.parameters] == [p.layout for p in alone.parameters]


def test_an_expert_without_rules_inside_is_whole_on_one_rank() -> None:
    rules = {"moe.experts": "experts", "moe.experts.1.{gate,up}": "colwise", "moe.experts.1.down": "rowwise"}
    program = verified(Block(2), {"version": 1, "modules": rules}, 4)
    assert [shape[0] for shape in held(program, "moe.experts.0.up.weight")] == [24, 0, 0, 0]
    assert [shape[0] for shape in held(program, "moe.experts.1.up.weight")] == [0, 0, 12, 12]


def test_explain_tells_the_ranks() -> None:
    text = render_program(tpplan.compile_plan(Block(2), PLAN, 8, ACTIVATIONS))
    assert "S(0, ranks 0 to 3)" in text
    assert "S(1, ranks 4 to 7)" in text


def test_counted_as_predicted() -> None:
    model = Block(2)
    predicted = tpplan.compile_plan(model, PLAN, 4, ACTIVATIONS).count_collectives()
    with fake_process_group(4):
        sharded = tpplan.parallelize(model, PLAN, init_device_mesh("cpu", (4,), mesh_dim_names=("tp",)), ACTIVATIONS)
        with CommDebugMode() as mode:
            sharded(*ACTIVATIONS).sum().backward()
    assert mode.get_total_counts() == sum(predicted.values())


@pytest.mark.processes
@pytest.mark.parametrize("plan", [PLAN, SEQUENCE], ids=["tp", "sequence"])
def test_on_processes(plan: dict[str, Any]) -> None:
    report = tpplan.verify(Block(2), plan, 4, ACTIVATIONS, processes=True)
    assert report.ok, report.problems


def test_fewer_experts_than_ranks_can_be_split_inside() -> None:
    """What the refusal says leads to a plan that compiles."""
    with pytest.raises(CompileError) as caught:
        tpplan.compile_plan(Block(2), {"version": 1, "modules": {"moe.experts": "experts"}}, 4, ACTIVATIONS)
    (finding,) = caught.value.diagnostics
    assert finding.code == "TP102"
    assert finding.help == (
        "use at most 2 ranks, or split each expert inside as well: `colwise` and `rowwise` on its layers, beside "
        "this rule"
    )
    verified(Block(2), PLAN, 4)


@pytest.mark.parametrize(
    ("rules", "code"),
    [
        ({"moe.experts.*.up": "colwise"}, "TP107"),
        ({"moe.experts.*.down": "rowwise"}, "TP114"),
        ({"moe.experts.*.{gate,up}": "colwise"}, "TP107"),
    ],
)
def test_nothing_is_gathered_inside(rules: dict[str, Any], code: str) -> None:
    """Both ways out that the refusal names lead to a plan that compiles."""
    with pytest.raises(CompileError) as caught:
        tpplan.compile_plan(Block(2), {"version": 1, "modules": {"moe.experts": "experts", **rules}}, 4, ACTIVATIONS)
    assert code in {finding.code for finding in caught.value.diagnostics}
    for finding in caught.value.diagnostics:
        assert (finding.help or "").startswith("split the whole expert: `colwise` for the layers that make")
        assert "or remove the rule for `moe.experts`" in (finding.help or "")
    verified(Block(2), PLAN, 4)
    verified(Block(2), {"version": 1, "modules": rules}, 4)


@pytest.mark.parametrize("style", ["replicate", "sequence", "experts"])
def test_other_rules_inside_are_refused(style: str) -> None:
    rules = {**RULES, "moe.experts.*.up": style}
    with pytest.raises(CompileError) as caught:
        tpplan.compile_plan(Block(2), {"version": 1, "modules": rules}, 4, ACTIVATIONS)
    assert {finding.code for finding in caught.value.diagnostics} <= {"TP146", "TP101"}
    assert all("remove this rule" in (f.help or "") for f in caught.value.diagnostics if f.code == "TP146")


def test_a_recurrent_expert_is_refused() -> None:
    """Its ranks would gather a hidden state in each step."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRU(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.cell(x[None])[0][0]

    rules = {"moe.experts": "experts", "moe.experts.*.cell": "colwise"}
    with pytest.raises(CompileError) as caught:
        tpplan.compile_plan(Block(2, Recurrent), {"version": 1, "modules": rules}, 4, ACTIVATIONS)
    assert {finding.code for finding in caught.value.diagnostics} == {"TP146"}
