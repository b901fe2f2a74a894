"""A small transformer, cut into the stages of a pipeline."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WORDS, HIDDEN, WIDTH, HEADS, BATCH, LENGTH, MICRO = 32, 16, 32, 4, 8, 8, 4
PLAIN: Mapping[str, Any] = {
    "embed": "vocab",
    "layers.*.attention.{q,k,v}": "colwise",
    "layers.*.attention.o": "rowwise",
    "layers.*.up": "colwise",
    "layers.*.down": "rowwise",
    "head": {"style": "colwise", "output": "replicate"},
}
SEQUENCE: Mapping[str, Any] = {**PLAIN, "layers.*.norm_{1,2}": "sequence", "norm": "sequence"}
HANDED_ON: Mapping[str, Any] = {
    **SEQUENCE,
    "layers.*": {"style": "replicate", "input": "sequence", "output": "sequence"},
}


class Attention(nn.Module):
    """Causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        heads = [p(x).unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2) for p in (self.q, self.k, self.v)]
        made = functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.o(made.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2, self.attention = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN), Attention()
        self.up, self.down = nn.Linear(HIDDEN, WIDTH), nn.Linear(WIDTH, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


class Model(nn.Module):
    """What a stage has of it is run; the rest is None."""

    def __init__(self, layers: int = 4, recomputes: bool = False) -> None:
        super().__init__()
        self.recomputes = recomputes
        self.embed: nn.Module | None = nn.Embedding(WORDS, HIDDEN)
        self.layers = nn.ModuleDict({str(i): Block() for i in range(layers)})
        self.norm: nn.Module | None = nn.LayerNorm(HIDDEN)
        self.head: nn.Module | None = nn.Linear(HIDDEN, WORDS, bias=False)

    def forward(self, x: Tensor) -> Any:
        if self.embed is not None:
            x = self.embed(x)
        for layer in self.layers.values():
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
        return x if self.head is None or self.norm is None else self.head(self.norm(x))


def made(**options: Any) -> Model:
    torch.manual_seed(0)
    return Model(**options).double()


def cut(model: Model, place: int, stages: int) -> Model:
    """The stage at `place`, with parameters of its own and the model's names."""
    stage = copy.deepcopy(model)
    each = len(stage.layers) // stages
    for name in [*stage.layers]:
        if not place * each <= int(name) < (place + 1) * each:
            del stage.layers[name]
    if place:
        stage.embed = None
    if place < stages - 1:
        stage.norm = stage.head = None
    return stage


def example(place: int) -> Tensor:
    """What the stage at `place` is passed, whole."""
    if not place:
        return words(1)[: BATCH // MICRO]
    numbers = torch.Generator().manual_seed(place)
    return torch.randn(BATCH // MICRO, LENGTH, HIDDEN, dtype=torch.float64, generator=numbers).requires_grad_()


def words(seed: int) -> Tensor:
    return torch.randint(WORDS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(seed))


def loss(made: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(made.flatten(0, 1), target.flatten())


def whole(model: Model, seed: int) -> tuple[float, dict[str, Tensor]]:
    """The unsharded model's loss on the batch of a seed, in parts as a pipeline takes it, and its gradients."""
    model.zero_grad()
    parts = zip(words(seed).chunk(MICRO), words(seed + 1).chunk(MICRO), strict=True)
    lost = sum((loss(model(x), y) for x, y in parts), torch.zeros((), dtype=torch.float64)) / MICRO
    lost.backward()
    return lost.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
