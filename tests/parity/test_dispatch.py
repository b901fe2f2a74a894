"""Experts that each rank holds whole, to which the tokens of a split sequence go all-to-all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

import tpplan
from tests.marking import slow_but
from tests.parity.test_expert_lists import Block as ListBlock
from tests.parity.test_expert_lists import of_hit
from tests.parity.test_whole_experts import (
    ACTIVATIONS,
    BODIES,
    CHOSEN,
    EXPERTS,
    SEQUENCE,
    WIDTH,
    Block,
    Body,
    by_size,
    of_added,
    of_grouped,
    of_hits,
    of_picked,
    of_weighed_first,
)
from tests.zoo.architectures import build
from tpplan.calls.call_errors import UnprovedCallError
from tpplan.compat.process_groups import fake_process_group
from tpplan.parity import verify_program
from tpplan.plan import CompileError, Exchange, Pattern
from tpplan.report.program_page import render_program
from tpplan.report.program_why import render_why

RULE = {"style": "experts", "exchange": "all-to-all"}
PLAN: dict[str, Any] = {"version": 1, "modules": {**SEQUENCE["modules"], "moe.experts": RULE}}
FORWARD, BACKWARD = 3, 2  # the sizes, the pairs, what is made of them; the gradients of these two

CASES = [(body, choices, size) for body in BODIES for choices in (1, 2, 3) for size in (2, 4)]
QUICK = [(of_grouped, 2, 2), (of_picked, 3, 4), (of_weighed_first, 2, 4), (of_hits, 2, 2), (of_added, 1, 4)]


def mixture(program: tpplan.Program) -> Any:
    return next(module for module in program.modules if module.experts is not None)


def choosing(model: Block, *experts: int) -> Block:
    """The model, of which all tokens choose these experts."""
    with torch.no_grad():
        model.moe.router.bias.fill_(-1e4)[[*experts]] = 1e4
    return model


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("body", "choices", "size"), slow_but(QUICK, CASES))
def test_tokens_go_to_the_ranks_with_their_experts(body: Body, choices: int, size: int) -> None:
    model = Block(body, choices)
    program = tpplan.compile_plan(model, PLAN, size, ACTIVATIONS)
    counts = program.count_collectives()
    assert counts["all-to-all"] == FORWARD + BACKWARD
    assert program.count_collectives(backward=False)["all-to-all"] == FORWARD
    assert "reduce-scatter" not in counts  # nothing else is exchanged, but for the result as a whole
    assert not mixture(program).entries and not mixture(program).exits
    assert tpplan.Program.from_dict(program.to_dict()) == program
    report = verify_program(model, program, (ACTIVATIONS, {}))
    assert report.ok, report.problems


@pytest.mark.parametrize("body", slow_but([of_grouped], BODIES))
@pytest.mark.parametrize("first", [0, EXPERTS - CHOSEN])
def test_ranks_to_which_nobody_sends_anything(body: Body, first: int) -> None:
    """They take part in the backward, and their experts have gradients of zeros."""
    report = tpplan.verify(choosing(Block(body), first, first + 1), PLAN, 4, ACTIVATIONS)
    assert report.ok, report.problems


@pytest.mark.parametrize("length", [2, 4])
def test_as_few_tokens_as_ranks(length: int) -> None:
    report = tpplan.verify(Block(of_picked), PLAN, 2, (torch.randn(2, length, WIDTH, requires_grad=True),))
    assert report.ok, report.problems


@pytest.mark.one_in(3)
@pytest.mark.processes
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("chosen", [(), (2, 3)], ids=["spread", "to one rank"])
def test_on_processes_in_float64(size: int, chosen: tuple[int, ...]) -> None:
    """Of two experts that all tokens choose, on four ranks two have nothing to do; on two ranks one."""
    model = choosing(Block(of_picked), *chosen) if chosen else Block(of_picked)
    call = (ACTIVATIONS[0].detach().double().requires_grad_(),)
    report = tpplan.verify(model.double(), PLAN, size, call, processes=True)
    assert report.ok, report.problems


def of_architecture(name: str, rule: object = RULE) -> tuple[nn.Module, dict[str, Any], dict[str, Tensor]]:
    """A model, the plan for it with whole experts and a split sequence, and a call."""
    model, call = build(name)
    plan = tpplan.load_plan(f"{name}-sequence").to_dict()
    rules = {pattern: held for pattern, held in plan["modules"].items() if ".experts" not in pattern}  # pyright: ignore
    return model, {**plan, "modules": {**rules, "model.layers.*.mlp.experts": rule}}, call


_KINDS = ("mixtral", "qwen3_moe", "qwen2_moe", "olmoe", "deepseek_v3", "gpt_oss")


@pytest.mark.parametrize(
    ("name", "size"),
    slow_but([("qwen3_moe", 2)], [(name, size) for name in _KINDS for size in (2, 4)]),
)
def test_models_of_transformers(name: str, size: int) -> None:
    """Their routers choose on split tokens, some by groups of experts, some by sigmoids and a bias."""
    model, plan, call = of_architecture(name)
    program = tpplan.compile_plan(model, plan, size, call)
    layers = sum(module.experts is not None for module in program.modules)
    assert layers and program.count_collectives()["all-to-all"] == layers * (FORWARD + BACKWARD)
    report = verify_program(model, program, ((), call))
    assert report.ok, report.problems


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_models_of_transformers_on_processes_in_float64(name: str, size: int) -> None:
    model, plan, call = of_architecture(name)
    config: Any = model.config
    config._experts_implementation = "batched_mm"  # torch has no grouped products in float64
    report = tpplan.verify(model.double(), plan, size, call, processes=True)
    assert report.ok, report.problems


# -- what is counted, and which way is taken --------------------------------------------------------------------------
def test_counted_as_predicted() -> None:
    model = Block(of_grouped)
    predicted = tpplan.compile_plan(model, PLAN, 2, ACTIVATIONS).count_collectives()
    with fake_process_group(2):
        sharded = tpplan.parallelize(model, PLAN, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), ACTIVATIONS)
        with CommDebugMode() as mode:
            result = sharded(*ACTIVATIONS)
            forward = mode.get_comm_counts()[torch.ops.c10d.alltoall_base_]
            result.sum().backward()
        counts = mode.get_comm_counts()
    assert forward == FORWARD
    assert counts[torch.ops.c10d.alltoall_base_] == predicted["all-to-all"] == FORWARD + BACKWARD
    assert mode.get_total_counts() == sum(predicted.values())


def test_without_gradients_nothing_is_sent_back_for_them() -> None:
    """Of frozen norms and router, and inputs without a gradient, pairs have none either."""
    model = Block(of_grouped)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("moe.experts"))
    call = (ACTIVATIONS[0].detach(),)
    program = tpplan.compile_plan(model, PLAN, 2, call)
    assert program.count_collectives()["all-to-all"] == FORWARD + 1
    report = verify_program(model, program, (call, {}))
    assert report.ok, report.problems


LARGE = (torch.empty(8, 8192, WIDTH).requires_grad_(),)


@pytest.mark.parametrize(
    ("choices", "size", "call", "cheaper"),
    [
        (1, 2, LARGE, True),
        (2, 2, LARGE, False),
        (1, 4, LARGE, True),
        (2, 4, LARGE, True),
        (4, 4, LARGE, False),
        (1, 4, ACTIVATIONS, False),  # as many small collectives take longer than fewer
    ],
)
def test_the_cheaper_way_is_taken(choices: int, size: int, call: tuple[Tensor], cheaper: bool) -> None:
    program = tpplan.compile_plan(Block(of_grouped, choices), SEQUENCE, size, call)
    experts = mixture(program).experts
    assert experts.dispatches == cheaper
    if call is not LARGE:
        return
    pairs, sums = experts.sent
    row = WIDTH * 4 + 4 / 2  # the weight goes there and back, the row twice
    tokens = call[0].numel() // WIDTH
    share = (size - 1) / size / size * tokens
    assert pairs == pytest.approx(4 * choices * share * row, rel=0.02)
    assert sums == pytest.approx(4 * size * share * WIDTH * 4, rel=0.02)


class Sharing(Block):
    """Beside the experts there is one that all tokens go to."""

    def __init__(self) -> None:
        super().__init__(of_grouped, 2)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        return self.last(x + self.moe(normed) + self.down(self.up(normed).relu()))


def test_what_gathers_tokens_anyway_gathers_them_for_the_experts() -> None:
    """They send more than all-to-all, but what they send is sent already."""
    plan = {**SEQUENCE, "modules": {**SEQUENCE["modules"], "up": "colwise", "down": "rowwise"}}
    assert not mixture(tpplan.compile_plan(Sharing(), plan, 4, LARGE)).experts.dispatches
    asked = {**plan, "modules": {**plan["modules"], "moe.experts": RULE}}
    program = tpplan.compile_plan(Sharing(), asked, 4, ACTIVATIONS)
    assert mixture(program).experts.dispatches
    report = verify_program(Sharing(), program, (ACTIVATIONS, {}))
    assert report.ok, report.problems


def test_a_router_of_whole_tokens() -> None:
    """Each rank takes what it has of its choices."""
    plan = {**PLAN, "modules": {**PLAN["modules"], "moe.router": "replicate"}}
    program = tpplan.compile_plan(Block(of_grouped), plan, 4, ACTIVATIONS)
    assert mixture(program).experts.dispatches
    report = verify_program(Block(of_grouped), program, (ACTIVATIONS, {}))
    assert report.ok, report.problems


def test_sums_can_be_asked_for() -> None:
    rules = {**SEQUENCE["modules"], "moe.experts": {"style": "experts", "exchange": "sums"}}
    program = tpplan.compile_plan(Block(of_grouped, 1), {"version": 1, "modules": rules}, 4, LARGE)
    assert not mixture(program).experts.dispatches


def test_explain_tells_both_ways() -> None:
    program = tpplan.compile_plan(Block(of_grouped), PLAN, 4, ACTIVATIONS)
    text = render_program(program)
    for name in ("sizes", "pairs", "made", "all-to-all 2.3 KiB, by sums 4.5 KiB"):
        assert name in text
    assert "the tokens are split" in render_why(program, Pattern.parse("moe.experts"))
    other = tpplan.compile_plan(Block(of_grouped), SEQUENCE, 4, ACTIVATIONS)
    assert "by sums 4.5 KiB, all-to-all 2.3 KiB" in render_program(other)


# -- what is refused --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("model", "rules", "says"),
    [
        (Block(of_grouped), {"moe.experts": RULE}, "split along the sequence"),
        (ListBlock(of_hit), {"moe.experts": RULE, "norm": "sequence", "last": "sequence"}, "a list of experts"),
        (Block(of_grouped), {**PLAN["modules"], "moe.experts.up": "replicate"}, "a rule of its own"),
    ],
)
def test_what_cannot_go_all_to_all_is_refused(model: nn.Module, rules: dict[str, Any], says: str) -> None:
    with pytest.raises(CompileError) as caught:
        tpplan.compile_plan(model, {"version": 1, "modules": rules}, 2, ACTIVATIONS)
    (finding,) = caught.value.diagnostics
    assert finding.code == "TP146" and says in finding.message and finding.help


def test_an_example_of_one_sequence_does_not_show_which_dim_is_split() -> None:
    with pytest.raises(CompileError) as caught:
        tpplan.compile_plan(Block(of_picked), PLAN, 2, (torch.randn(1, 4, WIDTH, requires_grad=True),))
    (finding,) = caught.value.diagnostics
    assert finding.code == "TP146" and "batch of 2" in (finding.help or "")


def test_the_way_out_of_whole_tokens_works() -> None:
    assert tpplan.compile_plan(Block(of_grouped), PLAN, 2, ACTIVATIONS)
    assert tpplan.compile_plan(Block(of_grouped), {"version": 1, "modules": {"moe.experts": "experts"}}, 2, ACTIVATIONS)


def test_an_exchange_that_does_not_exist() -> None:
    rules = {"moe.experts": {"style": "experts", "exchange": "gather"}}
    with pytest.raises(tpplan.PlanError) as caught:
        tpplan.load_plan({"version": 1, "modules": rules})
    assert [finding.code for finding in caught.value.diagnostics] == ["TP021"]
    with pytest.raises(tpplan.PlanError) as caught:
        tpplan.load_plan({"version": 1, "modules": {"norm": {"style": "sequence", "exchange": "sums"}}})
    assert [finding.code for finding in caught.value.diagnostics] == ["TP020"]


def test_with_whole_sequences_nothing_goes_all_to_all() -> None:
    plan = tpplan.load_plan(PLAN)
    assert [rule.exchange for rule in plan.rules if rule.style == "experts"] == [Exchange.ALL_TO_ALL]
    assert all(rule.exchange is None for rule in plan.with_whole_sequences().rules)


def test_a_body_that_does_something_else_with_as_many_pairs_is_refused() -> None:
    """It is right for 60 tokens and for each of their 120 pairs, but not for as many pairs at once."""
    for plan in (SEQUENCE, PLAN):
        with pytest.raises(CompileError) as caught:
            tpplan.compile_plan(Block(by_size), plan, 2, (torch.randn(3, 20, WIDTH),))
        assert [finding.code for finding in caught.value.diagnostics] == ["TP146"]


def test_a_body_that_does_something_else_with_more_tokens_is_refused_then() -> None:
    """The unsharded model would see 128 tokens at once, each of two ranks sees 64 of them."""
    with fake_process_group(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = tpplan.parallelize(Block(by_size, 1), PLAN, mesh, ACTIVATIONS)
        model(*ACTIVATIONS)
        with pytest.raises(UnprovedCallError) as caught:
            model(torch.randn(16, 8, WIDTH, requires_grad=True))
    assert "TP146 experts-not-whole" in str(caught.value)
