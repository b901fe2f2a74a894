"""Exit codes, streams, and that nothing but a code ever gets out of the command."""

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tpplan import __main__
from tpplan.cli import explain, schema
from tpplan.cli import main as entry
from tpplan.cli.exit_codes import INTERRUPTED, UsageError
from tpplan.cli.main import main

SOURCES = Path(__file__).parents[2] / "src"
COMMANDS = [
    "validate",
    "explain",
    "diff",
    "verify",
    "suggest",
    "advise",
    "export",
    "checkpoint",
    "demo",
    "bench",
    "plans",
    "rule",
    "schema",
    "env",
]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PYTHONPATH": str(SOURCES), **environment}
    command = [sys.executable, "-m", "tpplan", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=variables, check=False)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_s_help_ends_with_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    examples = capsys.readouterr().out.rpartition("\nexamples:\n")[2]
    assert f"tpplan {command}" in examples and "options:" not in examples


def test_the_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(re.search(rf"^    {command}( |$)", text, re.MULTILINE) for command in COMMANDS)


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    bare = capsys.readouterr()
    assert main(["--help"]) == 0 and capsys.readouterr() == bare and bare.err == ""


WRONG_USAGES = [
    "nonsense",
    "validate",
    "validate x --format xml",
    "validate x --model m --tp 0",
    "validate x --model m --set novalue",
    "verify x",
    "rule --markdown",
    "rule TP1 --all",
]


@pytest.mark.parametrize("arguments", WRONG_USAGES)
def test_wrong_usage_exits_with_2_and_says_so_on_stderr(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("validat x", "tpplan: there is no command `validat`; did you mean `validate`?"),
        ("validate x --tpp 3", "tpplan validate: there is no option `--tpp`; did you mean `--tp`?"),
        ("validate x --overlap", "tpplan validate: `--overlap` isn't an option; write `overlap:` in the plan"),
        ("checkpoint inspect x --modle=y", "tpplan checkpoint inspect: there is no option `--modle`; did you mean"),
        ("rule TP001 TP002", "tpplan rule: `TP002` is one argument too many"),
        ("--versoin", "tpplan: there is no option `--versoin`; did you mean `--version`?"),
        ("checkpoint inspct x", "tpplan checkpoint: ACTION: there is no `inspct`; did you mean `inspect`? There are"),
        ("bench overhaed", "tpplan bench: BENCHMARK: there is no `overhaed`; did you mean `overhead`? There are"),
        ("verify x --model m --dtype bf16", "tpplan verify: --dtype: there is no `bf16`; did you mean `bfloat16`?"),
        ("validate x --model m --tp 2,4", "tpplan validate: --tp: write several one by one: --tp 2 4"),
        ("validate x --strict=yes", "tpplan validate: --strict: it takes no value"),
        ("plans --show", "tpplan plans: --show: it takes a value"),
        ("advise --gpus 8", "tpplan advise: name a model with --model REF"),
        ("advise --model hf:llama --gpus 2 --tp 2", "tpplan advise: there is no option `--tp`\n"),
        ("explain llama --tp 2 --model hf:llama -o x", "tpplan explain: there is no option `-o`\n"),
        ("explain llama --model m --optimizer sgd", "tpplan explain: --optimizer is of an estimate, which takes --gpu"),
        ("explain llama --model m --assumptions", "tpplan explain: --assumptions is of an estimate, which takes --gpu"),
        ("explain llama --model m --gpu h100 --fsdp", "tpplan explain: --fsdp lets replicas share their state, and"),
        ("diff a b --dp 2", "tpplan diff: --dp is of an estimate, which takes --gpu or --topology"),
        ("suggest --model m --from-deepspeed no.json", "tpplan suggest: --from-deepspeed: there is no file no.json"),
        ("explain llama --model m --topology no.yaml", "TP220 unknown-name: there is no topology file `no.yaml`"),
        (
            "explain llama --model m --gpu H100",
            "TP220 unknown-name: there is no GPU `H100`\nhelp: did you mean `h100`?",
        ),
        ("plans nosuch", "tpplan plans: no shipped plan matches `nosuch`; `tpplan plans` lists them all"),
    ],
)
def test_what_there_isnt_is_refused_with_what_there_is(
    arguments: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments.split()) == 2
    assert capsys.readouterr().err.startswith(says)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            "advise --modle x --gpus 0 --format htm",
            [
                "there is no option `--modle`; did you mean `--model`?",
                "--gpus: 0 is less than 1",
                "--format: there is no `htm`; there are rich, json, markdown",
            ],
        ),
        (
            "explain --tpp 2 --sequence=x --format html --dp 0",
            [
                "there is no option `--tpp`; did you mean `--tp`?",
                "name a model with --model REF, a folder",
                "--dp: 0 is less than 1",
                "--sequence: 'x' isn't a whole number",
            ],
        ),
        ("diff", ["`A` and `B` are missing"]),
        ("validate x --modle m --sett a=b", ["there is no option `--modle`; did", "there is no option `--sett`; did"]),
    ],
)
def test_all_mistakes_are_told_at_once(arguments: str, says: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments.split()) == 2
    *told, last = capsys.readouterr().err.splitlines()
    called = f"tpplan {arguments.split()[0]}"
    assert len(told) == len(says) and all(map(str.startswith, sorted(told), sorted(f"{called}: {x}" for x in says)))
    assert last == f"`{called} --help` says what it takes"


def test_options_of_a_command_stand_behind_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--traceback", "validate", "llama"]) == 2
    assert "`--traceback` stands behind the command: `tpplan validate --traceback …`" in capsys.readouterr().err


def fail_with(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(arguments: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr(schema, "run", run)


def test_an_unexpected_exception_is_reported_as_our_bug(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_with(ZeroDivisionError("by zero"), monkeypatch)
    assert main(["schema"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("TP199 internal-error: ZeroDivisionError: by zero\n")
    assert "bug in tpplan" in captured.err and "Traceback" not in captured.err and captured.out == ""


@pytest.mark.parametrize("way", ["option", "variable"])
def test_the_traceback_is_there_for_who_asks(
    way: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_with(ZeroDivisionError("by zero"), monkeypatch)
    if way == "variable":
        monkeypatch.setenv("TPPLAN_TRACEBACK", "1")
    assert main(["schema", *(["--traceback"] if way == "option" else [])]) == 2
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_an_interrupt_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(KeyboardInterrupt(), monkeypatch)
    assert main(["schema"]) == 130


def test_an_interrupt_of_the_first_imports_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupts:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "tpplan.cli.main":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "tpplan.cli.main")
    monkeypatch.setattr(sys, "meta_path", [Interrupts(), *sys.meta_path])
    assert __main__.main() == INTERRUPTED and capsys.readouterr().err == "tpplan: interrupted\n"


def test_a_plan_error_is_shown_as_findings(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from tpplan.plan import CompileError, Diagnostic

    fail_with(CompileError([Diagnostic("TP102", "768 rows by 5 ranks", subject="h.0.c_fc")]), monkeypatch)
    assert main(["schema"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("h.0.c_fc: TP102 not-divisible: 768 rows by 5 ranks\n")


def test_a_reader_that_hangs_up_is_no_error() -> None:
    script = f"{sys.executable} -m tpplan rule --all | head -1"
    variables = {**os.environ, "PYTHONPATH": str(SOURCES)}
    finished = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=variables, check=True)
    assert finished.stdout.startswith("TP001") and finished.stderr == ""


@pytest.mark.parametrize(
    ("closed", "said"), [(">/dev/full", "No space left on device"), (">&-", "Bad file descriptor")]
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", ["rule --all", "--help", "--version", "schema", "validate nosuch"])
def test_results_that_cannot_be_written_are_an_error_of_the_system_s(
    arguments: str, unbuffered: str, closed: str, said: str
) -> None:
    variables = {**os.environ, "PYTHONPATH": str(SOURCES), "PYTHONUNBUFFERED": unbuffered}
    command = ["bash", "-c", f"{sys.executable} -m tpplan {arguments} {closed}"]
    finished = subprocess.run(command, capture_output=True, text=True, env=variables, check=False)
    assert (finished.returncode, finished.stderr) == (2, f"tpplan: {said}\n")


def test_an_ascii_terminal_is_written_to_all_the_same() -> None:
    finished = run("rule", "--all", PYTHONIOENCODING="ascii")
    assert finished.returncode == 0 and finished.stderr == ""


def test_the_module_runs_like_the_command() -> None:
    finished = run("--version")
    assert finished.returncode == 0 and finished.stdout.startswith("tpplan ")


def test_help_and_a_plan_only_validate_import_neither_torch_nor_pydantic_nor_rich(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("version: 1\nmodules: {a: colwise}\n")
    for arguments in (["--help"], ["validate", str(path)], ["rule"]):
        script = f"import sys; from tpplan.cli.main import main; code = main({arguments!r})\n"
        script += (
            "print([name for name in ('torch', 'pydantic', 'rich', 'numpy') if name in sys.modules], file=sys.stderr)"
        )
        variables = {**os.environ, "PYTHONPATH": str(SOURCES)}
        command = [sys.executable, "-c", script]
        finished = subprocess.run(command, capture_output=True, text=True, env=variables, check=True)
        assert finished.stderr == "[]\n"


def test_importing_the_package_imports_nothing_else() -> None:
    script = (
        "import sys, tpplan; print([name for name in sys.modules if name.startswith('tpplan.') or name == 'torch'])"
    )
    variables = {**os.environ, "PYTHONPATH": str(SOURCES)}
    command = [sys.executable, "-c", script]
    assert subprocess.run(command, capture_output=True, text=True, env=variables, check=True).stdout == "[]\n"


def test_every_public_name_is_listed() -> None:
    import tpplan

    assert set(tpplan.__all__) <= set(dir(tpplan))
    assert callable(tpplan.load_plan) and tpplan.__version__
    with pytest.raises(AttributeError):
        _ = tpplan.nonsense  # type: ignore[attr-defined]
    assert entry.main is main


SIZES = ["--tp 2 4", "--tp 2 --tp 4", "--tp=2 4", "--tp 2 4 2", "--tp 2 --tp=4"]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("format", ["text", "json"])
def test_a_command_answers_for_each_number_of_ranks(
    sizes: str, format: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(arguments: argparse.Namespace) -> int:
        assert arguments.module == "model.layers.0" and arguments.sizes == [arguments.tp]
        print(f'{{"size": {arguments.tp}}}')
        return 1 if arguments.tp == 2 else 0

    monkeypatch.setattr(explain, "run", run)
    assert main(["explain", "p", "--model", "m", *sizes.split(), "model.layers.0", "--format", format]) == 1
    text = capsys.readouterr().out
    if format == "json":
        assert json.loads(text) == [{"size": 2}, {"size": 4}]
    else:
        assert text == 'tp=2\n{"size": 2}\n\ntp=4\n{"size": 4}\n'


def test_one_that_fails_leaves_the_others_their_answers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(arguments: argparse.Namespace) -> int:
        if arguments.tp == 2:
            raise UsageError("not so")
        print("{}")
        return 0

    monkeypatch.setattr(explain, "run", run)
    assert main(["explain", "p", "--model", "m", "--tp", "2", "4", "--format", "json"]) == 2
    captured = capsys.readouterr()
    assert json.loads(captured.out) == [{}] and captured.err == "tpplan explain: not so\n"
