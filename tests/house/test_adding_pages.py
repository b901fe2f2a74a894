"""What the pages of docs/ show that add a style, a body and a diagnostic to tpplan works, change by change."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.house.worked_example import run_page


@pytest.mark.slow
@pytest.mark.parametrize("page", ["adding-a-style.md", "adding-a-body.md", "adding-a-diagnostic.md"])
def test_the_changes_of_a_page_do_what_it_prints(page: str, tmp_path: Path) -> None:
    printed, shown = run_page(page, tmp_path)
    assert printed == shown
