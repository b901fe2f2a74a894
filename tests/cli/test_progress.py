"""Progress is a line on a terminal that goes away; a pipe sees none of it, and Ctrl-C ends it."""

from __future__ import annotations

import io
import sys
import time
from contextlib import redirect_stderr

import pytest

from tpplan.cli import suggest
from tpplan.cli.main import main
from tpplan.progress import advance, doing, shown, tell, wants_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    for name in ("NO_COLOR", "CI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    return Terminal()


@doing("placing collectives")
def place() -> None:
    advance(1, 4)
    time.sleep(0.25)  # the line is drawn ten times a second


def test_steps_inside_of_each_other_are_a_line(terminal: Terminal, capsys: pytest.CaptureFixture[str]) -> None:
    with redirect_stderr(terminal), shown():
        with doing("finding a plan"):
            place()
            tell("weighing plans")
        print("the plan")
        print("a note", file=sys.stderr)
    said = terminal.getvalue()
    assert "finding a plan: placing collectives" in said and "weighing plans" in said
    assert said.endswith("a note\n")
    assert capsys.readouterr().out == "the plan\n"


def test_the_line_is_gone_before_something_is_written(terminal: Terminal) -> None:
    with redirect_stderr(terminal), shown(), doing("placing collectives"):
        print("a note", file=sys.stderr)
        line, _, after = terminal.getvalue().rpartition("a note")
        assert line.endswith("\x1b[2K") and after == "\n"  # the terminal's line is empty then


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("CI", "true"), ("TERM", "dumb")])
def test_nothing_is_shown_where_nobody_looks(
    name: str, value: str, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert wants_progress(terminal) and not wants_progress(io.StringIO())
    monkeypatch.setenv(name, value)
    with redirect_stderr(terminal), shown():
        place()
    assert not terminal.getvalue()


def test_ctrl_c_ends_it(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: object) -> int:
        with doing("finding a plan"):
            raise KeyboardInterrupt

    monkeypatch.setattr(suggest, "run", interrupted)
    with redirect_stderr(terminal):
        assert main(["suggest", "--model", "hf:llama"]) == 130
    said = terminal.getvalue()
    assert "finding a plan" in said and said.endswith("tpplan: interrupted\n") and "Traceback" not in said
    place()
    assert terminal.getvalue() == said
