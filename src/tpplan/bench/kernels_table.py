"""The figures of the kernels as text: a kernel's times, how much longer others take for a step, and what is met."""

from __future__ import annotations

from typing import Any

from tpplan.bench.kernels_subjects import COMPILED, EAGER, LIGER, OURS
from tpplan.bench.table import Table

_OTHERS = (EAGER, COMPILED, LIGER)
_FORWARD, _LEAST = 0.85, 0.95


def text_of(result: dict[str, Any]) -> str:
    """The table in Markdown, and how far the targets of docs/kernels.md are met."""
    ours = [row for row in result["rows"] if row["form"] == OURS]
    others = [row["microseconds"] for row in result["rows"] if (row["form"], row["way"]) == (EAGER, "step")]
    steps = [row["microseconds"] for row in ours if row["way"] == "step"]
    ratios = [other / own for other, own in zip(others, steps, strict=True)]
    shares = [
        _share("forward", [(row, _FORWARD) for row in ours if row["way"] == "forward"]),
        _share("backward", [(row, _backward(row["columns"])) for row in ours if row["way"] == "backward"]),
    ]
    met = "met" if min(ratios) >= _LEAST else "missed"
    least = f"- A step takes eager {min(ratios):.2f} to {max(ratios):.2f} times as long (at least {_LEAST}: {met})."
    return "\n".join([table_of(result).markdown(), "", *shares, least])


def _backward(columns: int) -> float:
    return 0.7 if columns <= 8192 else 0.55


def _share(way: str, rows: list[tuple[dict[str, Any], float]]) -> str:
    below = [row for row, least in rows if row["copy_share"] < least]
    lowest = min((row for row, _ in rows), key=lambda row: row["copy_share"])
    at = f"{lowest['kernel']} at {lowest['rows']:,} × {lowest['columns']:,}"
    met = f"{len(rows) - len(below)} of {len(rows)} rows"
    return f"- The share of the copy rate, {way}: met in {met}; the lowest is {lowest['copy_share']:.0%}, of {at}."


def table_of(result: dict[str, Any]) -> Table:
    """A row for each kernel, size and dtype."""
    cells: dict[tuple[Any, ...], dict[tuple[str, str], dict[str, Any]]] = {}
    for row in result["rows"]:
        size = row["kernel"], row["rows"], row["columns"], row["dtype"]
        cells.setdefault(size, {})[row["form"], row["way"]] = row
    columns = ("kernel, rows × columns", "forward, µs (of copy)", "backward, µs (of copy)", "host, µs a step")
    return Table(
        f"{result['environment']['gpu']}, {result['environment']['date']}",
        (*columns, *(f"step, {name}" for name in _OTHERS), "host, eager"),
        tuple(_row(size, held) for size, held in cells.items()),
    )


def _row(size: tuple[Any, ...], held: dict[tuple[str, str], dict[str, Any]]) -> tuple[str, ...]:
    kernel, rows, columns, dtype = size
    step = held[OURS, "step"]
    return (
        f"{kernel}, {rows:,} × {columns:,}, {dtype}",
        *(f"{held[OURS, w]['microseconds']:.0f} ({held[OURS, w]['copy_share']:.0%})" for w in ("forward", "backward")),
        f"{step['wall_microseconds']:.0f}",
        *(
            f"{held[name, 'step']['microseconds'] / step['microseconds']:.2f} ×" if (name, "step") in held else ""
            for name in _OTHERS
        ),
        f"{held[EAGER, 'step']['wall_microseconds']:.0f}",
    )


__all__ = ["table_of", "text_of"]
