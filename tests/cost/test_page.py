"""docs/costs.md has what its commands print, and its examples run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import tpplan
from tests.cost import mlp_table, throughput, truth
from tests.cost.page import PAGE, table_of
from tpplan.cost.cluster import built_in, cluster_of
from tpplan.cost.state_memory import OPTIMIZERS

pytest.importorskip("transformers")
TEXT = PAGE.read_text(encoding="utf-8")


def test_the_table_of_the_mlp_is_fresh_and_near_what_is_told() -> None:
    assert table_of("mlp", TEXT) == mlp_table.performance()
    found = mlp_table.estimates()
    for tp, (milliseconds, least, most) in mlp_table.TOLD.items():
        seconds = found[tp].step.total_seconds
        assert milliseconds is None or seconds * 1e3 == pytest.approx(milliseconds, rel=0.15)
        assert 0.9 * least < found[1].step.total_seconds / seconds < 1.1 * most
        assert found[tp].memory.parameters == 360_710_144 // tp


def test_the_mlp_is_right() -> None:
    assert "in float32" in mlp_table.correctness() and "in bfloat16" in mlp_table.correctness()


@pytest.mark.slow
def test_the_table_of_memory_is_fresh() -> None:
    row = next(line for line in table_of("memory", TEXT).splitlines() if line.startswith("| llama | 2 |"))
    found = truth.compare("llama", "llama", 2)
    assert f"| {found.activations[0] / 1024:,.0f} | {found.error('activations'):+.1%} |" in row


@pytest.mark.sweep
def test_the_table_of_throughputs_is_fresh_and_near_what_was_published() -> None:
    assert table_of("throughput", TEXT) == throughput.table()
    held_out = [(row.source, abs(error)) for row, _, error in throughput.errors() if not row.fitted]
    assert max(error for source, error in held_out if source != 4) < 0.15
    assert max(error for _, error in held_out) < 0.25  # one node, and other products than those that were fitted


def test_every_gpu_and_optimizer_is_on_the_page() -> None:
    assert all(f"`{name}`" in TEXT for name in (*built_in(), *OPTIMIZERS))
    fields = [name for name in cluster_of("h100").__dataclass_fields__ if name not in ("name", "title", "guesses")]
    assert all(f"`{name}`" in TEXT for name in fields)


def test_the_topology_of_the_page_is_one(tmp_path: Path) -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    path = tmp_path / "ours.yaml"
    path.write_text(text, encoding="utf-8")
    assert cluster_of(path).in_node == 4


def test_the_example_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code, shown) = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", TEXT, re.DOTALL)[0]
    exec(code, {"tpplan": tpplan, "torch": torch})
    assert capsys.readouterr().out == shown
