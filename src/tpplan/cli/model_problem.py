"""TP122: what is wrong with a `--model`, and how it should be written."""

from __future__ import annotations

from tpplan.hf.library import first_line
from tpplan.plan import PlanError


def problem(message: str, way_out: str) -> PlanError:
    """The finding, to be raised."""
    return PlanError.of("TP122", message, help=way_out)


__all__ = ["first_line", "problem"]
