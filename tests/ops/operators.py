"""Operators of torch.library, as users define them, and models around them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

LIBRARY = torch.library.Library("tests", "FRAGMENT")


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """(b, h, s, d), (b, k, t, d) twice; each key has h // k queries."""
    k, v = (held.repeat_interleave(q.shape[1] // held.shape[1], 1) for held in (k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    return scores.softmax(-1) @ v


def define(name: str, schema: str, function: Callable[..., Any], rule: str = "", fake: Any = None) -> Any:
    """An operator whose backward is another one, which differentiates `function`."""
    LIBRARY.define(f"{name}{schema}")
    LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tests::{name}", fake or (lambda *args, **kwargs: function(*args, **kwargs)))
    return getattr(torch.ops.tests, name)


def with_backward(operator: Any, function: Callable[..., Tensor], tensors: int) -> None:
    """Let an operator of so many tensors, then numbers, have a backward that computes it again."""

    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        held = [item.detach() for item in ctx.saved_tensors]
        with torch.enable_grad():
            made: Any = torch.func.vjp(lambda *given: function(*given, *ctx.numbers), *held)[1]
        return (*made(gradient), *(None for _ in ctx.numbers))

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[:tensors])
        ctx.numbers = inputs[tensors:]

    torch.library.register_autograd(operator._qualified_op_name, backward, setup_context=setup)


class Attention(nn.Module):
    """Heads, of which some share a key, around any function of (b, h, s, d)."""

    def __init__(self, function: Any, heads: int = 4, keys: int = 4, size: int = 8) -> None:
        super().__init__()
        self.size, self.function = size, function
        self.q, self.o = nn.Linear(16, heads * size), nn.Linear(heads * size, 16)
        self.k, self.v = nn.Linear(16, keys * size), nn.Linear(16, keys * size)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return x + self.o(self.function(q, k, v).transpose(1, 2).flatten(2))


class Between(nn.Module):
    """A column, a function of its features, and a row."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.up, self.down, self.function = nn.Linear(16, 24), nn.Linear(24, 16), function
        self.scale = nn.Parameter(torch.rand(24) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.function(self.up(x), self.scale))
