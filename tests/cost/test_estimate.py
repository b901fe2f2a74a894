"""Estimates: from a program, at its size and at others, and what is said where there is none."""

from __future__ import annotations

import dataclasses
import gc
import json
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import MixtralConfig, MixtralForCausalLM

import tpplan
from tpplan.cost.cluster import cluster_of
from tpplan.cost.estimates import Estimate
from tpplan.cost.kernel_times import known_dtype
from tpplan.cost.state_memory import OPTIMIZERS
from tpplan.forecast import measurement
from tpplan.forecast.tally import Tally
from tpplan.ops.flops import product_sizes

MODULES = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Mlp(nn.Module):
    def __init__(self, hidden: int = 64, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(hidden) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def program(tp: int = 2, batch: int = 2, length: int = 16, hidden: int = 64, **options: Any) -> tpplan.Program:
    model = Mlp(hidden, **options)
    plan = {"version": 1, "modules": MODULES}
    return tpplan.compile_plan(model, plan, tp, torch.zeros(batch, length, hidden))


@pytest.fixture(scope="module")
def compiled() -> tpplan.Program:
    return program()


def test_work_is_counted_as_torch_counts_it(compiled: tpplan.Program) -> None:
    model = Mlp()
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(2, 16, 64, requires_grad=True)).sum().backward()
    work = compiled.measure.at()
    # The input wants no gradient there: one of each block's six products is left out of the first.
    own = sum(task.flops[0] * task.times for task in work.tasks)
    assert own * 2 == work.model_flops[0]
    assert counter.get_total_flops() - 2 * 2 * 16 * 64 * 256 == work.model_flops[0]
    products = [task for task in work.tasks if task.kind == "product"]  # equal layers ran once, and count as often
    assert sum(task.times for task in products if not task.backward) == 3 * 2
    assert sum(task.times for task in products if task.backward) == 3 * 4 - 1
    assert len(products) < 3 * 2 + 3 * 4 - 1
    sends = [(task.name, task.made[0], task.backward) for task in work.tasks if task.kind == "collective"]
    assert set(sends) == {("all-reduce", 2 * 16 * 64 * 4, False), ("all-reduce", 2 * 16 * 64 * 4, True)}


@pytest.mark.parametrize(
    ("name", "operands", "dtype", "expected"),
    [
        ("aten._scaled_mm.default", [(16, 32), (32, 64), (), ()], "float8_e4m3fn", "fp8"),
        ("aten._scaled_mm.default", [(16, 32), (32, 64), (16, 1), (1, 64), (64,)], "float8_e5m2", "fp8"),
        ("aten._scaled_mm_v2.default", [(16, 32), (32, 64), (16, 1), (1, 64), (64,)], "float8_e4m3fn", "fp8"),
        ("aten._int_mm.default", [(16, 32), (32, 64)], "int8", "int8"),
        ("aten.mm.default", [(16, 32), (32, 64)], "complex64", "float32"),
    ],
)
def test_products_of_few_bits_are_products_at_their_rate(
    name: str, operands: list[tuple[int, ...]], dtype: str, expected: str
) -> None:
    assert product_sizes(name, operands, (16, 64)) == ((1, 16, 64, 32),)
    assert known_dtype(cluster_of("h100"), dtype) == expected


def test_whole_numbers_multiply_at_their_rate() -> None:
    with Tally({}, frozenset()) as tally:
        torch._int_mm(*(torch.empty(32, 32, dtype=torch.int8, device="meta") for _ in range(2)))  # pyright: ignore
    assert [(kernel.kind, kernel.dtype) for kernel in tally.kernels] == [("product", "int8")]


def test_memory_has_its_parts(compiled: tpplan.Program) -> None:
    memory = tpplan.estimate(compiled).memory
    held = sum(p.local_bytes for p in compiled.parameters)
    assert (memory.parameters, memory.gradients, memory.optimizer) == (held, held, 2 * held)
    assert memory.total == sum(memory.parts.values()) == sum(dataclasses.astuple(memory))
    # Of each block: what `up` read, what gelu read, what `down` read; and the result.
    rows = 2 * 16 * 4
    assert memory.activations == 3 * rows * (128 + 128) + 2 * rows * 64 + rows * 64


@pytest.mark.parametrize(
    ("optimizer", "each"),
    [("adamw", 12), ("adamw-8bit", 6.03125), ("adamw-plain", 4), ("muon", 8), ("sgd", 0), ("sgd-momentum", 2)],
)
def test_optimizers_keep_so_many_bytes_for_each_entry(optimizer: str, each: float) -> None:
    model = Mlp().to(torch.bfloat16)
    held = tpplan.compile_plan(
        model, {"version": 1, "modules": MODULES}, 2, torch.zeros(2, 16, 64, dtype=torch.bfloat16)
    )
    memory = tpplan.estimate(held, optimizer=optimizer).memory
    entries = sum(p.local_bytes // 2 for p in held.parameters)
    vectors = sum(p.local_bytes // 2 for p in held.parameters if len(p.shape) == 1)
    expected = entries * each + (4 * vectors if optimizer == "muon" else 0)
    assert memory.optimizer == pytest.approx(expected, abs=1) and memory.gradients == 2 * entries


@pytest.mark.parametrize("size", [(4, 16), (2, 48), (5, 40)])
def test_other_sizes_are_those_of_a_program_that_was_compiled_for_them(
    compiled: tpplan.Program, size: tuple[int, int]
) -> None:
    batch, length = size
    there = tpplan.estimate(program(batch=batch, length=length))
    live = tpplan.estimate(compiled, batch=batch, sequence=length)
    stored = tpplan.Program.from_dict(json.loads(compiled.to_json()))
    assert stored == compiled and stored.digest == compiled.digest
    assert there == live == tpplan.estimate(stored, batch=batch, sequence=length)
    assert tpplan.estimate(pickle.loads(pickle.dumps(compiled)), batch=batch, sequence=length) == live


def test_what_is_freed_after_a_step_is_no_temporary_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*arguments: Any, **options: Any) -> Any:
        found = plain(*arguments, **options)
        gc.collect()
        return found

    x = torch.zeros(2, 16, 64, dtype=torch.bfloat16)
    early, late = (tpplan.compile_plan(Mlp().bfloat16(), {"version": 1, "modules": MODULES}, 2, x) for _ in range(2))
    gc.disable()
    try:
        told = tpplan.estimate(early).memory
    finally:
        gc.enable()
    plain = measurement._run
    monkeypatch.setattr(measurement, "_run", run)
    assert tpplan.estimate(late).memory == told


class Turned(nn.Module):
    """A batch of 1 lies in memory as if it were never turned, and isn't copied."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x.transpose(0, 1).contiguous())


@pytest.mark.parametrize("batch", [1, 2])
def test_a_stored_program_tells_its_own_size_as_it_was_measured(batch: int) -> None:
    held = tpplan.compile_plan(Turned(), {"version": 1, "modules": {"up": "colwise"}}, 2, torch.zeros(batch, 16, 64))
    stored = tpplan.Program.from_dict(json.loads(held.to_json()))
    assert tpplan.estimate(stored) == tpplan.estimate(held)
    assert tpplan.estimate(stored, batch=4, sequence=20) == tpplan.estimate(held, batch=4, sequence=20)
    assert tpplan.Program.from_dict(json.loads(stored.to_json())).work == stored.work
    copies = [
        sum(t.launches for t in stored.work.at(n, 16).tasks if not t.backward)  # pyright: ignore
        for n in (1, 2)
    ]
    assert copies[0] < copies[1] if batch == 1 else copies[0] == copies[1]


def test_time_is_the_sum_of_what_runs(compiled: tpplan.Program) -> None:
    cost = tpplan.estimate(compiled, "h100")
    step = cost.step
    assert step.total_seconds == max(step.compute_seconds + step.exposed_seconds, step.host_seconds)
    assert cost.tokens_per_second == pytest.approx(2 * 16 / step.total_seconds)
    assert 0 < (cost.mfu or 0) < 1 and cost.fits and cost.generation is None
    assert [part.start for part in step.line] == sorted(part.start for part in step.line)
    assert {part.stream for part in step.line} == {"compute", "communication"}
    assert all(part.module.startswith("layers.0") for part in step.line)


def test_what_goes_around_a_plan_counts(compiled: tpplan.Program) -> None:
    large = program(batch=8, length=512, hidden=512)
    alone, shared, ddp = (tpplan.estimate(large, dp=dp, fsdp=fsdp) for dp, fsdp in ((1, False), (8, True), (8, False)))
    assert shared.memory.optimizer == -(-alone.memory.optimizer // 8) and ddp.memory == alone.memory
    assert shared.memory.temporaries > alone.memory.temporaries
    assert ddp.step.communication_seconds > alone.step.communication_seconds
    assert tpplan.estimate(large, dp=8, overlap=0).step.exposed_seconds > ddp.step.exposed_seconds
    kinds = [tpplan.estimate(large, checkpointing=kind) for kind in ("none", "selective", "full")]
    activations = [cost.memory.activations for cost in kinds]
    assert activations[0] > activations[1] > activations[2]
    rows = 8 * 512 * 4
    assert activations[2] == 2 * rows * 512 + rows * 512  # what blocks are passed by others, and the result
    assert activations[1] == activations[2] + 3 * rows * 1024  # and what `up` makes
    assert kinds[0].step.total_seconds < kinds[1].step.total_seconds < kinds[2].step.total_seconds
    odd = [tpplan.estimate(program(tp=3, batch=8, length=512, hidden=48), dp=dp) for dp in (1, 8)]
    assert ["between nodes" in " ".join(cost.guesses) for cost in odd] == [False, True]  # some of 3 ranks of 24
    assert tpplan.estimate(large, compiled=True).step.compute_seconds < alone.step.compute_seconds
    assert tpplan.estimate(large, precision="tf32").step.compute_seconds < alone.step.compute_seconds
    assert tpplan.estimate(large, "b200").step.compute_seconds < tpplan.estimate(large, "a100").step.compute_seconds


def test_a_generated_token_reads_all_weights_and_rows_of_one_token() -> None:
    with torch.device("meta"):  # weights that take longer to read than kernels to start
        model, x = Mlp(4096).bfloat16(), torch.zeros(4, 512, 4096, dtype=torch.bfloat16)
    held = tpplan.compile_plan(model, {"version": 1, "modules": MODULES}, 2, x)
    prompt, shorter = (tpplan.estimate(held, inference=True, compiled=True, sequence=n) for n in (512, 256))
    assert prompt.generation is not None and shorter.generation is not None
    faster = tpplan.estimate(held, "h200", inference=True, compiled=True, sequence=512)  # in nothing but its memory
    assert faster.generation is not None
    rates = [cluster.memory_bandwidth * cluster.memory_efficiency for cluster in map(cluster_of, ("h100", "h200"))]
    saved = prompt.memory.parameters * (1 / rates[0] - 1 / rates[1])
    assert prompt.generation.token_seconds - faster.generation.token_seconds == pytest.approx(saved, rel=0.05)
    assert prompt.generation.token_seconds == pytest.approx(shorter.generation.token_seconds)
    assert prompt.generation.first_token_seconds > shorter.generation.first_token_seconds
    assert prompt.generation.tokens_per_second == pytest.approx(4 / prompt.generation.token_seconds)
    assert prompt.memory.gradients == prompt.memory.optimizer == prompt.memory.activations == 0


def test_a_generated_token_reads_the_experts_that_it_chooses() -> None:
    config = MixtralConfig(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=8,
        vocab_size=1024,
    )  # fmt: skip
    with torch.device("meta"):
        model = MixtralForCausalLM(config).bfloat16().eval()
    experts = sum(
        p.numel() for name, p in model.named_parameters() if "experts" in name
    )  # in bytes of one of two ranks
    for batch in (1, 32):
        tokens = {"input_ids": torch.zeros(batch, 128, dtype=torch.long, device="meta"), "use_cache": False}
        held = tpplan.compile_plan(model, "mixtral", 2, tokens)
        costs = [tpplan.estimate(held, gpu, inference=True, compiled=True).generation for gpu in ("h100", "h200")]
        rates = [cluster.memory_bandwidth * cluster.memory_efficiency for cluster in map(cluster_of, ("h100", "h200"))]
        saved = sum(cost.token_seconds * way for cost, way in zip(costs, (1, -1), strict=True) if cost is not None)
        others = held.measure.at(forward=True).cache[0] + sum(p.local_bytes for p in held.parameters) - experts
        read = saved / (1 / rates[0] - 1 / rates[1]) - others
        assert read == pytest.approx(experts * (1 - (7 / 8) ** (2 * batch)), rel=0.1)


def test_everything_it_rests_on_is_data(compiled: tpplan.Program) -> None:
    cost = tpplan.estimate(compiled, "h200")
    assert isinstance(cost, Estimate) and cost.gpu == "h200"
    assert {"latency", "efficiency", "product_efficiency", "overlap", "compiled"} <= set(cost.assumptions)
    assert cost.guesses and json.loads(cost.to_json())["memory"]["total"] == cost.memory.total
    with pytest.raises(dataclasses.FrozenInstanceError):
        cost.memory.parameters = 0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        ({"gpu": "h1000"}, "TP220", "h100, h100-pcie, h200, a100, b200"),
        ({"optimizer": "adam"}, "TP220", ", ".join(OPTIMIZERS)),
        ({"checkpointing": "half"}, "TP220", "none, selective, full"),
        ({"precision": "int4"}, "TP220", "bfloat16"),
        ({"topology": "nowhere.yaml"}, "TP220", "YAML"),
    ],
)
def test_a_name_that_is_not_known_is_told_with_those_that_are(
    compiled: tpplan.Program, options: dict[str, Any], code: str, said: str
) -> None:
    with pytest.raises(tpplan.CostError) as caught:
        tpplan.estimate(compiled, **options)
    assert caught.value.code == code and said in str(caught.value)


@pytest.mark.parametrize("options", [{"dp": 0}, {"batch": 0}, {"sequence": -1}, {"overlap": 2}])
def test_a_size_that_cannot_be_is_refused(compiled: tpplan.Program, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="takes a"):
        tpplan.estimate(compiled, **options)


def test_a_program_without_work_is_told(compiled: tpplan.Program) -> None:
    older = tpplan.Program.from_dict(compiled.to_dict())
    assert older == compiled and older.work is None
    with pytest.raises(tpplan.CostError, match="compile it again") as caught:
        tpplan.estimate(older)
    assert caught.value.code == "TP222"


class Fixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x).view(2, 16 * 64)


def test_a_model_of_one_size_has_a_cost_at_that_alone() -> None:
    held = tpplan.compile_plan(Fixed(), {"version": 1, "modules": {"up": "colwise"}}, 2, torch.zeros(2, 16, 64))
    stored = tpplan.Program.from_dict(json.loads(held.to_json()))
    assert tpplan.estimate(stored) == tpplan.estimate(held)
    for one in (held, stored):
        with pytest.raises(tpplan.CostError, match="isn't known") as caught:
            tpplan.estimate(one, batch=3)
        assert caught.value.code == "TP222"


def test_a_program_that_cannot_be_measured_is_written_without_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no numbers")

    held = program(batch=3)
    monkeypatch.setattr(type(held.measure), "at", fail)
    assert "work" not in json.loads(held.to_json())
    with pytest.raises(tpplan.CostError, match="no numbers"):
        tpplan.estimate(held)


class Speech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heard, self.words = nn.Conv1d(8, 64, 3), nn.Embedding(32, 64)
        self.layers = nn.ModuleList([Block(64)])

    def forward(self, sound: Tensor, tokens: Tensor) -> Tensor:
        return self.layers[0](self.words(tokens) + self.heard(sound).mean(-1)[:, None])


def test_the_sequence_is_that_of_tokens_wherever_they_stand() -> None:
    call = {"sound": torch.zeros(2, 8, 50), "tokens": torch.zeros(2, 16, dtype=torch.long)}
    held = tpplan.compile_plan(Speech(), {"version": 1, "modules": MODULES}, 2, call)
    cost, longer = tpplan.estimate(held), tpplan.estimate(held, sequence=32)
    assert (cost.batch, cost.sequence) == (2, 16) and longer.memory.activations > cost.memory.activations
    assert cost.tokens_per_second == pytest.approx(32 / cost.step.total_seconds)


def test_a_call_without_a_sequence_has_a_batch_alone() -> None:
    plan = {"version": 1, "modules": {"layers.*.up": "colwise", "layers.*.down": "rowwise"}}
    held = tpplan.compile_plan(Mlp(), plan, 2, torch.zeros(4, 64))
    assert tpplan.estimate(held, batch=8).memory.activations == 2 * tpplan.estimate(held).memory.activations
    assert tpplan.estimate(tpplan.Program.from_dict(json.loads(held.to_json())), batch=8).batch == 8
    with pytest.raises(tpplan.CostError, match="no sequence"):
        tpplan.estimate(held, sequence=8)


def test_checkpoints_without_blocks_are_said_to_change_nothing(compiled: tpplan.Program) -> None:
    x, plan = torch.zeros(2, 16, 64), {"version": 1, "modules": {"0.up": "colwise", "0.down": "rowwise"}}
    plain = tpplan.compile_plan(nn.Sequential(Block(64)), plan, 2, x)
    none, full = (tpplan.estimate(plain, checkpointing=kind) for kind in ("none", "full"))
    assert none.memory == full.memory and "ModuleList" in " ".join(full.guesses)
    assert not any(
        "ModuleList" in guess for guess in (*none.guesses, *tpplan.estimate(compiled, checkpointing="full").guesses)
    )
