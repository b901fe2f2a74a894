"""What is said when a model can't be initialised as the stock model is."""

from __future__ import annotations

from tpplan.plan import Diagnostic, PlanError, Severity

UNKNOWN, OTHER, APART = "TP143", "TP144", "TP145"
BUILD = "pass what makes the stock model: tpplan.init_weights(model, build=lambda: Model(…))"
_SHOWN = 20
_UNSHARDED = "initialise the stock model, save it, and load that: tpplan.load_weights(model, folder)"


class InitializationError(PlanError):
    """A model can't be initialised as the stock model is; all findings are in `diagnostics`."""


def finding(
    code: str, message: str, way_out: str, *notes: str, severity: Severity = Severity.ERROR, subject: str | None = None
) -> Diagnostic:
    """A finding, with so many notes that they can be read."""
    shown = notes if len(notes) <= _SHOWN else (*notes[:_SHOWN], f"and {len(notes) - _SHOWN} more")
    return Diagnostic(code=code, message=message, help=way_out, notes=tuple(shown), severity=severity, subject=subject)


def problem(code: str, message: str, way_out: str, *notes: str) -> InitializationError:
    """An error with one finding."""
    return InitializationError([finding(code, message, way_out, *notes)])


def cannot(what: str, *notes: str) -> InitializationError:
    """That a constructor does what can't be recorded."""
    message = f"the stock model's constructor {what}, which can't be recorded"
    return problem(UNKNOWN, message, _UNSHARDED, *notes)


__all__ = ["APART", "BUILD", "OTHER", "UNKNOWN", "InitializationError", "cannot", "finding", "problem"]
