"""A finding about a plan, as plain data; `tpplan.report` renders it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, cast

from tpplan.plan.catalogue import CATALOGUE, Severity
from tpplan.plan.positions import Span

FROM_CATALOGUE: Final = cast("Severity", None)


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One finding. The message alone suffices; the label says what is wrong at the caret.

    Attributes:
        code: a code of the catalogue, such as `TP012`.
        message: one line, without the place.
        span: the token at fault, where there is one.
        label: a few words for beside the caret.
        help: the way out, as an instruction.
        notes: further facts, one line each.
        subject: what it's about when there's no span, such as a module's name.
        severity: the catalogue's unless given.
    """

    code: str
    message: str
    span: Span | None = None
    label: str = ""
    help: str | None = None
    notes: tuple[str, ...] = ()
    subject: str | None = None
    severity: Severity = FROM_CATALOGUE

    def __post_init__(self) -> None:
        """Take the catalogue's severity where none was given."""
        if self.severity is FROM_CATALOGUE:
            object.__setattr__(self, "severity", CATALOGUE[self.code].severity)

    @property
    def name(self) -> str:
        """The code's name in the catalogue, such as `unmatched-pattern`."""
        return CATALOGUE[self.code].name

    @property
    def place(self) -> str:
        """The file, line and column, else the subject, else nothing."""
        return str(self.span) if self.span is not None else self.subject or ""

    @property
    def title(self) -> str:
        """The code and its name, with the severity in front unless it's an error."""
        severity = "" if self.severity is Severity.ERROR else f"{self.severity} "
        return f"{severity}{self.code} {self.name}"

    @property
    def headline(self) -> str:
        """The finding in one line, with its place, code, name and message."""
        prefix = f"{self.place}: " if self.place else ""
        return f"{prefix}{self.title}: {self.message}"

    @property
    def text(self) -> str:
        """The finding with its way out and its notes, a line each."""
        way_out = [f"  help: {self.help}"] if self.help else []
        return "\n".join([self.headline, *way_out, *(f"  note: {note}" for note in self.notes)])

    @property
    def warned(self) -> str:
        """The text for a warning of Python's, which says itself that it is one: it begins with the code."""
        return self.text.removeprefix("warning ")

    @property
    def without_source(self) -> Diagnostic:
        """The same without the text of the plan that its span points into, which isn't needed to tell the place."""
        return self if self.span is None else replace(self, span=replace(self.span, source=None))

    @property
    def sort_key(self) -> tuple[str, int, int, str, str, str]:
        """Order by file, line, column and code; findings without a place come last within their file."""
        if self.span is None:
            return ("\U0010ffff", 0, 0, self.code, self.subject or "", self.message)
        return (self.span.file, self.span.start.line, self.span.start.column, self.code, "", self.message)


def told_once(diagnostics: Iterable[Diagnostic]) -> tuple[Diagnostic, ...]:
    """Findings as people read them, one after the other: a help that another with the same code has had is left out."""
    given = set[tuple[str, str | None]]()
    told: list[Diagnostic] = []
    for held in diagnostics:
        way_out = (held.code, held.help)
        told.append(replace(held, help=None) if way_out in given else held)
        given.add(way_out)
    return tuple(told)
