"""TP122: what is wrong with a `--model`, and how it should be written."""

from __future__ import annotations

from tpplan.plan import Diagnostic, PlanError


def problem(message: str, way_out: str) -> PlanError:
    """The finding, to be raised."""
    return PlanError([Diagnostic(code="TP122", message=message, help=way_out)])


def first_line(error: BaseException) -> str:
    """What an exception says, in a line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


__all__ = ["first_line", "problem"]
