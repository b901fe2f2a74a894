"""The examples of docs/coming-from.md run on two processes, those of a section in one namespace."""

from __future__ import annotations

import os
from contextlib import chdir
from pathlib import Path

import pytest

import tpplan
from tests.house.readme import blocks
from tests.runtime.world import Member, world
from tests.training.runs import launched

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
