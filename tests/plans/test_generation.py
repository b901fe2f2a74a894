"""Models that read with an encoder generate the tokens of the unsharded model: text, and sound."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import tpplan
from tests.marking import sweep_but
from tests.runtime.world import Member, world
from tests.zoo.architectures import build

IDS = torch.randint(3, 80, (2, 8), generator=torch.Generator().manual_seed(0))
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "top_k": 9},
    "beam": {"num_beams": 3},
}


def sources(family: str) -> dict[str, Any]:
    if family != "whisper":
        return {"inputs": IDS, "attention_mask": torch.ones_like(IDS)}
    return {"input_features": torch.randn(2, 20, 32, generator=torch.Generator().manual_seed(1))}


def tokens(model: Any, family: str, way: dict[str, Any]) -> torch.Tensor:
    torch.manual_seed(2)
    usual = {"do_sample": False, "max_new_tokens": 6, "eos_token_id": 2, "pad_token_id": 1}
    return model.generate(**sources(family), **(usual | {"decoder_start_token_id": 2} | way))


def generated(member: Member, family: str, plan: str) -> list[str]:
    meta, _ = build(family)
    torch.manual_seed(0)
    meta.config.use_cache = True  # pyright: ignore
    stock: Any = type(meta)(meta.config).eval()  # pyright: ignore
    sharded: Any = tpplan.parallelize(copy.deepcopy(stock), plan, member.mesh())
    wrong: list[str] = []
    for name, way in WAYS.items():
        ours, theirs = tokens(sharded, family, way), tokens(stock, family, way)
        if not torch.equal(ours, theirs):
            wrong.append(f"{name}: {ours.tolist()} and {theirs.tolist()}")
    return wrong


@pytest.mark.sweep
@pytest.mark.processes
@pytest.mark.parametrize(
    "plan", sweep_but(["t5", "whisper", "bart-sequence"], ["t5", "bart", "whisper", "t5-sequence", "bart-sequence"])
)
def test_a_model_with_an_encoder_generates_the_same_tokens(plan: str) -> None:
    assert world(2).run(generated, plan.removesuffix("-sequence"), plan) == [[], []]
