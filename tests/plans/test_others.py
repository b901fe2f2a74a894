"""The plans for models from outside of transformers' text models compute what the stock models do."""

from __future__ import annotations

import pytest

import tpplan
from tests.marking import sweep_but
from tests.plans.parity import PLANS
from tests.zoo.subjects import SUBJECTS

# By plan, the models of the zoo.
OTHERS = {
    "dinov2": "dinov2", "litgpt": "litgpt_llama", "llava": "llava", "qwen2_vl": "qwen2_vl", "sd3": "sd3",
    "swin": "swin", "torchtune_llama3": "torchtune_llama3", "wav2vec2": "wav2vec2",
}  # fmt: skip
WITH_SEQUENCE = ("litgpt", "llava", "qwen2_vl", "sd3", "swin", "torchtune_llama3")

CASES = [(plan, size) for name in OTHERS for plan in (name, f"{name}-sequence") for size in (2, 4)]
QUICK = [("dinov2", 2), ("litgpt-sequence", 4), ("swin", 2), ("torchtune_llama3-sequence", 4), ("wav2vec2", 2)]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("plan", "size"), sweep_but(QUICK, [case for case in CASES if (PLANS / f"{case[0]}.yaml").exists()])
)
def test_a_plan_computes_what_the_stock_model_computes(plan: str, size: int) -> None:
    subject = SUBJECTS[OTHERS[plan.removesuffix("-sequence")]]
    if not subject.installed:
        pytest.skip(f"needs {subject.package}")
    arguments, keywords = subject.call()
    report = tpplan.verify(subject.build(), PLANS / f"{plan}.yaml", size, arguments or keywords)
    assert report.ok, report.problems


def test_every_plan_is_there() -> None:
    assert all((PLANS / f"{name}.yaml").exists() for name in OTHERS)
    assert all((PLANS / f"{name}-sequence.yaml").exists() for name in WITH_SEQUENCE)
