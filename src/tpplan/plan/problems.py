"""Collecting every mistake of a plan, instead of stopping at the first."""

from __future__ import annotations

from tpplan.plan.diagnostic import Diagnostic, Severity
from tpplan.plan.nodes import Node
from tpplan.plan.positions import Span


class Stop(Exception):
    """Nothing more can be read from this file; what's wrong has been collected already."""


class Problems:
    """The findings so far."""

    def __init__(self) -> None:
        self.diagnostics: list[Diagnostic] = []

    def add(
        self,
        code: str,
        message: str,
        at: Node | Span | None = None,
        *,
        label: str = "",
        help: str | None = None,
        notes: tuple[str, ...] = (),
        subject: str | None = None,
    ) -> None:
        """Note a finding at a node or a span."""
        span = at if at is None or isinstance(at, Span) else at.span
        about = subject or (None if at is None or isinstance(at, Span) else at.path or None)
        self.diagnostics.append(Diagnostic(code, message, span, label, help, notes, about))

    def stop(self, code: str, message: str, at: Node | Span | None = None, **details: str) -> Stop:
        """Note a finding that ends the reading; to be raised."""
        self.add(code, message, at, label=details.get("label", ""), help=details.get("help"))
        return Stop()

    @property
    def failed(self) -> bool:
        """Whether any finding is an error."""
        return any(diagnostic.severity is Severity.ERROR for diagnostic in self.diagnostics)
