"""Warm up: have the calls that `generate` makes proved ahead, so that no request waits for a compilation.

in:  a sharded model, a prompt, what `generate` will be called with
out: nothing; a `generate` like this one compiles nothing any more

A few tokens are generated, as that makes the very calls: the prompt with the last token's logits, then single tokens
with a cache. What tells calls apart beside their arguments is whether the ranks can share the prompt, and for which
lengths a proof holds shows at a second one, so that it is generated from a few lengths. Assisted decoding calls for so
many logits as there are candidates, and one more; each number is another call to a proof. So a few rounds are made of
each, by prompts of one token in which looking up finds as many: whatever the model's logits are, that token comes next.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tpplan.compiler.trace.preconditions import MARK
from tpplan.compiler.trace.surroundings import generators
from tpplan.inputs import example_call
from tpplan.plan import ArgumentError
from tpplan.plan.taken import COUNT, takes
from tpplan.taken_models import INPUTS, MODEL

_TOKENS = 3  # the prompt's and two after it: the first of these finds a cache that is new, the second one that isn't
_ROUNDS = 3  # as many
_LONGER = 4  # than the candidates, so that looking up finds all of them
_OURS = ("max_length", "max_new_tokens", "min_length", "min_new_tokens", "stopping_criteria", "streamer")
_OF_ASSISTANTS = ("assistant_model", "assistant_tokenizer", "tokenizer", "prompt_lookup_num_tokens")


@takes(model=MODEL, inputs=INPUTS, candidates=COUNT)
def warm_up(
    model: nn.Module, inputs: Mapping[str, Any] | Tensor | None = None, *, candidates: int = 0, **options: Any
) -> None:
    """Compile ahead what `model.generate` needs, for prompts of any length.

    Every rank must call this alike. Random numbers are put back.

    Args:
        model: a sharded model of transformers.
        inputs: a prompt such as will be served, as keywords of `generate` or as its tokens; None makes one up. Under
            a sequence-parallel plan prompts of a single sequence, and of several, are warmed up one after the other.
        candidates: the most tokens that prompt lookup or an assistant proposes at once; 0 if neither is used.
        options: what else `generate` will be called with.

    Raises:
        ArgumentError: the model has no `generate`, or an argument is of another kind.
        UnprovedCallError: one of the calls can't be proved.

    Example:
        >>> model = tpplan.from_pretrained("my-llama", "llama")
        >>> torch.manual_seed(0) and None
        >>> tpplan.warm_up(model, do_sample=True)
    """
    if not callable(getattr(model, "generate", None)):
        raise ArgumentError(
            f"`{type(model).__name__}` has no `generate` to warm up: call the model once for each kind of call"
        )
    size = next((module.__dict__[MARK].axis.size for module in model.modules() if MARK in module.__dict__), 1)
    settings = {name: held for name, held in options.items() if name not in _OURS}
    alone = {name: held for name, held in settings.items() if name not in _OF_ASSISTANTS}
    restores = generators()
    try:
        for prompt in _of_all_lengths(_prompt(model, size, inputs), size):
            _generate(model, prompt, alone)
        assisted = {**alone, "num_beams": 1, "num_return_sequences": 1, "use_cache": True}
        for count in range(1, candidates + 1):
            for prompt in _of_all_lengths(_repeating(model, size, count), size):
                steered = _steered(settings.get("logits_processor"), _token(model))
                looked_up = {"prompt_lookup_num_tokens": count, "logits_processor": steered}
                _generate(model, prompt, assisted | looked_up, _ROUNDS * (count + 1))
    finally:
        for restore in restores:
            restore()


def _steered(processors: Any, token: int) -> Any:
    """The user's processors of logits, and one after which `token` always comes next."""
    from transformers import LogitsProcessor, LogitsProcessorList

    class Always(LogitsProcessor):
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            steered = torch.full_like(scores, -torch.inf)
            steered[:, token] = 0
            return steered

    return LogitsProcessorList([*(processors or ()), Always()])


def _generate(model: Any, prompt: Mapping[str, Any], settings: Mapping[str, Any], tokens: int = _TOKENS) -> None:
    model.generate(**prompt, **settings, max_new_tokens=tokens, min_new_tokens=tokens)


def _prompt(model: nn.Module, size: int, inputs: Mapping[str, Any] | Tensor | None) -> dict[str, Any]:
    """The prompt as `generate` takes it."""
    if isinstance(inputs, Tensor):
        return {"input_ids": inputs, "attention_mask": torch.ones_like(inputs)}
    if inputs is not None:
        return {**inputs}
    _, made = example_call(model, size, batch=1)
    token, device = _token(model), next(model.parameters()).device
    return {
        name: torch.full_like(held, token if name == "input_ids" else 1, device=device)
        for name, held in made.items()
        if not name.startswith("decoder_")
    }


def _repeating(model: nn.Module, size: int, count: int) -> dict[str, Any]:
    """A prompt after which looking up proposes `count` tokens."""
    length = -(-(count + _LONGER) // size) * size
    ids = torch.full((1, length), _token(model), device=next(model.parameters()).device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _token(model: Any) -> int:
    """A token that neither ends a sequence nor fills it up."""
    config: Any = getattr(model, "generation_config", None)
    special: set[Any] = set()
    for name in ("eos_token_id", "pad_token_id", "bos_token_id"):
        held = getattr(config, name, None)
        special.update(held if isinstance(held, list) else [held])  # pyright: ignore[reportUnknownArgumentType]
    return next(token for token in range(len(special) + 1) if token not in special)


def _of_all_lengths(prompt: Mapping[str, Any], size: int) -> Iterator[dict[str, Any]]:
    """The prompt; one that is a token shorter or longer, of which the ranks can share one alone; and shorter ones.

    At a second length that the ranks share alike it is found out for which others a prompt's proof holds.
    """
    ids = prompt.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        yield {**prompt}
        return
    length = ids.shape[1]
    other = (length + size - length % size if length % size else length - 1) if size > 1 else length
    for wanted in dict.fromkeys((length, other, length - size, other - size)):
        if wanted > 1 or wanted == length:
            yield {name: _of_length(held, length, wanted) for name, held in prompt.items()}


def _of_length(held: Any, length: int, wanted: int) -> Any:
    """A tensor of a prompt, whose last token is repeated where it has to be longer."""
    if not isinstance(held, Tensor) or held.dim() < 2 or held.shape[1] != length:
        return held
    return torch.cat([held, *[held[:, -1:]] * (wanted - length)], 1) if wanted > length else held[:, :wanted]


__all__ = ["warm_up"]
