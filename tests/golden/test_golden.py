"""The programs of all shipped plans, as recorded. `UPDATE_GOLDEN=1` rewrites them: read the difference first."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import tpplan
from tests.models.tiny import ARCHITECTURES, tiny_model
from tpplan.plan import load_plan

HERE = Path(__file__).parent
PLANS = [f"{name}{suffix}" for name in ARCHITECTURES for suffix in ("", "-sequence")]


def program_of(name: str) -> tpplan.Program:
    model, keywords = tiny_model(name.removesuffix("-sequence"), device="meta")
    return tpplan.compile_plan(model, name, tp=2, inputs=keywords)


@pytest.mark.parametrize("name", PLANS)
def test_a_shipped_plan_compiles_to_the_recorded_program(name: str) -> None:
    held = program_of(name).to_dict()
    held["assumptions"] = len(held["assumptions"])  # they name lines of transformers
    text = json.dumps(held, indent=1, sort_keys=True) + "\n"
    text = text.replace(f"{Path.cwd()}/", "")
    path = HERE / f"{name}.json"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def test_equal_inputs_give_equal_programs_that_survive_json() -> None:
    one, other = program_of("qwen3-sequence"), program_of("qwen3-sequence")
    assert one == other and one.digest == other.digest
    assert tpplan.Program.from_dict(json.loads(one.to_json())) == one


def test_a_plan_is_shipped_for_every_golden_program() -> None:
    assert sorted(path.stem for path in HERE.glob("*.json")) == sorted(PLANS)
    assert all(load_plan(name).rules for name in PLANS)
