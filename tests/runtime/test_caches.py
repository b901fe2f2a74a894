"""Caches of transformers on real processes: the unsharded model's tokens, and on each rank its part of the cache."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tpplan
from tests.caching import cache_of, passing
from tests.marking import sweep_but
from tests.runtime.world import Member, world
from tests.zoo.architectures import ARCHITECTURES, build, model_of
from tpplan.compiler.ir.hidden import hidden_tensors

RANKS = 2
SETTINGS: dict[str, Any] = {
    "max_new_tokens": 5, "do_sample": False, "pad_token_id": 1, "eos_token_id": None, "use_cache": True,
}  # fmt: skip


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(4, 88, (batch, length), generator=torch.Generator().manual_seed(seed))


def padded(batch: int, length: int) -> dict[str, Tensor]:
    """Prompts of different lengths, with padding in front."""
    ids = tokens(batch, length)
    mask = (torch.arange(length) >= torch.arange(batch)[:, None]).long()
    return {"input_ids": ids.where(mask > 0, torch.ones_like(ids)), "attention_mask": mask}


def static(model: Any, longest: int = 32) -> Any:
    from transformers import StaticCache

    return StaticCache(config=model.config, max_cache_len=longest)


def turns(model: Any, cache: Any) -> Tensor:
    """Two turns of a chat with one cache."""
    said = model.generate(tokens(2, 7), **passing(model, cache), **SETTINGS)
    return model.generate(torch.cat([said, tokens(2, 4, 1)], 1), **passing(model, cache), **SETTINGS)


def dynamic_turns(model: Any) -> Tensor:
    from transformers import DynamicCache

    return turns(model, DynamicCache(config=model.config))


def reused(model: Any) -> Tensor:
    cache = static(model)
    first = model.generate(tokens(2, 7), **passing(model, cache), **SETTINGS)
    cache.reset()
    return torch.cat([first.flatten(), model.generate(tokens(2, 6, 3), **passing(model, cache), **SETTINGS).flatten()])


def made_whole(model: Any) -> Tensor:
    """A cache with room for all heads."""
    config, cache = model.config, static(model)
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cache.early_initialization(2, heads, size, model.dtype, "cpu")
    return model.generate(tokens(2, 7), **passing(model, cache), **SETTINGS)


def by_hand(model: Any) -> Tensor:
    """A cache that the model makes itself, and returns."""
    ids = tokens(2, 7)
    cache: Any = None
    for _ in range(3):
        made = model(ids if cache is None else ids[:, -1:], **passing(model, cache), use_cache=True)
        cache = cache_of(made)
        ids = torch.cat([ids, made.logits[:, -1:].argmax(-1)], 1)
    return ids


WAYS: dict[str, Callable[[Any], Tensor]] = {
    "static": lambda m: m.generate(tokens(2, 7), cache_implementation="static", **SETTINGS),
    "reused": reused,
    "by hand": by_hand,
    "made whole": made_whole,
    "turns": dynamic_turns,
    "static turns": lambda m: turns(m, static(m)),
    "one token": lambda m: m.generate(tokens(2, 1), **SETTINGS),
    "alone": lambda m: m.generate(tokens(1, 8), **SETTINGS),
    "alone, odd": lambda m: m.generate(tokens(1, 7), **SETTINGS),
    "ragged": lambda m: m.generate(**padded(4, 8), **SETTINGS),
    "ragged static": lambda m: m.generate(**padded(4, 8), cache_implementation="static", **SETTINGS),
    "chunks": lambda m: m.generate(tokens(2, 9), prefill_chunk_size=4, **SETTINGS),
    "static beams": lambda m: m.generate(tokens(2, 5), num_beams=2, cache_implementation="static", **SETTINGS),
}


def scatter(model: nn.Module) -> None:
    """Give a model numbers that are far enough apart to tell tokens."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)


def tiny(name: str) -> tuple[Any, dict[str, Tensor]]:
    """A model of the zoo with numbers, and an example call."""
    _, inputs = build(name)
    dtype = torch.float32 if name == "gpt_oss" else torch.float64  # its products of groups take no float64 on a CPU
    torch.manual_seed(0)
    model = model_of(ARCHITECTURES[name]).to(dtype).eval()
    scatter(model)
    example = {key: torch.ones(held.shape, dtype=held.dtype) for key, held in inputs.items()}
    return model, example


def differing(member: Member, plan: str, ways: list[str]) -> list[str]:
    """The ways of generating that don't give the stock model's tokens."""
    stock, example = tiny(plan.removesuffix("-sequence"))
    sharded = tpplan.parallelize(copy.deepcopy(stock), f"plans/{plan}.yaml", member.mesh(), example)
    found: list[str] = []
    for way in ways:
        expected = WAYS[way](stock)
        try:
            same = torch.equal(WAYS[way](sharded), expected)
        except tpplan.TpplanError as error:
            found.append(f"{way}: {error}")
        else:
            found += [] if same else [way]
    return found


QUICK = ["static"]
WINDOWS = ["static", "static turns", "ragged static"]
TELLING = ["made whole", "turns", "static turns", "alone, odd", "ragged static", "chunks", "static beams"]
SLOW = [("llama-sequence", TELLING), ("gemma3_text", WINDOWS)]
SLOW += [("gpt_bigcode", ["turns"])]  # whose attention goes another way for one token than for several
SWEPT = [
    ("llama-sequence", [*WAYS]),
    ("llama", [*WAYS]),
    ("bloom", [*WAYS]),
    ("gpt_oss-sequence", WINDOWS),
    ("mistral", WINDOWS),
]
CASES = [("llama", QUICK), *SLOW, *SWEPT]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(("plan", "ways"), sweep_but([CASES[0]], CASES))
def test_every_way_of_generating_gives_the_stock_models_tokens(plan: str, ways: list[str]) -> None:
    assert world(RANKS).run(differing, plan, ways) == [[]] * RANKS


def shares(member: Member, name: str) -> list[float]:
    """The bytes of each kind of cache on a rank, as a share of the unsharded model's."""
    stock, example = tiny(name)
    sharded = tpplan.parallelize(copy.deepcopy(stock), f"plans/{name}.yaml", member.mesh(), example)
    found: list[float] = []
    for settings in ({}, {"cache_implementation": "static"}):
        held: list[int] = []
        for model in (stock, sharded):
            generate: Any = model.generate
            made = generate(tokens(2, 7), return_dict_in_generate=True, **SETTINGS, **settings)
            tensors = [tensor for _, tensor in hidden_tensors(cache_of(made)) if tensor.dim() > 2]
            held.append(sum(tensor.numel() * tensor.itemsize for tensor in tensors))
        found.append(held[1] / held[0])
    return found


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_a_rank_keeps_its_part_of_a_cache(name: str) -> None:
    assert world(RANKS).run(shares, name) == [[1 / RANKS] * 2] * RANKS
