"""The figures of serving as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tpplan.bench.forms import HUB, TORCH, TPPLAN, UNSHARDED
from tpplan.bench.requests import FIRST, LATER, WARMED
from tpplan.bench.table import Table

MORE_TARGET = 0.3  # seconds


def serving_tables(result: dict[str, Any]) -> list[Table]:
    """A table for each model and batch."""
    columns = ("", "tokens a second", "× unsharded", "quartiles", "ms", "processor ms", "collectives", "MiB")
    tables: list[Table] = []
    for model, batch, rounds in dict.fromkeys((row["model"], row["batch"], row["rounds"]) for row in result["rows"]):
        rows = tuple(
            (
                f"{row['form']}, {row['way']}",
                f"{row['tokens_per_second']:.1f}",
                f"{row['ratio']:.2f}" if row["form"] != UNSHARDED else "1",
                f"{row['low']:.2f} to {row['high']:.2f}" if row["form"] != UNSHARDED else "",
                f"{row['milliseconds']:.2f}",
                f"{row['processor_milliseconds']:.2f}",
                f"{row['collectives']:.0f}",
                f"{row['mib']:.3f}",
            )
            for row in result["rows"]
            if (row["model"], row["batch"]) == (model, batch)
        )
        tables.append(Table(f"{model}, batch {batch}, {result['ranks']} processes, {rounds} rounds", columns, rows))
    return tables


def serving_verdicts(rows: Sequence[dict[str, Any]]) -> list[str]:
    """How tpplan does beside the others."""
    speed = {(row["model"], row["batch"], row["way"], row["form"]): row for row in rows}
    lines: list[str] = []
    for model, batch, way, form in speed:
        if form != TPPLAN:
            continue
        ours = speed[model, batch, way, TPPLAN]
        others = [
            f"{ours['tokens_per_second'] / speed[model, batch, way, other]['tokens_per_second']:.2f} × {other}"
            for other in (TORCH, HUB)
            if (model, batch, way, other) in speed
        ]
        lines.append(
            f"{model}, batch {batch}, {way}: tpplan gives {ours['ratio']:.2f} × the tokens a second of the unsharded "
            f"model on one process, {', '.join(others)}"
        )
    return lines


def requests_tables(result: dict[str, Any]) -> list[Table]:
    """A table of requests."""
    names = ("unsharded", LATER, FIRST, WARMED)
    rows = tuple(
        (
            row["way"],
            *(f"{row['seconds'][name]:.3f}" for name in names),
            f"{row['seconds'][FIRST] - row['seconds'][LATER]:.3f}",
        )
        for row in result["rows"]
    )
    columns = ("s", *names, "what being the first costs")
    return [Table(f"{result['tokens']} tokens, {result['ranks']} processes, {result['rounds']} rounds", columns, rows)]


def requests_verdicts(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Whether what a first request needs is compiled in time."""
    extra = {
        (row["way"], name): row["seconds"][name] - row["seconds"][LATER] for row in rows for name in (FIRST, WARMED)
    }
    return [
        f"{way}: {name} takes {more:.2f} s more than later ones (at most {MORE_TARGET} s: "
        f"{'met' if more <= MORE_TARGET else 'missed'})"
        for (way, name), more in extra.items()
    ]


__all__ = ["requests_tables", "requests_verdicts", "serving_tables", "serving_verdicts"]
