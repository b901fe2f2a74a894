"""Ways of generating, each as a function of a model; the sharded model has to give the stock model's tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tpplan
from tests.runtime.test_caches import SETTINGS, dynamic_turns, padded, tiny, tokens
from tests.runtime.test_decode import CAUSAL, NAMES
from tests.runtime.world import Member

RANKS = 2
PLANS = Path(__file__).parents[2] / "plans"
WITH_ENCODERS = ("bart", "t5", "whisper")
FAMILIES = (*CAUSAL, *WITH_ENCODERS)
PLAN_NAMES = tuple(f"{name}{form}" for name in FAMILIES for form in ("", "-sequence"))
EQUAL = "="
NOT_THERE = "–"

Way = Callable[[Any, Any], Tensor]
"""Takes a model and one that may assist it, and gives tokens."""


def by_options(inputs: Callable[[], Mapping[str, Any]], **options: Any) -> Way:
    """`generate` with these inputs and options, from one seed."""

    def generated(model: Any, _: Any) -> Tensor:
        torch.manual_seed(5)
        return model.generate(**_as_in(model, inputs()), **{**SETTINGS, **options})

    return generated


def _as_in(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs, with floats in the model's dtype."""
    return {name: held.to(model.dtype) if held.is_floating_point() else held for name, held in inputs.items()}


def ids(batch: int, length: int) -> Callable[[], dict[str, Tensor]]:
    """A prompt, without a mask as all of it counts."""
    return lambda: {"input_ids": tokens(batch, length), "attention_mask": torch.ones(batch, length, dtype=torch.long)}


def repeated() -> dict[str, Tensor]:
    """Tokens that come again, so that looking up finds some."""
    found = tokens(1, 4, 2).repeat(1, 3)
    return {"input_ids": found, "attention_mask": torch.ones_like(found)}


def features(batch: int) -> Callable[[], dict[str, Tensor]]:
    """Sound."""
    return lambda: {"input_features": torch.randn(batch, 20, 32, generator=torch.Generator().manual_seed(1))}


def assisted(inputs: Callable[[], Mapping[str, Any]]) -> Way:
    """Another model, which isn't sharded, proposes two tokens at a time."""

    def generated(model: Any, assistant: Any) -> Tensor:
        return model.generate(**_as_in(model, inputs()), assistant_model=assistant, **SETTINGS)

    return generated


def encoded(inputs: Callable[[], Mapping[str, Any]]) -> Way:
    """What the encoder has made of an input serves two requests."""

    def generated(model: Any, _: Any) -> Tensor:
        said, options = _as_in(model, inputs()), SETTINGS
        with torch.no_grad():
            made = model.get_encoder()(**said)
        kept = {name: held for name, held in said.items() if name == "attention_mask"}
        ways: list[dict[str, Any]] = [{}, {"num_beams": 2}]
        every = [model.generate(encoder_outputs=copy.copy(made), **kept, **options, **way) for way in ways]
        return torch.cat([held.flatten() for held in every])

    return generated


SAMPLED: dict[str, Any] = {"do_sample": True, "top_k": 20, "temperature": 0.9}
STATIC: dict[str, Any] = {"cache_implementation": "static"}
LOOKUP: dict[str, Any] = {"prompt_lookup_num_tokens": 2}

OF_CAUSAL: dict[str, Way] = {
    "greedy": by_options(ids(2, 8)),
    "odd prompt": by_options(ids(1, 7)),
    "ragged": by_options(lambda: padded(4, 8)),
    "sampled": by_options(ids(2, 8), **SAMPLED),
    "beam": by_options(ids(2, 7), num_beams=3),
    "assisted": assisted(ids(1, 8)),
    "prompt lookup": by_options(repeated, **LOOKUP),
    "static": by_options(ids(2, 8), **STATIC),
    "chunks": by_options(ids(2, 9), prefill_chunk_size=4),
    "turns": lambda model, _: dynamic_turns(model),
}
"""Of models that read and write one sequence."""


def _of_encoders(even: Any, odd: Any, ragged: Any, alone: Any) -> dict[str, Way]:
    return {
        "greedy": by_options(even),
        "odd prompt": by_options(odd),
        "ragged": by_options(ragged),
        "sampled": by_options(even, **SAMPLED),
        "beam": by_options(odd, num_beams=3),
        "assisted": assisted(alone),
        "prompt lookup": by_options(alone, **LOOKUP),
        "static": by_options(even, **STATIC),
        "encoder kept": encoded(even),
    }


OF_TEXT = _of_encoders(ids(2, 8), ids(2, 7), lambda: padded(4, 8), repeated)
OF_SOUND = _of_encoders(features(2), features(3), features(4), features(1))


def ways_of(plan: str) -> dict[str, Way]:
    """The ways of generating of a plan's models."""
    family = plan.removesuffix("-sequence")
    return OF_CAUSAL if family not in WITH_ENCODERS else OF_SOUND if family == "whisper" else OF_TEXT


def subject(plan: str) -> tuple[Any, Any, dict[str, Tensor]]:
    """A stock model with numbers, a model that may assist it, and an example call."""
    family = plan.removesuffix("-sequence")
    stock, example = tiny(NAMES.get(family, family))
    stock.generation_config.decoder_start_token_id = 2
    try:
        ways_of(plan)["greedy"](stock, None)
    except RuntimeError:  # products of groups of rows take no float64 on a CPU
        stock = stock.float()
    assistant = copy.deepcopy(stock)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in assistant.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter += 0.05 * noise * parameter.abs().mean()
    told = assistant.generation_config
    told.num_assistant_tokens, told.num_assistant_tokens_schedule = 2, "constant"
    told.assistant_confidence_threshold = 0.0
    return stock, assistant, _as_in(stock, example)


def outcome(way: Way, stock: Any, sharded: Any, assistant: Any) -> str:
    """`=` for equal tokens; what else came of it, in a line."""
    try:
        expected = way(stock, assistant)
    except Exception:
        return NOT_THERE  # transformers itself refuses it
    try:
        tokens = way(sharded, assistant)
    except tpplan.TpplanError as error:
        return " ".join(str(error).split())
    except Exception as error:
        return f"**error**: {type(error).__name__}: {' '.join(str(error).split())}"
    return EQUAL if torch.equal(tokens, expected) else f"**wrong**: {tokens.tolist()}, not {expected.tolist()}"


def outcomes(member: Member, plan: str, names: tuple[str, ...] = ()) -> dict[str, str]:
    """What comes of each way, or of these, for a plan."""
    stock, assistant, example = subject(plan)
    try:
        sharded = tpplan.parallelize(copy.deepcopy(stock), PLANS / f"{plan}.yaml", member.mesh(), example).eval()
    except tpplan.TpplanError as error:
        return dict.fromkeys(ways_of(plan), " ".join(str(error).split()))
    return {
        name: outcome(way, stock, sharded, assistant)
        for name, way in ways_of(plan).items()
        if name in (names or (name,))
    }
