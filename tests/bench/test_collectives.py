"""What the benchmark of collectives counts: four all-reduces a Llama block, where parallelize_module needs seven."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tpplan.bench import collectives, generation_collectives
from tpplan.bench.causal import CAUSAL
from tpplan.bench.collectives_tables import collectives_tables, collectives_verdicts
from tpplan.compat.process_groups import fake_process_group
from tpplan.plan import shipped_plan_names

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def rows() -> dict[tuple[str, str], dict[str, Any]]:
    with fake_process_group(2):
        measured = collectives.measure(("llama", "llama-sequence", "torch_transformer"))
    assert measured["left_out"] == ["torch_transformer"]
    return {(row["plan"], row["by"]): row for row in measured["rows"]}


def block(row: dict[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    counted = row["block"]["counted"]
    return counted["forward"], counted["step"]


def test_a_tensor_parallel_llama_block_reduces_four_times(rows: dict[tuple[str, str], dict[str, Any]]) -> None:
    assert block(rows["llama", "tpplan"]) == ({"all-reduce": 2}, {"all-reduce": 4})


def test_a_sequence_parallel_llama_block_gathers_and_scatters_four_times(
    rows: dict[tuple[str, str], dict[str, Any]],
) -> None:
    forward, step = block(rows["llama-sequence", "tpplan"])
    assert forward == {"all-gather": 2, "reduce-scatter": 2}
    assert step == {"all-gather": 4, "reduce-scatter": 4}


def test_parallelize_module_reduces_a_llama_block_seven_times(rows: dict[tuple[str, str], dict[str, Any]]) -> None:
    assert block(rows["llama", collectives.TORCH]) == ({"all-reduce": 2}, {"all-reduce": 7})


@pytest.mark.parametrize("plan", ["llama", "llama-sequence"])
def test_what_is_predicted_is_what_torch_counts(plan: str, rows: dict[tuple[str, str], dict[str, Any]]) -> None:
    row = rows[plan, "tpplan"]
    assert row["model"]["predicted"] == row["model"]["counted"]
    assert row["agrees"]


@pytest.mark.sweep
def test_every_plan_with_an_architecture_is_predicted_rightly() -> None:
    with fake_process_group(2):
        measured = collectives.measure()
    assert [row["plan"] for row in measured["rows"] if row["agrees"] is False] == []
    assert len(measured["rows"]) > 2 * len(collectives.SHIPPED)


@pytest.fixture(scope="module")
def generating() -> dict[str, Any]:
    with fake_process_group(2):
        return generation_collectives.measure(("llama", "llama-sequence", "bert"))


@pytest.mark.sweep
def test_a_token_takes_two_sums_a_block_those_of_its_table_and_the_heads_gather(generating: dict[str, Any]) -> None:
    assert [row["plan"] for row in generating["rows"]] == ["llama", "llama-sequence"]
    for row in generating["rows"]:
        token = row[generation_collectives.TOKEN]
        assert token["counted"] == {"block": {"all-reduce": 2}, "around": {"all-gather": 1, "all-reduce": 1}}
        assert token["agrees"] and generation_collectives.is_least(row)


@pytest.mark.sweep
def test_a_prompt_is_split_under_sequence_parallelism(generating: dict[str, Any]) -> None:
    _, split = generating["rows"]
    prompt = split[generation_collectives.PROMPT]
    assert prompt["counted"]["block"] == {"all-gather": 2, "reduce-scatter": 2}
    assert prompt["agrees"]


def test_more_than_the_least_is_named() -> None:
    recorded = json.loads((Path(__file__).parents[2] / "docs/benchmarks/collectives.json").read_text())["rows"]
    fewer, row = (
        held for held in recorded if held["of"] == "generation" and held["plan"] in ("llama", "llama-sequence")
    )
    for block, around in ({"all-reduce": 3}, {}), ({"all-gather": 1}, {}), ({}, {"all-gather": 2}):
        more = row | {"token": {"counted": {"block": block, "around": around}, "agrees": False}}
        assert not generation_collectives.is_least(more)
        *_, predicted, least = collectives_verdicts([fewer, more])
        assert "3 of 4" in predicted
        assert "1 of 2" in least and least.endswith("under llama-sequence")
        _, table = collectives_tables({"tp": 2, "rows": [fewer, more]})
        assert [line[-1] for line in table.rows] == ["yes", "NO"]


def test_every_plan_of_a_causal_model_has_an_architecture() -> None:
    assert {f"{name}{form}" for name in CAUSAL for form in ("", "-sequence")} <= set(shipped_plan_names())
