"""Ranks that share a model are called with the same arguments, or told so at the first call of each kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.runtime.world import Member, world
from tests.training.runs import sharded
from tpplan import DifferentInputsError
from tpplan.calls.alike import RANDOM_STATE, refuse_different

pytestmark = pytest.mark.processes

IDS = torch.arange(12).view(2, 6)
NOISE = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(1))


def _calls(rank: int) -> list[dict[str, Any]]:
    """What the ranks pass, call by call; a call that was refused is no proof of the next."""
    return [
        {"input_ids": IDS + rank},
        {"input_ids": torch.arange(12 + 6 * rank).view(-1, 6)},
        {"input_ids": IDS} | ({"use_cache": False} if rank else {}),
        {"input_ids": IDS, "use_cache": bool(rank)},
        {"input_ids": IDS.int() if rank else IDS},
        {"inputs_embeds": NOISE + rank * 1e-7},
        {"input_ids": IDS},
        {"input_ids": IDS, "labels": IDS.roll(rank)},
        {"input_ids": IDS, "labels": IDS},
        {"input_ids": IDS, "attention_mask": None},
    ]


def _answers(member: Member) -> list[str]:
    model = sharded(member, "llama")
    found: list[str] = []
    model.train(not member.rank)
    with pytest.raises(DifferentInputsError, match=r"`training` is True and False"):
        model(input_ids=IDS)
    model.train()
    for call in _calls(member.rank):
        try:
            found.append(str(tuple(model(**call).logits.shape)))
        except DifferentInputsError as error:
            found.append(str(error))
    return found


def test_the_first_argument_that_differs_is_named_on_every_rank() -> None:
    first, second = world(2).run(_answers)
    assert first == second
    shape = "(2, 6, 64)"
    expected = (
        "`input_ids` has different numbers",
        "`input_ids` is int64(2, 6) and int64(3, 6)",
        "`use_cache` is passed on one of them alone",
        "`use_cache` is False and True",
        "`input_ids` is int64(2, 6) and int32(2, 6)",
        "`inputs_embeds` has different numbers",
        shape,
        "`labels` has different numbers",
        shape,
        shape,
    )
    for answer, said in zip(first, expected, strict=True):
        assert said in answer, (said, answer)
        assert answer == shape or answer.startswith("TP192 different-inputs: ranks 0 and 1 of the axis"), answer


def _generated(member: Member) -> list[int]:
    model = sharded(member, "gpt2").eval()
    tokens = model.generate(IDS, max_new_tokens=5, do_sample=False, pad_token_id=0)
    return tokens[0].tolist()


@pytest.mark.sweep
def test_generating_with_caches_that_hold_each_ranks_heads_is_no_difference() -> None:
    first, second = world(2).run(_generated)
    assert first == second and len(first) == 11


def _prompts(rank: int) -> list[dict[str, Any]]:
    """What the ranks are asked to generate from: the second time each is of a kind that was proved before."""
    return [
        {"inputs": IDS, "max_new_tokens": 2},
        {"inputs": IDS + rank, "max_new_tokens": 2},
        {"inputs": torch.arange(12 + 6 * rank).view(-1, 6), "max_new_tokens": 2},
        {"inputs": IDS, "max_new_tokens": 2 + rank},
        {"inputs": IDS, "max_new_tokens": 2, "do_sample": True},
        {"inputs": IDS, "max_new_tokens": 3},
    ]


def _served(member: Member) -> list[str]:
    model = sharded(member, "llama").eval()
    found: list[str] = []
    for prompt in _prompts(member.rank):
        torch.manual_seed(member.rank if "do_sample" in prompt else 0)
        try:
            made = model.generate(**{"do_sample": False, "pad_token_id": 0, "eos_token_id": None} | prompt)
            found.append(str(tuple(made.shape)))
        except DifferentInputsError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize(
    ("name", "way_out"),
    [(RANDOM_STATE, "torch.manual_seed"), ("the state of torch", "torch.manual_seed"), ("x", "batches")],
)
def test_random_states_that_differ_are_to_be_seeded(name: str, way_out: str) -> None:
    with pytest.raises(DifferentInputsError, match=way_out):
        refuse_different([[(name, "#1")], [(name, "#2")]])


@pytest.mark.sweep
def test_each_prompt_is_compared_before_anything_is_generated() -> None:
    """Without it, ranks would wait for each other, or give numbers that no model makes."""
    first, second = world(2).run(_served, seconds=60.0)
    assert first == second
    expected = (
        "(2, 8)", "`inputs` has different numbers", "`inputs` is int64(2, 6) and int64(3, 6)",
        "`max_new_tokens` is 2 and 3", "`the random state` has different numbers", "(2, 9)",
    )  # fmt: skip
    for answer, said in zip(first, expected, strict=True):
        assert said in answer, (said, answer)
        assert answer == said or answer.startswith("TP192 different-inputs"), answer
