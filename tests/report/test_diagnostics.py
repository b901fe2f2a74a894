"""Each format's rendering of the same findings, and what goes for all of them."""

import json
import os
import re
from pathlib import Path

import pytest

import tpplan
from tpplan.plan import Diagnostic, Severity, check_plan
from tpplan.report.diagnostics import Format, render, summary, wants_color

SNAPSHOTS = Path(__file__).parent / "snapshots"
UPDATE = bool(os.environ.get("UPDATE_SNAPSHOTS"))
MIXED = """\
version: 2
modules:
  日本.*.mlp: colwize
  a..b: {style: none, input: replicate}
  lm_head: {styl: colwise}
"""


def mixed_findings() -> list[Diagnostic]:
    _, findings = check_plan(MIXED)
    warning = Diagnostic(
        "TP104", "`lm_head` is gathered, at 100% of its size", subject="lm_head", help="pin it, or not"
    )
    note = Diagnostic("TP120", "3 parameters stay whole", notes=("12 MiB a rank", "of 40 MiB"))
    return [note, warning, *findings]


@pytest.mark.parametrize("format", list(Format))
@pytest.mark.parametrize("color", [False, True], ids=["plain", "color"])
def test_the_rendering_is_as_recorded(format: Format, color: bool) -> None:
    if color and format in (Format.JSON, Format.GITHUB, Format.SARIF):
        assert render(mixed_findings(), format, color=True) == render(mixed_findings(), format)
        return
    path = SNAPSHOTS / f"{format}{'-color' if color else ''}.txt"
    text = render(mixed_findings(), format, color=color).replace(tpplan.__version__, "VERSION") + "\n"
    if UPDATE:
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def test_the_order_is_that_of_the_file_and_what_has_no_place_comes_last() -> None:
    found = mixed_findings()
    assert render(found) == render(found[::-1])
    places = [record["line"] for record in json.loads(render(found, Format.JSON))]
    assert places == [1, 3, 4, 4, 5, 5, None, None]


def test_a_help_is_shown_once() -> None:
    """As of another model's plan, each of whose patterns matches nothing."""
    _, found = check_plan({"version": 1, "modules": {"a": "x", "b": "x", "c": "colwize"}})
    texts = [render(found), str(tpplan.PlanError(found))]
    for text in texts:
        assert text.count("use `colwise`") == 1 and text.count("did you mean `colwise`?") == 1
        assert text.count("TP005") == 3
    assert all(record["help"] for record in json.loads(render(found, Format.JSON)))


def test_without_colour_there_are_no_escapes() -> None:
    assert "\x1b" not in render(mixed_findings())
    plain = re.sub(r"\x1b\[[0-9;]*m", "", render(mixed_findings(), color=True))
    assert plain == render(mixed_findings())


KEYS = "code name severity message file line column end_line end_column subject label help notes"


def test_json_is_an_array_of_objects_with_every_key() -> None:
    records = json.loads(render(mixed_findings(), Format.JSON))
    assert all(list(record) == KEYS.split() for record in records)
    assert json.loads(render([], Format.JSON)) == []


def test_github_properties_and_data_are_escaped() -> None:
    finding = Diagnostic("TP107", "50% of a,b: wrong\nin line 2", subject="model.norm", help="x")
    assert render([finding], Format.GITHUB) == (
        "::error title=TP107 body-not-local::model.norm: 50%25 of a,b: wrong%0Ain line 2%0Ahelp: x"
    )
    _, findings = check_plan({"version": 1})
    assert "\n" not in render(findings, Format.GITHUB)


def test_a_message_can_t_break_out_of_its_line() -> None:
    finding = Diagnostic("TP107", "one\ntwo\x1b[2J", subject="a\nb")
    assert render([finding], Format.CONCISE) == "a\\x0ab: TP107 body-not-local: one\\x0atwo\\x1b[2J"


@pytest.mark.parametrize(
    ("severities", "text"),
    [
        ([], "Found no problems."),
        (["error"], "Found 1 error."),
        (["warning", "error", "error"], "Found 2 errors, 1 warning."),
        (["note", "note", "warning"], "Found 1 warning, 2 notes."),
    ],
)
def test_the_closing_line_counts_by_severity(severities: list[str], text: str) -> None:
    assert summary(Diagnostic("TP101", "x", severity=Severity(severity)) for severity in severities) == text


@pytest.mark.parametrize(
    ("terminal", "environment", "expected"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"NO_COLOR": "1"}, False),
        (True, {"NO_COLOR": ""}, True),
        (True, {"TERM": "dumb"}, False),
    ],
)
def test_colour_is_for_terminals_only(
    terminal: bool, environment: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import io

    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return terminal

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert wants_color(Stream()) is expected
