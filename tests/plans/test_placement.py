"""Placement takes no longer than what rules say, where every end is what its rule's style takes and gives.

Of the families on the zoo's tiny configurations; `tests/golden` holds the recorded programs to the same. Where not all
ends compile as rules say, those of as many rules as do are pinned, in the plan's order.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

import tpplan
from tests.golden.test_golden import as_rules_say, compiled
from tests.marking import sweep_but
from tests.plans.parity import PLANS
from tests.plans.test_families import ALONE, ARCHITECTURES, OF_SEQUENCES
from tests.zoo.architectures import build
from tpplan.cost.traffic import placement_time
from tpplan.plan import Plan

NAMES = [name for name, _ in (*ALONE, *OF_SEQUENCES)]
USUAL = ["gpt2-sequence", "deepseek_v3-sequence", "t5"]


def placed(name: str, plan: Plan | None = None) -> tpplan.Program:
    family = name.removesuffix("-sequence")
    if family not in {held.removesuffix("-sequence") for held in NAMES}:
        return compiled(name, plan)
    model, inputs = build(ARCHITECTURES.get(family, family))
    return tpplan.compile_plan(model, plan or PLANS / f"{name}.yaml", 2, inputs)


def by_rules(name: str) -> tuple[tpplan.Program, int]:
    """The program with ends as rules say, and of how many rules they are."""
    pinned = as_rules_say(name)
    try:
        return placed(name, pinned), len(pinned.rules)
    except tpplan.CompileError:
        pass
    held = replace(pinned, rules=tpplan.load_plan(PLANS / f"{name}.yaml").rules)
    found, count = placed(name, held), 0
    for place, rule in enumerate(pinned.rules):
        trial = replace(held, rules=(*held.rules[:place], rule, *held.rules[place + 1 :]))
        try:
            found, held, count = placed(name, trial), trial, count + 1
        except tpplan.CompileError:
            continue
    return found, count


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", sweep_but(USUAL, ["gpt2-sequence", *NAMES]))
def test_placement_takes_no_longer_than_rules_say(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PLANS.parent)
    (ruled, count), own = by_rules(name), placed(name)
    assert count and placement_time(own) > 0
    assert placement_time(own) - placement_time(_made_whole(own, ruled)) <= placement_time(ruled)


def _made_whole(own: tpplan.Program, ruled: tpplan.Program) -> tpplan.Program:
    """Of the first what it does for results that the other, whose plan pins them so, hands out in parts."""
    (root,), (other,) = ([m for m in program.modules if not m.name] or [None] for program in (own, ruled))
    handed = {held.path for held in (other.exits if other else ())}
    exits = tuple(held for held in (root.exits if root else ()) if held.path not in handed)
    kept = replace(root, entries=(), exits=exits) if root else None
    return replace(own, modules=(kept,) if kept else (), parameters=())


def test_of_two_values_of_one_length_the_one_that_is_read_is_whole() -> None:
    """Bloom's masks take the length from the embeddings, not from their norm: from there on the stream is split."""
    program = placed("bloom-sequence")
    norm = next(m for m in program.modules if m.name == "transformer.word_embeddings_layernorm")
    assert [str(held.forward) for held in norm.entries] == ["reduce-scatter"] and not norm.exits


def test_latent_attention_gathers_its_input_and_no_heads() -> None:
    """Its body takes the sequence's length from its input: with that split, heads would have to be gathered."""
    program = placed("deepseek_v3-sequence")
    assert not {"TP104", "TP105"} & {found.code for found in program.diagnostics}
    entries = next(m for m in program.modules if m.name == "model.layers.0.self_attn").entries
    assert [str(held.forward) for held in entries if held.path == ("hidden_states",)] == ["all-gather"]
