"""The table of `explain --premises`.

in:  premises, which `tpplan.calls.premises` makes
out: text
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from tpplan.report.grid import new_table
from tpplan.report.program_page import to_text

if TYPE_CHECKING:
    from tpplan.calls.premises import Premise


def render_premises(premises: Iterable[Premise], *, width: int = 120, color: bool = False) -> str:
    """One premise in a row, with the line of the code that makes it."""
    table = new_table("premise of", "condition", "line")
    for column in table.columns[1:]:
        column.no_wrap = False
    table.columns[1].overflow = table.columns[2].overflow = "fold"
    for premise in premises:
        table.add_row(premise.kind, premise.text, premise.line)
    return to_text([table], width=width, color=color)


__all__ = ["render_premises"]
