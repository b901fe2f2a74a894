"""Example calls: from what the user gives, or made from a transformers config."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from tpplan.compiler.bind.inner_models import wrapped_models
from tpplan.plan import ArgumentError, CompileError
from tpplan.plan.taken import refusal
from tpplan.plan.wording import all_of
from tpplan.taken_models import INPUTS

BATCH = 3  # odd, and seldom equal to another size
_TOKENS, _MOST, _LEAST = 64, 8, 2  # of a sequence; of a rank, at most and at least
Call = tuple[tuple[Any, ...], dict[str, Any]]


def example_call(
    model: nn.Module, size: int, inputs: object = None, *, batch: int = BATCH, sequence: int | None = None
) -> Call:
    """The positional and keyword arguments of an example call of `model`.

    Args:
        model: the model.
        size: number of ranks; a made-up sequence is divisible by it.
        inputs: a mapping (keywords), a tuple or list (positional arguments), one tensor, or None to make them up.
        batch, sequence: sizes of made-up inputs.

    Raises:
        CompileError: TP111, if no inputs are given and none can be made up.
    """
    if inputs is None:
        return (), _made_up(model, size, batch, sequence)
    if not INPUTS.fits(inputs):
        raise ArgumentError(refusal("inputs", INPUTS, inputs))
    given: Any = inputs
    if isinstance(given, Mapping):
        call: Call = (), {str(name): held for name, held in given.items()}  # pyright: ignore
    else:
        call = (given,) if isinstance(given, torch.Tensor) else tuple(given), {}
    _require_binding(model, call)
    return call


def _require_binding(model: nn.Module, call: Call) -> None:
    """TP110 for an example call that the model's `forward` can't take."""
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*call[0], **call[1])
    except TypeError as error:
        parts = [f"{len(call[0])} positional"] if call[0] else []
        came = all_of(call[1]) if call[1] else "nothing" if not parts else ""
        names = ", ".join(signature.parameters)
        raise CompileError.of(
            "TP110",
            f"`inputs` don't fit `{type(model).__name__}.forward({names})`: {error}",
            help="pass `inputs=` as a dict of its arguments by name, or a tuple of them in order; "
            f"{' and '.join([*parts, came] if came else parts)} came",
        ) from None


def with_labels(model: nn.Module, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """A call that was made up, with a label for each token, if the model takes labels and predicts tokens."""
    tokens = keywords.get("decoder_input_ids", keywords.get("input_ids"))
    if tokens is None or "labels" not in inspect.signature(type(model).forward).parameters:
        return dict(keywords)
    vocabulary: Callable[[], object] = getattr(model, "get_output_embeddings", lambda: model)
    if vocabulary() is None:  # one label for a sequence, say
        return dict(keywords)
    return {**keywords, "labels": tokens.clone()}


def step_settings(model: nn.Module, inference: bool) -> dict[str, Any]:
    """What a model of transformers is called with to tell a step, or a prompt before generation: without a cache."""
    accepted = inspect.signature(type(model).forward).parameters
    known = hasattr(getattr(model, "config", None), "to_dict")
    asked = {"use_cache": False} | ({"logits_to_keep": 1} if inference else {})
    return {name: held for name, held in asked.items() if known and name in accepted}


_USUAL = 4096


def usual_length(model: nn.Module) -> int:
    """The tokens of a sequence for which costs are told: 4096, or what a transformers model has positions for."""
    return min(_USUAL, _shortest_table(getattr(model, "config", None)) or _USUAL)


def beyond_positions(model: nn.Module, sequence: int) -> list[str]:
    """A warning where a sequence is longer than a transformers model has positions for, which shapes don't tell."""
    most = _shortest_table(getattr(model, "config", None)) or sequence
    return [f"the model has positions for {most:,} tokens, fewer than {sequence:,}"] if most < sequence else []


def _made_up(model: nn.Module, size: int, batch: int, sequence: int | None) -> dict[str, Any]:
    served = _served(model)
    config = getattr(served, "config", None)
    accepted = inspect.signature(type(served).forward).parameters
    known = config is not None and hasattr(config, "to_dict")
    made: dict[str, Any] = _senses(model, config, accepted, batch) if known else {}
    if not made and (not known or "input_ids" not in accepted):
        raise CompileError.of(
            "TP111",
            f"tpplan can't make inputs for `{type(model).__name__}`, which isn't a transformers model that takes "
            "`input_ids`",
            help="pass `inputs=`: a dict or tuple of tensors for one forward; tensors on `meta` will do",
            subject=type(model).__name__,
        )
    length = sequence or _sequence_length(config, size)
    shape = (batch, length)
    if "input_ids" in accepted:
        made["input_ids"] = torch.zeros(shape, dtype=torch.long, device="meta")
        if "attention_mask" in accepted:
            made["attention_mask"] = torch.ones(shape, dtype=torch.long, device="meta")
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in accepted:
        made["decoder_input_ids"] = torch.zeros(shape, dtype=torch.long, device="meta")
    return made


def _served(model: nn.Module) -> nn.Module:
    """The model that takes the arguments: `model`, or the one that it wraps, if it passes on whatever it gets."""
    for inner in (model, *(wrapped for _, wrapped in wrapped_models(model))):
        parameters = inspect.signature(type(inner).forward).parameters
        passes_on = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        if not passes_on or "input_ids" in parameters or "pixel_values" in parameters:
            return inner
    return model


def _senses(model: nn.Module, config: Any, accepted: Mapping[str, object], batch: int) -> dict[str, Any]:
    """Pictures and sounds of the sizes that the config gives, in the model's dtype; without those that it doesn't."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    sizes: dict[str, list[object]] = {}
    if "pixel_values" in accepted:
        seeing = getattr(config, "vision_config", None) or config
        side: Any = getattr(seeing, "image_size", None)
        sides = list(side) if isinstance(side, (tuple, list)) else [side, side]  # pyright: ignore
        sizes["pixel_values"] = [getattr(seeing, "num_channels", None), *sides]
    if "input_features" in accepted:
        frames: Any = getattr(config, "max_source_positions", None)
        sizes["input_features"] = [getattr(config, "num_mel_bins", None), 2 * frames if frames else None]
    return {
        name: torch.zeros(batch, *held, device="meta", dtype=dtype)  # pyright: ignore
        for name, held in sizes.items()
        if all(isinstance(n, int) and n > 0 for n in held)
    }


def _sequence_length(config: Any, size: int) -> int:
    """A length that the ranks can split, and that grows with them as little as can be: attention takes its square."""
    longest = _shortest_table(config)
    length = size * min(_MOST, max(_LEAST, -(-_TOKENS // size)))
    if isinstance(longest, int) and 0 < longest - 2 < length:  # some tables reserve two positions
        length = max(size, (longest - 2) // size * size)
    return length


def _shortest_table(config: Any) -> int | None:
    """The number of positions that the config allows: of an encoder's, a decoder's and a text tower's, the least."""
    held = [config, getattr(config, "text_config", None)]
    names = ("max_position_embeddings", "max_target_positions")
    found = [n for c in held for name in names if isinstance(n := getattr(c, name, None), int) and n > 0]
    return min(found, default=None)
