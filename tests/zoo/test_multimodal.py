"""Plans of models that read numbers of their inputs, proved on an example with numbers; other numbers come later."""

from __future__ import annotations

import pytest
import torch

import tpplan
from tests.marking import sweep_but
from tests.runtime.simulated import worst
from tests.zoo.multimodal import MULTIMODAL, build, inputs_of
from tpplan.api import suggest_text
from tpplan.plan import CompileError

TOLERANCE = 1e-6  # some norms compute in float32


@pytest.mark.slow
@pytest.mark.parametrize("name", sweep_but([*MULTIMODAL][::2], MULTIMODAL))
@pytest.mark.sweep
def test_pictures_may_stand_anywhere(name: str) -> None:
    """Results and gradients of calls with other pictures, at other places, and of the first ones again."""
    model, example = build(name), inputs_of(name, 0)
    plan = suggest_text(model, 2, inputs=example)
    calls = [((), inputs_of(name, number)) for number in (0, 1, 2, 0)]
    assert max(worst(model, plan, 2, ((), example), calls)) < TOLERANCE


@pytest.mark.sweep
def test_a_model_that_checks_its_pictures_needs_no_numbers() -> None:
    model, example = build("llava"), inputs_of("llava", 0)
    shapes = {name: tensor.to("meta") for name, tensor in example.items()}
    plan = tpplan.suggest_plan(model, 2, inputs=shapes)
    assert tpplan.compile_plan(model, plan, 2, shapes).digest == tpplan.compile_plan(model, plan, 2, example).digest


def test_a_model_that_reads_sizes_says_which_numbers_it_needs() -> None:
    shapes = {name: torch.empty_like(tensor, device="meta") for name, tensor in inputs_of("qwen2_vl", 0).items()}
    with pytest.raises(CompileError, match="reads numbers of `image_grid_thw`"):
        tpplan.suggest_plan(build("qwen2_vl"), 2, inputs=shapes)
