"""Benchmarks as tables: plain text cells, for a terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

from tpplan.bench.alternatives_tables import alternatives_tables, alternatives_verdicts
from tpplan.bench.collectives_tables import collectives_tables, collectives_verdicts
from tpplan.bench.compile_time import TARGET_GIB, TARGET_SECONDS
from tpplan.bench.decode import NEW_TOKEN, PROMPT, TOKEN
from tpplan.bench.forms import HUB, SEQUENCE, TORCH, TPPLAN, UNSHARDED
from tpplan.bench.loop import ADDED, FRESH, OWN
from tpplan.bench.overhead import BACKWARD, BY_HAND, FORWARD, NEW_LENGTH, WATCHED
from tpplan.bench.overlap_tables import overlap_tables, overlap_verdicts
from tpplan.bench.serving_tables import requests_tables, requests_verdicts, serving_tables, serving_verdicts
from tpplan.bench.table import Table

FORWARD_TARGET, BACKWARD_TARGET, ADDED_TARGET, TORCH_TARGET = 1.0, 1.15, 1.2, 4.5
TOKEN_TARGET, NEW_TARGET = 1.1, 1.1
SEQUENCE_TARGETS = {FORWARD: 1.3, BACKWARD: 1.5}
WATCHED_TARGET = 3.0
READ_TARGET, TIME_TARGET = 1.02, 1.3
MEMORY_TARGET, SAVE_TARGET = 100, 300  # MiB


def tables_of(result: dict[str, Any]) -> list[Table]:
    """The tables of a benchmark's result."""
    tables = {
        "overhead": _overhead,
        "loop": _overhead,
        "compile": _compile,
        "collectives": collectives_tables,
        "checkpoint": _checkpoint,
        "loss": _loss,
        "overlap": overlap_tables,
        "alternatives": alternatives_tables,
        "serving": serving_tables,
        "requests": requests_tables,
    }
    return tables[result["benchmark"]](result)


def show(result: dict[str, Any], console: Console) -> None:
    """Print a benchmark's result."""
    for table in tables_of(result):
        shown = RichTable(title=table.title, title_justify="left", title_style="bold")
        for position, column in enumerate(table.columns):
            shown.add_column(column, justify="right" if position else "left", overflow="fold")
        for row in table.rows:
            shown.add_row(*row)
        console.print(shown)
    for line in verdicts(result):
        console.print(line)


def verdicts(result: dict[str, Any]) -> list[str]:
    """The figures that have a target, each with whether it was met."""
    kind, rows = result["benchmark"], result["rows"]
    if result.get("quick"):
        return ["A quick run: its figures mean nothing."]
    if kind == "overhead":
        return [verdict for model in _unique(rows, "model") for verdict in _overhead_verdicts(model, rows)]
    if kind == "loop":
        return [verdict for model in _unique(rows, "model") for verdict in _loop_verdicts(model, rows)]
    if kind == "compile":
        longest = max(row["layers"] for row in rows)
        return [
            f"{row['plan']}, {longest} layers: {row['processor_seconds']:.1f} s of processor time and "
            f"{row['peak_gib']:.2f} GiB (at most {TARGET_SECONDS:.0f} s and {TARGET_GIB} GiB: "
            f"{_met(row['processor_seconds'] <= TARGET_SECONDS and row['peak_gib'] <= TARGET_GIB)})"
            for row in rows
            if row["layers"] == longest
        ]
    if kind == "checkpoint":
        return [verdict for row in rows for verdict in _checkpoint_verdicts(row)]
    if kind == "loss":
        return []
    if kind == "overlap":
        return overlap_verdicts(rows)
    if kind == "alternatives":
        return alternatives_verdicts(rows)
    if kind == "serving":
        return serving_verdicts(rows)
    if kind == "requests":
        return requests_verdicts(rows)
    return collectives_verdicts(rows)


def _overhead_verdicts(model: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    ratio = {(row["way"], row["form"]): row["ratio"] for row in rows if row["model"] == model}
    lines: list[str] = []
    for way, target in ((FORWARD, FORWARD_TARGET), (BACKWARD, BACKWARD_TARGET)):
        ours, torch = ratio[way, TPPLAN], ratio[way, TORCH]
        less = f"{torch / ours:.1f} × less than parallelize_module (at least {TORCH_TARGET}: "
        lines.append(
            f"{model}, {way}: {ours:.2f} × the unsharded model (at most {target}: {_met(ours <= target)}), "
            f"{less}{_met(torch / ours >= TORCH_TARGET)}), {ours / ratio[way, BY_HAND]:.2f} × what is written by hand"
        )
        split, most = ratio[way, SEQUENCE], SEQUENCE_TARGETS[way]
        lines.append(
            f"{model}, TP+SP, {way}: {split:.2f} × the unsharded model (at most {most}: {_met(split <= most)})"
        )
        watched = ratio[way, WATCHED] / ours
        lines.append(
            f"{model}, {way}: a watched call takes {watched:.1f} × a plain one (at most {WATCHED_TARGET}: "
            f"{_met(watched <= WATCHED_TARGET)})"
        )
    for form in (TPPLAN, SEQUENCE) if (TOKEN, TPPLAN) in ratio else ():
        ours = ratio[TOKEN, form]
        lines.append(
            f"{model}, {form}, {TOKEN}: {ours:.2f} × the unsharded model (at most {TOKEN_TARGET}: "
            f"{_met(ours <= TOKEN_TARGET)})"
        )
        lines += [
            f"{model}, {form}, {what}: {more:.2f} × the same of a length that came before (at most {NEW_TARGET}: "
            f"{_met(more <= NEW_TARGET)})"
            for what, more in (("a token", ratio[NEW_TOKEN, form] / ours), ("a call", ratio[NEW_LENGTH, form]))
        ]
    for way in (PROMPT, TOKEN) if (TOKEN, HUB) in ratio else ():
        ours, torch, hub = (ratio[way, form] for form in (TPPLAN, TORCH, HUB))
        lines.append(
            f"{model}, {way}: {torch / ours:.1f} × less than parallelize_module, {hub / ours:.1f} × less than "
            "transformers' own"
        )
    return lines


def _loop_verdicts(model: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    ratio = {(row["way"], row["form"]): row["ratio"] for row in rows if row["model"] == model}
    lines: list[str] = []
    for form, target in ((TPPLAN, ADDED_TARGET), (SEQUENCE, SEQUENCE_TARGETS[BACKWARD])):
        ours, fresh = ratio[ADDED, form], ratio[FRESH, form]
        lines.append(
            f"{model}, {form}, {ADDED}: {ours:.2f} × the unsharded model, {fresh:.2f} × where gradients are set to "
            f"None (at most {target}: {_met(ours <= target)})"
        )
    for way in (way for way, form in ratio if form == OWN):
        own = ratio[way, OWN] / ratio[way, TPPLAN]
        lines.append(
            f"{model}, {way}: {ratio[way, TPPLAN]:.2f} × the unsharded model, {own:.1f} × less than torch's own on "
            f"DTensors (at least 1: {_met(own >= 1)})"
        )
    return lines


def _checkpoint_verdicts(row: dict[str, Any]) -> list[str]:
    cold = row["cold_load_seconds"] / row["cold_read_seconds"]
    return [
        f"{row['ranks']} ranks: a rank reads {row['bytes_ratio']:.4f} × its share (at most {READ_TARGET}: "
        f"{_met(row['bytes_ratio'] <= READ_TARGET)})",
        f"{row['ranks']} ranks: loading needs {row['load_memory_mib']:.0f} MiB besides the share and the largest "
        f"tensor (at most {MEMORY_TARGET}: {_met(row['load_memory_mib'] <= MEMORY_TARGET)}), saving "
        f"{row['save_memory_mib']:.0f} MiB (at most {SAVE_TARGET}: {_met(row['save_memory_mib'] <= SAVE_TARGET)})",
        f"{row['ranks']} ranks: loading takes {row['ratio']:.2f} × a plain read (at most {TIME_TARGET}: "
        f"{_met(row['ratio'] <= TIME_TARGET)}), cold {cold:.2f} × (at most 1: {_met(cold <= 1)})",
    ]


def _met(condition: bool) -> str:
    return "met" if condition else "missed"


def _overhead(result: dict[str, Any]) -> list[Table]:
    tables: list[Table] = []
    for model in _unique(result["rows"], "model"):
        rows = tuple(
            (
                f"{row['form']}, {row['way']}",
                f"{row['milliseconds']:.2f}" if row["milliseconds"] >= 0.1 else f"{row['milliseconds']:.3f}",
                f"{row['ratio']:.2f}" if row["form"] != UNSHARDED else "1",
                f"{row['low']:.2f} to {row['high']:.2f}" if row["form"] != UNSHARDED else "",
            )
            for row in result["rows"]
            if row["model"] == model
        )
        tables.append(Table(model, ("", "ms", "ratio", "quartiles"), rows))
    return tables


def _compile(result: dict[str, Any]) -> list[Table]:
    passes = [name for name in result["rows"][0]["passes"] if name != "warnings_for"]
    columns = (
        "plan, layers",
        "s",
        "processor s",
        *passes,
        "peak GiB",
        "before GiB",
        "imports s",
        "first compile s",
        "conditions s",
    )
    rows = tuple(
        (
            f"{row['plan']}, {row['layers']}",
            f"{row['seconds']:.2f}",
            f"{row['processor_seconds']:.2f}",
            *(f"{row['passes'].get(name, 0):.2f}" for name in passes),
            f"{row['peak_gib']:.2f}",
            f"{row['peak_before_gib']:.2f}",
            f"{row['imports_seconds']:.1f}",
            f"{row['first_compile_seconds']:.1f}",
            f"{row['conditions_seconds']:.2f}",
        )
        for row in result["rows"]
    )
    return [Table("compile_plan, tp=8", columns, rows)]


def _checkpoint(result: dict[str, Any]) -> list[Table]:
    columns = (
        "", "GiB", "share MiB", "read / share", "load s", "plain read s", "ratio", "quartiles", "cold load s",
        "cold read s", "load MiB", "save s", "save MiB", "transformers s",
    )  # fmt: skip
    rows = tuple(
        (
            f"{row['ranks']} ranks, {row['files']} files",
            f"{row['gib']:.2f}",
            f"{row['share_mib']:.0f}",
            f"{row['bytes_ratio']:.4f}",
            *(f"{row[key]:.2f}" for key in ("load_seconds", "read_seconds", "ratio")),
            f"{row['low']:.2f} to {row['high']:.2f}",
            *(f"{row[key]:.2f}" for key in ("cold_load_seconds", "cold_read_seconds")),
            f"{row['load_memory_mib']:.0f}",
            f"{row['save_seconds']:.2f}",
            f"{row['save_memory_mib']:.0f}",
            "" if row["transformers_seconds"] is None else f"{row['transformers_seconds']:.2f}",
        )
        for row in result["rows"]
    )
    return [Table("Loading and saving", columns, rows)]


def _loss(result: dict[str, Any]) -> list[Table]:
    rows = tuple(
        (
            row["form"],
            f"{row['tokens']}",
            f"{row['tokens'] * row['vocabulary'] * 4 / 2**20:.0f}",
            f"{row['peak_mib']:.0f}",
            f"{row['seconds']:.2f}",
        )
        for row in result["rows"]
    )
    columns = ("", "tokens", "all logits in float32, MiB", "peak of a step, MiB", "s")
    return [Table(f"A step with a loss, {result['rows'][0]['ranks']} ranks", columns, rows)]


def _unique(rows: Sequence[dict[str, Any]], key: str) -> list[str]:
    return list(dict.fromkeys(row[key] for row in rows))
