"""The exceptions that tpplan raises on purpose."""

from __future__ import annotations

import re
from collections.abc import Iterable

from tpplan.plan.catalogue import CATALOGUE, Severity
from tpplan.plan.diagnostic import Diagnostic

_FINDING = re.compile(r"^(?P<code>TP\d{3}) [a-z-]+: (?P<message>.*)$")
_PART = re.compile(r"^  (?P<kind>help|note): (?P<text>.*)$")


class TpplanError(Exception):
    """The base of every exception that tpplan raises on purpose.

    Its text is a finding's: `TP138 second-derivative: …`, with its way out and its notes on lines of their own.
    """

    @property
    def diagnostics(self) -> tuple[Diagnostic, ...]:
        """The findings, as data; none of an error that has no code, such as one of a wrong argument."""
        return tuple(_findings(str(self)))

    @property
    def code(self) -> str | None:
        """The code of the first error, such as `TP138`; None if it has none."""
        return next((found.code for found in self.diagnostics if found.severity is Severity.ERROR), None)

    @property
    def severity(self) -> Severity:
        """An error's, whatever warnings it has beside."""
        return Severity.ERROR


class PlanError(TpplanError):
    """A plan has mistakes. All of them are in `diagnostics`, in the order of the file."""

    def __init__(self, diagnostics: Iterable[Diagnostic]) -> None:
        """Hold every finding, warnings included."""
        super().__init__(tuple(sorted(diagnostics, key=lambda diagnostic: diagnostic.sort_key)))

    @property
    def diagnostics(self) -> tuple[Diagnostic, ...]:
        """The findings."""
        return self.args[0]

    def __str__(self) -> str:
        """Every finding in one line, each followed by its help and notes."""
        return "\n".join(diagnostic.text for diagnostic in self.diagnostics)

    @property
    def errors(self) -> tuple[Diagnostic, ...]:
        """The findings that are errors."""
        return tuple(diagnostic for diagnostic in self.diagnostics if diagnostic.severity is Severity.ERROR)


class CompileError(PlanError):
    """A plan and a model don't fit together."""


class InternalError(TpplanError):
    """A bug in tpplan itself, which no plan or model should be able to cause."""

    def __str__(self) -> str:
        """The message, and whose fault it is."""
        return (
            f"TP199 internal-error: {super().__str__()}\nThis is a bug in tpplan, not in your plan; please report it."
        )


def _findings(text: str) -> Iterable[Diagnostic]:
    """The findings of a text in a finding's form."""
    code, message, parts = "", "", dict[str, list[str]]()
    for line in text.splitlines():
        begun, part = _FINDING.match(line), _PART.match(line)
        if begun is not None and begun["code"] in CATALOGUE:
            if code:
                yield _finding(code, message, parts)
            code, message, parts = begun["code"], begun["message"], {}
        elif part is not None:
            parts.setdefault(part["kind"], []).append(part["text"])
    if code:
        yield _finding(code, message, parts)


def _finding(code: str, message: str, parts: dict[str, list[str]]) -> Diagnostic:
    return Diagnostic(code, message, help="; ".join(parts.get("help", [])) or None, notes=tuple(parts.get("note", [])))
