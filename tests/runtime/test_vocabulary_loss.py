"""Losses over a vocabulary that is split, on real processes: by labels, in own loops, beside generation."""

from __future__ import annotations

import math

import pytest
import torch

from tests.runtime import vocabulary
from tests.runtime.vocabulary import GPT2, LLAMA, SEQUENCE, TOKENS, VOCABULARY
from tests.runtime.world import world

CALLS = [
    {},
    {"num_items_in_batch": 7},
    {"num_items_in_batch": torch.tensor(9)},
    {"labels": torch.full(TOKENS, -100)},
    {"shift_labels": torch.randint(0, VOCABULARY, TOKENS, generator=torch.Generator().manual_seed(3))},
    {"loss": "z"},
    {"position_ids": torch.arange(6).repeat(2)[None].repeat(2, 1)},
]


def check(found: list[list[tuple[float, float, float, tuple[int, ...]]]], tolerance: float = 2e-5) -> None:
    parts = [-(-VOCABULARY // 2), VOCABULARY // 2]
    for rank, calls in enumerate(found):
        for number, (loss, expected, error, shape) in enumerate(calls):
            assert shape == (*TOKENS, parts[rank])
            assert found[0][number][0] == loss or math.isnan(loss)  # to the last bit
            if math.isnan(expected):
                assert math.isnan(loss), number
            else:
                assert abs(loss - expected) <= tolerance * abs(expected), number
            assert error <= tolerance, number


@pytest.mark.slow
def test_the_loss_by_labels_is_that_of_the_unsharded_model() -> None:
    check(world(2).run(vocabulary.by_labels, "llama", LLAMA | SEQUENCE, CALLS[:2]))


@pytest.mark.sweep
@pytest.mark.parametrize("rules", [LLAMA, LLAMA | SEQUENCE], ids=["tp", "tp+sp"])
def test_the_loss_by_labels_in_all_kinds_of_calls(rules: dict[str, object]) -> None:
    check(world(2).run(vocabulary.by_labels, "llama", rules, CALLS))


@pytest.mark.slow
def test_a_head_that_is_tied_to_the_table() -> None:
    check(world(2).run(vocabulary.by_labels, "gpt2", GPT2, [{}, {"loss": "z"}]))


@pytest.mark.slow
def test_autocast() -> None:
    check(world(2).run(vocabulary.by_labels, "llama", LLAMA, [{"loss": "autocast"}]), 2e-2)


@pytest.mark.slow
def test_losses_of_own_loops() -> None:
    for errors in world(2).run(vocabulary.own_loop):
        assert set(errors) == {"model", "chunk", "mesh", "hidden"}
        assert all(loss <= 1e-5 and gradient <= 2e-5 for loss, gradient in errors.values()), errors


def test_logits_that_are_a_dtensor() -> None:
    assert max(max(errors) for errors in world(2).run(vocabulary.dtensors)) <= 1e-12


def test_logits_that_cannot_be_placed_are_refused() -> None:
    for texts in world(2).run(vocabulary.refused):
        assert all(text.startswith("TP165") for text in texts), texts


@pytest.mark.slow
def test_generation_chooses_among_all_classes() -> None:
    for rank, (made, expected, shape) in enumerate(world(2).run(vocabulary.generated)):
        assert made == expected
        assert shape == (1, 5, (49, 48)[rank])


@pytest.mark.slow
def test_no_rank_ever_has_all_logits() -> None:
    split, gathered = world(2).run(vocabulary.largest, "shard"), world(2).run(vocabulary.largest, "replicate")
    assert min(gathered) == 2 * 64 * 4096
    assert max(split) == 2 * 64 * 2048
