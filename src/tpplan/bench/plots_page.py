"""Results of benchmarks as one HTML page: bars of medians with quartiles, tables to sort, machine and versions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Any

from tpplan.bench.result_tables import tables_of, verdicts
from tpplan.bench.table import Table
from tpplan.report.html_parts import Cell, html_card, html_row, html_table, whole_page

_STYLE = """\
.plot{width:100%;height:auto;background:var(--box);border:1px solid var(--line);border-radius:.5rem;margin:.3rem 0}
.plot figcaption{padding:.4rem .5rem 0;font:600 .8rem system-ui,sans-serif}.plot svg{display:block;width:100%}
.plot text{font:12px system-ui,sans-serif;fill:var(--ink)}.plot .quiet{fill:var(--quiet)}
.plot rect{fill:var(--compute)}.plot .tpplan rect{fill:var(--accent)}.plot line{stroke:var(--ink)}
.plots{display:grid;gap:.6rem;grid-template-columns:repeat(auto-fit,minmax(min(100%,26rem),1fr))}"""
_BAR, _LEFT, _END, _WHOLE, _LETTER = 22, 100, 130, 500, 6.4
Row = dict[str, Any]


def html_of(results: Sequence[dict[str, Any]]) -> str:
    """The page.

    Args:
        results: as `running.run` returns them, in one run or several.
    """
    environment = results[0]["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    told = f"{environment['date']}, Python {environment['python']}, {versions}"
    cards = {
        "processor": environment["processor"], "cores": str(environment["cores"]), "GPU": environment["gpu"],
        "load before": str(environment["load"]),
    }  # fmt: skip
    header = f"<h1>tpplan bench</h1><p>{escape(told)}</p>"
    shown = "".join(html_card(what, held) for what, held in cards.items())
    parts = [f'<div class="cards">{shown}</div>', *(part for result in results for part in _result(result))]
    return whole_page("tpplan bench", header, "\n".join(parts), _STYLE)


def _result(result: dict[str, Any]) -> Iterator[str]:
    name = result["benchmark"]
    plots = [_plot(title, rows) for title, rows in _groups(result["rows"])]
    if plots:
        yield f'<h2>{escape(name)}: medians, with the quartiles of their ratios</h2><div class="plots">'
        yield "".join(plots) + "</div>"
    for number, table in enumerate(tables_of(result)):
        yield _table(table, f"{name}-{number}")
    yield "".join(f"<p>{escape(line)}</p>" for line in verdicts(result))


def _groups(rows: Iterable[Row]) -> Iterator[tuple[str, list[Row]]]:
    """Rows that are held against each other: forms that ran one way."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if {"milliseconds", "ratio", "low", "high", "form", "way"} <= row.keys():
            title = ", ".join(str(row[key]) for key in ("part", "model", "way") if key in row)
            title += f", batch {row['batch']}" if "batch" in row else ""
            groups.setdefault(title, []).append(row)
    yield from groups.items()


def _plot(title: str, rows: Sequence[Row]) -> str:
    """Bars of milliseconds; whiskers are the quartiles of the ratio, on the bar's own scale."""
    most = max(row["milliseconds"] * max(1.0, row["high"] / row["ratio"]) for row in rows)
    height = _BAR * len(rows) + 8
    left = max(_LEFT, 16 + round(_LETTER * max(len(row["form"]) for row in rows)))
    width = _WHOLE - left - _END
    label = escape(f"{title}: " + ", ".join(f"{row['form']} {row['milliseconds']:.2f} ms" for row in rows))
    parts = [f'<figure class="plot"><figcaption>{escape(title)}</figcaption>']
    parts.append(f'<svg viewBox="0 0 {_WHOLE} {height}" role="img" aria-label="{label}">')
    for place, row in enumerate(rows):
        y, scale = 4 + _BAR * place, width * row["milliseconds"] / most
        low, high = (scale * row[key] / row["ratio"] for key in ("low", "high"))
        ours = ' class="tpplan"' if row["form"].startswith("tpplan") else ""
        ratio = f'<tspan class="quiet"> × {row["ratio"]:.2f}</tspan>'
        parts.append(
            f'<g{ours}><text x="8" y="{y + 14}">{escape(row["form"])}</text>'
            f'<rect x="{left}" y="{y + 2}" width="{scale:.1f}" height="{_BAR - 6}"/>'
            f'<line x1="{left + low:.1f}" x2="{left + high:.1f}" y1="{y + 10}" y2="{y + 10}"/>'
            f'<text x="{left + max(scale, high) + 6:.1f}" y="{y + 14}">{row["milliseconds"]:.2f} ms{ratio}</text></g>'
        )
    return "".join([*parts, "</svg></figure>"])


def _table(table: Table, key: str) -> str:
    body = (html_row(_cell(text, place) for place, text in enumerate(row)) for row in table.rows)
    return html_table(escape(table.title), key, table.columns, body)


def _cell(text: str, place: int) -> Cell:
    try:
        return escape(text), float(text.replace(",", "")) if place else None
    except ValueError:
        return escape(text), None


__all__ = ["html_of"]
