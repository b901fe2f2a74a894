"""Attentions in which heads are counted, repeated and joined in many ways, in any number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

SIZE = 4
RULES: dict[str, Any] = {"**.{q,k,v}": "colwise", "**.o": "rowwise"}


class Attention(nn.Module):
    """Query heads, and key and value heads of which each serves a group of queries."""

    def __init__(self, queries: int, keys: int, width: int = 12) -> None:
        super().__init__()
        self.queries, self.keys, self.repeats = queries, keys, queries // keys
        self.q, self.o = nn.Linear(width, queries * SIZE), nn.Linear(queries * SIZE, width)
        self.k, self.v = nn.Linear(width, keys * SIZE), nn.Linear(width, keys * SIZE)

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of x: (batch, heads, sequence, size)."""
        q, k, v = (layer(x).view(*x.shape[:2], -1, SIZE).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return q, k, v

    def joined(self, mixed: Tensor) -> Tensor:
        """(batch, heads, sequence, size) as features."""
        return self.o(mixed.transpose(1, 2).reshape(mixed.shape[0], mixed.shape[2], -1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.projected(x)
        return self.joined(functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))


class Counted(Attention):
    """By numbers that the body remembers: of heads, of repeats, and of features."""

    def __init__(self, queries: int, keys: int) -> None:
        super().__init__(queries, keys)
        self.features = queries * SIZE

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, self.queries, SIZE).transpose(1, 2)
        k, v = (layer(x).view(batch, length, self.keys, SIZE).transpose(1, 2) for layer in (self.k, self.v))
        k, v = (t[:, :, None].expand(batch, self.keys, self.repeats, length, SIZE) for t in (k, v))
        k, v = (t.reshape(batch, self.queries, length, SIZE) for t in (k, v))
        mixed = (q @ k.transpose(-1, -2) / 2).softmax(-1) @ v
        return self.o(mixed.transpose(1, 2).reshape(batch, length, self.features))


class Interleaved(Attention):
    """Keys and values are repeated by `repeat_interleave`."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.projected(x)
        k, v = (t.repeat_interleave(self.repeats, dim=1) for t in (k, v))
        return self.joined(functional.scaled_dot_product_attention(q, k, v))


class Grouped(Attention):
    """Queries are viewed as groups, and nothing is repeated."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.projected(x)
        q = q.reshape(q.shape[0], k.shape[1], -1, *q.shape[2:])
        weights = torch.softmax(q @ k.unsqueeze(2).transpose(-1, -2) / 2, -1)
        return self.joined((weights @ v.unsqueeze(2)).flatten(1, 2))


class Flattened(Attention):
    """Heads are flattened with the batch."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.projected(x)
        k, v = (t.repeat_interleave(self.repeats, dim=1) for t in (k, v))
        shape = q.shape
        q, k, v = (t.reshape(-1, *t.shape[2:]) for t in (q, k, v))
        mixed = torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(-1), v)
        return self.joined(mixed.view(shape))


class Gated(Attention):
    """A gate of each feature, a scale of each head, and norms within heads."""

    def __init__(self, queries: int, keys: int) -> None:
        super().__init__(queries, keys)
        self.gate = nn.Linear(12, queries * SIZE)
        self.norm = nn.LayerNorm(SIZE)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.projected(x)
        mixed = functional.scaled_dot_product_attention(self.norm(q), self.norm(k), v, enable_gqa=True)
        joined = mixed.transpose(1, 2).flatten(2)
        return self.o(joined * torch.sigmoid(self.gate(x)))


class Biased(Attention):
    """A bias of each head's scores, by slopes in a buffer."""

    slopes: Tensor

    def __init__(self, queries: int, keys: int) -> None:
        super().__init__(queries, keys)
        self.register_buffer("slopes", torch.linspace(0.1, 1.0, queries))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.projected(x)
        k, v = (t.repeat_interleave(self.repeats, dim=1) for t in (k, v))
        places = torch.arange(x.shape[1], dtype=x.dtype)
        bias = self.slopes.view(1, -1, 1, 1) * (places[None] - places[:, None])
        return self.joined((q @ k.transpose(-1, -2) + bias).softmax(-1) @ v)


class Mix(nn.Module):
    """What an attention does with its heads, in a module of its own."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mixed = functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return mixed.transpose(1, 2).flatten(2)


class Nested(Attention):
    """Heads are taken apart in one body and joined in another."""

    def __init__(self, queries: int, keys: int) -> None:
        super().__init__(queries, keys)
        self.mix = Mix()

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.mix(*self.projected(x)))


class Together(nn.Module):
    """Queries, keys and values in one linear layer."""

    def __init__(self, queries: int, keys: int) -> None:
        super().__init__()
        self.sizes = [queries * SIZE, keys * SIZE, keys * SIZE]
        self.qkv, self.o = nn.Linear(12, sum(self.sizes)), nn.Linear(queries * SIZE, 12)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).split(self.sizes, -1)
        q, k, v = (t.unflatten(-1, (-1, SIZE)).transpose(1, 2) for t in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.o(mixed.transpose(1, 2).flatten(2))


class ByHead(nn.Module):
    """Query, key and value of each head beside each other in one linear layer."""

    def __init__(self, queries: int, keys: int) -> None:
        super().__init__()
        assert queries == keys
        self.heads = queries
        self.qkv, self.o = nn.Linear(12, 3 * queries * SIZE), nn.Linear(queries * SIZE, 12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], self.heads, 3 * SIZE).transpose(1, 2).chunk(3, -1)
        mixed = functional.scaled_dot_product_attention(q, k, v)
        return self.o(mixed.transpose(1, 2).flatten(2))


class Two(nn.Module):
    """Two attentions with other numbers of heads, one after the other."""

    def __init__(self, queries: int, keys: int) -> None:
        super().__init__()
        self.first, self.second = Attention(queries, keys), Attention(queries + 1, queries + 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(x + self.first(x))


ATTENTIONS: dict[str, Callable[[int, int], nn.Module]] = {
    "plain": Attention,
    "counted": Counted,
    "interleaved": Interleaved,
    "grouped": Grouped,
    "flattened": Flattened,
    "gated": Gated,
    "biased": Biased,
    "nested": Nested,
    "two": Two,
}
MORE: dict[str, dict[str, Any]] = {"gated": {"**.gate": "colwise"}, "biased": {"**.slopes": "colwise"}}
IN_ONE: dict[str, Callable[[int, int], nn.Module]] = {"together": Together, "by head": ByHead}


def attention(name: str, queries: int, keys: int) -> tuple[nn.Module, dict[str, Any], tuple[tuple[Any, ...], Any]]:
    """An attention in float64, its plan's rules, and a call."""
    torch.manual_seed(0)
    rules = {**RULES, **MORE.get(name, {})}
    if name in IN_ONE:
        rules = {"**.o": "rowwise", "**.qkv": {"style": "colwise", "packed": ["q", "k", "v"]}}
        rules = rules if name == "together" else rules | {"**.qkv": "colwise"}
    model = nn.Sequential((ATTENTIONS | IN_ONE)[name](queries, keys)).double()
    x = torch.randn(3, 6, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return model, rules, ((x.requires_grad_(),), {})
