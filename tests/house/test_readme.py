"""Whatever README.md shows works: its commands exist, its plans load, its Python runs, its sessions print the same."""

from __future__ import annotations

import difflib
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.readme import Block, blocks, exchanges, matches
from tests.runtime.torchrun import torchrun

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
COMMANDS = ("make demo", "make test")
SLOW = ("$ tpplan suggest", "$ tpplan explain")  # each compiles a model of billions of parameters
TIMEOUT_SECONDS = 600

PAGE = README.read_text(encoding="utf-8") if README.is_file() else ""
needs_readme = pytest.mark.skipif(not PAGE, reason="README.md isn't written yet")


def blocks_of(language: str) -> list[object]:
    """A test case per block of the language, or one that says there is none."""
    cases: list[object] = []
    for block in blocks(PAGE):
        if block.language == language:
            marks = [pytest.mark.slow] if block.slow or any(command in block.text for command in SLOW) else []
            if block.why_untested:
                marks.append(pytest.mark.skip(reason=f"README.md:{block.line}: {block.why_untested}"))
            cases.append(pytest.param(block, id=f"line{block.line}", marks=marks))
    reason = f"README.md shows no {language}" if PAGE else "README.md isn't written yet"
    return cases or [pytest.param(None, id="none", marks=pytest.mark.skip(reason=reason))]


@pytest.fixture
def workplace(tmp_path):
    """A folder like the repository's root to a reader of plans, where examples may leave files."""
    (tmp_path / "plans").symlink_to(ROOT / "plans", target_is_directory=True)
    return tmp_path


@pytest.fixture
def reader_environment(tmp_path_factory):
    """What a shell would have: `tpplan` on the path, a wide terminal without colour, and no network."""
    folder = tmp_path_factory.mktemp("bin")
    command = folder / "tpplan"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tpplan "$@"\n', encoding="utf-8")
    command.chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{folder}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "COLUMNS": "120",
        "NO_COLOR": "1",
        "TERM": "dumb",
    }


@needs_readme
@pytest.mark.parametrize("command", COMMANDS)
def test_command_is_shown_and_is_a_target(command):
    assert command in PAGE
    assert re.search(rf"^{command.removeprefix('make ')}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)


@needs_readme
def test_every_target_shown_exists():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    shown = set(re.findall(r"(?:^\$? ?|`)make ([\w-]+)", PAGE, re.M))
    assert shown <= targets


@needs_readme
def test_every_relative_link_leads_somewhere():
    targets = re.findall(r"\]\((?!https?:|mailto:|#)([^)#\s]+)", PAGE)
    assert [target for target in targets if not (ROOT / target).exists()] == []


@pytest.mark.parametrize("block", blocks_of("yaml"))
def test_plan_loads(block: Block):
    import tpplan

    assert tpplan.load_plan(block.text if block.text.endswith("\n") else f"{block.text}\n")


def printed_by(arguments, folder, environment):
    """What Python prints, called with these arguments in a folder."""
    ran = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.parametrize("block", blocks_of("python"))
def test_python_runs(block: Block, workplace, reader_environment):
    if block.processes:
        pytest.skip(f"README.md:{block.line} runs under torchrun")
    if not block.tested:
        pytest.skip(f"README.md:{block.line} isn't marked <!-- tested -->")
    printed_by(["-c", block.text], workplace, reader_environment)


@pytest.fixture
def folder_of_transformers(workplace):
    """The folder that README loads, with a tiny model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=96,
        eos_token_id=None,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(workplace / "my-llama")


@pytest.mark.slow
@needs_readme
@pytest.mark.processes
@pytest.mark.usefixtures("folder_of_transformers")
def test_python_prints_under_torchrun_what_is_shown(workplace, reader_environment):
    shown = blocks(PAGE)
    pairs = [(block, after) for block, after in itertools.pairwise(shown) if block.processes]
    assert pairs
    for number, (block, after) in enumerate(pairs):
        script = workplace / "train.py"
        script.write_text(block.text, encoding="utf-8")
        if number:
            printed = torchrun(script, block.processes, folder=workplace).stdout
        else:  # one of them as it is written there
            command = ["torch.distributed.run", "--standalone", f"--nproc-per-node={block.processes}", "train.py"]
            printed = printed_by(["-m", *command], workplace, reader_environment)
        assert all(line in printed for line in after.text.strip().splitlines()), printed


@needs_readme
def test_the_plan_of_the_first_screen_compiles_when_pasted():
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import tpplan

    (plan, *_) = [block for block in blocks(PAGE) if block.language == "yaml"]
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=96
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    assert tpplan.compile_plan(model, plan.text, tp=4).diagnostics == ()


@pytest.mark.parametrize("block", blocks_of("console"))
def test_console_session_prints_what_is_shown(block: Block, workplace, reader_environment):
    replayed = [exchange for exchange in exchanges(block.text) if exchange.command.startswith("tpplan")]
    if not replayed:
        pytest.skip(f"README.md:{block.line} runs no tpplan")
    for exchange in replayed:
        ran = subprocess.run(
            ["bash", "-c", exchange.command],
            cwd=workplace,
            env=reader_environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
        # The result is on stdout; a command that has none shows its complaint.
        printed = ran.stdout or ran.stderr
        assert matches(exchange.output, printed), "\n".join(
            [
                f"$ {exchange.command}",
                *difflib.unified_diff(exchange.output.splitlines(), printed.splitlines()),
                ran.stderr,
            ]
        )


def test_blocks_carry_language_line_and_comment():
    page = "# A\n\n<!-- tested -->\n```python\nx = 1\n```\ntext\n\n````yaml\na: 1\n```\n````\n"
    assert blocks(page) == [Block("python", "x = 1\n", 4, "tested"), Block("yaml", "a: 1\n```\n", 9)]


def test_console_session_splits_at_prompts():
    first, second = exchanges("$ tpplan rule \\\n    TP012\nTP012\n\n$ make test\n")
    assert (first.command, first.output) == ("tpplan rule TP012", "TP012\n")
    assert (second.command, second.output) == ("make test", "")


@pytest.mark.parametrize(
    ("expected", "printed", "same"),
    [
        ("a\nb\n", "\na  \nb\n\n", True),
        ("took ... s", "took 1.25 s\n", True),
        ("a\n...\nz", "a\nb\nc\nz\n", True),
        ("a\n...\nz", "a\nz\n", True),
        ("a", "a\nb\n", False),
        ("(a)", "a\n", False),
        ("a ... c", "a b\nc\n", False),
    ],
)
def test_outputs_are_compared_with_ellipses(expected, printed, same):
    assert matches(expected, printed) is same
