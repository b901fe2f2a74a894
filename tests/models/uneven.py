"""Models whose features and vocabularies two or four ranks can't share evenly, each with a plan and a call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.models.tiny import tiny_model

HIDDEN = 16
PLANS = Path(__file__).parents[2] / "plans"
Subject = tuple[nn.Module, dict[str, Any], tuple[tuple[Any, ...], dict[str, Any]]]
MLP: dict[str, Any] = {"up": "colwise", "down": "rowwise"}
GATED: dict[str, Any] = {"gate_up": {"style": "colwise", "packed": ["gate", "up"]}, "down": "rowwise"}


class Mlp(nn.Module):
    """up, GELU, down."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, features), nn.Linear(features, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(x)))


class Gated(nn.Module):
    """Gate and up in one linear layer, split by a number that the body remembers, or halved."""

    def __init__(self, features: int, remembers: bool) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(HIDDEN, 2 * features), nn.Linear(features, HIDDEN)
        self.features, self.remembers = features, remembers

    def forward(self, x: Tensor) -> Tensor:
        both = self.gate_up(x)
        gate, up = both.split(self.features, -1) if self.remembers else both.chunk(2, -1)
        return self.down(functional.silu(gate) * up)


class Language(nn.Module):
    """A table, an MLP and a head, tied to the table or not."""

    def __init__(self, vocabulary: int, tied: bool, padding: int | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, HIDDEN, padding_idx=padding)
        self.norm, self.mlp = nn.LayerNorm(HIDDEN), Mlp(11)
        self.head = nn.Linear(HIDDEN, vocabulary, bias=not tied)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        return self.head(x + self.mlp(self.norm(x)))


def _plan(modules: dict[str, Any]) -> dict[str, Any]:
    return {"version": 1, "modules": modules}


def _mlp(features: int) -> Subject:
    return Mlp(features), _plan(MLP), ((_x(),), {})


def _gated(features: int, remembers: bool) -> Subject:
    return Gated(features, remembers), _plan(GATED), ((_x(),), {})


def _language(vocabulary: int, tied: bool, padding: int | None = None, output: str = "replicate") -> Subject:
    plan = {"table": "vocab", **{f"mlp.{name}": style for name, style in MLP.items()}}
    plan["head"] = {"style": "colwise", "output": output}
    ids = torch.arange(36).reshape(3, 12) * 7 % vocabulary  # all ranks' rows, the last one's too
    return Language(vocabulary, tied, padding), _plan(plan), ((ids,), {})


def _shipped(name: str, more: dict[str, Any], **settings: Any) -> Subject:
    model, keywords = tiny_model(name, **settings)
    return model, {"version": 1, "extends": str(PLANS / f"{name}.yaml"), "modules": more}, ((), keywords)


def _x() -> Tensor:
    return torch.randn(3, 12, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()


_TOKENS = {"transformer.wte": "vocab", "lm_head": {"style": "colwise", "output": "replicate"}}
SUBJECTS: dict[str, Callable[[], Subject]] = {
    "mlp": lambda: _mlp(107),
    "a wide mlp": lambda: _mlp(1001),
    "an mlp that torch.chunk would leave a rank of without features": lambda: _mlp(6),
    "packed": lambda: _gated(107, remembers=False),
    "packed, split by an attribute": lambda: _gated(107, remembers=True),
    "packed, that torch.chunk would leave a rank of without features": lambda: _gated(6, remembers=False),
    "vocabulary": lambda: _language(89, tied=False),
    "vocabulary, its padding row on the last rank": lambda: _language(89, tied=False, padding=88),
    "tied vocabulary": lambda: _language(89, tied=True),
    "vocabulary that leaves a rank without rows": lambda: _language(5, tied=True, padding=1),
    "untied vocabulary that leaves a rank without rows": lambda: _language(5, tied=False),
    "vocabulary, handed out in shards": lambda: _language(89, tied=False, output="shard"),
    "llama": lambda: _shipped("llama", {}, intermediate_size=83, vocab_size=89),
    "tied llama": lambda: _shipped("llama", {}, intermediate_size=83, vocab_size=89, tie_word_embeddings=True),
    "gpt2": lambda: _shipped("gpt2", _TOKENS, n_inner=83, vocab_size=89),
    "gpt2 that torch.chunk would leave a rank of without features": lambda: _shipped("gpt2", {}, n_inner=9),
    "phi3": lambda: _shipped("phi3", {}, intermediate_size=83, vocab_size=89),
}


def uneven_subject(name: str) -> Subject:
    """A model in float64, a plan, and a call."""
    torch.manual_seed(0)
    model, plan, call = SUBJECTS[name]()
    return model.double(), plan, call
