"""The exceptions that tpplan raises on purpose."""

from __future__ import annotations

from collections.abc import Iterable

from tpplan.plan.catalogue import Severity
from tpplan.plan.diagnostic import Diagnostic


class TpplanError(Exception):
    """The base of every exception that tpplan raises on purpose."""


class PlanError(TpplanError):
    """A plan has mistakes. All of them are in `diagnostics`, in the order of the file."""

    def __init__(self, diagnostics: Iterable[Diagnostic]) -> None:
        """Hold every finding, warnings included."""
        self.diagnostics = tuple(sorted(diagnostics, key=lambda diagnostic: diagnostic.sort_key))
        super().__init__(self.diagnostics)

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
