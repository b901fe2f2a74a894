"""Decode: what a prompt and each token after it take on one rank, called as `generate` of transformers calls a model.

As in `overhead` the collectives are fake, so that the difference is what the runtime adds.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tpplan.bench.rounds import Timing, processor_seconds, time_interleaved
from tpplan.bench.subjects import ToySizes, toy_call

PROMPT = "a prompt, for its last token"
TOKEN = "a token after it, with a cache"
NEW_TOKEN = "a token at a length that is new"
_CACHE_NAMES = ("cache", "past_key_values", "cache_params")  # the last two before transformers 5.24
_TOKENS = 8  # for each prompt; the mask and the cache grow as in `generate`


def time_generation(
    forms: Mapping[str, nn.Module], sizes: ToySizes, rounds: int, calls: int
) -> list[tuple[str, str, Timing]]:
    """Time forms of one model, the first of which the others are held against.

    Args:
        forms: the models.
        sizes: of the prompt.
        rounds, calls: see `time_interleaved`.

    Returns:
        For a prompt, for a token of a generation like one that ran, and for one of the first generation that gets so
        long: the way, the form, and what it took.
    """
    found: list[tuple[str, str, Timing]] = []
    for way, subject in ((PROMPT, _prompt), (TOKEN, _tokens), (NEW_TOKEN, _new_tokens)):
        timed = time_interleaved({name: subject(model, sizes) for name, model in forms.items()}, rounds, calls)
        found += [(way, name, timing) for name, timing in timed.items()]
    return found


def next_calls(
    model: nn.Module, prompt: Mapping[str, Tensor]
) -> tuple[dict[str, Any], Callable[[int], dict[str, Any]]]:
    """The keywords of the call with a prompt; and, once that ran, those of the n-th token after it, from 1."""
    from transformers import DynamicCache

    ids = prompt["input_ids"]
    batch, length = ids.shape
    cache: Any = DynamicCache(config=model.config)  # pyright: ignore[reportArgumentType, reportCallIssue]
    common: dict[str, Any] = dict.fromkeys(_CACHE_NAMES, cache) | {"use_cache": True, "logits_to_keep": 1}
    accepted = inspect.signature(type(model).forward).parameters

    def call(ids: Tensor, tokens: int, start: int) -> dict[str, Any]:
        keywords: dict[str, Any] = {
            "input_ids": ids,
            "attention_mask": torch.ones(batch, tokens, dtype=torch.long, device=ids.device),
            "position_ids": torch.arange(start, tokens, device=ids.device).expand(batch, -1),
            **common,
        }
        return {name: held for name, held in keywords.items() if name in accepted}

    return call(ids, length, 0), lambda number: call(ids[:, -1:], length + number, length + number - 1)


def _prompt(model: nn.Module, sizes: ToySizes) -> Callable[[], float]:
    def run() -> float:
        first, _ = next_calls(model, toy_call(sizes))
        with torch.no_grad():
            start = processor_seconds()
            model(**first)
            return processor_seconds() - start

    return run


def _tokens(model: nn.Module, sizes: ToySizes) -> Callable[[], float]:
    def run() -> float:
        first, after = next_calls(model, toy_call(sizes))
        with torch.no_grad():
            model(**first)
            calls = [after(number) for number in range(1, _TOKENS + 1)]
            start = processor_seconds()
            for call in calls:
                model(**call)
            return (processor_seconds() - start) / _TOKENS

    return run


def _new_tokens(model: nn.Module, sizes: ToySizes) -> Callable[[], float]:
    first, after = next_calls(model, toy_call(sizes))
    numbers = itertools.count(1)
    with torch.no_grad():
        model(**first)
        for number in itertools.islice(numbers, _TOKENS):
            model(**after(number))

    def run() -> float:
        with torch.no_grad():
            took = 0.0
            for number in itertools.islice(numbers, _TOKENS):
                call = after(number)
                start = processor_seconds()
                model(**call)
                took += processor_seconds() - start
            return took / _TOKENS

    return run


__all__ = ["NEW_TOKEN", "PROMPT", "TOKEN", "next_calls", "time_generation"]
