"""Small models, each of which asks one question of the compiler."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, HEADS, BATCH, SEQUENCE = 16, 4, 3, 8


def activations(width: int = WIDTH) -> tuple[Tensor]:
    return (torch.zeros(BATCH, SEQUENCE, width, requires_grad=True),)


class Mlp(nn.Module):
    def __init__(self, width: int = WIDTH, inner: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Gated(nn.Module):
    """A gated layer: both `first` and `second` meet before `last`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(WIDTH, 32), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(functional.silu(self.first(x)) * self.second(x))


class Attention(nn.Module):
    """Heads are counted by an attribute, as OPT and many others do."""

    def __init__(self, heads: int = HEADS, literal: bool = True) -> None:
        super().__init__()
        self.num_heads = heads
        self.head_dim = WIDTH // heads
        self.literal = literal
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        def heads(y: Tensor) -> Tensor:
            return y.view(*x.shape[:2], self.num_heads if self.literal else -1, self.head_dim).transpose(1, 2)

        mixed = functional.scaled_dot_product_attention(heads(self.q(x)), heads(self.k(x)), heads(self.v(x)))
        return self.o(mixed.transpose(1, 2).reshape(*x.shape[:2], -1))


class OneKeyHead(Attention):
    """All queries use one key and value head."""

    def __init__(self) -> None:
        super().__init__(literal=False)
        self.k, self.v = nn.Linear(WIDTH, self.head_dim), nn.Linear(WIDTH, self.head_dim)

    def forward(self, x: Tensor) -> Tensor:
        def heads(y: Tensor) -> Tensor:
            return y.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)

        q, k, v = heads(self.q(x)), heads(self.k(x)), heads(self.v(x))
        mixed = functional.scaled_dot_product_attention(q, k.expand_as(q), v.expand_as(q))
        return self.o(mixed.transpose(1, 2).reshape(*x.shape[:2], -1))


class Block(nn.Module):
    def __init__(self, **settings: object) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention(**settings)  # pyright: ignore[reportArgumentType]
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


class Packed(nn.Module):
    """q|k|v in one linear, split in the body."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split(WIDTH, dim=-1)
        return self.o(torch.softmax(q @ k.mT, -1) @ v)


class Positions(nn.Module):
    """Reads the length of a sequence from an embedded sequence, as transformers does: the position-id trap."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(32, WIDTH), nn.Embedding(64, WIDTH)
        self.block = Mlp()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        return self.block(x + self.places(torch.arange(x.shape[1], device=x.device)))


class MeanByHand(nn.Module):
    """Divides by a size that is local on a shard: right shapes, wrong values."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        return self.down(y / y.shape[-1])


class WritesInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.body = WritesInPlaceBody()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.body(self.up(x)))


class WritesInPlaceBody(nn.Module):
    def forward(self, y: Tensor) -> Tensor:
        z = y * 2
        z[:, 0].zero_()
        return z


class Shared(nn.Module):
    """One module between a split and a whole activation."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.down(self.up(x)))


class WritesThroughAView(nn.Module):
    """Writes to a value that it reads again through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        seen = y.view(-1, y.shape[-1])
        y.add_(1)
        return self.down(seen.view(y.shape) + y)


class CountsItself(nn.Module):
    """Takes another path where the sequence is short: on a shard, that of a model nobody asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.proj = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return self.proj(self.proj(y) if y.shape[1] < SEQUENCE else y)


class Parallel(Mlp):
    """Holds what `parallelize` leaves in a model."""

    def __init__(self) -> None:
        super().__init__()
        vars(self.up)["_tpplan"] = object()


class Raises(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("no such input")


class Table(nn.Module):
    def __init__(self, rows: int = 32, max_norm: float | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, WIDTH, max_norm=max_norm)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids)


class LoneColwise(nn.Module):
    """A colwise result that a softmax over all columns reads."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 32)
        self.down = nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.softmax(self.up(x), -1).cumsum(-1))


class CallsBessel(nn.Module):
    """Calls an operator on features that it has split itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(32, 16)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.special.bessel_j0(x @ self.up.t()) @ self.down
