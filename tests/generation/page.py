"""docs/generation.md: the tokens of sharded models, for each plan of a model that generates and each way of generating.

python -m tests.generation.page                try all, write the page; exits with 1 if anything is wrong
python -m tests.generation.page llama t5       try these, and write their rows into the page
python -m tests.generation.page --missing      try those that the page has no results of
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.generation.ways import (
    EQUAL,
    NOT_THERE,
    OF_CAUSAL,
    OF_TEXT,
    PLAN_NAMES,
    RANKS,
    WITH_ENCODERS,
    outcomes,
    ways_of,
)
from tests.runtime.world import world

PAGE = Path(__file__).parents[2] / "docs" / "generation.md"
UNTRIED = "?"
_INTRODUCTION = f"""\
# Generation

Token by token: what `generate` gives with a sharded model, on {RANKS} gloo processes, against the stock model, for each
shipped plan of a model that generates and each way of generating. Models are tiny, with random numbers in float64
(gpt_oss: float32), so that equal tokens mean equal logits up to rounding.

`{EQUAL}`: the tokens of the stock model. `{NOT_THERE}`: transformers itself refuses it. A code: refused, for the
reason below the table. `{UNTRIED}`: not run yet. `make generation` writes this page; nothing in it is written by hand.

- *greedy*, *sampled*, *beam*: two prompts, neither in number nor in length those of the example call.
- *odd prompt*: a length that the ranks can't share. *ragged*: four prompts with padding in front.
- *assisted*: a model that isn't sharded proposes tokens. *prompt lookup*: tokens that come again are proposed.
- *static*: `cache_implementation="static"`; layers with a window have a sliding one, shorter than the prompt.
- *chunks*: `prefill_chunk_size`. *turns*: a second prompt goes on with the cache of the first.
- *encoder kept*: what the encoder made, called by itself, serves two requests.
"""
_CODE = re.compile(r"^(TP\d+|\*\*\w+\*\*)")
_ROW = re.compile(r"^\| ([\w-]+) \|")
_REASON = re.compile(r"^- `([\w-]+)`, ")


class Entry(NamedTuple):
    """What the page says of a plan: its row, and the reasons for what isn't equal."""

    row: str
    reasons: tuple[str, ...]


def entry(plan: str, found: Mapping[str, str]) -> Entry:
    """The page's entry for what came of a plan."""
    cells: list[str] = []
    reasons: list[str] = []
    for way in ways_of(plan):
        code = _CODE.match(found[way])
        cells.append(code[1] if code else found[way])
        if code:
            reasons.append(f"- `{plan}`, {way}: {found[way]}")
    return Entry(f"| {' | '.join([plan, *cells])} |", tuple(reasons))


def tried(plan: str) -> Entry:
    """The entry of a plan, after all ways of generating were tried."""
    first, *others = world(RANKS).run(outcomes, plan)
    assert all(other == first for other in others), (first, others)
    return entry(plan, first)


def written(text: str) -> dict[str, Entry]:
    """The entries of a page."""
    rows = {found[1]: line for line in text.splitlines() if (found := _ROW.match(line)) and found[1] != "plan"}
    reasons: dict[str, list[str]] = {}
    for line in text.splitlines():
        if found := _REASON.match(line):
            reasons.setdefault(found[1], []).append(line)
    return {plan: Entry(row, tuple(reasons.get(plan, ()))) for plan, row in rows.items() if UNTRIED not in row}


def page(entries: Mapping[str, Entry]) -> str:
    """The whole page."""
    every = {plan: entries.get(plan) or entry(plan, dict.fromkeys(ways_of(plan), UNTRIED)) for plan in PLAN_NAMES}
    lines = [_INTRODUCTION]
    for title, columns, of_encoders in (
        ("Models of one sequence", OF_CAUSAL, False),
        ("Models with an encoder", OF_TEXT, True),
    ):
        lines += [f"## {title}", "", f"| {' | '.join(['plan', *columns])} |", f"|{'---|' * (len(columns) + 1)}"]
        chosen = [plan for plan in PLAN_NAMES if (plan.removesuffix("-sequence") in WITH_ENCODERS) is of_encoders]
        lines += [*(every[plan].row for plan in chosen), ""]
    reasons = [reason for held in every.values() for reason in held.reasons]
    lines += ["## What is refused, and why", "", *(reasons or ["Nothing."])]
    return "\n".join(lines) + "\n"


def main(names: Sequence[str]) -> int:
    """Try all, or these, and write what came of it after each."""
    entries = written(PAGE.read_text(encoding="utf-8")) if names and PAGE.exists() else {}
    missing = [plan for plan in PLAN_NAMES if plan not in entries]
    for plan in missing if names == ["--missing"] else names or PLAN_NAMES:
        entries[plan] = tried(plan)
        print("\n".join((entries[plan].row, *entries[plan].reasons)), flush=True)
        PAGE.write_text(page(entries), encoding="utf-8")
    return int(any("**" in entry.row for entry in entries.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
