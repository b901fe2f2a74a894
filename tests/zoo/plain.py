"""Modules that somebody might write in torch alone."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from tests.zoo.subject import Inputs, Subject, numbers, steady, tokens

WIDTH, HEADS = 32, 4


def _plain(make: Any, inputs: Inputs) -> Subject:
    return Subject(make, steady(inputs), "")


class Residual(nn.Module):
    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*inner)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Tokens(nn.Module):
    """Tokens in, logits out, around blocks."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.table = nn.Embedding(88, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 88)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class LinearAttention(nn.Module):
    """Katharopoulos et al., 2020: keys and values are summed before queries read them."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        summed = torch.einsum("bhld,bhle->bhde", k, v)
        scale = torch.einsum("bhld,bhd->bhl", q, k.sum(2)).reciprocal()
        mixed = torch.einsum("bhld,bhde,bhl->bhle", q, summed, scale)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


class Retention(nn.Module):
    """Sun et al., 2023: decays by head instead of a softmax, a norm by head, and a gate."""

    decay: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.gate, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(5))
        self.norm = nn.GroupNorm(HEADS, WIDTH)
        self.register_buffer("decay", torch.log(1 - 2.0 ** (-5 - torch.arange(HEADS))))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (held(x).view(batch, length, HEADS, -1).transpose(1, 2) for held in (self.q, self.k, self.v))
        steps = torch.arange(length, device=x.device)
        distance = (steps[:, None] - steps).to(x.dtype)
        weights = torch.exp(self.decay.to(x.dtype)[:, None, None] * distance).masked_fill(distance < 0, 0)
        mixed = ((q @ k.transpose(-1, -2)) * weights) @ v
        mixed = mixed.transpose(1, 2).reshape(batch * length, -1)
        return self.out(self.norm(mixed).view(batch, length, -1) * F.silu(self.gate(x)))


class RelativeAttention(nn.Module):
    """A table of biases by distance, looked up inside of the body."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.biases = nn.Parameter(torch.randn(HEADS, 64))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (held(x).view(batch, length, HEADS, -1).transpose(1, 2) for held in (self.q, self.k, self.v))
        steps = torch.arange(length, device=x.device)
        bias = self.biases[:, steps[:, None] - steps + 32]
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.out(mixed.transpose(1, 2).flatten(2))


class TalkingHeads(nn.Module):
    """Shazeer et al., 2020: heads are mixed before the softmax and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.before, self.after = nn.Parameter(torch.eye(HEADS)), nn.Parameter(torch.eye(HEADS))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        scores = torch.einsum("bhqk,hg->bgqk", q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), self.before)
        weights = torch.einsum("bhqk,hg->bgqk", scores.softmax(-1), self.after)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class OneHotExperts(nn.Module):
    """Tokens go to experts by products with one-hot masks, as in Mesh TensorFlow."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, experts)
        self.up = nn.Parameter(torch.randn(experts, WIDTH, 2 * WIDTH) / 8)
        self.down = nn.Parameter(torch.randn(experts, 2 * WIDTH, WIDTH) / 8)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        chosen = F.one_hot(weights.argmax(-1), weights.shape[-1]).to(x.dtype) * weights
        given = torch.einsum("ble,bld->ebld", (chosen > 0).to(x.dtype), x)
        made = torch.einsum("ebld,edf->eblf", given, self.up).relu()
        return torch.einsum("eblf,efd,ble->bld", made, self.down, chosen)


class GatedUnit(nn.Module):
    """Hua et al., 2022: one wide projection is value and gate, a small one is shared by queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.shared, self.out = (
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.Linear(WIDTH, 16),
            nn.Linear(2 * WIDTH, WIDTH),
        )
        self.gamma, self.beta = nn.Parameter(torch.randn(2, 16)), nn.Parameter(torch.randn(2, 16))

    def forward(self, x: Tensor) -> Tensor:
        value, gate = F.silu(self.hidden(x)).chunk(2, -1)
        q, k = torch.einsum("bld,hd->blhd", F.silu(self.shared(x)), self.gamma).add(self.beta).unbind(2)
        weights = (q @ k.transpose(-1, -2) / x.shape[1]).relu().square()
        return self.out(gate * (weights @ value))


class Adapted(nn.Module):
    """LoRA, written by hand."""

    def __init__(self, inner: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.inner = inner
        self.a, self.b = nn.Linear(inner.in_features, rank, bias=False), nn.Linear(rank, inner.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + 2 * self.b(self.a(x))


class Crossing(nn.Module):
    """Latents read a longer sequence, and are read back."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(6, WIDTH))
        self.first = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.second = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        latents = self.latents.expand(x.shape[0], -1, -1)
        latents = latents + self.first(latents, x, x, need_weights=False)[0]
        return x + self.second(x, latents, latents, need_weights=False)[0]


class Recommender(nn.Module):
    """DLRM: bags of ids and dense features, crossed by products."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(64, 16, mode="sum") for _ in range(3))
        self.bottom = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(22, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        x = self.bottom(dense)
        held = torch.stack([x, *(table(ids[:, i]) for i, table in enumerate(self.tables))], 1)
        products = held @ held.transpose(1, 2)
        rows, columns = torch.tril_indices(4, 4, -1)
        return self.top(torch.cat([x, products[:, rows, columns]], 1)).sigmoid()


class Modulated(nn.Module):
    """A block of a diffusion transformer: what it is conditioned on shifts, scales and gates."""

    def __init__(self) -> None:
        super().__init__()
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH))
        self.first = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.second = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.attention = LinearAttention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        one = self.modulation(condition)[:, None].chunk(6, -1)
        x = x + one[2] * self.attention(self.first(x) * (1 + one[1]) + one[0])
        return x + one[5] * self.mlp(self.second(x) * (1 + one[4]) + one[3])


class ConvBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(16, 8, 3, padding=1)
        self.norm = nn.GroupNorm(4, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.norm(self.first(x)).relu())


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.LSTM | nn.GRU]) -> None:
        super().__init__()
        self.table, self.rnn, self.head = (
            nn.Embedding(88, WIDTH),
            kind(WIDTH, WIDTH, 2, batch_first=True),
            nn.Linear(WIDTH, 88),
        )

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.rnn(self.table(ids))[0])


class Tree(nn.Module):
    """Inputs and outputs in dicts, a module called twice, and a branch on a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, batch: dict[str, Tensor], again: bool = True) -> dict[str, Any]:
        x = self.down(self.up(batch["x"]).relu())
        if again:
            x = self.down(self.up(x + batch["y"]).relu())
        return {"x": x, "parts": [x[:, :2], x[:, 2:]]}


def _mlp(width: int = 2 * WIDTH) -> nn.Module:
    return Residual(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, width), nn.GELU(), nn.Linear(width, WIDTH))


def _transformer(**settings: Any) -> nn.Module:
    return nn.Transformer(WIDTH, HEADS, 2, 2, 64, dropout=0.0, batch_first=True, **settings)


class Scaled(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.scale = inner, nn.Parameter(torch.full((WIDTH,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.inner(x)


class TransposedMixer(nn.Module):
    """MLP-Mixer: layers over the positions, then over the features."""

    def __init__(self, length: int = 12) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.over_positions = nn.Sequential(nn.Linear(length, 24), nn.GELU(), nn.Linear(24, length))
        self.over_features = _mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.over_features(x + self.over_positions(self.norm(x).transpose(1, 2)).transpose(1, 2))


_ids: Inputs = (tokens(88, 3, 12),)
_x: Inputs = (numbers(3, 12, WIDTH),)

PLAIN: dict[str, Subject] = {
    "plain_mlp": _plain(lambda: nn.Sequential(_mlp(), _mlp()), _x),
    "plain_linear_attention": _plain(lambda: Tokens(Residual(LinearAttention()), _mlp()), _ids),
    "plain_retention": _plain(lambda: Tokens(Residual(Retention()), _mlp()), _ids),
    "plain_relative_biases": _plain(lambda: Tokens(Residual(RelativeAttention()), _mlp()), _ids),
    "plain_talking_heads": _plain(lambda: Tokens(Residual(TalkingHeads()), _mlp()), _ids),
    "plain_one_hot_experts": _plain(lambda: Tokens(Residual(OneHotExperts()), _mlp()), _ids),
    "plain_gated_unit": _plain(lambda: Tokens(Residual(GatedUnit())), _ids),
    "plain_adapted": _plain(
        lambda: Residual(Adapted(nn.Linear(WIDTH, 64)), nn.GELU(), Adapted(nn.Linear(64, WIDTH))), _x
    ),
    "plain_crossing": _plain(lambda: nn.Sequential(Crossing(), _mlp()), _x),
    "plain_recommender": _plain(Recommender, (numbers(3, 8), tokens(64, 3, 3, 2))),
    "plain_modulated": _plain(Modulated, (numbers(3, 12, WIDTH), numbers(3, WIDTH, seed=2))),
    "plain_convolutions": _plain(lambda: nn.Sequential(ConvBlock(), ConvBlock()), (numbers(3, 8, 8, 8),)),
    "plain_lstm": _plain(lambda: Recurrent(nn.LSTM), _ids),
    "plain_gru": _plain(lambda: Recurrent(nn.GRU), _ids),
    "plain_tree": _plain(Tree, {"batch": {"x": numbers(3, 4, WIDTH), "y": numbers(3, 4, WIDTH, seed=2)}}),
    "plain_scaled": _plain(lambda: nn.Sequential(Scaled(_mlp()), Scaled(_mlp())), _x),
    "plain_mixer": _plain(lambda: nn.Sequential(TransposedMixer(), TransposedMixer()), _x),
    "plain_weight_norm": _plain(
        lambda: Residual(weight_norm(nn.Linear(WIDTH, 64)), nn.ReLU(), weight_norm(nn.Linear(64, WIDTH))), _x
    ),
    "torch_transformer": _plain(_transformer, (numbers(3, 12, WIDTH), numbers(3, 8, WIDTH))),
    "torch_transformer_norm_first": _plain(
        lambda: _transformer(norm_first=True, activation="gelu"), (numbers(3, 12, WIDTH), numbers(3, 8, WIDTH))
    ),
    "torch_attention_of_other_widths": _plain(
        lambda: nn.MultiheadAttention(WIDTH, HEADS, kdim=24, vdim=20, batch_first=True),
        (numbers(3, 12, WIDTH), numbers(3, 8, 24), numbers(3, 8, 20)),
    ),
}  # fmt: skip
