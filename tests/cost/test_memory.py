"""Estimated memory is what a sharded model takes that really runs."""

from __future__ import annotations

import pytest

from tests.cost.truth import cases, compare
from tests.marking import in_thirds

pytest.importorskip("transformers")
QUICK = [("llama", "llama", 2), ("gpt2", "gpt2-sequence", 4)]
SLOW = [("mixtral", "mixtral-sequence", 2), ("t5", "t5-sequence", 4), ("vit", "vit", 2), ("llama", "llama-sequence", 4)]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("kind", "plan", "tp"), in_thirds(QUICK, SLOW, cases()))
def test_memory_is_that_of_a_rank_that_runs(kind: str, plan: str, tp: int) -> None:
    truth = compare(kind, plan, tp)
    for name in ("parameters", "gradients", "optimizer"):
        assert abs(truth.error(name)) <= 0.02, name
    assert abs(truth.error("activations")) <= 0.1


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["llama", "llama-sequence"])
def test_a_loss_counts(plan: str) -> None:
    assert abs(compare("llama", plan, 2, labels=True).error("activations")) <= 0.1
