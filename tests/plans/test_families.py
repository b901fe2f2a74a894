"""The plans for further families of models, on the tiny configurations of the zoo: outputs and every gradient.

Each is tried by itself on two ranks, and in its sequence-parallel form on four; a third of both in turns, the others
in the sweep. The zoo has suggestions that say the same in the other two settings.
"""

from __future__ import annotations

import pytest
import torch

import tpplan
from tests.marking import slow_but, sweep_but
from tests.plans.parity import PLANS
from tests.zoo.architectures import build
from tpplan.compiler.ir.layout import REPLICATED

FAMILIES = (
    "albert", "bart", "bloom", "clip", "cohere", "deberta-v2", "deepseek_v3", "electra", "falcon", "falcon-multi-query",
    "falcon_h1", "gemma", "gemma2", "gemma3_text", "glm4", "gpt_bigcode", "gpt_neo", "gpt_oss", "gptj", "granite",
    "granitemoe", "mamba", "mixtral", "mixtral-experts", "mpt", "nanogpt", "olmo2", "olmoe", "phi", "qwen2_moe",
    "qwen3_moe", "qwen3_next", "siglip", "stablelm", "starcoder2", "t5", "torch_decoder", "torch_encoder", "vit",
    "whisper",
)  # fmt: skip
# Where they have other names than plans.
ARCHITECTURES = {"falcon": "falcon_new", "falcon-multi-query": "falcon_old", "mixtral-experts": "mixtral"}
WITHOUT_SEQUENCE = ("vit",)  # an image's patches and the class token are an odd number

ALONE = [(name, 2) for name in FAMILIES]
OF_SEQUENCES = [(f"{name}-sequence" if name not in WITHOUT_SEQUENCE else name, 4) for name in FAMILIES]


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "size"), sweep_but(ALONE[::3] + OF_SEQUENCES[1::3], ALONE + OF_SEQUENCES))
def test_a_plan_computes_what_the_stock_model_computes(plan: str, size: int) -> None:
    family = plan.removesuffix("-sequence")
    model, inputs = build(ARCHITECTURES.get(family, family))
    report = tpplan.verify(model, PLANS / f"{plan}.yaml", size, inputs, dtype=torch.float32)
    assert report.ok, report.problems


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("name", "size"),
    [
        *(("mamba", 2), ("mixtral", 4), ("olmo2", 2), ("torch_encoder", 2)),
        *(pytest.param(name, 2, marks=pytest.mark.slow) for name in ("mixtral", "mixtral-experts")),
    ],
)
def test_a_family_of_each_kind(name: str, size: int) -> None:
    model, inputs = build(ARCHITECTURES.get(name, name))
    report = tpplan.verify(model, PLANS / f"{name}.yaml", size, inputs, dtype=torch.float32)
    assert report.ok, report.problems


def test_gradients_of_experts_are_rehearsed_in_their_own_dtype() -> None:
    """On four ranks torch takes their rows in float64, and wouldn't in bfloat16, in which it checks shapes."""
    model, inputs = build("mixtral")
    assert tpplan.compile_plan(model.double(), PLANS / "mixtral.yaml", 4, inputs).size == 4


@pytest.mark.parametrize("plan", slow_but(["gpt_bigcode-sequence"], ["qwen3_next", "gpt_bigcode-sequence"]))
def test_on_one_rank_everything_is_whole(plan: str) -> None:
    model, inputs = build(plan.removesuffix("-sequence"))
    program = tpplan.compile_plan(model, PLANS / f"{plan}.yaml", 1, inputs)
    assert not program.count_collectives()
    assert all(placement.layout == REPLICATED for placement in program.parameters)
    assert tpplan.verify(model, PLANS / f"{plan}.yaml", 1, inputs, dtype=torch.float32).ok
