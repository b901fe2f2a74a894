"""Experts in a list of modules, of which the numbers in a tensor pick: every expert sees the tokens routed to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional

import tpplan
from tpplan.api import suggest_text
from tpplan.compat.process_groups import fake_process_group
from tpplan.compiler.trace.choices import found_count
from tpplan.parity import verify_program
from tpplan.plan import CompileError
from tpplan.report.program_page import render_program
from tpplan.runtime.parameters.handed_out import OnceReader

WIDTH, INNER, EXPERTS, CHOSEN = 16, 24, 6, 2
ACTIVATIONS = (torch.randn(3, 8, WIDTH, requires_grad=True),)
RULES: dict[str, Any] = {"moe.experts.*.{gate,up}": "colwise", "moe.experts.*.down": "rowwise"}
PLAN = {"version": 1, "modules": RULES}
SEQUENCE = {"version": 1, "modules": {**RULES, "norm": "sequence", "last": "sequence"}}

Dispatch = Callable[[nn.ModuleList, Tensor, Tensor, Tensor], Tensor]


class Expert(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, INNER, bias) for _ in range(2))
        self.down = nn.Linear(INNER, WIDTH, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


def of_hit(experts: nn.ModuleList, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """The experts that are hit are looked up by number."""
    out = torch.zeros_like(x)
    mask = functional.one_hot(chosen, EXPERTS).permute(2, 1, 0)
    number: Any
    for number in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
        place, rows = torch.where(mask[number].squeeze(0))
        out.index_add_(0, rows, experts[number](x[None, rows].reshape(-1, WIDTH)) * weights[rows, place, None])
    return out


def of_each(experts: nn.ModuleList, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """All experts in turn; those without tokens are passed over by a size."""
    out = x.new_zeros(x.shape)
    for number, expert in enumerate(experts):
        rows, place = torch.where(chosen == number)
        if rows.shape[0] == 0:
            continue
        out = out.index_add(0, rows, expert(x[rows]) * weights[rows, place, None])
    return out


def of_any(experts: nn.ModuleList, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Tokens are picked by true and false; those without tokens are passed over by a branch on data."""
    out = torch.zeros_like(x)
    for number, expert in enumerate(experts):
        here = (chosen == number).any(-1)
        if here.any():
            share = (weights * (chosen == number)).sum(-1)[here]
            out[here] += share[:, None] * expert(x[here])
    return out


def of_scatter(experts: nn.ModuleList, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Results are scattered, each entry by itself."""
    out = torch.zeros_like(x)
    for number, expert in enumerate(experts):
        rows, place = torch.where(chosen == number)
        made = weights[rows, place, None] * expert(x[rows])
        out.scatter_add_(0, rows[:, None].expand(-1, WIDTH), made)
    return out


def of_all(experts: nn.ModuleList, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Every expert sees every token."""
    out = torch.zeros_like(x)
    for number, expert in enumerate(experts):
        out = out + (weights * (chosen == number)).sum(-1, keepdim=True) * expert(x)
    return out


def of_sorted(experts: nn.ModuleList, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Tokens are sorted by expert, and sliced by how many each gets, as in DeepSeek's `moe_infer`."""
    counts = chosen.new_zeros((chosen.shape[0], len(experts)))
    counts.scatter_(1, chosen, 1)
    order = chosen.view(-1).argsort()
    tokens = x[order // chosen.shape[1]]
    outputs: list[Tensor] = []
    start = 0
    for number, count in enumerate(counts.sum(dim=0).cpu().numpy()):
        end = start + count
        if count == 0:
            continue
        outputs.append(experts[number](tokens[start:end]))
        start = end
    made = torch.cat(outputs, dim=0) if len(outputs) else tokens.new_empty(0)
    placed = torch.empty_like(made)
    placed[order] = made
    return placed.view(*chosen.shape, -1).mul_(weights.unsqueeze(dim=-1)).sum(dim=1)


class Mixture(nn.Module):
    def __init__(self, dispatch: Dispatch, bias: bool) -> None:
        super().__init__()
        self.dispatch = dispatch
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(Expert(bias) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        weights, chosen = torch.topk(functional.softmax(self.router(tokens), -1), CHOSEN, -1)
        return self.dispatch(self.experts, tokens, weights, chosen).view_as(x)


class Block(nn.Module):
    def __init__(self, dispatch: Dispatch = of_hit, bias: bool = True) -> None:
        super().__init__()
        self.norm, self.last = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.moe = Mixture(dispatch, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.moe(self.norm(x)))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("plan", [PLAN, SEQUENCE], ids=["tp", "sequence"])
@pytest.mark.parametrize("dispatch", [of_hit, of_each, of_any, of_scatter, of_all, of_sorted])
@pytest.mark.one_in(5)
def test_experts_take_one_reduction_each_way(dispatch: Dispatch, plan: dict[str, Any], bias: bool) -> None:
    model = Block(dispatch, bias)
    program = tpplan.compile_plan(model, plan, 2, ACTIVATIONS)
    counts = program.count_collectives()
    if plan is PLAN:
        assert counts == {"all-reduce": 2 + 1}  # the third is of the router's gradient
    else:
        assert counts["reduce-scatter"] == 2
        assert counts["all-reduce"] == 1
    report = verify_program(model, program, (ACTIVATIONS, {}))
    assert report.ok, report.problems


@pytest.mark.parametrize("dispatch", [of_hit, of_any, of_sorted])
@pytest.mark.parametrize("size", [2, 4])
def test_tokens_that_all_go_to_the_same_experts(dispatch: Dispatch, size: int) -> None:
    """The trace calls all of them; experts that aren't called have no gradient, on no rank."""
    model = Block(dispatch)
    with torch.no_grad():
        model.moe.router.bias.copy_(torch.arange(EXPERTS) * 100.0)
    report = tpplan.verify(model, PLAN, size, ACTIVATIONS)
    assert report.ok, report.problems


def hit(chosen: Tensor) -> Tensor:
    return functional.one_hot(chosen, EXPERTS).sum((0, 1)).nonzero()


@pytest.mark.parametrize(
    "flag",
    [
        lambda chosen: len(torch.where(chosen == 1)[0]) > 4,
        lambda chosen: torch.where(chosen == 1)[0].numel() == 0,
        lambda chosen: hit(chosen).shape[0] > 4,
    ],
    ids=["few", "none", "experts"],
)
@pytest.mark.parametrize("order", [1, -1])
def test_what_is_passed_on_by_how_many_are_found_is_refused(flag: Callable[[Tensor], bool], order: int) -> None:
    """Both sides take the same steps, so that nobody would see it in a call."""

    def dispatch(experts: nn.ModuleList, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        made = (experts[0](x), x * 2)[::order]
        return of_each(experts, x, weights, chosen) + made[flag(chosen)]

    with pytest.raises(CompileError, match="something else where few entries are found, none, or all"):
        tpplan.compile_plan(Block(dispatch), PLAN, 2, ACTIVATIONS)


class Steered(nn.Module):
    """Does something else where few are found."""

    def __init__(self, how: Callable[[Tensor, int], Tensor], asked: Callable[[Tensor], int] = len) -> None:
        super().__init__()
        self.up, self.down, self.how, self.asked = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH), how, asked

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.how(self.up(x), self.asked((x[..., 0] > 0).nonzero())))


class LeftOut(nn.Module):
    """Parameters of its own, of which it uses none where few are found."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.randn(WIDTH, 16)), nn.Parameter(torch.randn(16, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.w).relu() @ self.v if len((x[..., 0] > 0).nonzero()) > 4 else x


@pytest.mark.parametrize(
    "how",
    [
        lambda h, n: h.softmax(-1) if n < 4 else h,
        lambda h, n: (h.softmax(-1), h * 2)[n > 4],
        lambda h, n: h.softmax(0 if n > 4 else -1),
        lambda h, n: h.softmax(-1) if n == 24 else h,
        lambda h, n: (h.softmax(-1) if h.sum().item() > -1e9 else h) if n < 4 else h,
    ],
    ids=["a step more", "unread", "another dim", "all", "by data"],
)
def test_a_step_of_those_where_few_are_found_is_refused(how: Callable[[Tensor, int], Tensor]) -> None:
    with pytest.raises(CompileError, match="something else where few entries are found, none, or all"):
        tpplan.compile_plan(
            Steered(how), {"version": 1, "modules": {"up": "colwise", "down": "rowwise"}}, 2, ACTIVATIONS
        )


@pytest.mark.parametrize(
    "asked",
    [
        lambda rows: rows.flatten().numel(),
        lambda rows: len(torch.cat([rows, rows])),
        lambda rows: torch.numel(rows),
        lambda rows: sum(1 for _ in rows),
    ],
    ids=["flattened", "joined", "numel", "iterated"],
)
def test_it_is_refused_however_the_number_is_asked_for(asked: Callable[[Tensor], int]) -> None:
    model = Steered(lambda h, n: h.softmax(-1) if n < 8 else h, asked)
    with pytest.raises(CompileError, match="something else where few entries are found, none, or all"):
        tpplan.compile_plan(model, {"version": 1, "modules": {"up": "colwise", "down": "rowwise"}}, 2, ACTIVATIONS)


def test_what_is_left_out_leaves_nothing_that_lies_otherwise() -> None:
    with pytest.raises(CompileError, match="something else where few entries are found, none, or all"):
        tpplan.compile_plan(LeftOut(), {"version": 1, "modules": {"w": "colwise", "v": "rowwise"}}, 2, ACTIVATIONS)


@pytest.mark.processes
@pytest.mark.parametrize("dispatch", [of_hit, of_sorted])
def test_on_processes(dispatch: Dispatch) -> None:
    report = tpplan.verify(Block(dispatch), PLAN, 2, ACTIVATIONS, processes=True)
    assert report.ok, report.problems


def test_counted_as_predicted() -> None:
    model = Block()
    predicted = tpplan.compile_plan(model, PLAN, 2, ACTIVATIONS).count_collectives()
    with fake_process_group(2):
        sharded = tpplan.parallelize(model, PLAN, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), ACTIVATIONS)
        with CommDebugMode() as mode:
            sharded(*ACTIVATIONS).sum().backward()
    assert mode.get_total_counts() == sum(predicted.values())


def test_a_bias_that_every_rank_adds_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Block()
    program = tpplan.compile_plan(model, PLAN, 2, ACTIVATIONS)
    monkeypatch.setattr(OnceReader, "__call__", lambda self, parameter: self._read(parameter))
    assert not verify_program(model, program, (ACTIVATIONS, {})).ok


def test_a_bias_that_another_layer_reads_is_added_after_the_reduction() -> None:
    model = Block()
    model.moe.experts.get_submodule("0.down").bias = model.last.bias
    program = tpplan.compile_plan(model, PLAN, 2, ACTIVATIONS)
    assert program.count_collectives()["all-reduce"] > 2 + 1
    report = verify_program(model, program, (ACTIVATIONS, {}))
    assert report.ok, report.problems


def test_a_plan_writes_itself() -> None:
    text = suggest_text(Block(), 2, False, ACTIVATIONS)
    assert "moe.experts.*.{gate,up}: colwise" in text
    assert "moe.experts.*.down: rowwise" in text


def test_what_is_found_is_no_size_that_an_axis_divides() -> None:
    assert [found_count(n) for n in (1, 2, 3, 8, 96)] == [1, 2, 3, 7, 89]


class Squashed(nn.ModuleList):
    """A function that isn't linear stands behind each expert, so that each has to reduce by itself."""

    def __getitem__(self, number: Any) -> Any:
        expert = super().__getitem__(number)
        return lambda x: torch.tanh(expert(x))


@pytest.mark.parametrize("dispatch", [of_hit, of_sorted])
def test_collectives_of_experts_run_as_often_as_experts_are_hit(dispatch: Dispatch) -> None:
    def of_squashed(experts: nn.ModuleList, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        return dispatch(Squashed(experts), x, weights, chosen)

    model = Block(of_squashed)
    with torch.no_grad():
        model.moe.router.bias.copy_(torch.arange(EXPERTS) * 100.0)
    program = tpplan.compile_plan(model, PLAN, 2, ACTIVATIONS)
    assert program.picked == tuple(f"moe.experts.{number}" for number in range(EXPERTS))
    assert tpplan.Program.from_dict(program.to_dict()) == program
    assert "Called for some data only" in render_program(program)
    report = verify_program(model, program, (ACTIVATIONS, {}))
    assert report.ok, report.problems
    assert report.least.get("all-reduce", 0) < report.collectives["all-reduce"] < report.predicted["all-reduce"]


def test_what_is_done_instead_of_an_empty_part_needs_the_same_reshards() -> None:
    def of_others(experts: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        out = of_sorted(experts, x, weights, chosen)
        for expert, count in zip(experts, functional.one_hot(chosen, EXPERTS).sum((0, 1)).tolist(), strict=True):
            if count == 0:
                out = out + expert.gate(x).softmax(-1).amax(-1, keepdim=True)
        return out

    with pytest.raises(CompileError, match="does something else where some of the numbers"):
        tpplan.compile_plan(Block(of_others), PLAN, 2, ACTIVATIONS)


def test_what_a_model_finds_elsewhere_leaves_its_collectives_counted_exactly() -> None:
    class Selecting(Block):
        """The positive entries of the result are summed: no module is called with them."""

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y * y[y > 0].sum()

    program = tpplan.compile_plan(Selecting(of_all), PLAN, 2, ACTIVATIONS)
    assert not program.picked
    assert program.count_collectives(picked=False) == program.count_collectives()
