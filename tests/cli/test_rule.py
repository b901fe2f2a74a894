import json

import pytest

from tpplan.cli.main import main
from tpplan.plan import CATALOGUE
from tpplan.plan.plan_keys import json_schema

CODES = ["TP012", "tp012", "tp12", "TP-12", "12", " Tp0012 ", "unmatched-pattern", "Unmatched-Pattern"]
UNKNOWN = [("TP9999", ""), ("tp", ""), ("TP998", "TP199"), ("unmatched-patern", "unmatched-pattern")]


@pytest.mark.parametrize("wanted", CODES)
def test_a_code_is_found_by_number_and_by_name(wanted: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rule", wanted]) == 0
    assert capsys.readouterr().out.startswith("TP012 unmatched-pattern (error)\n")


@pytest.mark.parametrize(("wanted", "hint"), UNKNOWN)
def test_an_unknown_code_exits_with_2_and_a_hint(wanted: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rule", wanted]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and hint in captured.err


def test_without_a_code_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rule"]) == 0
    assert [line[:5] for line in capsys.readouterr().out.splitlines()] == list(CATALOGUE)


def test_all_entries_can_be_read_in_one_go(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rule", "--all"]) == 0
    text = capsys.readouterr().out
    assert all(f"{entry.code} {entry.name} ({entry.severity})" in text for entry in CATALOGUE.values())


def test_the_schema_is_printed_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == json_schema()
