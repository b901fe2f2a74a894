"""What the catalogue records about one diagnostic code."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """How bad a finding is. Only errors make a command exit with 1."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """One diagnostic code. A code's meaning never changes, and a retired code is never used again.

    Attributes:
        code: such as `TP012`.
        name: such as `unmatched-pattern`.
        severity: what the finding counts as, unless the place that reports it says otherwise.
        summary: one line.
        explanation: the cause and the way out, in Markdown.
        bad: a plan (or a shell line, or Python) that causes it; empty where none can be shown.
        good: the same, put right.
    """

    code: str
    name: str
    severity: Severity
    summary: str
    explanation: str
    bad: str = ""
    good: str = ""
