"""The alternatives as tables: a model's steps, what each form took to make, host overhead, and a rank's compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tpplan.bench.forms import MODELS, TPPLAN
from tpplan.bench.table import Table

_FLOOR_TARGET = 1.05
_TITLES = {
    "host": "{model}, host overhead on a fake group, tp={tp}",
    "layer": "A rank's compute of one layer, hidden size {hidden}, tp={tp}, {dtype} on {device}",
}
Row = dict[str, Any]


def alternatives_tables(result: dict[str, Any]) -> list[Table]:
    """Those of each part."""
    tables: list[Table] = []
    for part, model in dict.fromkeys((row["part"], row["model"]) for row in result["rows"]):
        rows, told = [row for row in result["rows"] if (row["part"], row["model"]) == (part, model)], result[part]
        if part == "steps":
            on = f"{told['ranks']} {'GPUs' if told['device'] == 'cuda' else 'processes'}"
            tables += [_steps(f"{MODELS[model]}, {on}", rows), _made(f"{MODELS[model]}, to parallelize", rows)]
        else:
            dtype = str(told.get("dtype", "")).removeprefix("torch.")
            title = _TITLES[part].format(
                model=MODELS[model],
                tp=told["tp"],
                hidden=told["sizes"]["hidden"],
                dtype=dtype,
                device=told.get("device"),
            )
            tables.append(_simple(title, rows))
    return tables


def _steps(title: str, rows: Sequence[Row]) -> Table:
    columns = ("", "ms", "ratio", "quartiles", "processor ms", "ratio", "quartiles", "collectives", "MiB", "peak MiB")
    cells = (
        (
            f"{row['form']}, {row['way']}",
            *(cell for of in ("", "processor_") for cell in _timing(row, of)),
            str(row["collectives"]),
            f"{row['mib']:.1f}",
            f"{row['peak_mib']:.1f}",
        )
        for row in rows
    )
    return Table(title, columns, tuple(cells))


def _made(title: str, rows: Sequence[Row]) -> Table:
    seconds = {row["form"]: row["parallelize_seconds"] for row in rows}
    return Table(title, ("", "s"), tuple((form, f"{held:.2f}") for form, held in seconds.items()))


def _simple(title: str, rows: Sequence[Row]) -> Table:
    peaks = "peak_mib" in rows[0]
    columns = ("", "ms", "ratio", "quartiles", *(["peak MiB"] if peaks else []))
    cells = (
        (f"{row['form']}, {row['way']}", *_timing(row), *([f"{row['peak_mib']:.1f}"] if peaks else [])) for row in rows
    )
    return Table(title, columns, tuple(cells))


def _timing(row: Row, of: str = "") -> tuple[str, str, str]:
    spread = f"{row[f'{of}low']:.2f} to {row[f'{of}high']:.2f}"
    return f"{row[f'{of}milliseconds']:.2f}", f"{row[f'{of}ratio']:.2f}", spread


def alternatives_verdicts(rows: Sequence[Row]) -> list[str]:
    """How far the steps are from what is written by hand."""
    return [
        f"{MODELS[row['model']]}, {row['way']}: {row['ratio']:.2f} × what is written by hand (at most {_FLOOR_TARGET}: "
        f"{'met' if row['ratio'] <= _FLOOR_TARGET else 'missed'}), {row['processor_ratio']:.2f} × of processor time"
        for row in rows
        if row["part"] == "steps" and row["form"] == TPPLAN
    ]


__all__ = ["alternatives_tables", "alternatives_verdicts"]
