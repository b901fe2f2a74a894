from pathlib import Path

from tpplan.plan import CATALOGUE
from tpplan.report.catalogue import entry_text, index_text, markdown_page

PAGE = Path(__file__).parents[2] / "docs" / "diagnostics.md"


def test_the_committed_page_is_fresh() -> None:
    assert PAGE.read_text(encoding="utf-8") == markdown_page(CATALOGUE.values()) + "\n", "run `make docs`"


def test_the_list_has_a_line_for_each_code() -> None:
    lines = index_text(CATALOGUE.values()).splitlines()
    assert [line[:5] for line in lines] == list(CATALOGUE)


def test_an_entry_shows_the_cause_and_both_examples() -> None:
    text = entry_text(CATALOGUE["TP012"])
    assert text.startswith("TP012 unmatched-pattern (error)\n\nA pattern that matches no module.\n\n")
    assert "Wrong:\n\n    version: 1\n" in text and "Right:\n\n    version: 1\n" in text
    assert all(len(line) <= 104 for line in text.splitlines())
