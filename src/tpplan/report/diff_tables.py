"""What changes from one program to another, for people.

in:  a `ProgramDiff`
out: text, or Markdown for a comment on a pull request; one line where nothing changes
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from tpplan.report.estimate_tables import seconds_text
from tpplan.report.grid import QUIET_STYLE, TOTAL_STYLE, fitted, new_table
from tpplan.report.program_diff import ComparedReshard, DiffAmount, ProgramDiff
from tpplan.report.program_page import to_text
from tpplan.report.program_tables import placement_text, sizes_text
from tpplan.report.quantities import NOTHING, bytes_text, count_text

if TYPE_CHECKING:
    from tpplan.compiler.ir.program import ParameterPlacement

_AMOUNTS = "each rank, in a step"
_SPECIAL = re.compile(r"[^\w\s./,:;=%→·∂×()…–−+-]|_")


def render_diff(diff: ProgramDiff, width: int, color: bool) -> str:
    """The diff as text of `width` columns."""
    if not diff.changed:
        return "\n".join([_unchanged(diff, diff.before, diff.after), *diff.notes])
    parts: list[RenderableType] = [Text(f"{diff.before} → {diff.after}: {_on(diff)}", style=TOTAL_STYLE)]
    table = new_table(_AMOUNTS, "before", "after", "", right=(1, 2, 3))
    for amount in _shown(diff.amounts):
        style = "red" if amount.worse else "green" if amount.judged and amount.after < amount.before else ""
        weight = TOTAL_STYLE if amount.judged else QUIET_STYLE if amount.before == amount.after else ""
        table.add_row(*_cells(amount), style=" ".join(filter(None, (weight, style))))
    parts.append(table)
    for heading, rows in _changes(diff):
        parts.append(fitted(width, partial(_table, heading, rows)))
    parts += [Text("\n").join([Text(title, style=TOTAL_STYLE), *map(Text, lines)]) for title, lines in _lists(diff)]
    parts.append(Text(_verdict(diff), style=TOTAL_STYLE))
    return to_text(parts, width, color)


def diff_markdown(diff: ProgramDiff) -> str:
    """The diff for a comment on a pull request; names of the user's are escaped."""
    before, after = _code(diff.before), _code(diff.after)
    if not diff.changed:
        return "\n\n".join([_unchanged(diff, before, after, _code), *map(_code, diff.notes)])
    lines = [f"{before} → {after}: {_on(diff, _code)}. **{_verdict(diff)}**", ""]
    rows = [
        [f"**{_escaped(cell)}**" if amount.judged and cell else _escaped(cell) for cell in _cells(amount)]
        for amount in _shown(diff.amounts)
    ]
    lines += _grid([_AMOUNTS, "before", "after", ""], rows, "---:")
    for heading, changed in _changes(diff):
        cells = [
            [_code(row[0]), *("<br>".join(map(_escaped, cell.split("\n"))) for cell in row[1:])] for row in changed
        ]
        lines += ["", f"<details><summary>{heading}: {len(changed)}</summary>", ""]
        lines += [*_grid([heading, "before", "after"], cells, "---"), "", "</details>"]
    for title, held in _lists(diff):
        lines += ["", f"**{title}**", "", *(f"- {_code(line)}" for line in held)]
    return "\n".join(lines)


def _on(diff: ProgramDiff, quoted: Callable[[str], str] = str) -> str:
    on = f" of {quoted(diff.gpu)}, batch {diff.batch} × {diff.sequence:,}" if diff.gpu else ""
    return f"{quoted(diff.model)} on {count_text(diff.size, 'rank')}{on}"


def _unchanged(diff: ProgramDiff, before: str, after: str, quoted: Callable[[str], str] = str) -> str:
    return f"{before} → {after}: no change for {_on(diff, quoted)}."


def _verdict(diff: ProgramDiff) -> str:
    worse = ", ".join(diff.worse)
    return f"Worse: {worse}." if worse else "Nothing got worse."


def _shown(amounts: Iterable[DiffAmount]) -> Iterator[DiffAmount]:
    """Those that there are; of parts, those that change."""
    return (a for a in amounts if (a.before or a.after) and (a.judged or a.before != a.after))


def _cells(amount: DiffAmount) -> tuple[str, str, str, str]:
    def text(value: float) -> str:
        if amount.unit == "seconds":
            return seconds_text(value)
        return bytes_text(int(value)) if amount.unit == "bytes" else f"{value:,}"

    change = amount.after - amount.before
    sign = "+" if change > 0 else "−"
    if not change:
        told = "="
    elif amount.unit == "collectives" or not amount.before:
        told = f"{sign}{text(abs(change))}"
    else:
        share = abs(change) / amount.before
        told = f"{sign}{share:.1%}" if share >= 0.0005 else f"{sign}{100 * share:.1g}%"
    return amount.name, text(amount.before), text(amount.after), told


Row = tuple[str, str, str]


def _changes(diff: ProgramDiff) -> Iterator[tuple[str, list[Row]]]:
    """Tables: a heading, and rows of a place with what is there before and after."""

    def sized(held: ParameterPlacement) -> str:
        return f"{placement_text(held)}\n{sizes_text(held, diff.size)}"

    parameters = [(_counted(c.name, c.count), sized(c.before), sized(c.after)) for c in diff.parameters]
    reshards = [
        (_counted(f"{c.module or 'the model'} {c.way} {c.path}", c.count), _reshard(c.before), _reshard(c.after))
        for c in diff.reshards
    ]
    yield from ((h, r) for h, r in (("parameters", parameters), ("communication", reshards)) if r)


def _reshard(held: ComparedReshard | None) -> str:
    if held is None:
        return NOTHING
    lines = [held.moved]
    for way, name, count, sent in held.ways:
        times = f"{count} " if count > 1 else ""
        if name != "none":
            lines.append(f"{way} {times}{name}{f' {bytes_text(sent)}' if sent else ''}")
    return "\n".join(lines)


def _lists(diff: ProgramDiff) -> Iterator[tuple[str, Sequence[str]]]:
    named = (
        ("New warnings", diff.new_warnings),
        ("Warnings that are gone", diff.gone_warnings),
        ("Differs, too", diff.others),
        ("Not compared", diff.notes),
    )
    yield from ((title, lines) for title, lines in named if lines)


def _counted(name: str, count: int) -> str:
    return f"{name} × {count}" if count > 1 else name


def _table(heading: str, rows: Iterable[Row], tight: bool) -> Table:
    table = new_table(heading, "before", "after", tight=tight)
    for row in rows:
        table.add_row(*row)
    return table


def _grid(headings: Sequence[str], rows: Iterable[Sequence[str]], align: str) -> list[str]:
    lines = [f"| {' | '.join(headings)} |", f"| --- |{f' {align} |' * (len(headings) - 1)}"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows)]


def _code(text: str) -> str:
    """As code; by entities where it holds what Markdown or a table would read otherwise."""
    line = " ".join(text.split())
    return f"`{line}`" if line and not re.search(r"[`|<>&\\]", line) else f"<code>{_escaped(line)}</code>"


def _escaped(text: str) -> str:
    """Text in which neither Markdown nor HTML finds anything to read."""
    return _SPECIAL.sub(lambda found: f"&#{ord(found[0])};", " ".join(text.split()))


__all__ = ["diff_markdown", "render_diff"]
