"""Experts that each rank holds whole: stacks of matrices, and lists of modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional

import tpplan
from tests.marking import in_turns
from tests.parity.test_expert_lists import Block as ListBlock
from tests.parity.test_expert_lists import Dispatch, of_all, of_any, of_each, of_hit, of_scatter
from tpplan.calls.call_errors import UnprovedCallError
from tpplan.compat.process_groups import fake_process_group
from tpplan.parity import verify_program
from tpplan.plan import CompileError

WIDTH, INNER, EXPERTS, CHOSEN = 16, 24, 4, 2
ACTIVATIONS = (torch.randn(3, 8, WIDTH, requires_grad=True),)
PLAN: dict[str, Any] = {"version": 1, "modules": {"moe.experts": "experts"}}
SEQUENCE: dict[str, Any] = {
    "version": 1,
    "modules": {**PLAN["modules"], "norm": "sequence", "last": "sequence"},
}

Body = Callable[["Experts", Tensor, Tensor, Tensor], Tensor]


class Experts(nn.Module):
    """Matrices stacked by expert, and biases, with a body of the test's choice."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body, self.count = body, EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * INNER) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) / 4)
        self.up_bias = nn.Parameter(torch.randn(EXPERTS, 2 * INNER))
        self.down_bias = nn.Parameter(torch.randn(EXPERTS, WIDTH))
        self.dropout = nn.Dropout(0.1)

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return self.body(self, tokens, chosen, weights)


class Mixture(nn.Module):
    def __init__(self, body: Body, choices: int) -> None:
        super().__init__()
        self.choices = choices
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = Experts(body)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        weights, chosen = torch.topk(functional.softmax(self.router(tokens), -1), self.choices, -1)
        return self.experts(tokens, chosen, weights).view_as(x)


class Block(nn.Module):
    def __init__(self, body: Body, choices: int = CHOSEN) -> None:
        super().__init__()
        self.norm, self.last = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.moe = Mixture(body, choices)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.moe(self.norm(x)))


def gated(made: Tensor) -> Tensor:
    gate, up = made.chunk(2, -1)
    return functional.gelu(gate) * up


def of_grouped(self: Experts, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Pairs are sorted by expert, multiplied in groups, and put back in order."""
    choices = chosen.shape[-1]
    numbers, order = torch.sort(chosen.reshape(-1))
    counts = torch.histc(numbers.float(), bins=self.count, min=0, max=self.count - 1)
    ends = torch.cumsum(counts, 0, dtype=torch.int32)
    made = functional.grouped_mm(tokens[order // choices], self.up, offs=ends) + self.up_bias[numbers]
    made = functional.grouped_mm(gated(made), self.down, offs=ends) + self.down_bias[numbers]
    made = made * weights.reshape(-1)[order].unsqueeze(-1)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.shape[0])
    return made[back].view(*chosen.shape, WIDTH).sum(1)


def of_added(self: Experts, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """As before, and summed where the tokens are."""
    choices = chosen.shape[-1]
    numbers, order = chosen.reshape(-1).sort(stable=True)
    ends = torch.histc(numbers.float(), self.count, 0, self.count - 1).cumsum(0).to(torch.int32)
    rows = order // choices
    made = functional.grouped_mm(tokens[rows], self.up, offs=ends)
    made = functional.grouped_mm(gated(made), self.down, offs=ends)
    return torch.zeros_like(tokens).index_add_(0, rows, made * weights.reshape(-1)[order][:, None])


def of_picked(self: Experts, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Each pair picks its expert's matrices."""
    numbers = chosen.reshape(-1)
    rows = tokens.repeat_interleave(chosen.shape[-1], dim=0)
    made = torch.bmm(rows.unsqueeze(1), self.up[numbers]).squeeze(1)
    made.add_(self.up_bias[numbers])
    made = torch.bmm(gated(made).unsqueeze(1), self.down[numbers]).squeeze(1) + self.down_bias[numbers]
    return (made * weights.reshape(-1, 1)).view(*chosen.shape, WIDTH).sum(1)


def of_weighed_first(self: Experts, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Tokens are weighed before an expert that isn't linear sees them: a weight of zero doesn't leave it out."""
    numbers = chosen.reshape(-1)
    rows = tokens.repeat_interleave(chosen.shape[-1], dim=0) * weights.reshape(-1, 1)
    made = torch.bmm(rows.unsqueeze(1), self.up[numbers]).squeeze(1) + self.up_bias[numbers]
    made = torch.bmm(gated(made).unsqueeze(1), self.down[numbers]).squeeze(1) + self.down_bias[numbers]
    return made.view(*chosen.shape, WIDTH).sum(1)


def of_loop(self: Experts, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Experts in turn, each with the tokens that chose it."""
    out = torch.zeros_like(tokens)
    for number in range(self.count):
        rows, place = torch.where(chosen == number)
        if rows.shape[0] == 0:
            continue
        made = functional.linear(tokens[rows], self.up[number].t(), self.up_bias[number])
        made = gated(made) @ self.down[number] + self.down_bias[number]
        out.index_add_(0, rows, made * weights[rows, place, None])
    return out


def of_hits(self: Experts, tokens: Tensor, chosen: Tensor, weights: Tensor, least: int = 0) -> Tensor:
    """Experts that more than `least` tokens chose, looked up by number."""
    out = torch.zeros_like(tokens)
    mask = functional.one_hot(chosen, self.count).permute(2, 1, 0)
    number: Any
    for (number,) in torch.greater(mask.sum(dim=(-1, -2)), least).nonzero():
        place, rows = torch.where(mask[number])
        made = gated(tokens[rows] @ self.up[number] + self.up_bias[number])
        made = made @ self.down[number] + self.down_bias[number]
        out.index_add_(0, rows, made * weights[rows, place, None])
    return out


def of_turned(self: Experts, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Matrices are transposed by their attributes."""
    out = torch.zeros_like(tokens)
    for number in range(self.count):
        rows, place = torch.where(chosen == number)
        made = functional.linear(tokens[rows], self.up[number].T, self.up_bias[number])
        made = functional.linear(gated(made), self.down[number].mT, self.down_bias[number])
        out.index_add_(0, rows, made * weights[rows, place, None])
    return out


def of_permuted(self: Experts, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Whole stacks and rows of matrices are permuted."""
    numbers = chosen.reshape(-1)
    rows = tokens.repeat_interleave(chosen.shape[-1], dim=0)
    made = torch.bmm(self.up.permute(0, 2, 1)[numbers], rows.unsqueeze(2)).permute(0, 2, 1).squeeze(1)
    made = torch.bmm(gated(made).unsqueeze(1), self.down[numbers].permute(0, -2, 2)).squeeze(1)
    return (made * weights.reshape(-1, 1)).view(*chosen.shape, WIDTH).sum(1)


BODIES = (of_grouped, of_added, of_picked, of_weighed_first, of_loop, of_hits)


@pytest.mark.parametrize("plan", [PLAN, SEQUENCE], ids=["tp", "sequence"])
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.one_in(5)
def test_a_stack_takes_one_reduction_each_way(body: Body, plan: dict[str, Any], size: int) -> None:
    model = Block(body)
    program = tpplan.compile_plan(model, plan, size, ACTIVATIONS)
    counts = program.count_collectives()
    if plan is PLAN:
        assert counts == {"all-reduce": 2 + 1}  # the third is of the router's gradient
    else:
        assert counts["reduce-scatter"] == 2
        assert counts["all-reduce"] == 1
    shapes = {p.name: p.local_shape for p in program.parameters}
    assert shapes["moe.experts.up"] == (EXPERTS // size, WIDTH, 2 * INNER)
    assert shapes["moe.experts.down_bias"] == (EXPERTS // size, WIDTH)
    assert tpplan.Program.from_dict(program.to_dict()) == program
    report = verify_program(model, program, (ACTIVATIONS, {}))
    assert report.ok, report.problems


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("choices", [1, 3])
@pytest.mark.one_in(5)
def test_any_number_of_choices(body: Body, choices: int) -> None:
    report = tpplan.verify(Block(body, choices), PLAN, 2, ACTIVATIONS)
    assert report.ok, report.problems


@pytest.mark.one_in(5)
@pytest.mark.parametrize("body", [of_grouped, of_picked])
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_as_few_tokens_as_choices_or_experts(body: Body, rows: int) -> None:
    report = tpplan.verify(Block(body), PLAN, 2, (torch.randn(1, rows, WIDTH, requires_grad=True),))
    assert report.ok, report.problems


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("first", [0, EXPERTS - CHOSEN])
@pytest.mark.one_in(5)
def test_ranks_whose_experts_nobody_chose(body: Body, first: int) -> None:
    """All experts of the stack have a gradient, of zeros, on these ranks as well."""
    model = Block(body)
    with torch.no_grad():
        model.moe.router.bias.fill_(-1e4)[first : first + CHOSEN] = 1e4
    report = tpplan.verify(model, PLAN, 4, ACTIVATIONS)
    assert report.ok, report.problems


LISTS = [of_hit, of_each, of_any, of_scatter, of_all]
WAYS = [(2, True), (4, False), (2, False), (4, True)]  # the number of ranks, and whether sequences are split


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("dispatch", "way"), in_turns(LISTS, WAYS))
def test_a_list_takes_one_reduction_each_way(dispatch: Dispatch, way: tuple[int, bool]) -> None:
    """Six experts on four ranks, too: two, one, two and one."""
    size, plan = way[0], SEQUENCE if way[1] else PLAN
    model = ListBlock(dispatch)
    program = tpplan.compile_plan(model, plan, size, ACTIVATIONS)
    counts = program.count_collectives()
    assert counts["all-reduce"] == (2 + 1 if plan is PLAN else 1)
    held = {p.name: p.local_shape for p in program.parameters}
    assert held["moe.experts.0.up.weight"] == (INNER, WIDTH)
    assert held["moe.experts.5.up.weight"] == (0, WIDTH)
    assert tpplan.Program.from_dict(program.to_dict()) == program
    report = verify_program(model, program, (ACTIVATIONS, {}))
    assert report.ok, report.problems


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dispatch", [of_hit, of_any])
def test_experts_of_a_list_that_nobody_chose_have_no_gradient_on_any_rank(dispatch: Dispatch) -> None:
    model = ListBlock(dispatch)
    with torch.no_grad():
        model.moe.router.bias.copy_(torch.arange(6) * 100.0)
    report = tpplan.verify(model, PLAN, 2, ACTIVATIONS)
    assert report.ok, report.problems


@pytest.mark.processes
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("make", [lambda: Block(of_grouped), ListBlock], ids=["stack", "list"])
@pytest.mark.one_in(3)
def test_on_processes(make: Callable[[], nn.Module], size: int) -> None:
    report = tpplan.verify(make(), SEQUENCE, size, ACTIVATIONS, processes=True)
    assert report.ok, report.problems


@pytest.mark.parametrize("make", [lambda: Block(of_grouped), ListBlock], ids=["stack", "list"])
@pytest.mark.parametrize("plan", [PLAN, SEQUENCE], ids=["tp", "sequence"])
@pytest.mark.one_in(3)
def test_counted_as_predicted(make: Callable[[], nn.Module], plan: dict[str, Any]) -> None:
    model = make()
    predicted = tpplan.compile_plan(model, plan, 2, ACTIVATIONS).count_collectives()
    with fake_process_group(2):
        sharded = tpplan.parallelize(model, plan, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), ACTIVATIONS)
        with CommDebugMode() as mode:
            sharded(*ACTIVATIONS).sum().backward()
    assert mode.get_total_counts() == sum(predicted.values())


# -- bodies that are no such sums -----------------------------------------------------------------------------------
def squashed(self: Experts, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    return torch.tanh(of_picked(self, tokens, chosen, weights))


def by_number(self: Experts, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    return of_picked(self, tokens, chosen, weights * chosen)


def centred(self: Experts, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    return of_picked(self, tokens - tokens.mean(0), chosen, weights)


def averaged(self: Experts, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    return of_picked(self, tokens / tokens.shape[0], chosen, weights)


def normalized(self: Experts, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    return of_picked(self, tokens, chosen, weights / weights.sum(-1, keepdim=True))


def softened(self: Experts, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    return of_picked(self, tokens, chosen, weights.softmax(-1))


def of_the_first(self: Experts, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    return of_picked(self, tokens, chosen[:, :1].expand(-1, chosen.shape[1]), weights)


def limited(self: Experts, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Experts take no more than so many tokens, the first that come."""
    place = functional.one_hot(chosen.reshape(-1), EXPERTS).cumsum(0).gather(1, chosen.reshape(-1, 1))
    return of_picked(self, tokens, chosen, weights * (place.view_as(chosen) <= 4))


def largest(self: Experts, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    numbers = chosen.reshape(-1)
    rows = tokens.repeat_interleave(chosen.shape[-1], dim=0)
    made = torch.bmm(rows.unsqueeze(1), self.up[numbers]).squeeze(1)
    return torch.bmm(gated(made).unsqueeze(1), self.down[numbers]).squeeze(1).view(*chosen.shape, WIDTH).amax(1)


def with_all_matrices(self: Experts, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    return of_picked(self, tokens * self.up.mean(), chosen, weights)


def dropped(self: Experts, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    return of_picked(self, self.dropout(tokens), chosen, weights)


def overwritten(self: Experts, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    return of_picked(self, tokens.mul_(2), chosen, weights)


def from_behind(self: Experts, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    return of_picked(self, tokens, chosen - EXPERTS, weights)


def counted_and_scaled(self: Experts, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    return of_grouped(self, tokens * self.count, chosen, weights)


def unsorted(self: Experts, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    numbers = chosen.reshape(-1)
    ends = torch.histc(numbers.float(), self.count, 0, self.count - 1).cumsum(0).to(torch.int32)
    made = functional.grouped_mm(tokens.repeat_interleave(chosen.shape[-1], dim=0), self.up, offs=ends)
    made = functional.grouped_mm(gated(made), self.down, offs=ends) * weights.reshape(-1, 1)
    return made.view(*chosen.shape, WIDTH).sum(1)


def exchanged(self: Experts, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    return of_picked(self, tokens, chosen, weights.permute(1, 0).reshape(weights.shape))


def neighbouring(self: Experts, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    return of_picked(self, tokens.flip(0), chosen, weights)


Made = Callable[[Experts, Tensor, int], Tensor]


def over(self: Experts, tokens: Tensor, chosen: Tensor, weights: Tensor, numbers: Iterable[int], made: Made) -> Tensor:
    """The sum of what `made` makes of the tokens of each of these experts."""
    out = torch.zeros_like(tokens)
    for number in numbers:
        rows, place = torch.where(chosen == number)
        out = out.index_add(0, rows, made(self, tokens[rows], number) * weights[rows, place, None])
    return out


def own(self: Experts, tokens: Tensor, number: int) -> Tensor:
    return gated(tokens @ self.up[number]) @ self.down[number]


def with_a_neighbour(self: Experts, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    def made(self: Experts, tokens: Tensor, number: int) -> Tensor:
        return gated(tokens @ self.up[number]) @ self.down[(number + 1) % self.count]

    return over(self, tokens, chosen, weights, range(self.count), made)


def without_the_last(self: Experts, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    return over(self, tokens, chosen, weights, range(self.count - 1), own)


def scaled_by_number(self: Experts, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    return over(self, tokens, chosen, weights, range(self.count), lambda self, x, n: own(self, x, n) * n)


def centred_by_expert(self: Experts, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Within one expert's tokens: a rank sees all of these."""

    def made(self: Experts, tokens: Tensor, number: int) -> Tensor:
        found = own(self, tokens, number)
        return found - found.mean(0)

    return over(self, tokens, chosen, weights, range(self.count), made)


def twice(self: Experts, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    return over(self, tokens, chosen, weights, (*range(self.count), 0), own)


def of_many_hits(self: Experts, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    return of_hits(self, tokens, chosen, weights, 3)


def by_hits(self: Experts, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Divided by how many experts are hit."""
    mask = functional.one_hot(chosen, self.count).permute(2, 1, 0)
    hits = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
    return of_hits(self, tokens / len(hits), chosen, weights)


def when_all_are_hit(self: Experts, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    mask = functional.one_hot(chosen, self.count).permute(2, 1, 0)
    hits = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
    return of_hits(self, tokens / 2 if len(hits) == self.count else tokens, chosen, weights)


def of_the_first_ones(self: Experts, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """As many experts as are hit, but not those."""
    out = torch.zeros_like(tokens)
    mask = functional.one_hot(chosen, self.count).permute(2, 1, 0)
    for number in range(len(mask.sum(dim=(-1, -2)).greater(0).nonzero())):
        place, rows = torch.where(mask[number])
        made = gated(tokens[rows] @ self.up[number]) @ self.down[number]
        out.index_add_(0, rows, made * weights[rows, place, None])
    return out


REFUSED = (
    of_many_hits, by_hits, when_all_are_hit, of_the_first_ones,
    with_a_neighbour, without_the_last, scaled_by_number, centred_by_expert, twice, squashed, by_number, centred,
    averaged, normalized, softened, of_the_first, limited, largest, with_all_matrices, dropped, overwritten,
    from_behind, counted_and_scaled, unsorted, neighbouring, exchanged,
)  # fmt: skip


@pytest.mark.one_in(3)
@pytest.mark.parametrize("body", [of_turned, of_permuted])
@pytest.mark.parametrize("choices", [1, CHOSEN])
def test_matrices_may_be_turned_in_any_way(body: Body, choices: int) -> None:
    for size in (2, 4):
        report = tpplan.verify(Block(body, choices), PLAN, size, ACTIVATIONS)
        assert report.ok, report.problems


@pytest.mark.parametrize("body", REFUSED)
@pytest.mark.parametrize("choices", [1, CHOSEN])
@pytest.mark.one_in(5)
def test_a_body_that_is_no_sum_over_pairs_is_refused_or_equal(body: Body, choices: int) -> None:
    model = Block(body, choices)
    try:
        program = tpplan.compile_plan(model, PLAN, 2, ACTIVATIONS)
    except CompileError as error:
        assert {finding.code for finding in error.diagnostics} == {"TP146"}
        assert all(finding.help for finding in error.diagnostics)
        return
    assert choices == 1, "with several choices none of these is such a sum"
    report = verify_program(model, program, (ACTIVATIONS, {}))
    assert report.ok, report.problems


def test_the_refusal_names_the_operation_and_a_way_out() -> None:
    with pytest.raises(CompileError) as caught:
        tpplan.compile_plan(Block(centred), PLAN, 2, ACTIVATIONS)
    (finding,) = caught.value.diagnostics
    assert "aten.mean.dim" in finding.message
    assert any("test_whole_experts.py" in note for note in finding.notes)
    assert "colwise" in (finding.help or "")


def test_a_rule_on_experts_in_a_list_is_for_the_list() -> None:
    with pytest.raises(CompileError) as caught:
        tpplan.compile_plan(ListBlock(), {"version": 1, "modules": {"moe.experts.*": "experts"}}, 2, ACTIVATIONS)
    finding = caught.value.diagnostics[0]
    assert finding.help == "name the list instead: `moe.experts: experts`"
    tpplan.compile_plan(ListBlock(), {"version": 1, "modules": {"moe.experts": "experts"}}, 2, ACTIVATIONS)


def test_a_number_of_experts_that_the_ranks_do_not_divide_is_refused() -> None:
    with pytest.raises(CompileError) as caught:
        tpplan.compile_plan(Block(of_grouped), PLAN, 3, ACTIVATIONS)
    assert [finding.code for finding in caught.value.diagnostics] == ["TP102"]
    with pytest.raises(CompileError) as caught:
        tpplan.compile_plan(ListBlock(), PLAN, 8, ACTIVATIONS)
    assert [finding.code for finding in caught.value.diagnostics] == ["TP102"]


@pytest.mark.parametrize(
    ("rules", "code"),
    [
        ({"moe": "experts"}, "TP101"),
        ({"moe.router": "experts"}, "TP101"),
        ({"moe.experts.up": "experts"}, "TP101"),
        ({"moe.experts": "experts", "moe.experts.up": "replicate"}, "TP146"),
        ({"moe.experts": {"style": "experts", "output": "replicate"}}, "TP020"),
    ],
)
def test_rules_that_make_no_sense(rules: dict[str, Any], code: str) -> None:
    with pytest.raises(tpplan.PlanError if code == "TP020" else CompileError) as caught:
        tpplan.compile_plan(Block(of_grouped), tpplan.load_plan({"version": 1, "modules": rules}), 2, ACTIVATIONS)
    assert code in {finding.code for finding in caught.value.diagnostics}


def by_size(self: Experts, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Of many tokens, it weighs none."""
    return of_grouped(self, tokens, chosen, weights if tokens.shape[0] < 100 else torch.ones_like(weights))


def test_a_body_that_does_something_else_with_more_tokens_is_refused_then() -> None:
    with fake_process_group(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = tpplan.parallelize(Block(by_size), PLAN, mesh, ACTIVATIONS)
        model(*ACTIVATIONS)
        model(torch.randn(2, 7, WIDTH))
        with pytest.raises(UnprovedCallError) as caught:
            model(torch.randn(16, 8, WIDTH))
    assert "TP146 experts-not-whole" in str(caught.value)
