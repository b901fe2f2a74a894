"""Collectives beside matrix products: numbers, counts, and that they run while there is something to compute."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tpplan
from tests.marking import slow_but
from tests.models.tiny import ARCHITECTURES, tiny_model
from tests.plans.parity import assert_same_run, run, tolerance
from tests.runtime.world import Member, world
from tpplan.compiler.ir.program import Program
from tpplan.plan import load_plan
from tpplan.runtime.overlap.pairwise import gather_with, scatter_with
from tpplan.runtime.ranks.communicator import ProcessGroupCommunicator

UNITS = ("gather_linear", "linear_reduce", "weight_gradient")
CHOICES: tuple[dict[str, Any], ...] = (
    *({"overlap": [unit]} for unit in UNITS),
    {"overlap": list(UNITS)},
    {"overlap": list(UNITS), "recompute_gather": True},
    {"recompute_gather": True},
    {"overlap": "auto"},
)
PLANS = ("llama", "llama-sequence", "gpt2", "gpt2-sequence")


def _with(name: str, options: dict[str, Any]) -> dict[str, Any]:
    return {**load_plan(name).to_dict(), **options}


def _parities(member: Member, name: str, choices: Sequence[dict[str, Any]]) -> list[tuple[int, list[Counter[str]]]]:
    """Hold each choice against the stock model; the number of overlaps, the counts that were, and those predicted."""
    architecture = name.removesuffix("-sequence")
    stock, keywords = tiny_model(architecture)
    reference = run(stock, keywords)
    found: list[tuple[int, list[Counter[str]]]] = []
    allowed = tolerance(ARCHITECTURES[architecture].coarsest)
    for options in choices:
        plan = _with(name, options)
        program = tpplan.compile_plan(copy.deepcopy(stock), plan, member.size, keywords)
        sharded = tpplan.parallelize(copy.deepcopy(stock), plan, member.mesh(), keywords)
        assert_same_run(run(sharded, keywords), reference, allowed)
        sharded.zero_grad()
        ours = run(sharded, keywords)  # which isn't watched
        assert_same_run(ours, reference, allowed)
        with torch.no_grad():
            again = sharded(**keywords)
        for one, other in zip(reference.outputs, [again[0]], strict=False):
            assert (one - other).abs().max() <= allowed * one.abs().max()
        pairwise = [
            program.count_pairwise(backward=False),
            program.count_pairwise() - program.count_pairwise(backward=False),
        ]
        counts = [program.count_collectives(backward=False), program.count_collectives()]
        counts = [counts[0] - pairwise[0], counts[1] - counts[0] - pairwise[1]]
        assert [ours.forward, ours.backward] == counts, (name, options)
        found.append((len(program.overlaps), pairwise))
    return found


@pytest.mark.processes
@pytest.mark.parametrize(("name", "size"), slow_but([("llama-sequence", 2)], [("llama-sequence", 2), ("gpt2", 2)]))
def test_all_units_together_compute_the_same(name: str, size: int) -> None:
    (counts,) = zip(*world(size).run(_parities, name, CHOICES[4:5]), strict=True)
    assert all(rank == counts[0] for rank in counts)
    number, pairwise = counts[0]
    assert number and any(pairwise) == name.endswith("-sequence")


@pytest.mark.processes
@pytest.mark.sweep
@pytest.mark.parametrize(("name", "size"), [(name, size) for name in PLANS for size in (2, 4)])
def test_each_unit_alone_and_all_together_compute_the_same(name: str, size: int) -> None:
    ranks = world(size).run(_parities, name, CHOICES)
    assert all(rank == ranks[0] for rank in ranks)
    used = [number for number, _ in ranks[0]]
    assert used[3] == sum(used[:3]) > 0  # all together are each of them
    assert bool(used[0]) == name.endswith("-sequence") and bool(used[2]) != name.endswith("-sequence")


# -- exchanges of pairs -----------------------------------------------------------------------------------------------
def _exchanges(member: Member, dim: int, groups: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(member.rank)
    axis = ProcessGroupCommunicator(member.mesh().get_group())
    shape = [2, 3, 4]
    part = torch.randn(shape, generator=generator, dtype=torch.float64)
    seen: list[int] = []

    def doubled(held: Tensor) -> list[Tensor]:
        seen.append(held.shape[dim] // shape[dim])
        return [held * 2]

    whole, (twice,) = gather_with(axis, part, dim, groups, doubled)
    assert tuple(seen) == groups
    assert torch.equal(twice, whole * 2)
    assert torch.equal(whole, axis.all_gather(part, dim))
    wide = [n * member.size if d == dim else n for d, n in enumerate(shape)]
    terms = torch.randn(wide, generator=generator, dtype=torch.float64)
    chunks = terms.chunk(member.size, dim)
    mine = scatter_with(axis, dim, groups[::-1], lambda ranks: torch.cat([chunks[rank] for rank in ranks], dim))
    return terms, whole, mine


@pytest.mark.processes
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("groups", [(1, 1, 1, 1), (1, 1, 2), (4,)])
def test_rows_are_those_of_the_collective_and_sums_have_a_stated_order(dim: int, groups: tuple[int, ...]) -> None:
    ranks = world(4).run(_exchanges, dim, groups)
    assert all(torch.equal(whole, ranks[0][1]) for _, whole, _ in ranks)
    every = [terms.chunk(4, dim) for terms, _, _ in ranks]
    for rank, (_, _, mine) in enumerate(ranks):
        total = every[rank][rank].clone()
        for distance in (1, 2, 3):
            total += every[(rank - distance) % 4][rank]
        assert torch.equal(mine, total)


# -- what the compiler says -------------------------------------------------------------------------------------------
class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x) * self.gate(x))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp, self.end = nn.LayerNorm(8), MLP(), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.mlp(self.norm(x)))


WHOLE = {"mlp.up": "colwise", "mlp.gate": "colwise", "mlp.down": "rowwise"}
SPLIT = {**WHOLE, "norm": "sequence", "end": "sequence"}


def _compiled(modules: dict[str, Any], **options: Any) -> Program:
    plan = {"version": 1, "modules": modules, **options}
    return tpplan.compile_plan(Normed(), plan, 2, torch.randn(2, 8, 8, requires_grad=True))


@pytest.mark.parametrize(
    ("modules", "options", "expected"),
    [
        (WHOLE, {"overlap": "none"}, []),
        (WHOLE, {"overlap": []}, []),
        (WHOLE, {"overlap": "auto"}, [("weight_gradient", ("mlp.up", "mlp.gate"))]),
        (SPLIT, {"overlap": "auto"}, [("gather_linear", ("mlp.up", "mlp.gate")), ("linear_reduce", ("mlp.down",))]),
        (SPLIT, {"overlap": ["linear_reduce"]}, [("linear_reduce", ("mlp.down",))]),
        (
            {**WHOLE, "mlp.up": {"style": "colwise", "overlap": "none"}},
            {"overlap": "auto"},
            [("weight_gradient", ("mlp.gate",))],
        ),
        (
            {**SPLIT, "mlp.down": {"style": "rowwise", "overlap": ["linear_reduce"]}},
            {},
            [("linear_reduce", ("mlp.down",))],
        ),
    ],
)
def test_a_plan_says_what_is_overlapped(modules: Any, options: Any, expected: list[Any]) -> None:
    program = _compiled(modules, **options)
    assert [(str(unit), o.linears) for o in program.overlaps for unit in o.units] == expected
    assert not program.diagnostics
    assert Program.from_dict(program.to_dict()) == program
    assert all(
        (overlap.least > 0) == (options.get("overlap") == "auto")
        for overlap in program.overlaps
        if "weight_gradient" not in overlap.units
    )
    assert (program.digest == _compiled(modules).digest) == (not expected or not options)


@pytest.mark.parametrize(
    ("modules", "options", "message"),
    [
        (WHOLE, {"overlap": ["gather_linear"]}, "no all-gather stands before linear layers"),
        (WHOLE, {"overlap": ["linear_reduce"]}, "no linear layer's result is summed by a reduce-scatter"),
        (SPLIT, {"overlap": ["weight_gradient"]}, "no all-reduce stands behind"),
        (WHOLE, {"overlap": ["weight_gradient", "half_batches"]}, "halves of a batch aren't computed in turns"),
        (WHOLE, {"recompute_gather": True}, "no all-gather stands before linear layers"),
    ],
)
def test_what_cannot_be_had_is_told_with_its_reason(modules: Any, options: Any, message: str) -> None:
    (found,) = _compiled(modules, **options).diagnostics
    assert found.code == "TP152" and message in found.message and found.help


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"overlap": "sometimes"}, "TP021"),
        ({"overlap": ["gather_linears"]}, "TP021"),
        ({"overlap": 3}, "TP021"),
        ({"overlap": {"a": 1}}, "TP004"),
        ({"recompute_gather": "yes"}, "TP004"),
        ({"modules": {"mlp.norm": {"style": "sequence", "overlap": "auto"}}}, "TP020"),
    ],
)
def test_mistakes_are_told(options: dict[str, Any], code: str) -> None:
    with pytest.raises(tpplan.PlanError) as error:
        load_plan({"version": 1, "modules": WHOLE, **options})
    assert [found.code for found in error.value.diagnostics] == [code]


def test_a_plan_is_written_as_it_was_read() -> None:
    rules = {**WHOLE, "mlp.up": {"style": "colwise", "overlap": ["weight_gradient"]}}
    for overlap in ("auto", ["gather_linear", "linear_reduce"]):
        plan = load_plan({"version": 1, "modules": rules, "overlap": overlap, "recompute_gather": True})
        assert load_plan(plan.to_dict()) == plan == load_plan(plan.to_yaml())


# -- bodies and calls that aren't as usual ----------------------------------------------------------------------------
def _uses(member: Member, options: dict[str, Any]) -> None:
    plan = {"version": 1, "modules": SPLIT if "gather_linear" in options["overlap"] else WHOLE, **options}
    torch.manual_seed(0)
    stock = Normed().double()
    x = torch.randn(2, 8, 8, dtype=torch.float64, requires_grad=True)
    sharded = tpplan.parallelize(copy.deepcopy(stock), plan, member.mesh(), x)
    for use in USES:
        for model in (stock, sharded):
            model.zero_grad()
        one, other = use(stock, x.detach().clone().requires_grad_()), use(sharded, x.detach().clone().requires_grad_())
        for ours, theirs in zip(other, one, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
        for (name, p), q in zip(sharded.named_parameters(), stock.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), (use.__name__, name)
            if p.grad is not None and q.grad is not None:
                torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-12, atol=1e-12)  # pyright: ignore


def plain(model: Any, x: Tensor) -> list[Tensor]:
    y = model(x)
    y.sin().sum().backward()
    return [y, x.grad]  # pyright: ignore


def hooked(model: Any, x: Tensor) -> list[Tensor]:
    """Hooks that see, and that change, what a layer reads."""
    seen: list[Tensor] = []
    handles = [
        model.mlp.up.register_forward_pre_hook(lambda _, given: (given[0] * 2,)),
        model.mlp.gate.register_forward_hook(lambda _, given, made: seen.append(given[0].detach().clone())),
    ]
    try:
        return [*plain(model, x), *seen]
    finally:
        for handle in handles:
            handle.remove()


def checkpointed(model: Any, x: Tensor) -> list[Tensor]:
    from torch.utils.checkpoint import checkpoint

    y = checkpoint(model, x, use_reentrant=False)
    y.sin().sum().backward()
    return [y, x.grad]  # pyright: ignore


def checkpointed_inside(model: Any, x: Tensor) -> list[Tensor]:
    from torch.utils.checkpoint import checkpoint

    stock = model.mlp.forward
    model.mlp.forward = lambda held: checkpoint(stock, held, use_reentrant=False)
    try:
        return plain(model, x)
    finally:
        del model.mlp.forward


def frozen(model: Any, x: Tensor) -> list[Tensor]:
    model.mlp.up.weight.requires_grad_(False)
    try:
        return plain(model, x)
    finally:
        model.mlp.up.weight.requires_grad_(True)


def inference(model: Any, x: Tensor) -> list[Tensor]:
    with torch.inference_mode():
        return [model(x).clone()]


def twice(model: Any, x: Tensor) -> list[Tensor]:
    first, second = model(x), model(x.detach() + 1)
    (first * second).sum().backward()
    return [first, second, x.grad]  # pyright: ignore


def longer(model: Any, x: Tensor) -> list[Tensor]:
    return plain(model, torch.cat([x, x], 1).detach().requires_grad_())


def of_one_row(model: Any, x: Tensor) -> list[Tensor]:
    """Without a batch, and a sequence of one: what a layer reads has a dim less, or can't be split."""
    return plain(model, x[0].detach().requires_grad_())


USES: list[Callable[..., list[Tensor]]] = [
    plain,
    hooked,
    checkpointed,
    checkpointed_inside,
    frozen,
    inference,
    twice,
    longer,
    plain,
]


@pytest.mark.processes
@pytest.mark.parametrize(
    "options",
    [
        {"overlap": ["gather_linear", "linear_reduce"]},
        {"overlap": ["gather_linear", "linear_reduce"], "recompute_gather": True},
        {"overlap": ["weight_gradient"]},
    ],
)
def test_unusual_calls_compute_the_same(options: dict[str, Any]) -> None:
    world(2).run(_uses, options)
