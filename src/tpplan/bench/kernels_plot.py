"""The figures of the kernels as a picture: bars of throughput for one number of rows, in SVG without a library."""

from __future__ import annotations

from html import escape
from typing import Any

_COLOURS = ("#0b6e99", "#b8b8b8", "#7f7f7f", "#d98e04")
_BAR, _GAP, _LEFT, _WIDTH = 12, 14, 260, 420


def render_svg(result: dict[str, Any]) -> str:
    """Bars of the forward with its backward, as a share of the copy rate, at the largest size of each kernel."""
    rows = _largest([row for row in result["rows"] if row["way"] == "step"])
    names = list(dict.fromkeys(row["form"] for row in rows))
    groups = list(dict.fromkeys((row["kernel"], row["dtype"]) for row in rows))
    height = 60 + len(groups) * (_BAR * len(names) + _GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 80}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f'<text x="8" y="18" font-size="13">{escape(_title(result))}</text>',
    ]
    for position, name in enumerate(names):
        x = _LEFT + position * 110
        parts.append(f'<rect x="{x}" y="28" width="10" height="10" fill="{_COLOURS[position % len(_COLOURS)]}"/>')
        parts.append(f'<text x="{x + 14}" y="37">{escape(name)}</text>')
    y = 52
    for kernel, dtype in groups:
        here = [row for row in rows if (row["kernel"], row["dtype"]) == (kernel, dtype)]
        size = f"{here[0]['rows']} × {here[0]['columns']}"
        parts.append(f'<text x="8" y="{y + _BAR}">{escape(f"{kernel}, {dtype}, {size}")}</text>')
        for row in here:
            parts += _bar(row, names.index(row["form"]), y)
        y += _BAR * len(names) + _GAP
    return "\n".join([*parts, "</svg>", ""])


def _bar(row: dict[str, Any], position: int, top: int) -> list[str]:
    share = row["copy_share"] or 0.0
    width, y = max(1, round(min(share, 1.1) * _WIDTH / 1.1)), top + position * _BAR
    colour = _COLOURS[position % len(_COLOURS)]
    return [
        f'<rect x="{_LEFT}" y="{y}" width="{width}" height="{_BAR - 2}" fill="{colour}"/>',
        f'<text x="{_LEFT + width + 4}" y="{y + _BAR - 3}">{share:.0%}, {row["microseconds"]:.0f} µs</text>',
    ]


def _largest(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    sizes: dict[tuple[str, str], int] = {}
    for row in rows:
        key = row["kernel"], row["dtype"]
        sizes[key] = max(sizes.get(key, 0), row["rows"] * row["columns"])
    return [row for row in rows if row["rows"] * row["columns"] == sizes[row["kernel"], row["dtype"]]]


def _title(result: dict[str, Any]) -> str:
    environment = result["environment"]
    title = f"Forward with backward, share of the copy rate: {environment['gpu']}, {environment['date']}"
    return title + (" (dry run on a CPU: no measurement)" if result["dry"] else "")
