"""What the benchmark of collectives counts: four all-reduces a Llama block, where parallelize_module needs seven."""

from __future__ import annotations

from typing import Any

import pytest

from tpplan.bench import collectives
from tpplan.compat import fake_process_group

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
