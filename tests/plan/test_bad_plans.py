"""One bad plan for each code, and how its findings look. `UPDATE_SNAPSHOTS=1` writes the snapshots anew."""

import os
from pathlib import Path

import pytest

from tests.plan.toy import llama_modules
from tpplan.plan import CATALOGUE, Diagnostic, check_plan
from tpplan.report.diagnostics import render, summary

BAD = Path(__file__).parent / "bad"
UPDATE = bool(os.environ.get("UPDATE_SNAPSHOTS"))

# Too large to keep, or nothing at all: made below.
MADE_HERE = {"TP015", "TP019"}
# These concern a plan and a model, or the sharded model at work: tests/compiler, tests/plans, tests/runtime,
# tests/checkpoint and tests/cli cause them.
WITH_A_MODEL = {code for code in CATALOGUE if "TP100" < code < "TP199"}  # see tests/compiler/test_findings.py
# TP199 has its case in tests/cli/test_main.py; plans from and for other libraries: tests/suggest, tests/cli.
ELSEWHERE = {"TP199", *(code for code in CATALOGUE if code >= "TP210")}


def findings(path: str) -> list[Diagnostic]:
    plan, diagnostics = check_plan(path)
    return diagnostics + (plan.match(llama_modules()).diagnostics if plan else [])


def test_every_code_about_a_plan_has_a_bad_plan() -> None:
    here = {path.stem for path in BAD.glob("*.yaml")} | MADE_HERE
    assert sorted([*here, *ELSEWHERE, *WITH_A_MODEL]) == list(CATALOGUE)


@pytest.mark.parametrize("code", sorted(path.stem for path in BAD.glob("*.yaml")))
def test_a_bad_plan_is_reported_as_recorded(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(BAD)
    found = findings(f"{code}.yaml")
    assert code in {diagnostic.code for diagnostic in found}
    compare_to_snapshot(BAD / f"{code}.txt", f"{render(found)}\n\n{summary(found)}\n")


def test_a_huge_file_is_refused_without_being_parsed(tmp_path: Path) -> None:
    path = tmp_path / "huge.yaml"
    path.write_text("version: 1\n" + "# padding\n" * 120_000)
    plan, (finding,) = check_plan(path)
    assert plan is None and finding.code == "TP015"


@pytest.mark.parametrize("name", ["nowhere.yaml", ".", "", "a" * 5000, "nul\0.yaml"])
def test_a_path_that_leads_nowhere_is_a_finding(name: str) -> None:
    plan, (finding,) = check_plan(name)
    assert plan is None and finding.code == "TP019"


def compare_to_snapshot(path: Path, text: str) -> None:
    if UPDATE:
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")
