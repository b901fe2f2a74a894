"""The exceptions that tpplan raises on purpose."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

from tpplan.plan.catalogue import Severity
from tpplan.plan.diagnostic import Diagnostic, told_once


class TpplanError(Exception):
    """The base of every exception that tpplan raises on purpose: findings, or a text for what has no code."""

    def __init__(self, found: str | Iterable[Diagnostic] = "") -> None:
        """Hold every finding, warnings included."""
        super().__init__(found if isinstance(found, str) else tuple(found))

    @classmethod
    def of(
        cls,
        code: str,
        message: str,
        *,
        help: str | None = None,
        notes: Iterable[str] = (),
        subject: str | None = None,
        cause: TpplanError | None = None,
    ) -> Self:
        """An error with one finding, and after it those of the `cause` that it follows from."""
        found = Diagnostic(code, message, help=help, notes=tuple(notes), subject=subject)
        return cls([found, *(() if cause is None else cause.diagnostics)])

    def __reduce__(self) -> tuple[object, ...]:
        """Pickled by what it holds, whatever arguments its class takes."""
        return _made_again, (type(self), self.args), self.__dict__ or None

    @property
    def diagnostics(self) -> tuple[Diagnostic, ...]:
        """The findings; none of an error that has no code, such as one of a wrong argument."""
        return () if isinstance(self.args[0], str) else self.args[0]

    @property
    def code(self) -> str | None:
        """The code of the first error, such as `TP138`; None if it has none."""
        return next((found.code for found in self.diagnostics if found.severity is Severity.ERROR), None)

    @property
    def severity(self) -> Severity:
        """An error's, whatever warnings it has beside."""
        return Severity.ERROR

    def __str__(self) -> str:
        """Every finding in one line, each followed by its help and notes."""
        return "\n".join(diagnostic.text for diagnostic in told_once(self.diagnostics)) or super().__str__()


def _made_again(kind: type[TpplanError], held: tuple[object, ...]) -> TpplanError:
    return kind.__new__(kind, *held)


class ArgumentError(TpplanError, TypeError, ValueError):
    """A wrong argument of a public function; the message names it, says what came and what is taken."""


class PlanError(TpplanError):
    """A plan has mistakes. All of them are in `diagnostics`, in the order of the file."""

    def __init__(self, diagnostics: Iterable[Diagnostic]) -> None:
        """Hold every finding, warnings included."""
        super().__init__(sorted(diagnostics, key=lambda diagnostic: diagnostic.sort_key))

    @property
    def errors(self) -> tuple[Diagnostic, ...]:
        """The findings that are errors."""
        return tuple(diagnostic for diagnostic in self.diagnostics if diagnostic.severity is Severity.ERROR)


class CompileError(PlanError):
    """A plan and a model don't fit together."""


class InternalError(TpplanError):
    """A bug in tpplan itself, which no plan or model should be able to cause."""

    def __init__(self, message: str) -> None:
        """Say what was met."""
        super().__init__(message)

    @property
    def diagnostics(self) -> tuple[Diagnostic, ...]:
        """The message, and whose fault it is."""
        return (Diagnostic("TP199", self.args[0], help="this is a bug in tpplan, not in your plan; please report it"),)
