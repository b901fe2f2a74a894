import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from tpplan.cli.main import main
from tpplan.plan import CompileError, Diagnostic, Plan

GOOD = "version: 1\nmodules: {lm_head: colwise}\n"
BAD = "version: 1\nmodules: {lm_head: colwize}\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "good.yaml").write_text(GOOD)
    (tmp_path / "bad.yaml").write_text(BAD)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def validate(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(["validate", *arguments])
    captured = capsys.readouterr()
    assert captured.err == ""
    return code, captured.out


def test_a_valid_plan_exits_with_0(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert validate(capsys, "good.yaml") == (0, "The plan is valid.\n")
    assert validate(capsys, "good.yaml", "good.yaml") == (0, "All 2 plans are valid.\n")


def test_mistakes_exit_with_1_and_are_shown_on_stdout(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = validate(capsys, "good.yaml", "bad.yaml")
    assert code == 1
    assert text.startswith("bad.yaml:2:20: TP005 unknown-style: `colwize` isn't a style\n")
    assert text.endswith("\n\nFound 1 error.\n")


def test_a_file_that_isn_t_there_exits_with_2(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = validate(capsys, "bad.yaml", "missing.yaml", "--format", "concise")
    assert code == 2
    assert "missing.yaml: TP019 file-not-readable: there is no such file\n" in text
    assert text.endswith("Found 2 errors.\n")


def test_the_machine_formats_hold_nothing_but_findings(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert validate(capsys, "good.yaml", "--format", "json") == (0, "[]\n")
    assert validate(capsys, "good.yaml", "--format", "github") == (0, "")
    code, text = validate(capsys, "bad.yaml", "--format", "json")
    assert code == 1 and [record["code"] for record in json.loads(text)] == ["TP005"]
    _, text = validate(capsys, "bad.yaml", "--format", "github")
    assert text.startswith("::error file=bad.yaml,line=2,col=20,endLine=2,endColumn=26,title=TP005 unknown-style::")


def test_a_plan_is_read_from_standard_input(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for data, finding in ((b"version: 1", "<text>:1:1: TP007"), (b"version: 1\nname: \xe4\n", "<text>:2:7: TP017")):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="ascii"))
        code, text = validate(capsys, "-", "--format", "concise")
        assert code == 1 and text.startswith(finding)


@pytest.mark.parametrize("option", [("--tp", "2"), ("--set", "a=b"), ("--batch", "1"), ("--sequence", "8")])
def test_model_options_without_a_model_are_refused(
    option: Sequence[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["validate", "good.yaml", *option]) == 2
    assert capsys.readouterr().err == f"tpplan validate: {option[0]} needs --model\n"


class Compiler:
    """Stands in for the compiler, and records what it's asked for."""

    def __init__(self, findings: Sequence[Diagnostic], fails: bool) -> None:
        self.findings = findings
        self.fails = fails
        self.asked: list[object] = []

    def load_model(self, reference: str, overrides: dict[str, str], **sizes: object) -> tuple[str, str]:
        self.asked.append((reference, overrides, sizes))
        return "model", "inputs"

    def compile_plan(self, model: object, plan: Plan, *, tp: int, inputs: object) -> SimpleNamespace:
        self.asked.append((model, plan.name, tp, inputs))
        if self.fails:
            raise CompileError(self.findings)
        return SimpleNamespace(diagnostics=self.findings)


def stand_in(monkeypatch: pytest.MonkeyPatch, *findings: Diagnostic, fails: bool = False) -> Compiler:
    compiler = Compiler(findings, fails)
    api, reference = ModuleType("tpplan.api"), ModuleType("tpplan.cli.model_reference")
    api.compile_plan = compiler.compile_plan  # type: ignore[attr-defined]
    reference.load_model = compiler.load_model  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tpplan.api", api)
    monkeypatch.setitem(sys.modules, "tpplan.cli.model_reference", reference)
    return compiler


MODEL = ("--model", "hf:llama", "--tp", "4", "--set", "num_hidden_layers=2", "--set", "a=b=c", "--batch", "3")


def test_the_plan_is_compiled_for_the_model(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = stand_in(monkeypatch)
    assert validate(capsys, "good.yaml", *MODEL) == (0, "The plan is valid for hf:llama at tp=4.\n")
    assert compiler.asked == [
        ("hf:llama", {"num_hidden_layers": "2", "a": "b=c"}, {"batch": 3, "sequence": None}),
        ("model", "good", 4, "inputs"),
    ]


def test_warnings_alone_exit_with_0(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, Diagnostic("TP104", "gathered", subject="lm_head"))
    code, text = validate(capsys, "good.yaml", "--model", "hf:llama")
    assert code == 0
    assert text.startswith("lm_head: warning TP104 gathered-colwise: gathered\n")
    assert text.endswith("\n\nThe plan is valid for hf:llama at tp=2. Found 1 warning.\n")


@pytest.mark.parametrize(("code", "expected"), [("TP102", 1), ("TP122", 2)])
def test_the_compiler_s_errors_are_findings(
    code: str, expected: int, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, Diagnostic(code, "no"), fails=True)
    assert validate(capsys, "good.yaml", "--model", "x")[0] == expected


def test_a_plan_with_mistakes_is_not_compiled(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = stand_in(monkeypatch)
    assert validate(capsys, "bad.yaml", "--model", "x")[0] == 1
    assert compiler.asked == []


SMALL = ["num_hidden_layers=1", "hidden_size=64", "intermediate_size=96", "num_attention_heads=4"]
SMALL += ["num_key_value_heads=4"]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("sizes", "code", "says"),
    [("1", 0, "valid for hf:llama at tp=1."), ("3", 0, "TP132"), ("8", 1, "use at most 4 ranks"), ("1 2", 0, "tp=2.")],
)
def test_a_number_of_ranks_is_fine_or_the_most_is_told(
    sizes: str, code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    settings = [f"--set={setting}" for setting in SMALL]
    assert main(["validate", "llama", "--model", "hf:llama", *settings, "--tp", *sizes.split()]) == code
    text = capsys.readouterr().out
    assert says in text and "single head" not in text


def test_a_stage_is_checked_against_the_plan_of_its_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    modules = "embed: vocab\n  layers.*.attention.{q,k,v}: colwise\n  layers.*.attention.o: rowwise"
    Path("plan.yaml").write_text(f"version: 1\nmodules:\n  {modules}\n")
    code = "from tests.runtime.pipelines import cut, example, made\n\n\ndef make():\n    "
    Path("stage.py").write_text(f"{code}return cut(made(), 1, 4), (example(1).detach(),)\n")
    assert main(["validate", "plan.yaml", "--model", "stage.py:make"]) == 1
    assert "for a part of the plan's model pass `partial=True` (`--partial`)" in capsys.readouterr().out
    assert main(["validate", "plan.yaml", "--model", "stage.py:make", "--partial"]) == 0
    assert main(["verify", "plan.yaml", "--model", "stage.py:make", "--partial"]) == 0
    assert main(["validate", "plan.yaml", "--partial"]) == 2
