"""What the rules say of each operator is what was recorded. `UPDATE_SNAPSHOTS=1` writes the record anew.

`python -m tests.rules.outcomes aten.mm.default` prints what stands behind an operator's line, to compare two versions.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.rules.outcomes import NAMES, lines_of, summary

UPDATE = bool(os.environ.get("UPDATE_SNAPSHOTS"))
RECORD = Path(__file__).with_name("outcomes.txt")
VERSION = torch.__version__.partition("+")[0]


@pytest.mark.slow
def test_what_the_rules_say_of_each_operator_is_what_was_recorded() -> None:
    recorded = RECORD.read_text(encoding="utf-8").splitlines() if RECORD.exists() else [""]
    if not UPDATE and recorded[0] != f"torch {VERSION}":
        pytest.skip(f"recorded with {recorded[0]}, whose operator database and DTensor have other calls and rules")
    found = [f"torch {VERSION}", *(summary(name, lines) for name, lines in lines_of(NAMES).items())]
    if UPDATE:
        RECORD.write_text("\n".join(found) + "\n", encoding="utf-8")
        return
    changed = {line.split()[0] for line in {*found} ^ {*recorded}}
    assert not changed, f"rules of {', '.join(sorted(changed))} say something else: python -m tests.rules.outcomes"
