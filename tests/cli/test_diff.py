"""`tpplan diff` on plans and on programs: exit codes, formats, and what it says of files that are something else."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tpplan.cli.main import main

MLP = "version: 1\nname: mlp\nmodules:\n  up: colwise\n  down: rowwise\n"
WHOLE = "version: 1\nname: whole\nmodules:\n  up: replicate\n"
MODEL = ["--model", f"{__name__}:mlp", "--tp", "2"]

Run = Callable[..., tuple[int, str, str]]


def mlp(features: int = 16) -> tuple[nn.Module, torch.Tensor]:
    """Two linear layers on `meta`, and an input."""
    with torch.device("meta"):
        model = nn.Sequential()
        model.add_module("up", nn.Linear(features, 32))
        model.add_module("down", nn.Linear(32, features))
    return model, torch.empty(4, features, device="meta")


def wider() -> tuple[nn.Module, torch.Tensor]:
    """The same for more features."""
    return mlp(24)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    (tmp_path / "mlp.yaml").write_text(MLP)
    (tmp_path / "whole.yaml").write_text(WHOLE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)

    def call(*arguments: str) -> tuple[int, str, str]:
        code = main([*arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def written(run: Run, plan: str, *more: str) -> str:
    name = Path(plan).with_suffix(".json").name
    code, text, _ = run("explain", plan, *(more or MODEL), "--format", "json")
    assert code == 0
    Path(name).write_text(text)
    return name


@pytest.mark.parametrize(
    ("plans", "options", "code", "told"),
    [
        (("mlp.yaml", "mlp.yaml"), ["--exit-code"], 0, "mlp.yaml → mlp.yaml: no change for Sequential on 2 ranks.\n"),
        (("mlp.yaml", "whole.yaml"), [], 0, "Worse: memory of parameters."),
        (("mlp.yaml", "whole.yaml"), ["--exit-code"], 1, "Worse: memory of parameters."),
        (("whole.yaml", "mlp.yaml"), ["--exit-code"], 1, "Worse: collectives, bytes sent."),
        (("mlp.yaml", "whole.yaml"), ["--exit-code", "--gpu", "h100"], 1, "memory of parameters, memory"),
        (("mlp.yaml", "whole.yaml"), ["--gpu", "h100"], 0, "Sequential on 2 ranks of h100, batch 4 × 1\n"),
        (("mlp.yaml", "whole.yaml"), ["--format", "markdown"], 0, "`mlp.yaml` → `whole.yaml`: `Sequential` on 2 ranks"),
    ],
)
def test_two_plans(run: Run, plans: tuple[str, str], options: list[str], code: int, told: str) -> None:
    found, text, _ = run("diff", *plans, *MODEL, *options)
    assert found == code and told in text
    assert ("time of a step" in text) == ("--gpu" in options)


def test_programs_say_the_same_as_their_plans_and_need_no_model(run: Run) -> None:
    before, after = written(run, "mlp.yaml"), written(run, "whole.yaml")
    ways = [
        (before, after),
        (before, "whole.yaml", *MODEL[:2]),
        ("mlp.yaml", after, *MODEL),
        ("mlp.yaml", "whole.yaml", *MODEL),
    ]
    told = []
    for arguments in ways:
        code, text, chatter = run("diff", *arguments, "--gpu", "h100", "--format", "json")
        assert (code, chatter) == (0, "")
        told.append({key: value for key, value in json.loads(text).items() if key not in ("before", "after")})
    assert told.count(told[0]) == 4 and told[0]["gpu"] == "h100" and told[0]["parameters"]
    _, _, chatter = run("diff", before, after, *MODEL)
    assert "both are programs, which need no --model, --tp" in chatter


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("absent.json", None, "absent.json: TP019 file-not-readable"),
        ("absent", None, "absent: TP019 file-not-readable"),
        ("broken.json", "{", "broken.json: TP230 not-a-program: this isn't a program: it isn't JSON"),
        ("list.json", "[1]", "it has no list of `modules`"),
        ("binary.json", "\x00\x01", "it isn't JSON"),
        ("deep.json", "[" * 100_000, "it isn't JSON"),
        ("other.json", '{"modules": []}', "program version None is not 3"),
        ("half.json", '{"modules": [], "version": 3, "size": "x"}', "TP230"),
        ("plan.json", '{"version": 1, "modules": {"up": "colwize"}}', "TP005"),
        ("flow.yaml", "{version: 1, modules: {up: colwize}}", "TP005"),
    ],
)
def test_what_can_t_be_read_is_told_by_file(run: Run, name: str, text: str | None, told: str) -> None:
    if text is not None:
        Path(name).write_text(text)
    code, out, findings = run("diff", name, "mlp.yaml", *MODEL)
    assert out == "" and told in findings and "help: " in findings.replace("= help", "help")
    assert code == (1 if told == "TP005" else 2)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--model", f"{__name__}:wider"], "up.weight is (32, 16) float32 in one, (32, 24) float32 in the other"),
        ([*MODEL[:3], "4"], "the axis is 2 ranks in one, 4 ranks in the other"),
    ],
    ids=["model", "ranks"],
)
def test_a_program_and_a_plan_of_something_else_aren_t_compared(run: Run, options: list[str], told: str) -> None:
    before = written(run, "mlp.yaml")
    code, out, findings = run("diff", before, "whole.yaml", *options)
    assert (code, out) == (2, "") and "TP231" in findings and told in findings


def test_a_plan_without_a_model_or_a_program_without_its_work_is_refused(run: Run) -> None:
    code, _, message = run("diff", "mlp.yaml", "whole.yaml")
    assert code == 2 and "--model REF" in message
    before = written(run, "mlp.yaml")
    plain = json.loads(Path(before).read_text())
    del plain["work"], plain["diagnostics"]
    Path("old.json").write_text(json.dumps(plain))
    assert "Warnings aren't compared: old.json" in run("diff", "old.json", before)[1]
    code, out, findings = run("diff", "old.json", before, "--gpu", "h100")
    assert (code, out) == (1, "") and findings.startswith("old.json: TP222")


def test_a_plan_that_doesn_t_compile_is_told_at_its_line(run: Run) -> None:
    Path("bad.yaml").write_text(MLP.replace("down:", "dwon:"))
    code, out, findings = run("diff", "mlp.yaml", "bad.yaml", *MODEL)
    assert (code, out) == (1, "") and findings.startswith("bad.yaml:5:3: TP012")
