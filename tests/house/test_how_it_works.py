"""What docs/how-it-works.md shows runs, and prints what is shown."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "how-it-works.md"


def test_each_block_prints_what_is_shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPPLAN_DUMP", "")  # which the page sets
    names: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```(?:\n```text\n(.*?)```)?", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 6
    for code, shown in blocks:
        exec(code, names)
        assert capsys.readouterr().out == shown
