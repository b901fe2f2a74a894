"""The examples of docs/coming-from.md run on two processes, those of a section in one namespace."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.distributed import tensor
from torch.distributed.tensor import parallel

import tpplan
from tests.house.readme import blocks
from tests.runtime.world import Member, world
from tests.training.runs import launched
from tpplan.cli.main import main
from tpplan.suggest import import_hf
from tpplan.suggest.import_styles import import_styles

PAGE = Path(__file__).parents[2] / "docs" / "coming-from.md"
SECTIONS = {
    section.partition("\n")[0]: "".join(block.text for block in blocks(section) if block.processes)
    for section in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]
}


def run_section(member: Member, text: str, folder: str) -> None:
    with chdir(folder), launched(member):
        exec(text, {"os": os, "__name__": "example"})
    tpplan.undo_process_changes()


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("title", [title for title, text in SECTIONS.items() if text])
def test_what_can_be_run_runs(title: str, tmp_path: Path) -> None:
    world(2).run(run_section, SECTIONS[title], str(tmp_path))


def test_each_example_runs_or_says_why_not() -> None:
    assert len([title for title, text in SECTIONS.items() if text]) == 3
    for block in blocks(PAGE.read_text(encoding="utf-8")):
        compile(block.text, f"{PAGE.name}:{block.line}", "exec")
        assert block.processes == 2 or block.why_untested


CODE = re.compile(r"`([^`]+)`")
WORDS = {**vars(tensor), **vars(parallel)}


def rows(title: str) -> Iterator[tuple[list[str], list[str], str]]:
    """What a section's table has in code on the left and on the right, and the right side's text."""
    (section,) = (held for held in PAGE.read_text(encoding="utf-8").split("\n## ") if held.startswith(title))
    for line in section.splitlines():
        if line.startswith("| ") and not line.startswith("| ---"):
            left, right = (cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:3])
            yield CODE.findall(left), CODE.findall(right), right


def rule_of(text: str) -> Any:
    """A rule as a plan has it, read from its text."""
    held: Any = tpplan.load_plan(f"version: 1\nmodules:\n  m: {text}\n").to_dict()["modules"]
    return held["m"]


def imported(text: str, module: nn.Module) -> Any:
    plan, notes = import_styles(nn.ModuleDict({"m": module, "other": nn.Linear(2, 2)}), {
        "m": eval(text, WORDS), "other": parallel.ColwiseParallel(),
    })  # fmt: skip
    rules: Any = plan.to_dict()["modules"]
    return rules.get("m"), [note.code for note in notes]


def test_styles_of_torch_become_the_rules_beside_them() -> None:
    held = 0
    for theirs, ours, right in rows("torch"):
        for text in theirs:
            if text.startswith(("ColwiseParallel(", "RowwiseParallel(", "SequenceParallel(")):
                module = nn.Embedding(4, 2) if "nn.Embedding" in theirs else nn.Linear(2, 2)
                assert imported(text, module)[0] == rule_of(ours[0]), text
                held += 1
            elif text.startswith("Prepare"):
                assert issubclass(WORDS[text], parallel.ParallelStyle) and right.startswith("nothing")
                way = text.removeprefix("PrepareModule").lower()
                layouts = f"{way}_layouts=Replicate(), desired_{way}_layouts=Replicate()"
                assert imported(f"{text}({layouts})", nn.Linear(2, 2)) == (None, ["TP217"])
                held += 1
    assert held >= 8
    with pytest.raises(tpplan.CompileError, match="TP217"):
        imported("type('Own', (ParallelStyle,), {'_apply': None})()", nn.Linear(2, 2))


def test_styles_of_transformers_become_the_rules_beside_them() -> None:
    named = set[str]()
    for theirs, ours, right in list(rows("transformers"))[1:]:
        named |= set(theirs)
        for place, style in enumerate(theirs):
            if right.startswith("nothing"):
                assert style in import_hf._NOTES
            else:
                text = style if right == "the same" else ours[place % len(ours)]
                assert rule_of(import_hf._STYLES[style]) == rule_of(text), style
    from transformers.integrations import tensor_parallel

    missing = {name for name in named if name not in tensor_parallel.ALL_PARALLEL_STYLES} - set(import_hf._NOTES)
    assert not missing


def test_what_stands_beside_megatron_s_layers_is_a_rule() -> None:
    found = list(rows("Megatron"))[1:]
    for _, ours, _ in found[:4]:
        assert rule_of(ours[0])
    pinned = [text for _, ours, _ in found for text in ours if text.startswith(("output:", "packed:"))]
    assert len(pinned) == 2 and all(rule_of(f"{{style: colwise, {text}}}") for text in pinned)


def test_commands_on_the_page_have_the_options_that_it_names(capsys: pytest.CaptureFixture[str]) -> None:
    named = re.findall(r"`tpplan ([a-z]+)([^`]*)`", PAGE.read_text(encoding="utf-8"))
    assert len(named) >= 4
    for command, rest in named:
        assert main([command, "--help"]) == 0
        told = capsys.readouterr().out
        assert all(option in told for option in re.findall(r"--[a-z-]+", rest)), (command, rest)
