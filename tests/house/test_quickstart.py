"""The commands of docs/quickstart-gpu.md run as they stand there, on processes with gloo."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.house.readme import blocks

ROOT = Path(__file__).parents[2]
BLOCKS = blocks((ROOT / "docs" / "quickstart-gpu.md").read_text(encoding="utf-8"))
PATHS = (str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", ""))
ENVIRONMENT = {
    **os.environ,
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    "PYTHONPATH": os.pathsep.join(filter(None, PATHS)),
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}

pytestmark = [pytest.mark.slow, pytest.mark.processes]


def commands(program: str) -> list[list[str]]:
    """The lines of each block that call a program."""
    every = [
        [line for line in block.text.splitlines() if f"{program} " in line and "srun" not in line]
        for block in BLOCKS
        if block.language == "sh"
    ]
    return [lines for lines in every if lines]


def said(lines: Sequence[str], folder: Path) -> str:
    """What commands that run at the same time print."""
    started = [
        subprocess.Popen(["bash", "-c", line], cwd=folder, env=ENVIRONMENT, text=True, stdout=-1, stderr=-2)
        for line in lines
    ]
    try:
        printed = [process.communicate(timeout=280)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * len(started), "\n".join(printed)
    return "\n".join(printed)


def test_the_script_trains_on_one_node_and_on_two(tmp_path: Path) -> None:
    (script,) = (block.text for block in BLOCKS if block.language == "python")
    (tmp_path / "train.py").write_text(script, encoding="utf-8")
    one, two = commands("torchrun")
    losses: list[list[str]] = []
    for number, lines in enumerate((one, two), 1):
        assert len(lines) == number
        printed = said(lines, tmp_path)
        # Two ranks may write at once, so that a line ends after the next one has begun.
        losses.append(sorted(re.findall(r"replica \d, step \d: loss \d\.\d{3}", printed)))
        assert (tmp_path / "checkpoint" / "model.safetensors").is_file()
    assert len(losses[0]) == 6
    assert losses[0] == losses[1]


def test_the_plan_is_checked_before(tmp_path: Path) -> None:
    ((validate, verify, advise),) = commands("tpplan")
    said([validate], tmp_path)
    assert "module calls" in said([verify], tmp_path)
    assert advise.startswith("tpplan advise")  # tests/cost runs it
