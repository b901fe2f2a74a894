"""What a case of the battery is: a small module that hides something from a trace, a plan, and calls that differ."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

D, WIDE, HEADS = 16, 32, 4
"""Sizes of the stream, of the features between two linear layers, and the number of heads."""

MLP = {"up": "colwise", "down": "rowwise"}
ATTENTION = {"{q,k,v}": "colwise", "o": "rowwise"}

Expectation = Literal["equal", "refused", "equal_or_refused"]
Arguments = tuple[Any, ...] | dict[str, Any]


@dataclass(frozen=True)
class Call:
    """One call of the model, and a backward from all its results.

    Attributes:
        arguments: makes the arguments, positional ones or keywords, the same ones in each process.
        train: whether the model is in training mode.
        before: what is done to either model before the call.
        under: a context for the forward and for the backward.
    """

    arguments: Callable[[], Arguments]
    train: bool = True
    before: Callable[[nn.Module], object] | None = None
    under: Callable[[], AbstractContextManager[Any]] = nullcontext


@dataclass(frozen=True)
class Case:
    """A module, its plan, its calls, and what a user may expect of them.

    Attributes:
        name: unique among all cases.
        cause: the kind of thing that is hidden.
        build: makes the stock model.
        rules: the plan's modules.
        calls: each is compared with the stock model's; the first one's arguments are the example.
        expect: what must come of it.
        dtype: of the parameters.
        tolerance: of results and gradients, relative to the largest number of each.
    """

    name: str
    cause: str
    build: Callable[[], nn.Module]
    rules: dict[str, Any]
    calls: tuple[Call, ...]
    expect: Expectation
    dtype: torch.dtype
    tolerance: float

    def make(self) -> nn.Module:
        """A stock model, the same numbers each time."""
        torch.manual_seed(0)
        return self.build().to(self.dtype)


class Cases(dict[str, Case]):
    """All cases. Of a class of its own, since captures look into plain dicts of the files that modules come from."""


CASES = Cases()


def case(
    cause: str,
    rules: dict[str, Any],
    *calls: Call,
    expect: Expectation = "equal",
    dtype: torch.dtype = torch.float64,
    tolerance: float = 1e-9,
) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Register a class of modules that is made without arguments as a case."""

    def register(made: type[nn.Module]) -> type[nn.Module]:
        name = re.sub(r"(?<!^)(?=[A-Z])", "_", made.__name__).lower()
        add(name, cause, made, rules, calls, expect, dtype, tolerance)
        return made

    return register


def add(
    name: str,
    cause: str,
    build: Callable[[], nn.Module],
    rules: dict[str, Any],
    calls: Sequence[Call],
    expect: Expectation = "equal",
    dtype: torch.dtype = torch.float64,
    tolerance: float = 1e-9,
) -> None:
    """Register a case."""
    assert name not in CASES, name
    CASES[name] = Case(name, cause, build, rules, tuple(calls), expect, dtype, tolerance)


def t(*shape: int, dtype: torch.dtype = torch.float64, grad: bool = True, scale: float = 1.0) -> Tensor:
    """Random numbers, a leaf that wants a gradient."""
    return (torch.randn(*shape, dtype=torch.float64) * scale).to(dtype).requires_grad_(grad)


def ids(*shape: int, below: int = 12) -> Tensor:
    """Random ids."""
    return torch.randint(0, below, shape)


def call(arguments: Callable[[], Arguments] | None = None, **options: Any) -> Call:
    """A call; by default of three sequences of six."""
    return Call(arguments or (lambda: (t(3, 6, D),)), **options)


class Mlp(nn.Module):
    """Two linear layers; what is between them is each case's own."""

    bias = True

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, WIDE, self.bias), nn.Linear(WIDE, D, self.bias)

    def middle(self, h: Tensor) -> Tensor:
        return torch.relu(h)

    def forward(self, x: Tensor) -> Any:
        return self.down(self.middle(self.up(x)))


class Attention(nn.Module):
    """Plain attention by heads; what is done to queries and keys, and to scores, is each case's own."""

    def __init__(self, heads: int = HEADS) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))
        self.heads, self.width = heads, D // heads

    def turn(self, x: Tensor) -> Tensor:
        return x

    def score(self, scores: Tensor) -> Tensor:
        return scores

    def forward(self, x: Tensor) -> Any:
        q, k, v = (layer(x).unflatten(-1, (-1, self.width)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        scores = self.turn(q) @ self.turn(k).transpose(-1, -2) * self.width**-0.5
        return self.o((self.score(scores).softmax(-1) @ v).transpose(1, 2).flatten(2))
