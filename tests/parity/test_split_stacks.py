"""Stacked experts that are shared out over groups of ranks, and split inside over the ranks of their group."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional

import tpplan
from tests.marking import in_turns
from tests.parity.test_expert_groups import held, verified
from tests.parity.test_whole_experts import WIDTH, by_size, of_added, of_grouped, of_hits, of_loop, of_picked
from tests.parity.test_whole_experts import of_weighed_first as of_weighed
from tpplan.calls.call_errors import UnprovedCallError
from tpplan.compat.process_groups import fake_process_group
from tpplan.plan import CompileError
from tpplan.report.program_page import render_program
from tpplan.runtime.parameters.packed_tensors import PackedShard

ACTIVATIONS = (torch.randn(3, 8, WIDTH, requires_grad=True),)
MATRICES: dict[str, Any] = {
    "moe.experts.up": {"style": "colwise", "packed": ["gate", "up"]},
    "moe.experts.down": "rowwise",
}
BIASES: dict[str, Any] = {
    "moe.experts.up_bias": {"style": "colwise", "packed": ["gate", "up"]},
    "moe.experts.down_bias": "rowwise",
}
INSIDE = {**MATRICES, **BIASES}
RULES: dict[str, Any] = {"moe.experts": "experts", **INSIDE}
PLAN: dict[str, Any] = {"version": 1, "modules": RULES}
SEQUENCE: dict[str, Any] = {"version": 1, "modules": {**RULES, "norm": "sequence", "last": "sequence"}}
WITHOUT_BIASES = {"version": 1, "modules": {"moe.experts": "experts", **MATRICES}}

Body = Callable[[Any, Tensor, Tensor, Tensor], Tensor]


class Experts(nn.Module):
    """As many experts as are wanted, of so many features."""

    def __init__(self, count: int, inner: int, body: Body) -> None:
        super().__init__()
        self.body, self.count, self.inner = body, count, inner
        self.up = nn.Parameter(torch.randn(count, WIDTH, 2 * inner) / 4)
        self.down = nn.Parameter(torch.randn(count, inner, WIDTH) / 4)
        self.up_bias = nn.Parameter(torch.randn(count, 2 * inner))
        self.down_bias = nn.Parameter(torch.randn(count, WIDTH))
        self.scale = nn.Parameter(torch.randn(count, WIDTH))

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return self.body(self, tokens, chosen, weights)


class Mixture(nn.Module):
    def __init__(self, experts: nn.Module, count: int, choices: int) -> None:
        super().__init__()
        self.choices = choices
        self.router = nn.Linear(WIDTH, count)
        self.experts = experts

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        weights, chosen = torch.topk(functional.softmax(self.router(tokens), -1), self.choices, -1)
        return self.experts(tokens, chosen, weights).view_as(x)


class Block(nn.Module):
    def __init__(self, count: int = 2, body: Body = of_grouped, inner: int = 32, choices: int = 2) -> None:
        super().__init__()
        self.norm, self.last = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.moe = Mixture(Experts(count, inner, body), count, choices)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.moe(self.norm(x)))


WAYS = [(4, False), (8, True), (2, True), (8, False), (4, True), (2, False)]


@pytest.mark.parametrize(("count", "way"), in_turns([2, 4, 6], WAYS))
def test_a_stack_takes_one_reduction_each_way(count: int, way: tuple[int, bool]) -> None:
    size, plan = way[0], SEQUENCE if way[1] else PLAN
    program = verified(Block(count), plan, size)
    counts = program.count_collectives()
    assert counts["all-reduce"] == (2 + 1 if plan is PLAN else 1)  # one is of the router's gradient
    assert counts.get("reduce-scatter", 0) == (0 if plan is PLAN else 2)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("body", [of_picked, of_weighed, of_hits])
@pytest.mark.parametrize("size", [4, 8])
def test_other_bodies(body: Body, size: int) -> None:
    verified(Block(2, body), PLAN, size)


def test_a_loop_over_experts_whose_number_is_local() -> None:
    program = verified(Block(6, of_loop), PLAN, 4)
    (module,) = (module for module in program.modules if module.name == "moe.experts")
    assert [attribute.on(3) for attribute in module.local_attributes if attribute.name == "count"] == [3]


def test_a_body_without_biases() -> None:
    verified(Block(2, of_added), WITHOUT_BIASES, 4)


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("count", "size", "up", "bias"),
    [
        (2, 4, [(1, WIDTH, 32)] * 4, [(1, WIDTH), (1, 0)] * 2),
        (6, 4, [(3, WIDTH, 32)] * 4, [(3, WIDTH), (3, 0)] * 2),
        (4, 8, [(1, WIDTH, 32)] * 8, [(1, WIDTH), (1, 0)] * 4),
        (2, 8, [(1, WIDTH, 16)] * 8, [(1, WIDTH), (1, 0), (1, 0), (1, 0)] * 2),
        (4, 2, [(2, WIDTH, 64)] * 2, [(2, WIDTH)] * 2),
        (3, 4, [(3, WIDTH, 16)] * 4, [(3, WIDTH)] * 4),
    ],
)
def test_who_holds_what(count: int, size: int, up: list[tuple[int, ...]], bias: list[tuple[int, ...]]) -> None:
    program = verified(Block(count), PLAN, size)
    assert held(program, "moe.experts.up") == up
    assert held(program, "moe.experts.down_bias") == bias


@pytest.mark.one_in(3)
@pytest.mark.parametrize("inner", [10, 7])
@pytest.mark.parametrize("body", [of_picked, of_hits])
def test_uneven_parts(body: Body, inner: int) -> None:
    """Of 7 features the four ranks of a group have 2, 2, 2 and one."""
    program = verified(Block(2, body, inner), PLAN, 8)
    assert [shape[1] for shape in held(program, "moe.experts.down")] == (
        [3, 3, 3, 1] if inner == 10 else [2, 2, 2, 1]
    ) * 2


@pytest.mark.parametrize("first", [0, 4])
@pytest.mark.parametrize("body", [of_grouped, of_picked])
def test_ranks_whose_experts_nobody_chose(body: Body, first: int) -> None:
    model = Block(6, body)
    with torch.no_grad():
        model.moe.router.bias.fill_(-1e4)[first : first + 2] = 1e4
    verified(model, PLAN, 4)


@pytest.mark.parametrize("choices", [1, 3])
def test_any_number_of_choices(choices: int) -> None:
    verified(Block(4, choices=choices), PLAN, 8)


def scaled(self: Experts, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """A matrix without a rule scales what each expert reads, and what it makes."""
    numbers = chosen.reshape(-1)
    rows = tokens.repeat_interleave(chosen.shape[-1], dim=0) * self.scale[numbers]
    gate, up = torch.bmm(rows.unsqueeze(1), self.up[numbers]).squeeze(1).view(-1, 2, self.inner).unbind(1)
    made = torch.bmm((functional.silu(gate) * up).unsqueeze(1), self.down[numbers]).squeeze(1) * self.scale[numbers]
    return (made * weights.reshape(-1, 1)).view(*chosen.shape, WIDTH).sum(1)


@pytest.mark.parametrize("size", [4, 8])
def test_a_parameter_without_a_rule_and_a_local_count(size: int) -> None:
    """Each rank of a group has the parameter, whose gradient is summed; the body reads how many features it has."""
    program = verified(Block(2, scaled), WITHOUT_BIASES, size)
    (scale,) = (p for p in program.parameters if p.name == "moe.experts.scale")
    assert scale.summed
    assert scale.local_shape == (1, WIDTH)
    (module,) = (module for module in program.modules if module.name == "moe.experts")
    assert [(a.name, a.local) for a in module.local_attributes] == [("inner", 32 * 2 // size)]


def test_on_as_many_ranks_as_experts_each_is_whole_on_one() -> None:
    program = verified(Block(4), PLAN, 4)
    assert [finding.code for finding in program.diagnostics] == ["TP148"]
    alone = verified(Block(4), {"version": 1, "modules": {"moe.experts": "experts"}}, 4)
    assert [p.layout for p in program.parameters] == [p.layout for p in alone.parameters]


def test_explain_tells_the_ranks() -> None:
    text = render_program(tpplan.compile_plan(Block(2), PLAN, 8, ACTIVATIONS))
    assert "S(0, each on 4 ranks, by dim 2: 32|32)" in text
    assert "S(0, on the first of 4 ranks)" in text


def test_counted_as_predicted() -> None:
    model = Block()
    predicted = tpplan.compile_plan(model, PLAN, 4, ACTIVATIONS).count_collectives()
    with fake_process_group(4):
        sharded = tpplan.parallelize(model, PLAN, init_device_mesh("cpu", (4,), mesh_dim_names=("tp",)), ACTIVATIONS)
        with CommDebugMode() as mode:
            sharded(*ACTIVATIONS).sum().backward()
    assert mode.get_total_counts() == sum(predicted.values())


@pytest.mark.one_in(3)
@pytest.mark.processes
@pytest.mark.parametrize("plan", [PLAN, SEQUENCE], ids=["tp", "sequence"])
def test_on_processes(plan: dict[str, Any]) -> None:
    report = tpplan.verify(Block(), plan, 4, ACTIVATIONS, processes=True)
    assert report.ok, report.problems


def test_other_numbers_of_tokens() -> None:
    with fake_process_group(4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        model = tpplan.parallelize(Block(body=by_size), PLAN, mesh, ACTIVATIONS)
        model(*ACTIVATIONS)
        model(torch.randn(2, 7, WIDTH))
        with pytest.raises(UnprovedCallError) as caught:
            model(torch.randn(16, 8, WIDTH))
    assert "TP146 experts-not-whole" in str(caught.value)


def test_experts_that_the_ranks_do_not_divide_can_be_split_inside() -> None:
    """What the refusal says leads to a plan that compiles."""
    with pytest.raises(CompileError) as caught:
        tpplan.compile_plan(Block(), {"version": 1, "modules": {"moe.experts": "experts"}}, 4, ACTIVATIONS)
    (finding,) = caught.value.diagnostics
    assert finding.code == "TP102"
    assert finding.help == (
        "use a number of ranks that divides the experts, or split each expert inside as well: `colwise` and `rowwise` "
        "on its matrices, beside this rule"
    )
    verified(Block(), PLAN, 4)


@pytest.mark.parametrize(
    ("rules", "says", "way_out"),
    [
        ({"moe.experts.up": {"style": "colwise", "packed": ["gate", "up"]}}, "aten", "for those that read them"),
        ({"moe.experts.down": "rowwise"}, "aten", "for those that read them"),
        (MATRICES, "aten", "biases too"),
        ({**INSIDE, "moe.experts.up": "replicate"}, "has a rule of its own", "remove this rule"),
        ({**INSIDE, "moe.experts.scale": "rowwise"}, "`scale`", "remove the rule"),
    ],
)
def test_rules_inside_that_do_not_fit(rules: dict[str, Any], says: str, way_out: str) -> None:
    """The ways out lead to plans that compile."""
    with pytest.raises(CompileError) as caught:
        tpplan.compile_plan(Block(), {"version": 1, "modules": {"moe.experts": "experts", **rules}}, 4, ACTIVATIONS)
    (finding,) = caught.value.diagnostics
    assert finding.code == "TP146"
    assert says in finding.message and way_out in (finding.help or "")


@pytest.mark.parametrize("size", [4, 3])
def test_tokens_go_to_whole_experts_only(size: int) -> None:
    rules = {**SEQUENCE["modules"], "moe.experts": {"style": "experts", "exchange": "all-to-all"}}
    activations = (torch.randn(3, 12, WIDTH, requires_grad=True),)
    with pytest.raises(CompileError) as caught:
        tpplan.compile_plan(Block(body=of_picked), {"version": 1, "modules": rules}, size, activations)
    (finding,) = caught.value.diagnostics
    assert finding.code == "TP146" and "remove `exchange`" in (finding.help or "")
    tpplan.compile_plan(Block(body=of_picked), SEQUENCE, size, activations)


class Norm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


def normed(self: Experts, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """A module inside needs a statistic of all features of a row."""
    numbers = chosen.reshape(-1)
    rows = tokens.repeat_interleave(chosen.shape[-1], dim=0)
    gate, up = torch.bmm(rows.unsqueeze(1), self.up[numbers]).squeeze(1).chunk(2, -1)
    made = torch.bmm(self.get_submodule("norm")(gate * up).unsqueeze(1), self.down[numbers]).squeeze(1)
    return (made * weights.reshape(-1, 1)).view(*chosen.shape, WIDTH).sum(1)


def test_nothing_is_exchanged_inside() -> None:
    """Split over all ranks, such experts sum the statistics of their features; whole experts need none of that."""
    model = Block(2, normed)
    model.moe.experts.norm = Norm()  # pyright: ignore
    with pytest.raises(CompileError) as caught:
        tpplan.compile_plan(model, WITHOUT_BIASES, 4, ACTIVATIONS)
    (finding,) = caught.value.diagnostics
    assert finding.code == "TP146"
    assert finding.message.endswith("it would have to exchange something inside")
    verified(model, {"version": 1, "modules": {"moe.experts": "experts"}}, 2)
    assert verified(model, {"version": 1, "modules": MATRICES}, 4).count_collectives()["all-reduce"] > 3


class Skipping(Block):
    """It leaves its mixture out of some calls."""

    def forward(self, x: Tensor, skips: bool = False) -> Tensor:
        return self.last(self.norm(x)) if skips else super().forward(x)


def test_calls_that_leave_the_experts_out() -> None:
    with fake_process_group(4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        model = tpplan.parallelize(Skipping(), PLAN, mesh, ACTIVATIONS)
        assert model(*ACTIVATIONS, skips=True).shape == ACTIVATIONS[0].shape
        model(*ACTIVATIONS).sum().backward()
    with pytest.raises(CompileError) as caught:
        tpplan.compile_plan(Skipping(), PLAN, 4, (*ACTIVATIONS, True))
    assert "the example doesn't call it" in caught.value.diagnostics[0].message


def test_on_a_single_rank_nothing_is_said() -> None:
    assert verified(Block(), PLAN, 1).diagnostics == ()


def test_a_placement_survives_pickling() -> None:
    layout = next(p.layout for p in verified(Block(), PLAN, 4).parameters if p.name == "moe.experts.down")
    placement = PackedShard(layout, (2, 32, WIDTH), 0, (None,))
    assert pickle.loads(pickle.dumps(placement)) == placement
    function, (plain, *rest) = placement.__reduce__()
    assert function(plain[:6], *rest).layout == replace(layout, inner_dim=None)  # as it was written once
