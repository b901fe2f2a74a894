"""The figures of overlap as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tpplan.bench.overlap_times import HOST, NONE, STEPS
from tpplan.bench.table import Table

HOST_TARGET = 1.1


def overlap_tables(result: dict[str, Any]) -> list[Table]:
    """A table for each number of ranks and link."""
    tables: list[Table] = []
    for way, link in dict.fromkeys((row["way"], row["link"]) for row in result["rows"]):
        slow = link == "slow"
        columns = ("plan, overlap", "ms", "× none", "quartiles", *(("link busy, ms", "hidden") if slow else ()))
        rows = tuple(
            (
                f"{row['model']}, {row['form']}",
                f"{row['milliseconds']:.2f}",
                f"{row['ratio']:.2f}" if row["form"] != NONE else "1",
                f"{row['low']:.2f} to {row['high']:.2f}" if row["form"] != NONE else "",
                *((f"{row['sent']:.0f}", f"{100 * row['hidden']:.0f}%") if slow else ()),
            )
            for row in result["rows"]
            if row["way"] == way
        )
        tables.append(Table(f"Forward and backward, {way}", columns, rows))
    return tables


def overlap_verdicts(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What overlap costs the host, and what it hides of a slow link."""
    lines: list[str] = []
    for row in rows:
        if row["form"] == NONE:
            continue
        if row["part"] == HOST:
            met = "met" if row["ratio"] <= HOST_TARGET else "missed"
            lines.append(
                f"{row['model']}, {row['form']}: the host takes {row['ratio']:.2f} × what it takes without (at most "
                f"{HOST_TARGET}: {met})"
            )
        elif row["part"] == STEPS and row["link"] == "slow":
            lines.append(
                f"{row['model']}, {row['form']}, {row['ranks']} ranks, slow link: {100 * row['hidden']:.0f}% of "
                f"{row['sent']:.0f} ms hidden, {row['ratio']:.2f} × a step without"
            )
    return lines


__all__ = ["overlap_tables", "overlap_verdicts"]
