"""Advice: rows for each degree, one of them recommended, and why others aren't possible."""

from __future__ import annotations

import functools
import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import tpplan
from tests.cost.test_estimate import Mlp
from tpplan import progress
from tpplan.cli.main import main
from tpplan.cost.cluster import cluster_of
from tpplan.cost.estimates import MemoryEstimate
from tpplan.cost.link_times import Group, collective_seconds
from tpplan.cost.other_degrees import Microbatch, degrees_text, other_degrees, other_step, ways_of
from tpplan.forecast.degrees import _Choices
from tpplan.report.estimate_tables import advice_markdown
from tpplan.report.shares_plot import advice_svg

transformers = pytest.importorskip("transformers")
FIELDS: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 64,
}  # fmt: skip


def llama(**fields: Any) -> nn.Module:
    config = transformers.LlamaConfig(**FIELDS | fields)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


STEPS: list[str] = []
MEMORY: dict[str, Any] = {"target_memory": "9KiB"}


@pytest.fixture(scope="module")
def small() -> tpplan.Advice:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress, "_display", lambda *_: STEPS.append(": ".join(progress._steps[-2:])))
        return tpplan.advise(llama(), gpus=2, batch=2, sequence=32)


@pytest.fixture(scope="module")
def over_heads() -> tpplan.Advice:
    return tpplan.advise(llama(), gpus=8, batch=2, sequence=32)


@pytest.fixture(scope="module")
def large() -> tpplan.Advice:
    """A model of which a GPU of 30 MiB holds a part."""
    return tpplan.advise(llama(hidden_size=256, intermediate_size=1024), gpus=4, batch=1, sequence=32,
                         target_memory="12MiB")  # fmt: skip


def test_each_choice_of_degrees_is_a_row(small: tpplan.Advice) -> None:
    degrees = [(row.tp, row.dp, row.sequence_parallel, row.fsdp) for row in small]
    assert degrees == [(1, 2, False, False), (1, 2, False, True), (2, 1, False, False), (2, 1, True, False)]
    assert all(row.fits and row.memory and row.step and row.tokens_per_second > 0 for row in small)
    assert "tp=2: placing collectives" in STEPS


def test_more_tokens_than_the_model_has_positions_for_are_warned_of() -> None:
    told = "the model has positions for 64 tokens, fewer than 128"
    advice = tpplan.advise(llama(), gpus=1, batch=1, sequence=128)
    assert advice[0].reason.endswith(f"no parallelism; warning: {told}")
    assert told in advice.guesses and told in advice.summary


def test_what_is_not_used_is_no_guess() -> None:
    x = torch.zeros(2, 64)
    told = [tpplan.advise(nn.Sequential(nn.Linear(64, 64)), 1, inputs={"input": x}, **more) for more in ({}, MEMORY)]
    assert ["ModuleList" in " ".join(advice.guesses) for advice in told] == [False, True]  # checkpoints, where it fits


def test_a_plot_has_a_line_for_each_kind_of_parallelism(small: tpplan.Advice) -> None:
    root = ElementTree.fromstring(advice_svg(replace(small, model="<A>")))
    texts = [node.text or "" for node in root.iter() if node.tag.endswith("text")]
    assert texts[0].endswith(": <A> on 2 h100, 2 × 32") and texts[-2:] == ["tensor parallel", "and sequence parallel"]
    lines = [node.attrib["points"].split() for node in root.iter() if node.tag.endswith("polyline")]
    heights = {point.partition(",")[2] for line in lines for point in line[:1]}
    assert [len(line) for line in lines] == [2, 2] and heights == {"320.0"}  # nothing is sent at tp 1
    alone = advice_svg(replace(small, rows=tuple(row for row in small if row.tp == 1)))
    assert alone.count("<circle") == 1 and "polyline" not in advice_svg(replace(small, rows=()))


def test_a_reason_is_one_cell_of_a_table(small: tpplan.Advice) -> None:
    rows = tuple(replace(row, reason="`q|k|v`\nof the model") for row in small)
    lines = advice_markdown(replace(small, rows=rows)).splitlines()
    assert "| **`q\\|k\\|v` of the model** |" in lines[2]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines[: 2 + len(rows)]} == {11}


def test_a_model_that_fits_one_gpu_is_told_to_use_data_parallelism(small: tpplan.Advice) -> None:
    best = small.recommended
    assert best is not None and (best.tp, best.dp, best.fsdp) == (1, 2, False)
    assert "data parallelism" in best.reason and [row for row in small if row.recommended] == [best]
    assert small.smallest == 1 and best.largest_batch > 2
    assert all(not row.reason for row in small if row.fits and not row.recommended)


@pytest.mark.slow
def test_a_degree_that_does_not_compile_has_the_reason(over_heads: tpplan.Advice) -> None:
    assert all(row.tp * row.dp == 8 for row in over_heads) and {row.tp for row in over_heads} == {1, 2, 4, 8}
    impossible = [row for row in over_heads if row.memory is None]
    assert impossible and all(row.tp == 8 and not row.fits and row.reason.startswith("TP") for row in impossible)
    assert all(row.tokens_per_second == 0 for row in impossible)


@pytest.mark.slow
def test_a_row_that_does_not_fit_says_what_it_lacks(large: tpplan.Advice) -> None:
    over = [row for row in large if row.memory is not None and not row.fits]
    assert over and all("lacks" in row.reason for row in over)
    assert all(row.checkpointing == "full" and row.largest_batch < 1 for row in over)
    best = large.recommended
    assert best is not None and best.fits and best.memory is not None and best.memory.total <= large.available
    assert not any(row.fits and row.tp == 1 and not row.fsdp for row in large) and large.smallest is not None


@pytest.mark.slow
def test_the_largest_batch_fits_and_one_more_does_not(large: tpplan.Advice) -> None:
    row = large.recommended
    assert row is not None
    for batch, fits in ((row.largest_batch, True), (row.largest_batch + 2, False)):
        again = tpplan.advise(llama(hidden_size=256, intermediate_size=1024), gpus=4, batch=batch, sequence=32,
                              target_memory="12MiB")  # fmt: skip
        (same,) = [r for r in again if (r.tp, r.sequence_parallel, r.fsdp) == (row.tp, row.sequence_parallel, row.fsdp)]
        assert (same.fits and same.checkpointing == row.checkpointing) is fits


@pytest.mark.slow
def test_ranks_beyond_a_node_are_warned_of(tmp_path: Path) -> None:
    path = tmp_path / "pairs.yaml"
    path.write_text("like: h100\nin_node: 2\n", encoding="utf-8")
    advice = tpplan.advise(llama(), gpus=4, topology=path, batch=1, sequence=32)
    assert all(("nodes" in row.reason) is (row.tp == 4) for row in advice if row.memory is not None)
    assert "nodes" in " ".join(advice.guesses)


@pytest.mark.slow
def test_generation_has_a_cache_and_no_gradients() -> None:
    advice = tpplan.advise(llama(), gpus=2, batch=3, sequence=32, inference=True)
    assert [(row.tp, row.sequence_parallel, row.fsdp) for row in advice] == [(1, False, False), (2, False, False)]
    for row in advice:
        assert row.memory is not None and row.memory.gradients == row.memory.optimizer == 0
        # Two layers, keys and values, 2 heads of 16 features over the ranks.
        assert row.memory.cache == 2 * 2 * 3 * 32 * (32 // row.tp) * 2


@pytest.mark.slow
def test_a_model_without_a_plan_gets_one() -> None:
    advice = tpplan.advise(Mlp(), gpus=2, batch=2, sequence=16, inputs={"x": torch.zeros(2, 16, 64)})
    assert [row.tp for row in advice if row.fits] == [1, 1, 2, 2]


PICTURES: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "image_size": 32,
    "patch_size": 8, "encoder_stride": 8,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("ViTForImageClassification", transformers.ViTConfig(**PICTURES)),
        ("ViTForMaskedImageModeling", transformers.ViTConfig(**PICTURES)),
        # One label for a sequence.
        ("LlamaForSequenceClassification", transformers.LlamaConfig(**FIELDS, pad_token_id=0)),
    ],
)
@pytest.mark.one_in(3)
def test_a_model_with_another_head_than_the_shipped_plan_is_for_gets_one(name: str, config: Any) -> None:
    with torch.device("meta"):
        model = getattr(transformers, name)(config)
    advice = tpplan.advise(model, gpus=2, sequence=32)
    assert all(row.fits for row in advice if not row.sequence_parallel), [row.reason for row in advice]
    assert advice.recommended is not None and advice.recommended.tp == 1 == advice.smallest


def test_advise_and_explain_and_what_explain_wrote_tell_the_same(
    small: tpplan.Advice, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["--model", f"{__name__}:llama", "--tp", "2", "--batch", "2", "--sequence", "32", "--gpu", "h100"]
    assert main(["explain", "llama", *model, "--format", "json"]) == 0
    text = capsys.readouterr().out
    plain = json.loads(text)["estimate"]
    row = next(row for row in json.loads(small.to_json())["rows"] if row["tp"] == 2)
    assert plain["memory"] == row["memory"] and plain["step"] == row["step"]
    path = tmp_path / "written.json"
    path.write_text(text, encoding="utf-8")
    assert main(["diff", "llama", str(path), *model, "--exit-code"]) == 0
    assert "no change for LlamaForCausalLM on 2 ranks of h100, batch 2 × 32" in capsys.readouterr().out


@pytest.mark.slow
def test_a_model_that_nothing_fits_is_told_what_else_there_is() -> None:
    advice = tpplan.advise(llama(), gpus=2, batch=1, sequence=32, target_memory=2000)
    assert advice.recommended is None and advice.smallest is None and "parallelism" in advice.summary
    assert advice.other == {}  # two layers are no more stages, nor 32 tokens more ranks of a context
    assert advice.summary == "It doesn't fit 2 h100. Pipeline, context or expert parallelism isn't enough either."


@pytest.mark.parametrize(
    ("memory", "experts", "most", "found", "text"),
    [
        (MemoryEstimate(90, 0, 0, 10), 0.0, {}, {}, ""),
        (MemoryEstimate(60, 60, 180, 40), 0.0, {}, {"pipeline": 5}, "pipeline 5"),
        (MemoryEstimate(10, 10, 30, 350, 50), 0.0, {}, {"context": 8}, "context 8"),
        (MemoryEstimate(20, 20, 40, 30), 0.5, {}, {"pipeline": 2, "context": 2, "experts": 2},
         "pipeline 2 or context 2 or experts 2"),
        (MemoryEstimate(20, 20, 40, 30), 0.5, {"pipeline": 1, "experts": 1}, {"context": 2}, "context 2"),
        (MemoryEstimate(60, 60, 180, 150), 0.9, {}, {"pipeline": 6, "context": 3}, "pipeline 6 with context 3"),
        (MemoryEstimate(60, 60, 180, 150), 0.9, {"pipeline": 4}, {"pipeline": 4, "context": 6},
         "pipeline 4 with context 6"),
        (MemoryEstimate(60, 60, 180, 150), 0.9, {"pipeline": 4, "context": 5}, {}, ""),
        (MemoryEstimate(60, 60, 180, 40), 0.0, {"pipeline": 4}, {"pipeline": 4, "context": 2},
         "pipeline 4 with context 2"),
        (MemoryEstimate(150, cache=50, temporaries=10), 0.0, {}, {"pipeline": 3}, "pipeline 3"),
    ],
)  # fmt: skip
def test_other_parallelism_is_told_by_what_it_splits(
    memory: MemoryEstimate, experts: float, most: dict[str, int], found: dict[str, int], text: str
) -> None:
    assert other_degrees(memory, 100, experts, most) == found
    assert degrees_text(ways_of(found, memory, 100)) == text


def test_a_step_of_a_pipeline_has_its_bubble_and_its_sends() -> None:
    cluster = cluster_of("h100")
    one = Microbatch(8.0, 0.4, 1000, (2, 3), 16, 1 << 30, 1 << 34, 1 << 32)
    inside = other_step(cluster, one, pipeline=4)
    assert (inside.gpus, inside.microbatches) == (24, 16)
    send = collective_seconds(cluster, "all-gather", 1 << 31, Group(2))  # each of two sends its half
    assert (1 << 30) / cluster.link < send
    slot = 8.0 / 4 + 2 * send
    assert inside.seconds == pytest.approx((16 + 4 - 1) * slot + 0.4 / 4)
    assert inside.bubble_seconds == pytest.approx(3 * slot) and inside.sending_seconds == pytest.approx(32 * send)
    assert inside.tokens_per_second == pytest.approx(16 * 1000 / inside.seconds)
    across = other_step(cluster, one, pipeline=8)  # 16 GPUs of a replica are two nodes
    assert across.sending_seconds > 2 * 2 * inside.sending_seconds


def test_ranks_of_a_context_pass_keys_and_values_around() -> None:
    cluster = cluster_of("h100")
    one = Microbatch(8.0, 0.4, 1000, (2, 1), 16, 1 << 30, 1 << 34, 1 << 32)
    step = other_step(cluster, one, context=4)
    assert (step.gpus, step.microbatches, step.bubble_seconds) == (8, 1, 0.0)
    ring = 3 * 16 * collective_seconds(cluster, "all-gather", 1 << 30, Group(4))
    assert ring > 3 * (1 << 34) * 3 / 4 / cluster.link  # three parts of the other ranks', of the four of all
    sums = collective_seconds(cluster, "all-reduce", 1 << 32, Group(4))
    assert step.seconds == pytest.approx(8.0 / 4 + ring + sums + 0.4)
    assert step.sending_seconds == pytest.approx(ring + sums)
    both = other_step(cluster, one, pipeline=2, context=4)
    assert both.seconds == pytest.approx(
        (8 + 1) * (8.0 / 8 + ring / 2 + 2 * collective_seconds(cluster, "all-gather", 1 << 29, Group(2, 2)))
        + collective_seconds(cluster, "all-reduce", 1 << 31, Group(4)) + 0.4 / 2
    )  # fmt: skip
    assert other_step(cluster, one) == replace(step, context=1, gpus=2, seconds=8.4, sending_seconds=0.0,
                                               tokens_per_second=1000 / 8.4)  # fmt: skip


@functools.cache
def of_stages(ways: int) -> tuple[tpplan.AdviceRow, tpplan.Advice]:
    """What a GPU that holds nothing is told of, with all checkpointing, and one that holds one of so many stages."""
    options: dict[str, Any] = {"gpus": 1, "batch": 1, "sequence": 32}
    (row,) = tpplan.advise(llama(), target_memory=1, **options) if ways == 2 else [of_stages(2)[0]]
    assert row.memory is not None
    kept = row.memory.parameters + row.memory.gradients + row.memory.optimizer
    return row, tpplan.advise(llama(), target_memory=row.memory.total - kept + kept // ways + 64, **options)


def test_what_steps_rest_on_is_told() -> None:
    row, advice = of_stages(2)
    assert row.step is not None
    (step,) = advice.other_steps
    assert (step.pipeline, step.context, step.gpus, step.microbatches) == (2, 1, 2, 8)
    own = row.step.total_seconds * 9 / 2  # nine slots of half the layers
    assert own * 0.9 < step.seconds < own * 1.2
    assert any("1F1B" in guess for guess in advice.guesses) and not any("rings" in guess for guess in advice.guesses)
    assert "pipeline 2 (2 GPUs, " in advice.summary and " of 8 microbatches, 11% of it bubble, " in advice.summary
    assert json.loads(advice.to_json())["other_steps"][0]["microbatches"] == 8


def test_pipeline_stages_are_no_more_than_layers() -> None:
    for ways in (2, 3):
        assert of_stages(ways)[1].other.get("pipeline") == (ways if ways <= 2 else None)


@pytest.mark.parametrize(
    ("rows", "needed", "least"),
    [
        ({1: False, 2: True, 4: True}, {}, 2),  # of rows that fit
        ({1: True, 2: True}, {}, 1),
        ({1: False, 2: False}, {2: 16, 4: 8, 8: 32}, 8),  # of degrees, with as many replicas as each needs
        ({1: False, 2: False}, {2: 8, 4: 16}, 8),
        ({1: False, 2: True}, {1: 8}, 2),
        ({1: False, 2: False}, {}, None),
    ],
)
def test_the_least_number_of_gpus_is_the_least_of_all_ways(
    rows: dict[int, bool], needed: dict[int, int], least: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject: Any = SimpleNamespace(inference=False)
    choices = _Choices(subject, cluster_of("h100"), 0, max(rows), "adamw", False)
    monkeypatch.setattr(_Choices, "program", lambda self, tp, split: tp)
    monkeypatch.setattr(_Choices, "_smallest_of", lambda self, tp: needed.get(tp))
    told: Any = [SimpleNamespace(tp=tp, dp=max(rows) // tp, fsdp=False, fits=fits) for tp, fits in rows.items()]
    assert choices.smallest(told) == least


@pytest.mark.parametrize(
    ("rows", "best"),  # (tp, fsdp, checkpointing): tokens a second
    [
        ({(1, False, "none"): 10, (1, True, "none"): 11, (2, False, "none"): 12}, (1, False, "none")),
        ({(1, False, "full"): 10, (1, True, "none"): 13, (2, False, "none"): 14}, (1, True, "none")),
        ({(1, False, "full"): 10, (1, True, "full"): 9, (2, False, "none"): 14}, (1, False, "full")),
        ({(1, True, "none"): 10, (2, False, "none"): 12, (16, False, "none"): 14}, (2, False, "none")),
    ],
)
def test_what_one_gpu_holds_is_not_split_nor_computed_again_where_sharing_is_faster(
    rows: dict[tuple[int, bool, str], float], best: tuple[int, bool, str]
) -> None:
    subject: Any = SimpleNamespace(inference=False)
    told: Any = [
        SimpleNamespace(tp=tp, fsdp=fsdp, checkpointing=kind, fits=True, tokens_per_second=rate)
        for (tp, fsdp, kind), rate in rows.items()
    ]
    row = _Choices(subject, cluster_of("h100"), 0, 16, "adamw", False).best(told)
    assert row is not None and (row.tp, row.fsdp, row.checkpointing) == best


@pytest.mark.slow
def test_experts_are_split_into_no_more_than_there_are() -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1}
    sizes |= {"vocab_size": 1024, "intermediate_size": 256, "num_local_experts": 4}
    config = transformers.MixtralConfig(**sizes)
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(config)
    options: dict[str, Any] = {"gpus": 1, "batch": 1, "sequence": 32}
    (row,) = tpplan.advise(model, **options)
    assert row.memory is not None
    kept = row.memory.parameters + row.memory.gradients + row.memory.optimizer
    whole, held = (sum(p.numel() for name, p in model.named_parameters() if part in name) for part in ("", ".experts."))
    rest = row.memory.total - int(kept * held / whole)
    for ways in (2, 4, 8):
        advice = tpplan.advise(model, target_memory=rest + (row.memory.total - rest) // ways + 64, **options)
        assert advice.other.get("experts") == (ways if ways <= 4 else None)
        assert "pipeline" not in advice.other


@pytest.mark.slow
def test_the_least_gpus_may_be_ranks_over_two_nodes(tmp_path: Path) -> None:
    path = tmp_path / "alone.yaml"
    path.write_text("like: h100\nin_node: 1\n", encoding="utf-8")
    options: dict[str, Any] = {"topology": path, "batch": 1, "sequence": 32, "inference": True}
    (whole, half) = (row.memory for row in tpplan.advise(llama(), gpus=2, **options))
    assert whole is not None and half is not None and half.total < whole.total
    advice = tpplan.advise(llama(), gpus=2, target_memory=whole.total - 1, **options)
    assert advice.recommended is not None and advice.recommended.tp == 2 == advice.smallest


@pytest.mark.parametrize("options", [{"gpus": 0}, {"batch": 0}, {"sequence": 0}, {"target_memory": "70 cows"}])
def test_a_size_that_cannot_be_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"takes a|isn't a size"):
        asked: dict[str, Any] = {"gpus": 2, "batch": 1, "sequence": 16} | options
        tpplan.advise(llama(), **asked)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"batch": 4}, "pass `batch=2, sequence=16`"),
        ({"sequence": 8}, "pass `batch=2, sequence=16`"),
        ({"inputs": {"y": torch.zeros(2, 16, 64)}}, "TP110"),
    ],
)
def test_inputs_are_of_the_size_that_is_asked_for(asked: dict[str, Any], told: str) -> None:
    options: dict[str, Any] = {"gpus": 2, "batch": 2, "sequence": 16, "inputs": {"x": torch.zeros(2, 16, 64)}}
    with pytest.raises(tpplan.TpplanError, match=told):
        tpplan.advise(Mlp(), **options | asked)


def test_sizes_are_those_of_the_inputs_or_usual_ones() -> None:
    given = tpplan.advise(Mlp(), 1, inputs={"x": torch.zeros(2, 16, 64)})
    model: Any = llama()
    usual = tpplan.advise(model, 1)
    assert (given.batch, given.sequence) == (2, 16)
    assert (usual.batch, usual.sequence) == (1, model.config.max_position_embeddings)


def mlp_of_three() -> tuple[nn.Module, dict[str, Any]]:
    return Mlp(), {"x": torch.zeros(3, 24, 64)}


def test_the_command_takes_the_size_of_the_inputs_that_a_model_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "--model", f"{__name__}:mlp_of_three", "--gpus", "1", "--target-memory", "9KiB"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "3 × 24 tokens" in text and "a rank lacks 0.0 GiB" not in text
    assert main(["advise", "--model", f"{__name__}:mlp_of_three", "--gpus", "1", "--batch", "4"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("tpplan advise: `inputs`") and "batch=3, sequence=24" in told and "bug" not in told


COMMAND = ["advise", "--model", "hf:llama", "--gpus", "2", "--seq", "32", "--set", "dtype=bfloat16"]


def of_small(*more: str) -> list[str]:
    return [*COMMAND, *(word for key, held in FIELDS.items() for word in ("--set", f"{key}={held}")), *more]


@pytest.mark.slow
def test_the_command_prints_each_format(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(of_small("--format", "json")) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["gpus"] == 2 and [row["tp"] for row in plain["rows"]] == [1, 1, 2, 2]
    assert plain["rows"][0]["recommended"] and plain["rows"][0]["memory"]["total"] > 0


@pytest.mark.slow
def test_the_command_prints_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(of_small("--format", "markdown", "--target-memory", "1KiB")) == 0
    text = capsys.readouterr().out
    assert text.startswith("| tp | sp |") and "lacks" in text
    assert main(of_small("--inference")) == 0
    text = capsys.readouterr().out
    assert "data parallelism" in text and "tokens/s" in text


def test_the_command_refuses_what_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(of_small("--gpu", "h1000")) == 2
    assert "TP220" in capsys.readouterr().err
    for size in ("much", "0.5B", "70G"):
        assert main(of_small("--target-memory", size)) == 2
        assert f"--target-memory: {size!r} isn't a size" in capsys.readouterr().err


@pytest.mark.slow
def test_explain_ends_with_the_estimate(capsys: pytest.CaptureFixture[str]) -> None:
    words = [word for key, held in FIELDS.items() for word in ("--set", f"{key}={held}")]
    command = ["explain", "llama", "--model", "hf:llama", "--tp", "2", *words, "--gpu", "h100", "--dp", "8"]
    assert main([*command, "--assumptions"]) == 0
    text = capsys.readouterr().out
    assert "memory of a rank, h100" in text and "tp 2, dp 8" in text and "product_efficiency" in text
    assert main([*command, "--format", "json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["estimate"]["dp"] == 8 and plain["work"]["tasks"]
    assert tpplan.estimate(tpplan.Program.from_dict(plain)).memory.total > 0
    assert plain["inputs"][0]["shape"] == [1, 64] and plain["estimate"]["sequence"] == 64  # as far as positions go
    assert main([*command, "model"]) == 2
