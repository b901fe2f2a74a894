"""`warm_up`: what `generate` calls is proved ahead, so that requests of any length compile nothing."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import tpplan
from tests.models.tiny import example_keywords, tiny_model
from tests.runtime.world import Member, world
from tpplan.calls import guard

pytest.importorskip("transformers")

CANDIDATES = 2
GREEDY: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "use_cache": True}


def prompt(length: int) -> dict[str, Any]:
    """Tokens that come again, so that looking up finds some."""
    ids = example_keywords("llama")["input_ids"][:1, :3].repeat(1, 5)[:, :length]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def served(member: Member, plan: str, lengths: tuple[int, ...]) -> tuple[list[bool], int, int]:
    """Whether the tokens are the stock model's, and how often was compiled: in the warm-up, and after it."""
    stock = tiny_model("llama", num_hidden_layers=1)[0].eval()
    with mock.patch.object(guard, "prove", side_effect=guard.prove) as compiles:
        sharded = tpplan.parallelize(copy.deepcopy(stock), plan, member.mesh(), example_keywords("llama"))
        torch.manual_seed(3)
        before = torch.get_rng_state()
        tpplan.warm_up(sharded, candidates=CANDIDATES, pad_token_id=0, use_cache=True)
        assert torch.equal(torch.get_rng_state(), before)
        ahead = compiles.call_count
        equal = [
            torch.equal(sharded.generate(**prompt(n), **GREEDY, **ways), stock.generate(**prompt(n), **GREEDY, **ways))  # pyright: ignore
            for n in lengths
            for ways in ({}, {"prompt_lookup_num_tokens": CANDIDATES})
        ]
        return equal, ahead, compiles.call_count - ahead


@pytest.mark.sweep
@pytest.mark.processes
def test_no_request_waits_for_a_compilation() -> None:
    for equal, ahead, later in world(2).run(served, "plans/llama-sequence.yaml", (12, 7)):
        assert (equal, ahead > 0, later) == ([True] * 4, True, 0)


@pytest.mark.sweep
@pytest.mark.processes
def test_nor_with_whole_sequences() -> None:
    for equal, ahead, later in world(2).run(served, "plans/llama.yaml", (12, 7, 9)):
        assert (equal, ahead > 0, later) == ([True] * 6, True, 0)


def test_a_model_that_generates_nothing_is_refused() -> None:
    with pytest.raises(TypeError, match=r"`Linear` has no `generate`"):
        tpplan.warm_up(nn.Linear(2, 2))
