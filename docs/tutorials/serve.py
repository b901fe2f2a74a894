"""Serve requests with a sharded model: they join the batch and leave it between steps.

    torchrun --nproc-per-node 2 docs/tutorials/serve.py

The first rank takes requests, and broadcasts what came since the last step; all else is the same code on every rank, so
that all call the model alike. Each rank caches the keys and values of its own heads. The head's logits stay split, and
the next token is chosen from them by an all-gather of two numbers a request. The script ends by generating each answer
with the unsharded model. Leave that out with `--no-compare`, as you would for a model that doesn't fit on one device.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import pad
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import tpplan

VOCABULARY, END = 256, 0
# Before 5.24, transformers called the argument otherwise.
CACHE = "cache" if "cache" in signature(LlamaForCausalLM.forward).parameters else "past_key_values"
PLAN = {"version": 1, "extends": "llama", "modules": {"lm_head": {"style": "colwise", "output": "shard"}}}


@dataclass
class Request:
    """A prompt, how many tokens to add at most, and those that were added."""

    number: int
    prompt: list[int]
    most: int
    tokens: list[int] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        """Whether it leaves the batch."""
        return len(self.tokens) == self.most or self.tokens[-1:] == [END]


class Batch:
    """The requests that are under way: their caches, padded on the left to one length, and the mask of that."""

    def __init__(self, model: Any, device: str) -> None:
        """Begin with none."""
        self.model = model
        self.device = device
        self.requests: list[Request] = []
        self.cache: DynamicCache | None = None
        self.mask = torch.zeros(0, 0, dtype=torch.long, device=device)

    def join(self, request: Request) -> None:
        """Read a prompt, and put its keys and values under those of the others."""
        ids = torch.tensor([request.prompt], device=self.device)
        mask, cache = torch.ones_like(ids), DynamicCache(config=self.model.config)
        request.tokens.append(self._next(ids, mask, cache)[0])
        if self.requests:
            length = max(mask.shape[1], self.mask.shape[1])
            cache = self._merged(cache, length)
            mask = torch.cat([_padded(self.mask, length), _padded(mask, length)])
        self.requests, self.cache, self.mask = [*self.requests, request], cache, mask

    def step(self) -> None:
        """Add a token to each request."""
        last = torch.tensor([[request.tokens[-1]] for request in self.requests], device=self.device)
        self.mask = pad(self.mask, (0, 1), value=1)
        for request, token in zip(self.requests, self._next(last, self.mask, self.cache), strict=True):
            request.tokens.append(token)

    def leave(self) -> list[Request]:
        """Take out the requests that are done."""
        done = [request for request in self.requests if request.is_done]
        if done:
            kept = [place for place, request in enumerate(self.requests) if not request.is_done]
            self.requests, self.mask = [self.requests[place] for place in kept], self.mask[kept]
            if self.cache is not None and kept:
                self.cache.batch_select_indices(torch.tensor(kept, device=self.device))
        return done

    def _next(self, ids: Tensor, mask: Tensor, cache: DynamicCache | None) -> list[int]:
        places = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        called = {"input_ids": ids, "attention_mask": mask, "position_ids": places, CACHE: cache}
        logits = self.model(**called, use_cache=True, logits_to_keep=1).logits
        return tpplan.generation.argmax(logits[:, -1], model=self.model).tolist()

    def _merged(self, other: DynamicCache, length: int) -> DynamicCache:
        """The caches of the batch and of one more, (batch, heads of this rank, length, features) in each layer."""
        assert self.cache is not None
        merged = DynamicCache(config=self.model.config)
        for number, (ours, theirs) in enumerate(zip(self.cache.layers, other.layers, strict=True)):
            parts = [(ours.keys, theirs.keys), (ours.values, theirs.values)]
            keys, values = (torch.cat([_longer(tensor, length) for tensor in pair]) for pair in parts)
            merged.update(keys, values, number)
        return merged


def _padded(mask: Tensor, length: int) -> Tensor:
    return pad(mask, (length - mask.shape[1], 0))


def _longer(tensor: Tensor, length: int) -> Tensor:
    return pad(tensor, (0, 0, length - tensor.shape[2], 0))


def arriving(step: int) -> list[Request]:
    """What a server would take from its queue: here five prompts, one at every other step."""
    words = ["to be, or not", "a", "the ranks are", "serve", "tokens come one by one"]
    return [Request(step // 2, list(words[step // 2].encode()), 4 + step % 7)] if step < 10 and step % 2 == 0 else []


@torch.no_grad()
def serve(model: Any, device: str) -> list[Request]:
    """All requests, answered."""
    batch, answered, step = Batch(model, device), list[Request](), 0
    while step < 10 or batch.requests:
        came: list[Any] = [arriving(step) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(came, src=0)  # so that every rank has the same batch
        for request in came[0]:
            batch.join(request)
        answered += batch.leave()
        if batch.requests:
            batch.step()
            answered += batch.leave()
        step += 1
    return answered


def build() -> LlamaForCausalLM:
    """The stock model; the same on every rank."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"bos_token_id": 1, "eos_token_id": END, "pad_token_id": END}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, **sizes, **ends)).eval()


def main() -> None:
    """Serve, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compare", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("tp",))
    answered = serve(tpplan.parallelize(build().to(device), PLAN, mesh), device)

    stock, equal = build().to(device), 0
    for request in answered if options.compare else ():
        ids = torch.tensor([request.prompt], device=device)
        whole = stock.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=request.most, do_sample=False)
        equal += whole[0, ids.shape[1] :].tolist() == request.tokens
    if dist.get_rank() == 0:
        for request in answered:
            print(f"request {request.number}: {bytes(request.prompt)!r} -> {request.tokens}")
        if options.compare:
            print(f"{equal} of {len(answered)} answers are those of the unsharded model")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
