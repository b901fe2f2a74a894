"""The counts of collectives as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tpplan.bench.generation_collectives import PROMPT, TOKEN, is_least
from tpplan.bench.table import Table

_AGREES = {True: "yes", False: "NO", None: ""}


def collectives_tables(result: dict[str, Any]) -> list[Table]:
    """Those of a training step, and those of generation."""
    rows: list[tuple[str, ...]] = []
    for row in result["rows"]:
        if row["of"] != "steps":
            continue
        block, model = row["block"]["counted"], row["model"]["counted"]
        name = row["plan"] if row["by"] == "tpplan" else f"{row['plan']}, {row['by']}"
        rows.append((name, _counts(block), _counts(model), _AGREES[row["agrees"]]))
    columns = ("plan", "a block: forward / with backward", "a model of two blocks", "as predicted")
    generating = tuple(
        (
            row["plan"],
            *(
                cell
                for call in (PROMPT, TOKEN)
                for cell in (
                    _of_call(row[call]["counted"]["block"]),
                    _of_call(row[call]["counted"]["around"]),
                    _AGREES[row[call]["agrees"]],
                )
            ),
            "yes" if is_least(row) else "NO",
        )
        for row in result["rows"]
        if row["of"] == "generation"
    )
    of_calls = (
        "plan", "a prompt: a block", "around the blocks", "as predicted", "a token: a block", "around the blocks",
        "as predicted", "least",
    )  # fmt: skip
    tables = [Table(f"Collectives counted, tp={result['tp']}", columns, tuple(rows))]
    return tables + (
        [Table(f"Collectives of generation, tp={result['tp']}", of_calls, generating)] if generating else []
    )


def _of_call(count: dict[str, int]) -> str:
    return ", ".join(f"{kind} {number}" for kind, number in count.items()) or "none"


def collectives_verdicts(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Whether predictions hold, and whether a token takes the least."""
    checked = [row["agrees"] for row in rows if row["of"] == "steps" and row["agrees"] is not None]
    generating = [row for row in rows if row["of"] == "generation"]
    calls = [row[call]["agrees"] for row in generating for call in (PROMPT, TOKEN)]
    known = [agrees for agrees in calls if agrees is not None]
    least = [row["plan"] for row in generating if is_least(row)]
    others = [row["plan"] for row in generating if not is_least(row)]
    training = f"predicted and counted agree for {sum(checked)} of {len(checked)} plans in training"
    if not generating:
        return [training]
    return [
        training,
        f"predicted and counted agree for {sum(known)} of {len(known)} prompts and tokens",
        f"a token takes at most two all-reduces a block, one for a table split by rows, and the gather of the head's "
        f"logits, under {len(least)} of {len(generating)} plans{_but(others)}",
    ]


def _but(names: Sequence[str]) -> str:
    return f"; it takes others under {', '.join(names)}" if names else ""


def _counts(count: dict[str, dict[str, int]]) -> str:
    """`all-reduce 2 / 4`: in a forward, and in a forward with its backward."""
    forward, step = count["forward"], count["step"]
    return ", ".join(f"{kind} {forward.get(kind, 0)} / {step[kind]}" for kind in step) or "none"


__all__ = ["collectives_tables", "collectives_verdicts"]
