"""Models of which each shows some of the layouts that a parameter can have, with a plan and an example call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import tpplan
from tests.parity.test_grouped_projections import WIDTH as GROUPS_WIDTH
from tests.parity.test_grouped_projections import Attention as Groups
from tests.parity.test_grouped_projections import by_place
from tests.plans.parity import PLANS
from tests.zoo.architectures import build
from tpplan.plan import Plan

DTYPE = torch.float64
WIDTH, HEADS, GROUPS = 16, 8, 2


@dataclass(frozen=True)
class Subject:
    """A stock model with its plan and an example call."""

    model: nn.Module
    plan: Plan
    inputs: dict[str, Tensor]


class Packs(nn.Module):
    """Plain splits, packs of one size and of several; with `more` features ranks can't share them evenly."""

    def __init__(self, more: int = 0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16 + more), nn.Linear(16 + more, 8)
        self.wide, self.narrow = 8 + more, 4 + more
        self.pair = nn.Linear(8, self.wide + self.narrow)
        self.wide_out, self.narrow_out = nn.Linear(self.wide, 8), nn.Linear(self.narrow, 8)
        self.even, self.even_out = nn.Linear(8, 8 + 2 * more), nn.Linear(4 + more, 8)
        self.register_buffer("scale", torch.rand(()))

    def forward(self, x: Tensor) -> Tensor:
        wide, narrow = self.pair(x).split([self.wide, self.narrow], -1)
        one, other = self.even(x).chunk(2, -1)
        packed = self.wide_out(wide) + self.narrow_out(narrow) + self.even_out(one * other)
        return (self.down(torch.relu(self.up(x))) + packed) * self.scale


class Attention(nn.Module):
    """Key and value heads fewer than four ranks, in layers of their own or in one with the queries."""

    def __init__(self, together: bool, heads: int = HEADS, groups: int = GROUPS) -> None:
        super().__init__()
        self.together, self.size, self.repeats = together, WIDTH // HEADS, heads // groups
        self.width, self.kept = heads * self.size, groups * self.size
        self.norm = nn.LayerNorm(WIDTH)
        if together:
            self.qkv = nn.Linear(WIDTH, self.width + 2 * self.kept)
        else:
            self.q, self.k, self.v = (nn.Linear(WIDTH, n) for n in (self.width, self.kept, self.kept))
        self.out = nn.Linear(self.width, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        if self.together:
            q, k, v = self.qkv(x).split([self.width, self.kept, self.kept], -1)
        else:
            q, k, v = self.q(x), self.k(x), self.v(x)
        q, k, v = (t.unflatten(-1, (-1, self.size)).transpose(1, 2) for t in (q, k, v))
        k, v = (t[:, :, None].expand(-1, -1, self.repeats, -1, -1).flatten(1, 2) for t in (k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Tied(nn.Module):
    """A table that is the head as well."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.down(self.up(self.table(x)).relu()))


_PACKS = {
    "up": "colwise",
    "down": "rowwise",
    "pair": {"style": "colwise", "packed": ["wide", "narrow"]},
    "{wide,narrow}_out": "rowwise",
    "even": {"style": "colwise", "packed": ["one", "other"]},
    "even_out": "rowwise",
}


def _toy(model: nn.Module, modules: dict[str, Any], x: Tensor) -> Subject:
    return Subject(model, tpplan.load_plan({"version": 1, "modules": modules}), {"x": x})


def _family(name: str) -> Subject:
    model, inputs = build(name)
    plan = tpplan.load_plan(PLANS / f"{name}.yaml")
    return Subject(model, plan, {k: torch.ones_like(t, device="cpu") for k, t in inputs.items()})


_APART = {"{q,k,v}": "colwise"}
_TOGETHER = {"qkv": {"style": "colwise", "packed": ["q", "k", "v"]}}


def _attention(together: bool, heads: int = HEADS, groups: int = GROUPS) -> Subject:
    rules = {**(_TOGETHER if together else _APART), "out": "rowwise"}
    return _toy(Attention(together, heads, groups), rules, torch.rand(2, 5, WIDTH, dtype=DTYPE))


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "packs": lambda: _toy(Packs(), _PACKS, torch.rand(3, 8, dtype=DTYPE)),
    "uneven": lambda: _toy(Packs(1), _PACKS, torch.rand(3, 8, dtype=DTYPE)),
    "shared": lambda: _attention(False),
    "shared in packs": lambda: _attention(True),
    "heads": lambda: _attention(False, 9, 3),
    "heads in packs": lambda: _attention(True, 9, 3),
    "groups": lambda: _toy(
        Groups(by_place), {"all": "colwise", "out": "rowwise"}, torch.rand(2, 5, GROUPS_WIDTH, dtype=DTYPE)
    ),
    "tied": lambda: _toy(
        Tied(), {"table": "vocab", "up": "colwise", "down": "rowwise", "head": "colwise"}, torch.arange(6).view(2, 3)
    ),
    "gpt2": lambda: _family("gpt2"),
    "phi3": lambda: _family("phi3"),
    "gpt_bigcode": lambda: _family("gpt_bigcode"),
    "qwen3_next": lambda: _family("qwen3_next"),
}


ONLY_FLOAT32 = ("qwen3_next",)  # torch multiplies groups of experts in no other dtype


def subject(name: str, seed: int = 0) -> Subject:
    """A subject with random parameters, in training mode."""
    found = SUBJECTS[name]()
    dtype = torch.float32 if name in ONLY_FLOAT32 else DTYPE
    found.model.to_empty(device="cpu").to(dtype).train()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in (*found.model.parameters(), *found.model.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=DTYPE))
            else:
                tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape))
    return found
