"""What runs in continuous integration: SARIF, annotations, --strict and --ignore, the hook, and the page's workflow."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.cli.test_validate import BAD, GOOD, stand_in
from tpplan.cli.main import main
from tpplan.plan import Diagnostic

TOP = Path(__file__).parents[2]
WARNING = Diagnostic("TP104", "gathered", subject="lm_head")
NOTE = Diagnostic("TP126", "a single head", subject="q_proj")


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("GITHUB_WORKSPACE", raising=False)
    (tmp_path / ".git").mkdir()
    (tmp_path / "a folder" / "plans").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a folder")
    Path("plans/good.yaml").write_text(GOOD)
    Path("plans/bad.yaml").write_text(BAD)
    return tmp_path


def sarif(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    code = main(["validate", *words, "--format", "sarif"])
    log = json.loads(capsys.readouterr().out)
    assert log["version"] == "2.1.0" and len(log["runs"]) == 1
    return code, log["runs"][0]


def test_sarif_places_findings_from_the_top_of_the_repository(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, run = sarif(capsys, "plans/bad.yaml")
    (result,) = run["results"]
    assert code == 1 and result["level"] == "error"
    assert run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"] == "TP005"
    place = result["locations"][0]["physicalLocation"]
    assert place["artifactLocation"] == {"uri": "a%20folder/plans/bad.yaml", "uriBaseId": "%SRCROOT%"}
    assert place["region"] == {"startLine": 2, "startColumn": 20, "endLine": 2, "endColumn": 27}


def test_sarif_without_findings_is_an_empty_run(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, run = sarif(capsys, "plans/good.yaml")
    assert code == 0 and run["results"] == [] and run["tool"]["driver"]["name"] == "tpplan"


@pytest.mark.parametrize("git", [True, False])
def test_annotations_have_paths_from_the_top(
    git: bool, repository: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not git:  # a container without it
        (repository / ".git").rmdir()
        monkeypatch.setenv("GITHUB_WORKSPACE", str(repository))
    assert main(["validate", "plans/bad.yaml", str(Path("plans/bad.yaml").resolve()), "--format", "github"]) == 1
    for line in capsys.readouterr().out.splitlines():
        assert line.startswith("::error file=a folder/plans/bad.yaml,line=2,")


@pytest.mark.parametrize("format", ["github", "sarif"])
def test_a_finding_without_a_place_stands_at_the_head_of_its_plan(
    format: str, repository: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, WARNING)
    assert main(["validate", "plans/good.yaml", "--model", "x", "--format", format]) == 0
    text = capsys.readouterr().out
    if format == "github":
        assert text.startswith("::warning file=a folder/plans/good.yaml,line=1,") and "::lm_head: gathered" in text
    else:
        (result,) = json.loads(text)["runs"][0]["results"]
        assert result["locations"][0]["logicalLocations"] == [{"fullyQualifiedName": "lm_head"}]
        assert result["locations"][0]["physicalLocation"]["region"]["startLine"] == 1


@pytest.mark.parametrize(
    ("options", "code", "shown"),
    [
        ("", 0, "TP104 TP126"),
        ("--strict", 1, "TP104 TP126"),
        ("--strict --ignore TP104", 0, "TP126"),
        ("--ignore tp104 --ignore single-head", 0, ""),
        ("--strict --ignore TP104,tp126", 0, ""),
        ("--strict --ignore TP126", 1, "TP104"),
    ],
)
def test_warnings_can_fail_or_be_left_out(
    options: str, code: int, shown: str, repository: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    stand_in(monkeypatch, WARNING, NOTE)
    assert main(["validate", "plans/good.yaml", "--model", "x", *options.split()]) == code
    text = capsys.readouterr().out
    assert re.findall(r"TP\d+(?= )", text) == shown.split()
    assert ("The plan is valid" in text) == (code == 0)


def test_errors_are_never_ignored(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "plans/bad.yaml", "--ignore", "TP005"]) == 1
    captured = capsys.readouterr()
    assert "TP005" in captured.out and captured.err == "tpplan: errors can't be ignored: TP005\n"


def test_an_unknown_code_is_refused(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "plans/good.yaml", "--ignore", "TP104,gathered-column"]) == 2
    assert "did you mean gathered-colwise?" in capsys.readouterr().err


def test_findings_say_at_which_numbers_of_ranks_they_were_met(
    repository: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = stand_in(monkeypatch, WARNING)
    plain = compiler.compile_plan

    def compile_plan(model: object, plan: Any, *, tp: int, inputs: object) -> object:
        compiler.findings = [WARNING] if tp < 8 else [WARNING, NOTE]
        return plain(model, plan, tp=tp, inputs=inputs)

    monkeypatch.setattr(sys.modules["tpplan.api"], "compile_plan", compile_plan)
    for sizes in ("--tp 2 4 8", "--tp 2 --tp 4 --tp 8", "--tp=2 4 --tp=8"):
        assert main(["validate", "--model", "x", *sizes.split(), "plans/good.yaml", "--format", "concise"]) == 0
        first, second, last = capsys.readouterr().out.splitlines()
        assert first.endswith("TP104 gathered-colwise: gathered") and second.endswith("a single head (at tp=8)")
        assert last.startswith("The plan is valid for x at tp=2, tp=4, tp=8.")


def test_the_hooks_check_the_plans_of_this_repository(capsys: pytest.CaptureFixture[str]) -> None:
    for hook in YAML(typ="safe").load(TOP / ".pre-commit-hooks.yaml"):
        names = [f"plans/{path.name}" for path in sorted((TOP / "plans").iterdir())]
        files = [str(TOP / name) for name in names if re.search(hook["files"], name)]
        program, *words = shlex.split(hook["entry"])
        assert program == "tpplan" and len(files) > 90
        assert main([*words, *files]) == 0


def test_the_page_s_workflow_and_hook_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    workflow, hooks = re.findall(r"```yaml\n(.*?)```", (TOP / "docs" / "ci.md").read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "plans").mkdir()
    assert main(["plans", "--show", "llama"]) == 0
    (tmp_path / "plans" / "my.yaml").write_text(capsys.readouterr().out)
    monkeypatch.chdir(tmp_path)
    steps = YAML(typ="safe").load(workflow)["jobs"]["validate"]["steps"]
    runs = [shlex.split(step["run"]) for step in steps if step.get("run", "").startswith("tpplan ")]
    assert [words[1] for words in runs] == ["validate", "validate"]
    (hook,) = YAML(typ="safe").load(hooks)["repos"][0]["hooks"]
    assert re.search(hook["files"], "plans/my.yaml")
    small = [f"--set={key}" for key in ("num_hidden_layers=1", "hidden_size=64", "intermediate_size=96")]
    small += [f"--set={key}" for key in ("num_attention_heads=8", "num_key_value_heads=8", "vocab_size=128")]
    for words in (*runs, [*shlex.split(hook["entry"]), "plans/my.yaml"]):
        words = ["plans/my.yaml" if word == "plans/*.yaml" else word for word in words[1 : [*words, ">"].index(">")]]
        assert main([*words, *(small if "--model" in words else [])]) == 0, capsys.readouterr()
        assert "error" not in capsys.readouterr().out
