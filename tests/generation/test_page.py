"""docs/generation.md has a row for each plan of a model that generates, and says what is so."""

from __future__ import annotations

import pytest

from tests.generation.page import PAGE, Entry, entry, page, tried, written
from tests.generation.ways import OF_CAUSAL, PLAN_NAMES, PLANS
from tests.runtime.test_decode import NAMES
from tests.zoo.architectures import ARCHITECTURES

GENERATING = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq")


def test_the_page_has_a_row_for_every_plan_of_a_model_that_generates() -> None:
    families = {path.stem: path.stem.removesuffix("-sequence") for path in PLANS.glob("*.yaml")}
    made = {plan: ARCHITECTURES.get(NAMES.get(family, family)) for plan, family in families.items()}
    generating = {plan for plan, held in made.items() if held is not None and held.maker in GENERATING}
    assert generating == set(PLAN_NAMES)
    text = PAGE.read_text(encoding="utf-8")
    assert [plan for plan in PLAN_NAMES if f"\n| {plan} |" not in text] == []


def test_nothing_on_the_page_is_wrong_or_an_error_of_torch() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert "**" not in text
    assert page(written(text)) == text


def test_what_is_refused_has_its_reason() -> None:
    found = dict.fromkeys(OF_CAUSAL, "=") | {"chunks": "TP117 unproved-call: no", "turns": "–"}
    made = entry("llama", found)
    assert made.row.count("=") == len(OF_CAUSAL) - 2
    assert "| TP117 | – |" in made.row
    assert made.reasons == ("- `llama`, chunks: TP117 unproved-call: no",)
    assert written(page({"llama": made})) == {"llama": Entry(*made)}


@pytest.mark.sweep
@pytest.mark.processes
@pytest.mark.parametrize("plan", PLAN_NAMES)
def test_a_row_says_what_comes_of_the_plan(plan: str) -> None:
    assert tried(plan) == written(PAGE.read_text(encoding="utf-8"))[plan]
