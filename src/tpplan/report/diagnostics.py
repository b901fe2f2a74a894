"""Rendering findings: in full with the source line, in one line each, as JSON or SARIF, and as GitHub annotations."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import Final, TextIO

from tpplan.plan import Diagnostic, Severity
from tpplan.plan.diagnostic import told_once
from tpplan.report.excerpt import excerpt, printable
from tpplan.report.sarif import in_repository, render_sarif

_RESET: Final = "\x1b[0m"
_BOLD: Final = "\x1b[1m"
_GUTTER: Final = "\x1b[1;34m"
_HELP: Final = "\x1b[1;36m"
_COLORS: Final = {Severity.ERROR: "\x1b[1;31m", Severity.WARNING: "\x1b[1;33m", Severity.NOTE: "\x1b[1;34m"}
_GITHUB_COMMANDS: Final = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.NOTE: "notice"}


class Format(StrEnum):
    """How findings are written."""

    FULL = "full"
    CONCISE = "concise"
    JSON = "json"
    GITHUB = "github"
    SARIF = "sarif"


def render(diagnostics: Iterable[Diagnostic], format: Format = Format.FULL, *, color: bool = False) -> str:
    """The findings as text, by file, line, column and code; empty if there are none, unless it's JSON or SARIF."""
    ordered = sorted(diagnostics, key=lambda diagnostic: diagnostic.sort_key)
    return _RENDERERS[format](ordered, color)


def summary(diagnostics: Iterable[Diagnostic]) -> str:
    """The closing line, such as `Found 2 errors, 1 warning`."""
    counts = Counter(diagnostic.severity for diagnostic in diagnostics)
    parts = [
        f"{counts[severity]} {severity}{'s' * (counts[severity] != 1)}" for severity in Severity if counts[severity]
    ]
    return f"Found {', '.join(parts)}." if parts else "Found no problems."


def wants_color(stream: TextIO) -> bool:
    """Whether to colour what's written to `stream`: only a terminal, and not under NO_COLOR."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and stream.isatty()


def to_record(diagnostic: Diagnostic) -> dict[str, object]:
    """The finding as plain data for JSON. Lines and columns count from 1; the end is just behind the token."""
    span = diagnostic.span
    return {
        "code": diagnostic.code,
        "name": diagnostic.name,
        "severity": diagnostic.severity.value,
        "message": diagnostic.message,
        "file": span.file if span else None,
        "line": span.start.line if span else None,
        "column": span.start.column if span else None,
        "end_line": span.end.line if span else None,
        "end_column": span.end.column if span else None,
        "subject": diagnostic.subject,
        "label": diagnostic.label or None,
        "help": diagnostic.help,
        "notes": list(diagnostic.notes),
    }


def _render_full(diagnostics: Sequence[Diagnostic], color: bool) -> str:
    return "\n\n".join(_full(held, _Paint(color, _COLORS[held.severity])) for held in told_once(diagnostics))


def _render_concise(diagnostics: Sequence[Diagnostic], color: bool) -> str:
    return "\n".join(_headline(diagnostic, _Paint(color, _COLORS[diagnostic.severity])) for diagnostic in diagnostics)


def _render_json(diagnostics: Sequence[Diagnostic], color: bool) -> str:
    import json

    return json.dumps([to_record(diagnostic) for diagnostic in diagnostics], indent=2, ensure_ascii=False)


def _render_github(diagnostics: Sequence[Diagnostic], color: bool) -> str:
    return "\n".join(_github(diagnostic) for diagnostic in diagnostics)


def _render_sarif(diagnostics: Sequence[Diagnostic], color: bool) -> str:
    return render_sarif(diagnostics)


_RENDERERS: Final[dict[Format, Callable[[Sequence[Diagnostic], bool], str]]] = {
    Format.FULL: _render_full,
    Format.CONCISE: _render_concise,
    Format.JSON: _render_json,
    Format.GITHUB: _render_github,
    Format.SARIF: _render_sarif,
}


class _Paint:
    """Colours text, or leaves it alone."""

    def __init__(self, color: bool, severity: str) -> None:
        self.color = color
        self.severity = severity

    def __call__(self, text: str, style: str | None = None) -> str:
        return f"{style or self.severity}{text}{_RESET}" if self.color else text


def _headline(diagnostic: Diagnostic, paint: _Paint) -> str:
    place = f"{paint(printable(diagnostic.place), _BOLD)}: " if diagnostic.place else ""
    return f"{place}{paint(diagnostic.title)}: {printable(diagnostic.message)}"


def _full(diagnostic: Diagnostic, paint: _Paint) -> str:
    lines = [_headline(diagnostic, paint)]
    shown = excerpt(diagnostic.span) if diagnostic.span else None
    if shown:
        gutter = " " * len(str(shown.number))
        label = f" {printable(diagnostic.label)}" if diagnostic.label else ""
        carets = paint("^" * shown.width + label)
        bar = paint("|", _GUTTER)
        lines.append(f"{gutter} {bar}")
        lines.append(f"{paint(str(shown.number), _GUTTER)} {bar} {shown.text}".rstrip())
        lines.append(f"{gutter} {bar} {' ' * shown.indent}{carets}")
        lines.append(f"{gutter} {bar}")
    if diagnostic.help:
        lines.append(f"{paint('help:', _HELP)} {printable(diagnostic.help)}")
    lines.extend(f"{paint('note:', _BOLD)} {printable(note)}" for note in diagnostic.notes)
    return "\n".join(lines)


def _github(diagnostic: Diagnostic) -> str:
    span = diagnostic.span
    properties: dict[str, object] = {}
    if span:
        properties |= {"file": in_repository(span.file), "line": span.start.line, "col": span.start.column}
        properties |= {"endLine": span.end.line, "endColumn": max(span.end.column - 1, 1)}
    properties["title"] = f"{diagnostic.code} {diagnostic.name}"
    written = ",".join(f"{key}={_escape_property(str(value))}" for key, value in properties.items())
    about = f"{diagnostic.subject}: " if (span is None or span.source is None) and diagnostic.subject else ""
    lines = [about + diagnostic.message]
    if diagnostic.help:
        lines.append(f"help: {diagnostic.help}")
    lines.extend(f"note: {note}" for note in diagnostic.notes)
    text = _escape_data("\n".join(lines))
    return f"::{_GITHUB_COMMANDS[diagnostic.severity]} {written}::{text}"


def _escape_data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escape_property(text: str) -> str:
    return _escape_data(text).replace(":", "%3A").replace(",", "%2C")
