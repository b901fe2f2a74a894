"""docs/coverage.json, a row for each architecture, written from what the sweep found; docs/coverage.md, its summary.

python -m tests.zoo.page                       sweep all, write both; exits with 1 if anything is wrong
python -m tests.zoo.page llama bert            sweep these alone, and print their rows
python -m tests.zoo.page --update llama bert   sweep these alone, and put their rows into the file
python -m tests.zoo.page --update              sweep those that have no row, or one without a time
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from tests.zoo.architectures import ARCHITECTURES
from tests.zoo.subjects import FAMILIES, SUBJECTS
from tests.zoo.sweep import SIZES, TOLERANCE, Outcome, run

DOCS = Path(__file__).parents[2] / "docs"
PAGE, ROWS = DOCS / "coverage.md", DOCS / "coverage.json"
_INTRODUCTION = f"""\
# Coverage

What `tpplan suggest` makes of stock architectures by itself, in tiny configurations: the model is captured, a plan is
found and compiled at {" and ".join(map(str, SIZES))} ranks, with and without sequence parallelism, and every output
and every gradient of the sharded model is held against the unsharded one, in float32 for the text models and in float64
for the others, where they run in it (at most {TOLERANCE:.0e}, relative
to the tensor's scale). Grouped-query attention has 2 key and value heads here, fewer than the 4 ranks.

[coverage.json](coverage.json) has a row for each architecture: the share of the parameters of its repeated blocks, and
of all parameters, that is sharded; the collectives of one block, forward and backward, at 2 ranks, without and with
sequence parallelism; the largest error; what is refused or left whole, and why; what a plan had to be allowed (see
`Freedoms`); and the seconds of a processor that all four settings took.

`make zoo` writes both; nothing in them is written by hand, and nothing in tpplan knows the name of an architecture.
"""
_PARTS: dict[str, Sequence[str]] = {"text models": [*ARCHITECTURES], **{f: [*held] for f, held in FAMILIES.items()}}
_HEAD = ("models", "equal", "refused", "wrong", "sharded, median", "least")
_LEAST = 50  # percent of the blocks' parameters: rows with less are named


@dataclass(frozen=True)
class Row:
    """What came of one architecture in all settings.

    Attributes:
        sharded: at each size, the percentages of the blocks' parameters and of all; nothing where it was refused.
        layer, sequence: the collectives of a block at 2 ranks; of the second None if the stream isn't split.
        error: the largest; None if nothing could be run.
        reasons: what is refused or left whole, with the settings in which that is so.
        problems: everything that is wrong.
        freedoms: what was allowed in some setting.
        seconds: of a processor for all settings; None if that wasn't measured.
    """

    sharded: dict[str, tuple[float, float]]
    layer: dict[str, int]
    sequence: dict[str, int] | None
    error: float | None
    reasons: list[str] = field(default_factory=list[str])
    problems: list[str] = field(default_factory=list[str])
    freedoms: list[str] = field(default_factory=list[str])
    seconds: int | None = None

    @staticmethod
    def of(outcomes: Sequence[Outcome]) -> Row:
        """What there is to say of these outcomes."""
        plain = {o.size: o for o in outcomes if not o.sequence}
        stream = next(o for o in outcomes if o.sequence and o.size == SIZES[0])
        errors = [float(f"{o.error:.0e}") for o in outcomes if o.error is not None]
        held = {str(n): (o.blocks, o.model) for n, o in plain.items() if o.blocks and o.model}
        return Row(
            {n: (round(blocks.percent, 1), round(model.percent, 1)) for n, (blocks, model) in held.items()},
            dict(sorted(plain[SIZES[0]].collectives.items())),
            dict(sorted(stream.collectives.items())) if stream.stream else None,
            max(errors, default=None),
            _with_settings(outcomes, [o.refused for o in outcomes]),
            _with_settings(outcomes, [o.problems for o in outcomes]),
            [*dict.fromkeys(name for o in outcomes for name in o.freedoms)],
            round(sum(o.seconds for o in outcomes)),
        )  # fmt: skip

    @property
    def outcome(self) -> str:
        """`equal` in all settings, `refused` in some, or `wrong`."""
        return "wrong" if self.problems else "equal" if len(self.sharded) == len(SIZES) else "refused"

    @property
    def share(self) -> float:
        """Of the blocks' parameters, at the fewest ranks."""
        return self.sharded.get(str(SIZES[0]), (0.0, 0.0))[0]


def _with_settings(outcomes: Sequence[Outcome], told: Sequence[Iterable[str]]) -> list[str]:
    """Each text once, with the settings in which it is so if these aren't all."""
    settings: dict[str, list[str]] = {}
    for outcome, texts in zip(outcomes, told, strict=True):
        for text in texts:
            where = f"{outcome.size} ranks{', sequence-parallel' if outcome.sequence else ''}"
            settings.setdefault(text, []).append(where)
    return [text if len(where) == len(outcomes) else f"{text} ({'; '.join(where)})" for text, where in settings.items()]


def read_rows(path: Path = ROWS) -> dict[str, Row]:
    """The rows of a file."""
    return {name: Row(**held) for name, held in json.loads(path.read_text(encoding="utf-8")).items()}


def written(rows: Mapping[str, Row]) -> str:
    """The file of these rows, a line for each, in the order of the families."""
    names = [name for held in _PARTS.values() for name in held if name in rows]
    return "{\n" + ",\n".join(f"{json.dumps(n)}: {json.dumps(asdict(rows[n]))}" for n in names) + "\n}\n"


def page(rows: Mapping[str, Row]) -> str:
    """The summary of these rows."""
    lines = [
        _INTRODUCTION,
        "| | models | equal | refused | wrong | sharded, median | least |",
        "|---|---|---|---|---|---|---|",
    ]
    for family, names in _PARTS.items():
        lines.append(_counted(family, {name: rows[name] for name in names if name in rows}))
    lines += ["", "*Sharded* is the share of the blocks' parameters at 2 ranks.", "", "## Which", ""]
    for family, names in _PARTS.items():
        lines += [f"**{family[0].upper()}{family[1:]}**: {', '.join(name for name in names if name in rows)}.", ""]
    few = sorted((held.share, name) for name, held in rows.items() if held.share < _LEAST)
    lines += [f"## Less than {_LEAST}% of the blocks, or refused", ""]
    lines += [f"- {name}, {share}%: {_first(rows[name])}" for share, name in few]
    slow = sorted(((held.seconds, name) for name, held in rows.items() if held.seconds), reverse=True)
    if slow:
        lines += ["", "## What had to be allowed", "", *_allowed(rows), ""]
        lines += ["## The slowest", "", "Seconds of a processor for four settings each.", ""]
        lines += [f"- {name}: {seconds} s" for seconds, name in slow[:5]]
    return "\n".join(lines).rstrip() + "\n"


def _counted(family: str, rows: Mapping[str, Row]) -> str:
    counts = Counter(held.outcome for held in rows.values())
    shares = {name: held.share for name, held in rows.items() if held.share}
    least = min(shares, key=lambda name: shares[name], default="–")
    cells = [family, len(rows), *(counts[what] for what in ("equal", "refused", "wrong"))]
    cells += [f"{median(shares.values()):.1f}%", f"{shares[least]}% ({least})"] if shares else ["–", "–"]
    return f"| {' | '.join(map(str, cells))} |"


def _first(row: Row) -> str:
    return next(iter((*row.problems, *row.reasons)), "no reason is known")


def _allowed(rows: Mapping[str, Row]) -> Iterable[str]:
    """For each freedom, which models needed it."""
    names: dict[str, list[str]] = {}
    for name, held in rows.items():
        for freedom in held.freedoms:
            names.setdefault(freedom, []).append(name)
    swept = [held for held in rows.values() if held.seconds is not None]
    yield f"- nothing: {sum(not held.freedoms for held in swept)} of the {len(swept)} models for which that was noted"
    yield from (f"- `{freedom}`: {', '.join(held)}" for freedom, held in names.items())


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
    """Sweep, and write the rows and their summary, or print rows."""
    update = arguments[:1] == ["--update"]
    names = arguments[1:] if update else arguments
    every = (*ARCHITECTURES, *SUBJECTS)
    known = read_rows() if update else {}
    if update and not names:
        names = [name for name in every if name not in known or known[name].seconds is None]
    swept = names or every
    missing = sorted({SUBJECTS[n].package for n in swept if n in SUBJECTS and not SUBJECTS[n].installed})
    if missing:
        print(f"not installed: {', '.join(missing)}; `pip install 'tpplan[zoo]'`", file=sys.stderr)
        return 2
    found: dict[str, Row] = {}
    for name in swept:
        found[name] = Row.of(sweep(name))
        if update or not names:  # as it comes: a sweep takes hours
            known = known | {name: found[name]}
            ROWS.write_text(written(known), encoding="utf-8")
            PAGE.write_text(page(known), encoding="utf-8")
        else:
            print(json.dumps({name: asdict(found[name])}))
    return 1 if any(held.problems for held in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
