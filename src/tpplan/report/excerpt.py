"""The source line under a finding, with carets under the exact token.

In: a span. Out: lines such as

     9 |   model.layers.*.self_atn.q_proj: colwise
       |   ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^ matches no module

Columns are terminal cells: tabs are expanded, wide characters take two cells, and a long line is cut around the token.
"""

from __future__ import annotations

import unicodedata
from typing import Final, NamedTuple

from tpplan.plan import Span

TAB_WIDTH: Final = 4
MAX_WIDTH: Final = 100
_CONTEXT = 30


class Excerpt(NamedTuple):
    """A line ready to print.

    Attributes:
        number: the line's number.
        text: the line, cut and with tabs expanded.
        indent: cells before the first caret.
        width: how many carets.
    """

    number: int
    text: str
    indent: int
    width: int


def excerpt(span: Span) -> Excerpt | None:
    """The line on which `span` starts; None where the source isn't known."""
    line = span.line_text
    if line is None:
        return None
    start = min(span.start.column - 1, len(line))
    end = min(span.end.column - 1, len(line)) if span.end.line == span.start.line else len(line.rstrip())
    cells = _cells(line)
    end = max(end, start)
    first, last = _window(cells, start, end)
    head = "…" if first > 0 else ""
    tail = "…" if last < len(cells) else ""
    indent = len(head) + sum(width for _, width in cells[first:start])
    width = sum(width for _, width in cells[start : min(end, last)])
    return Excerpt(span.start.line, head + "".join(text for text, _ in cells[first:last]) + tail, indent, max(width, 1))


def printable(text: str) -> str:
    """The text with control characters spelled out, so that a plan can't write escape sequences to a terminal."""
    return "".join(character if _is_printable(character) else f"\\x{ord(character):02x}" for character in text)


def _is_printable(character: str) -> bool:
    return unicodedata.category(character) not in ("Cc", "Cs", "Zl", "Zp")


def _cells(line: str) -> list[tuple[str, int]]:
    """What to print for each character, and how many cells it takes."""
    cells: list[tuple[str, int]] = []
    column = 0
    for character in line:
        if character == "\t":
            width = TAB_WIDTH - column % TAB_WIDTH
            cells.append((" " * width, width))
        elif not _is_printable(character):
            width = 1
            cells.append(("�", 1))
        else:
            width = _width(character)
            cells.append((character, width))
        column += width
    return cells


def _width(character: str) -> int:
    if character == "\u200d" or unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _window(cells: list[tuple[str, int]], start: int, end: int) -> tuple[int, int]:
    """The characters to show: all, or as many around the token as fit."""
    if sum(width for _, width in cells) <= MAX_WIDTH:
        return 0, len(cells)
    first = start
    room = _CONTEXT
    while first > 0 and room >= cells[first - 1][1]:
        first -= 1
        room -= cells[first][1]
    last = first
    room = MAX_WIDTH
    while last < len(cells) and room >= cells[last][1]:
        room -= cells[last][1]
        last += 1
    return first, last
