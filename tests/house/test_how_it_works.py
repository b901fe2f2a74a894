"""What docs/how-it-works.md and docs/quantisation.md show runs, and prints what is shown."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.models.quantised import EXACT, WITH_MAXIMA

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(("page", "count"), [("how-it-works", 6), ("quantisation", 2)])
def test_each_block_prints_what_is_shown(
    page: str, count: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TPPLAN_DUMP", "")  # which the page sets
    names: dict[str, Any] = {}
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```(?:\n```text\n(.*?)```)?", text, re.DOTALL)
    assert len(blocks) == count
    for code, shown in blocks:
        exec(code, names)
        assert capsys.readouterr().out == shown


def test_each_kind_of_quantised_layer_is_a_row() -> None:
    text = (DOCS / "quantisation.md").read_text(encoding="utf-8")
    table = text.partition("## Which kinds")[2].partition("\n\n*Exact*")[0]
    rows = re.findall(r"^\| (.+?) \| (.+?) \|", table, re.MULTILINE)[1:]
    assert [name for name, _ in rows] == [*EXACT, *WITH_MAXIMA]
    assert {name for name, said in rows if said == "exact"} == set(EXACT)
