"""Kernels in training steps on real processes: the sum with its norm, and the loss of split classes."""

from __future__ import annotations

import pytest

from tests.runtime import with_kernels
from tests.runtime.vocabulary import LLAMA, SEQUENCE
from tests.runtime.world import world


@pytest.mark.one_in(3)
@pytest.mark.parametrize("rules", [LLAMA, LLAMA | SEQUENCE], ids=["tp", "tp+sp"])
def test_steps_are_those_of_the_stock_model(rules: dict[str, object]) -> None:
    for errors, calls in world(2).run(with_kernels.steps, rules):
        assert max(errors) <= 2e-5, errors
        assert calls == {"norm": 2, "loss": 2}  # of one layer, in two steps
