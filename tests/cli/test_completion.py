"""What a shell is offered: argcomplete asks the command itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "src"
CASES = [
    ("tpplan ch", {"checkpoint"}),
    ("tpplan validate --mo", {"--model"}),
    ("tpplan explain llama-s", {"llama-sequence"}),
    ("tpplan rule TP01", {f"TP01{n}" for n in range(9)}),
    ("tpplan validate llama --model hf:phi3", {"hf:phi3"}),
    ("tpplan checkpoint check here phi3-", {"phi3-sequence"}),
    ("tpplan validate my", {"my.yaml"}),
]


@pytest.mark.parametrize(("line", "offered"), CASES)
def test_a_shell_is_offered(line: str, offered: set[str], tmp_path: Path) -> None:
    pytest.importorskip("argcomplete")
    if "hf:" in line:
        pytest.importorskip("transformers")
    (tmp_path / "my.yaml").touch()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCES), *sys.path]), "_ARGCOMPLETE": "1"}
    environment |= {"COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_STDOUT_FILENAME": "offered"}
    command = [sys.executable, "-m", "tpplan"]
    subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, check=True)
    found = {word.strip() for word in (tmp_path / "offered").read_text().split("\013")}
    assert offered <= found and len(found) < 30


def test_the_command_s_file_says_that_it_completes() -> None:
    head = (SOURCES / "tpplan" / "cli" / "main.py").read_text(encoding="utf-8")[:1024]
    assert "PYTHON_ARGCOMPLETE_OK" in head  # what argcomplete looks for in the first 1024 bytes
