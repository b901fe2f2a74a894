"""Tables whose first column holds names: never cut, and at the cost of the other columns if space is short."""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO
from typing import Final

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

INDENT: Final = "  "
TOTAL_STYLE: Final = "bold"
QUIET_STYLE: Final = "dim"
_UNLIMITED: Final = 10_000


def new_table(*columns: str, right: tuple[int, ...] = (), tight: bool = False) -> Table:
    """An empty table under a rule.

    Args:
        columns: the headings.
        right: columns that are aligned to the right.
        tight: with one blank between columns instead of two.
    """
    # The box adds the second blank.
    padding = (0, 0) if tight else (0, 1, 0, 0)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=padding, show_edge=False, header_style="bold")
    for position, heading in enumerate(columns):
        table.add_column(heading, no_wrap=True, justify="right" if position in right else "left")
    return table


def fitted(width: int, make: Callable[[bool], Table]) -> Table:
    """A table that is at most `width` wide, where that can be.

    Args:
        width: in columns.
        make: makes the table; given True, with more lines in narrower cells.
    """
    table = make(False)
    if natural_width(table) <= width:
        return table
    table = make(True)
    excess = natural_width(table) - width
    names = table.columns[0]
    if excess > 0:
        longest = max(len(str(cell)) for cell in (names.header, *names.cells))
        names.width, names.no_wrap, names.overflow = max(longest - excess, 12), False, "fold"
    return table


def natural_width(table: Table) -> int:
    """How wide a table is if it may."""
    console = Console(file=StringIO(), width=_UNLIMITED)
    return Measurement.get(console, console.options, table).maximum
