"""The benchmark of kernels, dry: it measures every form of every kernel, and says that it measured nothing."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch

from tpplan.bench import kernels
from tpplan.bench.kernels_plot import render_svg
from tpplan.bench.kernels_subjects import COMPILED, EAGER, OURS, SUBJECTS, tensors_of
from tpplan.bench.kernels_table import text_of
from tpplan.kernels.thresholds import KERNELS

dry = pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")


def test_every_kernel_is_a_subject_and_computes_what_it_is_held_against() -> None:
    assert set(SUBJECTS) == set(KERNELS)
    for name, subject in SUBJECTS.items():
        inputs = tensors_of(subject, 5, 32, torch.float32, "cpu")
        torch.testing.assert_close(subject.ours(*inputs), subject.eager(*inputs), msg=name)


@dry
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_a_dry_run_measures_every_form_and_says_that_it_means_nothing(tmp_path: Path) -> None:
    result = kernels.measure(("rms_norm", "cross_entropy"), dtypes=("fp32",))
    assert result["dry"]
    rows = result["rows"]
    assert {row["form"] for row in rows} >= {OURS, EAGER, COMPILED}
    assert {row["way"] for row in rows} == {"forward", "backward", "step"}
    assert all(row["microseconds"] > 0 for row in rows if row["way"] != "backward")
    raw, picture = kernels.write(result, tmp_path)
    assert json.loads(raw.read_text()) == json.loads(json.dumps(result))
    assert "dry" in raw.name
    assert "no measurement" in "".join(ElementTree.parse(picture).getroot().itertext())


def test_the_shipped_figures_are_what_was_measured() -> None:
    docs = Path(__file__).parents[2] / "docs"
    result = json.loads((docs / "benchmarks" / "kernels.json").read_text())
    assert not result["dry"]
    assert text_of(result) in (docs / "kernels.md").read_text()
    assert render_svg(result) == (docs / "benchmarks" / "kernels.svg").read_text()


def test_no_figure_of_a_dry_run_is_in_the_documentation() -> None:
    assert not list((Path(__file__).parents[2] / "docs" / "benchmarks").glob("*-dry.*"))
