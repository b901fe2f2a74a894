"""Whisper's own ways of generating: long recordings, timestamps, fallback to other temperatures."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import tpplan
from tests.plans.parity import PLANS
from tests.runtime.test_caches import tiny
from tests.runtime.world import Member, world

RANKS = 2
LONG, SHORT = 90, 32  # frames; a window has 32
SETTINGS: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}


def sound(batch: int, frames: int) -> Tensor:
    found = torch.randn(batch, 20, frames, generator=torch.Generator().manual_seed(1))
    return found.cumsum(-1).sin().double()


def prepared(stock: Any) -> Any:
    """With the tokens that whisper's generation knows, in a small vocabulary: text, then times."""
    settings: dict[str, Any] = {
        "bos_token_id": 3, "eos_token_id": 2, "pad_token_id": 1, "decoder_start_token_id": 4,
        "no_timestamps_token_id": 50, "max_initial_timestamp_index": 10, "prev_sot_token_id": 5,
        "is_multilingual": False, "return_timestamps": False, "max_length": 24,
        "alignment_heads": [[0, 1], [1, 0], [1, 3]],
    }  # fmt: skip
    for name, held in settings.items():
        setattr(stock.generation_config, name, held)
    stock.config.median_filter_width = 3
    return stock


def told(found: Any) -> list[Tensor]:
    """All tensors of a result."""
    if isinstance(found, Tensor):
        return [found]
    if isinstance(found, dict):
        return [tensor for name, held in found.items() if name != "result" for tensor in told(held)]
    return [tensor for held in found for tensor in told(held)] if isinstance(found, (list, tuple)) else []


def long(model: Any, batch: int = 2, frames: int = LONG, **options: Any) -> Any:
    torch.manual_seed(3)
    mask = torch.ones(batch, frames, dtype=torch.long)
    for row in range(1, batch):
        mask[row, frames - 20 * row :] = 0
    options = {"return_timestamps": True, "attention_mask": mask, **SETTINGS, **options}
    return model.generate(sound(batch, frames), **options)


FALLBACK: dict[str, Any] = {
    "temperature": (0.0, 0.4, 0.8), "compression_ratio_threshold": 1.35, "logprob_threshold": -0.9,
    "no_speech_threshold": 0.2,
}  # fmt: skip

WAYS: dict[str, Callable[[Any], Any]] = {
    "short": lambda m: m.generate(sound(2, SHORT), **SETTINGS),
    "short, timestamps": lambda m: m.generate(sound(2, SHORT), return_timestamps=True, **SETTINGS),
    "long": long,
    "one": lambda m: long(m, 1),
    "segments": lambda m: long(m, return_segments=True),
    "beams": lambda m: long(m, num_beams=2),
    "conditioned": lambda m: long(m, condition_on_prev_tokens=True),
    "prompted": lambda m: long(m, prompt_ids=torch.tensor([5, 20, 21, 22])),
    "prompted everywhere": lambda m: long(
        m, prompt_ids=torch.tensor([5, 20, 21, 22]), prompt_condition_type="all-segments", condition_on_prev_tokens=True
    ),
    "fallback": lambda m: long(m, **FALLBACK),
    "fallback, conditioned": lambda m: long(m, condition_on_prev_tokens=True, **FALLBACK),
    "sampled": lambda m: long(m, temperature=0.7),
    "static": lambda m: long(m, cache_implementation="static"),
    "all of it": lambda m: long(m, return_dict_in_generate=True, output_scores=True),
    "token timestamps": lambda m: m.generate(
        sound(2, SHORT), return_token_timestamps=True, return_timestamps=True, **SETTINGS
    ),
    "token timestamps of a long one": lambda m: long(m, return_token_timestamps=True, return_segments=True),
    "token timestamps, beams": lambda m: long(m, return_token_timestamps=True, num_beams=2),
}


def differing(member: Member, plan: str, ways: Sequence[str]) -> list[str]:
    """The ways that don't give what the stock model gives."""
    stock, example = tiny("whisper")
    prepared(stock)
    example = {name: held.double() if held.is_floating_point() else held for name, held in example.items()}
    sharded = tpplan.parallelize(copy.deepcopy(stock), PLANS / f"{plan}.yaml", member.mesh(), example).eval()
    found: list[str] = []
    for way in ways:
        expected, ours = told(WAYS[way](copy.deepcopy(stock))), told(WAYS[way](sharded))
        assert len(expected) == len(ours), way
        same = (
            a.shape == b.shape and torch.allclose(a.double(), b.double()) for a, b in zip(ours, expected, strict=True)
        )
        found += [] if all(same) else [way]
    return found


@pytest.mark.sweep
@pytest.mark.processes
@pytest.mark.parametrize("plan", ["whisper", "whisper-sequence"])
def test_long_recordings_and_times_are_those_of_the_stock_model(plan: str) -> None:
    assert world(RANKS).run(differing, plan, [*WAYS], seconds=1200.0) == [[]] * RANKS


def test_fallback_has_other_temperatures_at_least_once() -> None:
    stock, _ = tiny("whisper")
    prepared(stock)
    assert not torch.equal(long(stock), long(stock, **FALLBACK))
