"""What a refusal's help says, done: each remedy ends the finding that it is for, and following them leads to a plan."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

import tpplan
from tests.compiler import small_models as toys
from tests.compiler.follow import Attempt, remedies
from tests.compiler.test_findings import BAD, CASES
from tests.marking import sweep_but
from tests.models.tiny import tiny_model
from tpplan.plan import Diagnostic, PlanError, Severity

MODELS = (
    toys.Mlp, toys.Gated, toys.Attention, toys.OneKeyHead, toys.Block, toys.Packed, toys.MeanByHand,
    toys.WritesInPlace, toys.Shared, toys.WritesThroughAView, toys.LoneColwise, toys.CallsBessel,
)  # fmt: skip
STYLES = ("colwise", "rowwise", "replicate", "sequence")
PINS = ("input: shard", "input: replicate", "input: sequence", "output: replicate", "output: shard", "output: sequence")
# Their help is about the model or the call.
ELSEWHERE = {"TP108", "TP110", "TP111", "TP136"}
STEPS = 16


def errors(make: Callable[[], nn.Module], tried: Attempt, inputs: Any) -> list[Diagnostic]:
    try:
        tpplan.compile_plan(make(), tried.text(), tp=tried.size, inputs=inputs)
    except PlanError as error:
        return [found for found in error.diagnostics if found.severity is Severity.ERROR]
    return []


def named(found: Diagnostic, tried: Attempt) -> tuple[object, ...]:
    """What makes a finding another one: lines move as rules are removed."""
    rule = None if found.span is None else tried.at(found.span.start.line)
    return found.code, found.subject, found.message, found.notes, rule


def drawn(draw: random.Random, model: nn.Module) -> Attempt:
    """A plan that a user who understands nothing of the model might write."""
    rules: dict[str, str] = {}
    for name, module in model.named_modules():
        if name and list(module.parameters(recurse=False)) and draw.random() < 0.7:
            style, pin = draw.choice(STYLES), draw.choice(PINS) if draw.random() < 0.6 else ""
            rules[name] = f"{{style: {style}, {pin}}}" if pin else style
    return Attempt(rules, draw.choice((2, 2, 2, 3, 4)))


def assert_helpful(make: Callable[[], nn.Module], tried: Attempt, inputs: Any) -> None:
    for _ in range(STEPS):
        found = errors(make, tried, inputs)
        if not found:
            return
        first: Attempt | None = None
        for error in found:
            assert error.help, error
            ways = [*remedies(error, tried)]
            assert ways or error.code in ELSEWHERE, (tried.text(), error.headline, error.help)
            for text, after in ways:
                assert after != tried, (tried.text(), error.headline, text)
                left = {named(other, after) for other in errors(make, after, inputs)}
                assert named(error, tried) not in left, (tried.text(), error.headline, text)
            first = first or (ways[0][1] if ways else None)
        if first is None:
            return
        tried = first
    pytest.fail(f"no plan after {STEPS} steps")


def sweeping(quick: int, every: int) -> list[Any]:
    return sweep_but(range(quick), range(every))


@pytest.mark.one_in(6)
@pytest.mark.parametrize("seed", sweeping(40, 1000))
def test_any_plan_is_mended_by_what_its_findings_say(seed: int) -> None:
    draw = random.Random(seed)
    make = draw.choice(MODELS)
    assert_helpful(make, drawn(draw, make()), toys.activations())


@pytest.mark.slow
@pytest.mark.parametrize("seed", sweeping(1, 60))
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_so_is_any_of_a_model_of_transformers(name: str, seed: int) -> None:
    """Several rules may be behind one finding there, so that not each remedy ends it."""
    draw = random.Random(seed)
    model, inputs = tiny_model(name, device="meta")
    tried = drawn(draw, model)
    for step in range(2 * STEPS):
        found = errors(lambda: model, tried, inputs)
        if not found:
            return
        ways = [*remedies(found[0], tried)]
        assert ways or found[0].code in ELSEWHERE, (tried.text(), found[0].headline, found[0].help)
        if not ways:
            return
        tried = ways[step % len(ways)][1]
    pytest.fail("no plan")


@pytest.mark.one_in(6)
@pytest.mark.parametrize("code", sorted(CASES.keys() - ELSEWHERE))
def test_the_recorded_plans_are_mended_by_what_they_say(code: str) -> None:
    make, inputs, size = CASES[code]
    lines = (BAD / f"{code}.yaml").read_text(encoding="utf-8").partition("modules:\n")[2].splitlines()
    rules = dict(
        line.strip().rsplit(": ", 1) if "{style" not in line else line.strip().split(": ", 1) for line in lines
    )
    assert_helpful(make, Attempt({pattern.strip("'\""): held for pattern, held in rules.items()}, size), inputs)
