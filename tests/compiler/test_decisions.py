"""What the compiler decides on small models: where it reshards, what it sums, what it learns from a failed check."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

import tpplan
from tests.compiler import small_models as toys
from tpplan.compiler.ir.layout import Collective
from tpplan.compiler.ir.program import ModuleProgram, Program

IDS = (torch.zeros(toys.BATCH, toys.SEQUENCE, dtype=torch.long),)
TENSOR_PARALLEL = {
    "attention.{q,k,v}": "colwise",
    "attention.o": "rowwise",
    "mlp.up": "colwise",
    "mlp.down": "rowwise",
}
SEQUENCE = TENSOR_PARALLEL | {"first": "sequence", "second": "sequence", "mlp.norm": "sequence"}


def compiled(model: nn.Module, rules: Mapping[str, object], inputs: tuple[torch.Tensor, ...], tp: int = 2) -> Program:
    return tpplan.compile_plan(model, {"version": 1, "modules": rules}, tp=tp, inputs=inputs)


def by_name(program: Program) -> dict[str, ModuleProgram]:
    return {module.name: module for module in program.modules}


def test_query_key_and_value_share_one_gradient_reduction_at_the_attention() -> None:
    program = compiled(toys.Block(), TENSOR_PARALLEL, toys.activations())
    (entry,) = by_name(program)["attention"].entries
    assert (str(entry.source), str(entry.target)) == ("R", "R·∂P")
    assert (entry.forward, entry.backward) == (Collective.NONE, Collective.ALL_REDUCE)
    assert program.count_collectives() == {"all-reduce": 4}


def test_sequence_parallelism_turns_the_reductions_into_gathers_and_scatters() -> None:
    model = nn.Sequential(nn.Linear(toys.WIDTH, toys.WIDTH), toys.Block(), toys.Block())
    rules = {f"{i}.{name}": style for i in (1, 2) for name, style in SEQUENCE.items()}
    program = compiled(model, rules, toys.activations())
    second = [r for m, r in program.reshards() if m.name.startswith("2.")]
    assert sorted(str(r.forward) for r in second) == ["all-gather", "all-gather", "reduce-scatter", "reduce-scatter"]
    assert sorted(str(r.backward) for r in second) == ["all-gather", "all-gather", "reduce-scatter", "reduce-scatter"]


def test_norms_and_rowwise_biases_in_a_sequence_region_are_summed() -> None:
    program = compiled(toys.Block(), SEQUENCE, toys.activations())
    summed = {placement.name for placement in program.summed_parameters}
    assert {"first.weight", "first.bias", "attention.o.bias", "mlp.norm.weight", "mlp.down.bias"} <= summed
    assert not any("up" in name or name.endswith(("q.bias", "o.weight")) for name in summed)


def test_without_a_sequence_nothing_is_summed() -> None:
    assert compiled(toys.Block(), TENSOR_PARALLEL, toys.activations()).summed_parameters == ()


def test_a_literal_head_count_is_localised() -> None:
    program = compiled(toys.Block(literal=True), TENSOR_PARALLEL, toys.activations())
    (attribute,) = by_name(program)["attention"].local_attributes
    assert (attribute.name, attribute.whole, attribute.local) == ("num_heads", 4, 2)


def test_heads_counted_from_the_features_need_no_localising() -> None:
    program = compiled(toys.Block(literal=False), TENSOR_PARALLEL, toys.activations())
    assert all(not module.local_attributes for module in program.modules)


def test_a_sequence_whose_length_is_read_is_split_only_later() -> None:
    rules = {"tokens": "vocab", "block.norm": "sequence", "block.up": "colwise", "block.down": "rowwise"}
    program = compiled(toys.Positions(), rules, IDS)
    assert all(not r.target.is_sharded for r in by_name(program)["tokens"].exits)
    assert any(r.target.is_sharded for m, r in program.reshards() if m.name.startswith("block"))


def test_a_body_that_divides_by_a_local_size_is_gathered_or_refused() -> None:
    try:
        program = compiled(toys.MeanByHand(), {"up": "colwise", "down": "rowwise"}, toys.activations())
    except tpplan.CompileError as error:
        assert "TP107" in str(error)
    else:
        (gathered,) = by_name(program)["up"].exits
        assert not gathered.target.is_sharded
        assert "TP104" in {diagnostic.code for diagnostic in program.diagnostics}


def test_a_write_into_a_part_of_a_sharded_value_is_gathered_or_refused() -> None:
    try:
        program = compiled(toys.WritesInPlace(), {"up": "colwise", "down": "rowwise"}, toys.activations())
    except tpplan.CompileError as error:
        assert "TP113" in str(error)
    else:
        assert all(not r.target.is_sharded for r in by_name(program)["body"].entries)
        assert "TP104" in {diagnostic.code for diagnostic in program.diagnostics}


def test_the_bias_of_a_rowwise_linear_is_added_after_the_reduction() -> None:
    program = compiled(toys.Mlp(), {"up": "colwise", "down": "rowwise"}, toys.activations())
    (exit_,) = by_name(program)["down"].exits
    assert (str(exit_.source), str(exit_.target)) == ("P", "R")


def test_a_pinned_output_leaves_the_model_sharded() -> None:
    model = nn.Sequential(nn.Linear(toys.WIDTH, 32))
    sharded = compiled(model, {"0": {"style": "colwise", "output": "shard"}}, toys.activations())
    whole = compiled(model, {"0": {"style": "colwise", "output": "replicate"}}, toys.activations())
    assert by_name(sharded)["0"].exits == () and by_name(whole)["0"].exits[0].forward is Collective.ALL_GATHER
    assert sharded.diagnostics == whole.diagnostics == ()


def test_a_batch_of_one_needs_no_other_program() -> None:
    one = compiled(toys.Block(), TENSOR_PARALLEL, (torch.zeros(1, toys.SEQUENCE, toys.WIDTH, requires_grad=True),))
    three = compiled(toys.Block(), TENSOR_PARALLEL, toys.activations())
    assert one.count_collectives() == three.count_collectives()


def test_equal_layers_are_solved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from tpplan.compiler.rules.propagate import Propagator

    asked: list[int] = []
    stock = Propagator.outcomes
    monkeypatch.setattr(Propagator, "outcomes", lambda *given: (asked.append(1), stock(*given))[1])
    counts: list[int] = []
    for layers in (2, 8):
        asked.clear()
        model = nn.Sequential(*(toys.Block() for _ in range(layers)))
        compiled(model, {f"*.{name}": style for name, style in TENSOR_PARALLEL.items()}, toys.activations())
        counts.append(len(asked))
    assert counts[0] == counts[1]


def test_every_pass_is_dumped_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPPLAN_DUMP", str(tmp_path / "dump"))
    compiled(toys.Block(), TENSOR_PARALLEL, toys.activations())
    names = sorted(path.name for path in (tmp_path / "dump").iterdir())
    assert names[:3] == ["01-bind.txt", "02-capture.txt", "03-place-00.txt"] and names[-1] == "04-program.json"
    assert "attention.q.weight[16, 16]: S(0)" in (tmp_path / "dump" / "03-place-00.txt").read_text(encoding="utf-8")


def test_compiling_leaves_the_model_as_it_was() -> None:
    model = toys.Block()
    before = {name: (type(m), dict(vars(m))) for name, m in model.named_modules()}
    compiled(model, SEQUENCE, toys.activations())
    assert {name: (type(m), dict(vars(m))) for name, m in model.named_modules()} == before
