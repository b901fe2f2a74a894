"""Collectives beside matrix products: numbers, counts, and that they run while there is something to compute."""

from __future__ import annotations

import copy
import json
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import tpplan
from tests.cost import half_batches, overlap_table
from tests.marking import slow_but
from tests.models.tiny import ARCHITECTURES, output_tensors, tiny_model
from tests.plans.parity import assert_close, assert_same_run, run, tolerance
from tests.runtime.world import Member, world
from tests.zoo.architectures import ARCHITECTURES as ZOO
from tests.zoo.architectures import model_of
from tpplan.compat.modules import own_parameters
from tpplan.compiler.ir.program import Program
from tpplan.cost.cluster import cluster_of
from tpplan.cost.hiding import LinearPart, Rates, schedules
from tpplan.cost.link_times import Group
from tpplan.cost.traffic import module_traffic, placement_time
from tpplan.plan import OverlapUnit, load_plan
from tpplan.report.estimate_tables import render_estimate
from tpplan.report.program_page import render_program
from tpplan.runtime.overlap.joint import Joint, JointLayer
from tpplan.runtime.overlap.pairwise import gather_with, scatter_with
from tpplan.runtime.overlap.scattered import Scattered
from tpplan.runtime.parameters.handed_out import HandedOut
from tpplan.runtime.ranks import communicator
from tpplan.runtime.ranks.communicator import ProcessGroupCommunicator
from tpplan.runtime.ranks.one_shot import SharedMemory

PAGE = Path(__file__).parents[2] / "docs" / "overlap.md"
UNITS = ("gather_linear", "linear_reduce", "weight_gradient")
CHOICES: tuple[dict[str, Any], ...] = (
    *({"overlap": [unit]} for unit in UNITS),
    {"overlap": list(UNITS)},
    {"overlap": list(UNITS), "recompute_gather": True},
    {"recompute_gather": True},
    {"overlap": "auto"},
)
PLANS = ("llama", "llama-sequence", "gpt2", "gpt2-sequence", "mixtral", "mixtral-sequence", "t5", "t5-sequence")


def _with(name: str, options: dict[str, Any]) -> dict[str, Any]:
    return {**load_plan(name).to_dict(), **options}


def _subject(architecture: str) -> tuple[nn.Module, dict[str, Any], torch.dtype]:
    """A stock model, a call of it, and the coarsest dtype that it computes in."""
    if architecture in ARCHITECTURES:
        return *tiny_model(architecture), ARCHITECTURES[architecture].coarsest
    torch.manual_seed(0)
    held = ZOO[architecture]
    call = {
        name: torch.ones(given.shape, dtype=given.dtype) if "mask" in name else torch.randint(1, 24, given.shape)
        for name, given in held.inputs().items()
    }
    return model_of(held).float().eval(), call, torch.float32


def _parities(member: Member, name: str, choices: Sequence[dict[str, Any]]) -> list[tuple[int, list[Counter[str]]]]:
    """Hold each choice against the stock model; the number of overlaps, the counts that were, and those predicted."""
    stock, keywords, coarsest = _subject(name.removesuffix("-sequence"))
    counts = not name.startswith("t5")
    reference, allowed = run(stock, keywords, counts), tolerance(coarsest)
    found: list[tuple[int, list[Counter[str]]]] = []
    for options in choices:
        plan = _with(name, options)
        program = tpplan.compile_plan(copy.deepcopy(stock), plan, member.size, keywords)
        sharded = tpplan.parallelize(copy.deepcopy(stock), plan, member.mesh(), keywords)
        sharded(**keywords)  # a call that is begun once more, by another program, is more than CommDebugMode follows
        ours = run(sharded, keywords, counts)
        assert_same_run(ours, reference, allowed)
        with torch.no_grad():
            again = output_tensors(sharded(**keywords))
        for one, other in zip(reference.outputs, again, strict=True):
            assert_close("without gradients", other, one, allowed)
        pairwise = [
            program.count_pairwise(backward=False),
            program.count_pairwise() - program.count_pairwise(backward=False),
        ]
        predicted = [program.count_collectives(backward=False), program.count_collectives()]
        predicted = [predicted[0] - pairwise[0] + program.count_parts(), predicted[1] - predicted[0] - pairwise[1]]
        assert not counts or [ours.forward, ours.backward] == predicted, (name, options)
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


# -- torch's fused operators ----------------------------------------------------------------------------------------
@contextmanager
def _fused_on_processes() -> Generator[Counter[str]]:
    """Have torch's fused operators run by what they fall back to, which any process group can; counts their calls."""
    import torch.distributed._symmetric_memory as symmetric

    calls = Counter[str]()
    kernels = torch.library.Library("symm_mem", "IMPL")
    for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):

        def counted(*args: Any, _name: str = name, **options: Any) -> Any:
            calls[_name] += 1
            return getattr(symmetric, f"_{_name}_fallback")(*args, **options)

        kernels.impl(name, counted, "CPU")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(communicator, "share_memory", lambda group, n, device: SharedMemory(torch.empty(n), group, n))
        yield calls
    kernels._destroy()


def _fused_parity(member: Member, name: str, options: dict[str, Any]) -> tuple[Counter[str], Counter[str]]:
    """The calls of fused operators that are made in a step, and those that the program has."""
    stock, keywords, coarsest = _subject(name.removesuffix("-sequence"))
    plan = _with(name, {"overlap": list(UNITS), "fused_overlap": True, **options})
    reference, allowed = run(stock, keywords), tolerance(coarsest)
    program = tpplan.compile_plan(copy.deepcopy(stock), plan, member.size, keywords)
    with _fused_on_processes() as calls:
        sharded = tpplan.parallelize(copy.deepcopy(stock), plan, member.mesh(), keywords)
        sharded(**keywords)
        calls.clear()
        assert_same_run(run(sharded, keywords), reference, allowed)
        made = Counter(calls)
        with torch.no_grad():
            again = output_tensors(sharded(**keywords))
    for one, other in zip(reference.outputs, again, strict=True):
        assert_close("without gradients", other, one, allowed)
    units = Counter(str(unit) for overlap in program.overlaps for unit in overlap.units)
    gathers, scatters = units["gather_linear"], units["linear_reduce"]
    return made, Counter(fused_all_gather_matmul=gathers + scatters, fused_matmul_reduce_scatter=scatters)


@pytest.mark.processes
@pytest.mark.one_in(6)
@pytest.mark.parametrize("options", [{}, {"recompute_gather": True}])
@pytest.mark.parametrize(("name", "size"), [("gpt2-sequence", 2), ("llama-sequence", 2), ("llama-sequence", 4)])
def test_fused_operators_compute_the_same(name: str, size: int, options: dict[str, Any]) -> None:
    for made, predicted in world(size).run(_fused_parity, name, options):
        assert made == predicted and all(made.values())


def _without_shared_memory(member: Member) -> list[str]:
    torch.manual_seed(0)
    model, x = Normed(), torch.randn(2, 8, 8)
    plan = {"version": 1, "modules": SPLIT, "overlap": "auto", "fused_overlap": True}
    expected = model(x)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sharded = tpplan.parallelize(model, plan, member.mesh(), x)
    torch.testing.assert_close(sharded(x), expected)
    return [str(warning.message) for warning in caught]


@pytest.mark.processes
def test_where_ranks_share_no_memory_a_warning_says_so() -> None:
    for said in world(2).run(_without_shared_memory):
        assert any("fused operators, but exchanges run beside products: " in message for message in said)


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


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("modules", "options", "expected"),
    [
        (WHOLE, {"overlap": "none"}, []),
        (WHOLE, {"overlap": []}, []),
        (
            WHOLE,
            {"overlap": "auto"},
            [("weight_gradient", ("mlp.up", "mlp.gate")), ("linear_reduce", ("mlp.down",))],
        ),
        (WHOLE, {"overlap": ["linear_reduce"]}, [("linear_reduce", ("mlp.down",))]),
        (SPLIT, {"overlap": "auto"}, [("gather_linear", ("mlp.up", "mlp.gate")), ("linear_reduce", ("mlp.down",))]),
        (SPLIT, {"overlap": ["linear_reduce"]}, [("linear_reduce", ("mlp.down",))]),
        (
            {**WHOLE, "mlp.up": {"style": "colwise", "overlap": "none"}},
            {"overlap": "auto"},
            [("weight_gradient", ("mlp.gate",)), ("linear_reduce", ("mlp.down",))],
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
        ({"mlp.up": "colwise"}, {"overlap": ["linear_reduce"]}, "no linear layer's result is summed where"),
        (WHOLE, {"chunks": 4}, "no layer's product is made in parts"),
        (WHOLE, {"overlap": ["weight_gradient"], "chunks": 4}, "no layer's product is made in parts"),
        (SPLIT, {"overlap": ["weight_gradient"]}, "no all-reduce stands behind"),
        (WHOLE, {"overlap": ["weight_gradient", "half_batches"]}, "halves of a batch aren't computed in turns"),
        (WHOLE, {"recompute_gather": True}, "no all-gather stands before linear layers"),
        (WHOLE, {"overlap": "auto", "fused_overlap": True}, "no gather or reduce-scatter of a split sequence"),
        (SPLIT, {"fused_overlap": True}, "no gather or reduce-scatter of a split sequence"),
    ],
)
def test_what_cannot_be_had_is_told_with_its_reason(modules: Any, options: Any, message: str) -> None:
    plan = load_plan(json.dumps({"version": 1, "modules": modules, **options}, indent=1))
    every = tpplan.compile_plan(Normed(), plan, 2, torch.randn(2, 8, 8, requires_grad=True)).diagnostics
    (found,) = [diagnostic for diagnostic in every if diagnostic.code == "TP152"]
    assert message in found.message and found.help
    assert found.span is not None and found.span.start.line > 4  # of the option, below the rules


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"overlap": "sometimes"}, "TP021"),
        ({"overlap": ["gather_linears"]}, "TP021"),
        ({"overlap": 3}, "TP021"),
        ({"overlap": {"a": 1}}, "TP004"),
        ({"overlap": "gather_linear"}, "TP004"),
        ({"recompute_gather": "yes"}, "TP004"),
        ({"fused_overlap": 1}, "TP004"),
        ({"chunks": 1}, "TP004"),
        ({"chunks": 65}, "TP004"),
        ({"chunks": "4"}, "TP004"),
        ({"chunks": True}, "TP004"),
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
        plan = load_plan({"version": 1, "modules": rules, "overlap": overlap, "chunks": 4, "recompute_gather": True})
        assert load_plan(plan.to_dict()) == plan == load_plan(plan.to_yaml())


class Halved(nn.Linear):
    """A linear layer that does more than its product."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 0.5


def test_a_layer_whose_own_code_does_more_is_left_out() -> None:
    model = Normed()
    model.mlp.gate = Halved(8, 16)
    plan = {"version": 1, "modules": WHOLE, "overlap": ["weight_gradient"]}
    x = torch.randn(2, 8, 8, requires_grad=True)
    assert [overlap.linears for overlap in tpplan.compile_plan(model, plan, 2, x).overlaps] == [("mlp.up",)]
    assert tpplan.verify(model, plan, 2, x).ok


def test_what_is_gathered_again_is_counted_sent_and_not_kept() -> None:
    modules = {**SPLIT, "mlp.up": {"style": "colwise", "overlap": ["gather_linear"]}}
    kept, again = _compiled(modules), _compiled(modules, recompute_gather=True)
    assert again.count_collectives() - kept.count_collectives() == Counter({"all-gather": 1})
    assert again.count_collectives(backward=False) == kept.count_collectives(backward=False)
    traffic = [module_traffic(program.modules, 2) for program in (kept, again)]
    assert traffic[1].backward.total - traffic[0].backward.total == 2 * 8 * 8 * 4 // 2
    assert placement_time(again) > placement_time(kept)
    memory = [tpplan.estimate(program, "h100").memory.activations for program in (kept, again)]
    assert memory[0] - memory[1] == 2 * 8 * 8 * 4 // 2  # the whole input against a part
    assert [overlap.linears for overlap in again.overlaps] == [("mlp.up", "mlp.gate")]  # else the gate would keep it
    assert Program.from_dict(again.to_dict()) == again != kept


# -- the schedule and its price ---------------------------------------------------------------------------------------
class Proportional(Rates):
    """Products take a second for each row."""

    def products(self, layers: Iterable[LinearPart], rows: int) -> float:
        return float(rows * len(list(layers)))


@pytest.mark.parametrize(
    ("rows", "groups", "alone", "hidden"),
    [
        (2, (1, 1), 1.0, 1.0),  # the own part is multiplied while the other comes
        (2, (1, 1), 3.0, 1.0),  # which takes longer: one product is hidden
        (2, (2,), 1.0, 0.0),
        (4, (1, 1, 1, 1), 3.0, 3.0),
        (4, (1, 1, 1, 1), 6.0, 3.0),  # parts come each two seconds
        (4, (1, 1, 2), 3.0, 2.0),  # two parts are waited for
        (8, (1, 1, 2), 3.0, 3.0),
    ],
)
def test_what_an_exchange_hides(rows: int, groups: tuple[int, ...], alone: float, hidden: float) -> None:
    layers = [(1, 1, "float32", 4)]
    assert Proportional(cluster_of("h100")).pairwise(layers, rows, groups, 1, alone) == pytest.approx(hidden)


def test_all_groupings_are_of_all_parts() -> None:
    for size in (2, 3, 4, 6, 8):
        for chunks in (None, 2, 3, 8):
            ways = list(schedules(size, 3, chunks))
            assert all(sum(groups) == size and 1 <= grouped <= 3 for groups, grouped in ways)
            assert chunks is None or {len(groups) for groups, _ in ways} == {min(chunks, size)}


@pytest.mark.parametrize(("number", "size"), [(3, 2), (4, 4)])
def test_a_plan_says_of_how_many_products_layers_are(number: int, size: int) -> None:
    plan = {"version": 1, "modules": WHOLE, "overlap": ["linear_reduce"], "chunks": number}
    x = torch.randn(2, 8, 8, requires_grad=True)
    program = tpplan.compile_plan(Normed(), plan, size, x)
    assert [overlap.groups for overlap in program.overlaps] == [(1,) * number]
    assert program.count_collectives(backward=False) == Counter({"all-reduce": 1})
    assert program.count_parts() == Counter({"all-reduce": number - 1})
    assert not tpplan.compile_plan(Normed(), {**plan, "overlap": "auto"}, size, x).count_parts()  # of so few rows
    split = tpplan.compile_plan(Normed(), {**plan, "modules": SPLIT, "overlap": "auto"}, size, x)
    assert {len(overlap.groups) for overlap in split.overlaps} == {min(number, size)}


@pytest.mark.parametrize(("product", "parts", "hidden"), [(1.0, 4, 3.0), (0.1, 4, 0.3), (1.0, 1, 0.0)])
def test_what_a_sum_in_parts_hides(product: float, parts: int, hidden: float) -> None:
    """Of a sum that takes as long as four products of a part, or 40: all but the last, or what is computed."""

    class Timed(Proportional):
        def products(self, layers: Iterable[LinearPart], rows: int) -> float:
            return rows * product / 64

    cluster, layers, rows = cluster_of("h100"), [(1, 1, "float32", 1)], 64 * parts
    free = replace(cluster, latency={"all-reduce": (0.0,) * 3}, efficiency={"all-reduce": (1.0,) * 3}, link=64.0)
    found = Timed(free).summed(layers, rows, (1,) * parts, Group(2))
    assert found == pytest.approx(hidden)


def wide_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=8192, intermediate_size=28672, num_attention_heads=64, num_hidden_layers=1)
    with torch.device("meta"):
        return LlamaForCausalLM(config).bfloat16()


def test_an_estimate_has_what_is_exposed_and_the_same_work() -> None:
    ids = torch.zeros(1, 4096, dtype=torch.long, device="meta")
    model = wide_llama()
    costs: dict[str, Any] = {}
    for name, options in {
        "none": {}, "auto": {"overlap": "auto"}, "all": {"overlap": ["gather_linear", "linear_reduce"]}
    }.items():  # fmt: skip
        program = tpplan.compile_plan(model, _with("llama-sequence", options), 8, {"input_ids": ids, "labels": ids})
        estimate = tpplan.estimate(program, "h100")
        costs[name] = estimate.step
        shown = render_estimate(estimate, 120, False)
        assert ("collectives of a block" in shown) == bool(options)
        assert ("Run beside matrix products" in render_program(program)) == bool(options)
    none, auto, every = costs["none"], costs["auto"], costs["all"]
    assert none.exposed_seconds == none.communication_seconds == every.communication_seconds
    assert none.compute_seconds == every.compute_seconds
    assert not any(held.hidden for held in none.line)
    sends = [held for held in every.line if held.stream == "communication"]
    assert len(sends) == len([held for held in none.line if held.stream == "communication"])
    assert sum(held.seconds - held.hidden for held in sends) < 0.8 * sum(held.seconds for held in sends)
    assert auto.exposed_seconds <= every.exposed_seconds < none.exposed_seconds  # auto leaves out what costs more
    assert none.total_seconds - every.total_seconds == pytest.approx(none.exposed_seconds - every.exposed_seconds)
    line = every.line
    assert any(  # a sum runs beside what was before it
        one.stream == "communication" and other.stream == "compute" and one.start < other.start + other.seconds - 1e-9
        and other.start < one.start + one.seconds - 1e-9
        for one in line for other in line
    )  # fmt: skip


@pytest.mark.slow
def test_the_table_on_the_page_is_the_models() -> None:
    shown = [" ".join(line.split("|")[2:]) for line in PAGE.read_text(encoding="utf-8").splitlines() if "%" in line]
    for _, _, *figures in overlap_table.rows():
        numbers = [figure.rpartition(" ")[2] if "%" in figure else figure for figure in figures]
        assert " ".join(numbers) in [" ".join(line.split()) for line in shown], numbers


@pytest.mark.slow
def test_the_table_of_half_batches_is_the_models() -> None:
    page = PAGE.parent / "decisions" / "059-what-overlap-leaves.md"
    cells = [line.strip("| \n").split(" | ") for line in page.read_text(encoding="utf-8").splitlines() if "%" in line]
    shown = {tuple(line[1:]) for line in cells}
    for name in overlap_table.MODELS:
        figures = tuple(f"{100 * share:.0f}%" for share in half_batches.shares(name, *half_batches.CALLS[0]))
        assert figures in shown, figures


# -- the order of things ----------------------------------------------------------------------------------------------
class Noted(ProcessGroupCommunicator):
    """Two ranks of which the other sends the same; notes what begins and what is waited for."""

    def __init__(self) -> None:
        self.size, self.rank, self.events = 2, 0, list[str]()

    def at(self, place: str) -> Noted:
        return self

    def begin_collective(self, collective: Any, tensor: Tensor, dim: int = 0) -> Callable[[], Tensor]:
        self.events.append(f"begin {collective}")
        made = {"all-reduce": tensor * 2, "all-gather": torch.cat([tensor, tensor], dim)}.get(str(collective))
        return lambda: self._waited(tensor.chunk(2, dim)[0] * 2 if made is None else made)

    @contextmanager
    def pairwise(self, collective: Any) -> Generator[Any]:
        def swap(sent: Tensor, distance: int) -> Callable[[], Tensor]:
            self.events.append(f"send {distance}")
            return lambda: self._waited(sent)

        yield swap

    def _waited(self, made: Tensor) -> Tensor:
        self.events.append("wait")
        return made


class Products(TorchDispatchMode):
    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func) in ("aten.mm.default", "aten.mm.out", "aten.addmm.default", "aten.addmm_.default"):
            self.events.append("product")
        return func(*args, **(kwargs or {}))


def _joint(axis: Noted, dim: int | None, again: bool, unit: OverlapUnit) -> Joint:
    held = HandedOut(axis)
    members = tuple(JointLayer(nn.Linear(4, 4, bias=False), lambda p: p, None, False) for _ in range(2))
    return Joint(axis, dim, members, frozenset({unit}), again, 0, (1, 1), 1, held)


@pytest.mark.parametrize(
    ("joint", "forward", "backward"),
    [
        ((None, False, OverlapUnit.WEIGHT_GRADIENT), "pp", "pp(reduce)pp."),
        ((1, False, OverlapUnit.GATHER_LINEAR), ">p.pp", "pp(scatter)pp."),
        ((1, True, OverlapUnit.GATHER_LINEAR), ">p.pp", "(gather)pp(scatter).pp."),
    ],
)
def test_what_travels_does_so_while_something_is_computed(joint: Any, forward: str, backward: str) -> None:
    """p: a product; >: a part is sent; (…): a collective begins; .: something is waited for."""
    axis = Noted()
    made = _joint(axis, *joint)
    x = torch.randn(1, 2, 4, requires_grad=True)
    with Products(axis.events):
        whole = made(x, lambda _: pytest.fail("the plain step"))
        products = [made.product_of(m.module, whole, own_parameters(m.module)["weight"]) for m in made.members]
    assert _shown(axis.events) == forward
    axis.events.clear()
    with Products(axis.events):
        sum(held.sum() for held in products if held is not None).backward()  # pyright: ignore
    assert _shown(axis.events) == backward


def test_a_gradient_of_other_readers_counts_and_stays_as_it_was() -> None:
    made = _joint(Noted(), None, False, OverlapUnit.WEIGHT_GRADIENT)
    x = torch.randn(1, 2, 4, requires_grad=True)
    whole = made(x, lambda _: pytest.fail("the plain step"))
    product, _ = [made.product_of(m.module, whole, own_parameters(m.module)["weight"]) for m in made.members]
    assert product is not None
    given = torch.ones(1, 2, 4)
    torch.autograd.backward([whole, product], [given, given])
    weight = own_parameters(made.members[0].module)["weight"]
    assert torch.equal(given, torch.ones(1, 2, 4)) and weight is not None
    torch.testing.assert_close(x.grad, 2 * (given + given @ weight))


def test_terms_are_sent_before_the_last_is_made_and_waited_for_after_it() -> None:
    axis = Noted()
    layer = Scattered(axis, 1, False, 0, (1, 1))
    x, weight = torch.randn(1, 4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    with Products(axis.events):
        made = layer(x, weight)
    assert made is not None and _shown(axis.events) == "p>p."
    axis.events.clear()
    with Products(axis.events):
        made.sum().backward()
    assert _shown(axis.events) == ">p.pp"


def test_rows_are_summed_while_others_are_made() -> None:
    axis = Noted()
    layer = Scattered(axis, None, False, 0, (1, 1, 1))
    x, weight = torch.randn(1, 4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    with Products(axis.events):
        made = layer(x, weight)
    assert made is not None and _shown(axis.events) == "p(reduce)p(reduce)p(reduce)..."
    torch.testing.assert_close(made, 2 * x @ weight.t())
    axis.events.clear()
    with Products(axis.events):
        made.sum().backward()
    assert _shown(axis.events) == "pp"
    assert layer(x[:, :1], weight) is None
    for groups, dim in (
        ((1, 1, 1), None),
        ((1, 1), 1),
    ):  # what a model returns is its caller's, what is frozen isn't kept
        given = x.detach().clone().requires_grad_()
        read = given * 1.0
        made = replace(layer, groups=groups, dim=dim)(read, weight.detach())
        assert made is not None
        made.add_(1.0)
        read.data.zero_()
        made.sum().backward()
        torch.testing.assert_close(given.grad, torch.ones(1, 4, 4) @ weight)
    axis.events.clear()
    with Products(axis.events):
        assert layer(x[:, :2], weight) is not None
    assert _shown(axis.events) == "p(reduce)p(reduce).."  # as far as there are rows
    axis.one_shot = 4 * 4 * 4
    assert layer(x, weight) is None  # ranks sum that in one step


def _shown(events: list[str]) -> str:
    signs = {"product": "p", "wait": ".", "send 1": ">"}
    words = {"begin all-reduce": "(reduce)", "begin reduce-scatter": "(scatter)", "begin all-gather": "(gather)"}
    return "".join((signs | words)[event] for event in events)


def _traced(member: Member, modules: dict[str, Any], options: dict[str, Any]) -> tuple[str, str]:
    """What a profiler saw of a forward and of its backward, in order."""
    model = tpplan.parallelize(
        Normed(), {"version": 1, "modules": modules, **options}, member.mesh(), torch.ones(2, 8, 8)
    )
    found: list[str] = []
    x = torch.randn(2, 8, 8, requires_grad=True)
    model(x).sum().backward()  # what is proved first isn't of interest
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as forward:
        made = model(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as backward:
        made.sum().backward()
    for seen in (forward, backward):
        events = sorted(seen.events() or (), key=lambda event: event.time_range.start)
        products = ("aten::mm", "aten::addmm", "aten::addmm_")
        names = [e.name for e in events if e.name in products or e.name.startswith("tpplan")]
        found.append(
            "".join("p" if n.startswith("aten") else ")" if n.startswith("tpplan wait") else "(" for n in names)
        )
    return found[0], found[1]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("modules", "options", "expected"),
    [
        (WHOLE, {}, ("ppp(", "pppppp(")),
        (WHOLE, {"overlap": ["weight_gradient", "linear_reduce"], "chunks": 2}, ("ppp(p())", "pppp(pp)")),
        (SPLIT, {}, ("(ppp((", "(pppppp(((")),
        (SPLIT, {"overlap": ["gather_linear", "linear_reduce"]}, ("(pp)pp(pp)(", "(p)pppp(pp)((")),
    ],
)
def test_a_profiler_sees_products_between_launches_and_waits(modules: Any, options: Any, expected: Any) -> None:
    """p: a product; (: a collective, or where one or its first part begins; ): a part or a collective is waited for."""
    for seen in world(2).run(_traced, modules, options):
        assert seen == expected


def test_fewer_rows_than_pay_run_the_plain_step() -> None:
    axis = Noted()
    made = replace(_joint(axis, 1, False, OverlapUnit.GATHER_LINEAR), least=6)
    plain = torch.randn(1, 4, 4)
    assert made(torch.randn(1, 2, 4), lambda _: plain) is plain  # four rows of both ranks
    assert made(torch.randn(1, 3, 4), lambda _: plain) is not plain
    layer = Scattered(axis, 1, False, 6, (1, 1))
    assert layer(torch.randn(1, 4, 4), torch.randn(4, 4)) is None
    assert layer(torch.randn(1, 6, 4), torch.randn(4, 4)) is not None


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


@pytest.mark.one_in(5)
@pytest.mark.processes
@pytest.mark.parametrize(
    "options",
    [
        {"overlap": ["gather_linear", "linear_reduce"]},
        {"overlap": ["gather_linear", "linear_reduce"], "recompute_gather": True},
        {"overlap": ["weight_gradient", "linear_reduce"], "chunks": 3},
    ],
)
def test_unusual_calls_compute_the_same(options: dict[str, Any]) -> None:
    world(2).run(_uses, options)
