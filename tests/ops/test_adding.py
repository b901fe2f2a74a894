"""What docs/adding-an-operator.md shows runs, and adds an operator by the registry alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tpplan.ops import registry

PAGE = Path(__file__).parents[2] / "docs" / "adding-an-operator.md"


@pytest.fixture
def table() -> Iterator[None]:
    before = dict(registry.TABLE)
    yield
    registry.TABLE.clear()
    registry.TABLE.update(before)


@pytest.mark.usefixtures("table")
def test_the_page_is_true(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL):
        exec(block, names)
    assert "result 0: Tensor-likes are not close!" in capsys.readouterr().out
