"""docs/state.md: what comes of each use of state, for each layout and mesh.

python -m tests.checkpoint.page               try all, write the page; exits with 1 if anything is wrong
python -m tests.checkpoint.page packs tied    try these alone, and print their rows
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.checkpoint.cells import CELLS
from tests.checkpoint.subjects import SUBJECTS
from tests.checkpoint.test_states import OF_TORCH, SHAPES, outcomes

PAGE = Path(__file__).parents[2] / "docs" / "state.md"
SAVED = "distributed checkpoint"
_INTRODUCTION = f"""\
# State

What users do with parameters, gradients, optimizer states and checkpoints of a sharded model, on gloo processes: for
each layout that a parameter can have, and each mesh, every use is compared with the unsharded model's. It has to be in
the stock order and bit-equal (sums and fused kernels: within rounding).

`make states` writes this page; nothing in it is written by hand. The {len(CELLS) + 1} uses: {", ".join(CELLS)}; and a
{SAVED}, saved on each mesh and read on every other.

`SGD fused` is refused by torch itself for DTensors; it isn't counted.
"""


def tried(name: str, shape: tuple[int, ...]) -> dict[str, str]:
    """What is wrong with which use; empty if nothing is."""
    with tempfile.TemporaryDirectory() as folder:
        found = outcomes(name, shape, list(CELLS), Path(folder))
    with tempfile.TemporaryDirectory() as folder:
        wrong = outcomes(name, shape, ["save"], Path(folder))
        for other in SHAPES:
            wrong |= outcomes(name, other, ["read"], Path(folder))
    return found | ({SAVED: next(iter(wrong.values()))} if wrong else {})


def row(name: str, found: Mapping[tuple[int, ...], Mapping[str, str]]) -> str:
    """A layout's row of the table."""
    count = len(CELLS) + 1 - len(OF_TORCH)
    cells = [
        f"{count - len(wrong)} of {count}" + "".join(f"; {use}: {t}" for use, t in wrong.items())
        for wrong in found.values()
    ]
    return f"| {' | '.join([name, *cells])} |"


def main(names: Sequence[str]) -> int:
    """Try all, or these, and write or print what came of it."""
    rows: list[str] = []
    wrong = False
    for name in names or SUBJECTS:
        found = {shape: tried(name, shape) for shape in SHAPES}
        wrong |= any(found.values())
        rows.append(row(name, found))
        print(rows[-1], flush=True)
    if not names:
        head = ["model", *(" × ".join(map(str, shape)) for shape in SHAPES)]
        table = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *rows]
        PAGE.write_text(_INTRODUCTION + "\n" + "\n".join(table) + "\n", encoding="utf-8")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
