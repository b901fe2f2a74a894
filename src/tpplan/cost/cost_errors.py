"""What keeps a cost from being told."""

from __future__ import annotations

from collections.abc import Iterable

from tpplan.plan import TpplanError
from tpplan.plan.nearest import did_you_mean


class CostError(TpplanError):
    """A cost can't be told: an unknown GPU, optimizer or kind of checkpointing, or a program that wasn't measured."""


def unknown(what: str, given: str, known: Iterable[str], way_out: str = "") -> CostError:
    """The error for a name that isn't known; it lists those that are."""
    names = [*known]
    nearest = did_you_mean(given, names)
    hint = f"did you mean `{nearest}`? " if nearest else ""
    listed = f"{what}s are {', '.join(names)}" if not what.startswith("kind") else f"there are {', '.join(names)}"
    return CostError.of(
        "TP220", f"there is no {what} `{given}`", help=f"{hint}{listed}{'; ' + way_out if way_out else ''}"
    )


__all__ = ["CostError", "unknown"]
