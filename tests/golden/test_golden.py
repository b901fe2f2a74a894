"""The program of every shipped plan at two ranks, as recorded. `UPDATE_SNAPSHOTS=1` writes the records anew.

A change here is a change of what runs: read it before you accept it.
"""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tpplan
from tests.marking import slow_but
from tests.models.tiny import ARCHITECTURES, tiny_model
from tests.zoo.architectures import build
from tpplan.cost.traffic import placement_time
from tpplan.plan import Pin, Plan, Style, load_plan
from tpplan.rehearsal.rehearse import Rehearsed, rehearse

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
UPDATE = bool(os.environ.get("UPDATE_SNAPSHOTS"))
OF_THE_ZOO = {"mixtral-experts": "mixtral"}
NAMES = [f"{name}{style}" for name in (*ARCHITECTURES, *OF_THE_ZOO) for style in ("", "-sequence")]


def compiled(name: str, plan: Plan | None = None) -> tpplan.Program:
    kind = name.removesuffix("-sequence")
    if kind in OF_THE_ZOO:
        model, keywords = build(OF_THE_ZOO[kind])
    else:
        one_layer: dict[str, Any] = {"num_hidden_layers": 1} if ARCHITECTURES[kind].kind else {"layers": 1}
        model, keywords = tiny_model(kind, device="meta", **one_layer)
    program = tpplan.compile_plan(model, plan or f"plans/{name}.yaml", 2, keywords)
    # Lines of transformers' own source move with its releases.
    return replace(program, assumptions=tuple(text.rpartition(":")[0] for text in program.assumptions))


def shown(program: tpplan.Program) -> str:
    """The program as JSON, a line for each parameter and each module."""
    lines: list[str] = []
    for key, held in sorted(program.to_dict().items()):
        if isinstance(held, list) and held:
            items = ",\n".join(f"  {json.dumps(item, sort_keys=True)}" for item in held)
            lines.append(f"{json.dumps(key)}: [\n{items}\n]")
        else:
            lines.append(f"{json.dumps(key)}: {json.dumps(held)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


@pytest.mark.parametrize("name", NAMES)
def test_the_program_of_a_plan_is_as_recorded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    rehearsals: list[Rehearsed] = []
    monkeypatch.setattr("tpplan.rehearsal.prove.rehearse", lambda *call: rehearsals.extend(rehearse(*call)))
    program = compiled(name)
    assert rehearsals
    assert all(rehearsed.ran == rehearsed.predicted for rehearsed in rehearsals)
    path = HERE / f"{name}.json"
    if UPDATE:
        path.write_text(shown(program), encoding="utf-8")
    recorded = json.loads(path.read_text(encoding="utf-8"))
    assert program.to_dict() == recorded
    assert program.freedoms == ()  # what is tried first is enough for all of them
    assert tpplan.Program.from_dict(recorded) == program
    assert tpplan.Program.from_dict(recorded).digest == program.digest


def as_rules_say(name: str) -> Plan:
    """The plan with nothing left open: each end is what its style takes and gives, so that rules place all reshards."""
    after = "sequence" if name.endswith("-sequence") else "replicate"
    ends = {Style.COLWISE: ("replicate", "shard"), Style.ROWWISE: ("shard", after),
            Style.SEQUENCE: ("sequence", "sequence"), Style.VOCAB: ("replicate", "replicate")}  # fmt: skip
    plan = load_plan(f"plans/{name}.yaml")
    pins = [
        (rule, [Pin(end) for end in ends[rule.style]] if rule.style in ends else [None, None]) for rule in plan.rules
    ]
    rules = [replace(rule, input=rule.input or taken, output=rule.output or given) for rule, (taken, given) in pins]
    return replace(plan, rules=tuple(rules))


# With all ends as rules say, the body of GPT-2 with its stream split is refused (TP107).
@pytest.mark.parametrize("name", slow_but(("llama", "llama-sequence"), [n for n in NAMES if n != "gpt2-sequence"]))
def test_placement_takes_no_longer_than_what_rules_say(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    recorded = tpplan.Program.from_dict(json.loads((HERE / f"{name}.json").read_text(encoding="utf-8")))
    assert 0 < placement_time(recorded) <= placement_time(compiled(name, as_rules_say(name)))


def test_every_record_has_its_plan() -> None:
    assert sorted(path.stem for path in HERE.glob("*.json")) == sorted(NAMES)
