"""docs/coverage.md: a row for each architecture, written from what the sweep found.

python -m tests.zoo.page                       sweep all, write the page; exits with 1 if anything is wrong
python -m tests.zoo.page llama bert            sweep these alone, and print their rows
python -m tests.zoo.page --update llama bert   sweep these alone, and put their rows into the page
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.zoo.architectures import ARCHITECTURES
from tests.zoo.subjects import FAMILIES, SUBJECTS
from tests.zoo.sweep import SIZES, TOLERANCE, Outcome, run

PAGE = Path(__file__).parents[2] / "docs" / "coverage.md"
_INTRODUCTION = f"""\
# Coverage

What `tpplan suggest` makes of stock architectures by itself, in tiny configurations: the model is captured, a plan is
found and compiled at {" and ".join(map(str, SIZES))} ranks, with and without sequence parallelism, and every output
and every gradient of the sharded model is held against the unsharded one, in float32 for the text models and in float64
for the others, where they run in it (at most {TOLERANCE:.0e}, relative
to the tensor's scale). Grouped-query attention has 2 key and value heads here, fewer than the 4 ranks.

`make zoo` writes this page; nothing in it is written by hand, and nothing in tpplan knows the name of an architecture.

*Sharded* is the share of the parameters of the repeated blocks (of all parameters, in brackets). *A layer* counts the
collectives of one block, forward and backward, of the kind of block that has most, at 2 ranks (AR: all-reduce, AG:
all-gather, RS: reduce-scatter).
"""
_PARTS: dict[str, Sequence[str]] = {"text models": [*ARCHITECTURES], **{f: [*held] for f, held in FAMILIES.items()}}
_HEAD = ("architecture", "sharded, 2 ranks", "4 ranks", "a layer", "a layer, sequence-parallel", "largest error")
_REASONS = "## What is refused or left whole, and why"
_ROW = re.compile(r"^\| [\w-]+ \| (?:[\d.]+%|refused|\*\*wrong)")
_NAMED = re.compile(r"^\*\*([\w-]+)\*\*$", re.MULTILINE)
_REASON = re.compile(r"^- (.*)$", re.MULTILINE)
_SHORT = {"all-reduce": "AR", "all-gather": "AG", "reduce-scatter": "RS", "all-to-all": "A2A"}


@dataclass(frozen=True)
class Entry:
    """What the page says of one architecture: its row, and why something is refused or whole."""

    row: str
    reasons: tuple[str, ...]

    @staticmethod
    def of(outcomes: Sequence[Outcome]) -> Entry:
        """What there is to say of these outcomes."""
        return Entry(row(outcomes), tuple(reasons(outcomes)))


def row(outcomes: Sequence[Outcome]) -> str:
    """The table's row for the outcomes of one architecture."""
    plain = {o.size: o for o in outcomes if not o.sequence}
    first = plain[SIZES[0]]
    stream = next(o for o in outcomes if o.sequence and o.size == SIZES[0])
    errors = [o.error for o in outcomes if o.error is not None]
    cells = [first.name, *(_shares(plain[size]) for size in SIZES)]
    cells += [_collectives(first), _collectives(stream) if stream.stream else "–"]
    cells.append(f"{max(errors):.0e}" if errors else "–")
    return f"| {' | '.join(cells)} |"


def _shares(outcome: Outcome) -> str:
    if outcome.problems:
        return "**wrong**"
    if outcome.blocks is None or outcome.model is None:
        return "refused"
    return f"{outcome.blocks.percent:.1f}% ({outcome.model.percent:.1f}%)"


def _collectives(outcome: Outcome) -> str:
    counted = sorted(outcome.collectives.items())
    return ", ".join(f"{count} {_SHORT.get(what, what)}" for what, count in counted) or "–"


def reasons(outcomes: Iterable[Outcome]) -> list[str]:
    """What is refused or left whole, with the settings in which that is so, and everything that is wrong."""
    settings: dict[str, list[str]] = {}
    count = 0
    for outcome in outcomes:
        count += 1
        for reason in (*outcome.refused, *(f"**wrong**: {problem}" for problem in outcome.problems)):
            where = f"{outcome.size} ranks{', sequence-parallel' if outcome.sequence else ''}"
            settings.setdefault(reason, []).append(where)
    return [reason if len(where) == count else f"{reason} ({'; '.join(where)})" for reason, where in settings.items()]


def page(found: Mapping[str, Entry]) -> str:
    """The whole page."""
    lines = [_INTRODUCTION]
    for family, names in _PARTS.items():
        rows = [found[name].row for name in names if name in found]
        lines += [f"## {family[0].upper()}{family[1:]}", "", _counted(rows), ""]
        lines += [f"| {' | '.join(_HEAD)} |", f"|{'---|' * len(_HEAD)}", *rows, ""]
    lines += [_REASONS, "", "Of the blocks' parameters, what makes up a hundredth of the model or more.", ""]
    for name in (name for names in _PARTS.values() for name in names if name in found):
        if found[name].reasons:
            lines += [f"**{name}**", "", *(f"- {reason}" for reason in found[name].reasons), ""]
    return "\n".join(lines).rstrip() + "\n"


def read(text: str) -> dict[str, Entry]:
    """What a page says of each architecture."""
    tables, _, causes = text.partition(_REASONS)
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in tables.splitlines() if _ROW.match(line)}
    held = _NAMED.split(causes)
    reasons = {name: tuple(_REASON.findall(body)) for name, body in zip(held[1::2], held[2::2], strict=True)}
    return {name: Entry(line, reasons.get(name, ())) for name, line in rows.items()}


def _counted(rows: Sequence[str]) -> str:
    """How many models are equal in all settings, refused in some, or wrong."""
    wrong = sum("**wrong**" in line for line in rows)
    refused = sum("refused" in line and "**wrong**" not in line for line in rows)
    counts = {"equal": len(rows) - wrong - refused, "refused": refused, "wrong": wrong}
    return f"{len(rows)} models: {', '.join(f'{count} {what}' for what, count in counts.items() if count)}."


def sweep(name: str) -> list[Outcome]:
    """The outcomes of one architecture in every setting; told on stderr as they come."""
    outcomes: list[Outcome] = []
    for size in SIZES:
        for sequence in (False, True):
            try:
                outcome = run(name, size, sequence)
            except Exception as error:
                text = (str(error) or type(error).__name__).splitlines()[0][:200]
                outcome = Outcome(name, size, sequence, problems=(f"{type(error).__name__}: {text}",))
            print(outcome, file=sys.stderr, flush=True)
            outcomes.append(outcome)
    return outcomes


def main(arguments: list[str]) -> int:
    """Sweep, and write the page or print rows."""
    update = arguments[:1] == ["--update"]
    names = arguments[1:] if update else arguments
    missing = sorted(
        {held.package for name, held in SUBJECTS.items() if not held.installed and name in (names or SUBJECTS)}
    )
    if missing:
        print(f"not installed: {', '.join(missing)}; `pip install 'tpplan[zoo]'`", file=sys.stderr)
        return 2
    found = {name: sweep(name) for name in names or (*ARCHITECTURES, *SUBJECTS)}
    entries = {name: Entry.of(outcomes) for name, outcomes in found.items()}
    if names and not update:
        print("\n".join(line for entry in entries.values() for line in (entry.row, *entry.reasons)))
    else:
        known = read(PAGE.read_text(encoding="utf-8")) if update else {}
        PAGE.write_text(page(known | entries), encoding="utf-8")
    return 0 if all(o.ok for outcomes in found.values() for o in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
