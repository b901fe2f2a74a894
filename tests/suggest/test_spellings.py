"""Attention in spellings of its own: a plan writes itself, shards it all, and computes the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tpplan
from tests.marking import in_turns
from tests.runtime.simulated import worst
from tpplan.api import suggest_text
from tpplan.suggest.sharded_share import block_share

WIDTH = 64
SAMPLE = torch.randn(3, 6, WIDTH, requires_grad=True)


class SequenceFirst(nn.Module):
    """Queries lose their batch among the heads before they are transposed, keys and values after that."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.num_heads = 4

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        length, batch, _ = x.shape
        q = self.q(x).view(length, batch * self.num_heads, -1).transpose(0, 1)
        k, v = (m(x).view(length, batch, self.num_heads, -1).permute(1, 2, 0, 3) for m in (self.k, self.v))
        k, v = (t.reshape(batch * self.num_heads, length, -1) for t in (k, v))
        mixed = functional.softmax(q @ k.transpose(1, 2), -1) @ v
        assert mixed.shape[0] == batch * self.num_heads
        mixed = mixed.transpose(0, 1).contiguous().view(length, batch, -1)
        return self.out(mixed).transpose(0, 1)


class BiasesByHead(nn.Module):
    """One projection by heads, to whose queries and values vectors are added, viewed as heads."""

    def __init__(self) -> None:
        super().__init__()
        self.all, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.q_bias, self.v_bias = (nn.Parameter(torch.randn(WIDTH)) for _ in range(2))
        self.num_heads = 8

    def heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self.num_heads, -1).permute(0, 2, 1, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(self.all(x)).chunk(3, -1)
        q, v = q + self.heads(self.q_bias[None, None, :]), v + self.heads(self.v_bias[None, None, :])
        mixed = functional.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.permute(0, 2, 1, 3).flatten(2))


class OneKey(nn.Module):
    """Eight heads of queries, each normed by a module, and one of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, WIDTH // 8), nn.Linear(WIDTH, WIDTH // 8)
        self.q_norm, self.k_norm = nn.RMSNorm(WIDTH // 8), nn.RMSNorm(WIDTH // 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m(x).unflatten(-1, (-1, WIDTH // 8)).transpose(1, 2) for m in (self.q, self.k, self.v))
        q, k = self.q_norm(q), self.k_norm(k).repeat_interleave(8, 1)
        mixed = functional.scaled_dot_product_attention(q, k, v.repeat_interleave(8, 1))
        return self.out(mixed.transpose(1, 2).flatten(2))


class AsManyHeadsAsFeatures(nn.Module):
    """Eight heads of eight: half of the one count is half of the other, until a tensor is made for the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.size, self.number = 8, 8

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (m(x).view(*x.shape[:2], -1, self.size).transpose(1, 2) for m in (self.q, self.k, self.v))
        bias = torch.zeros(1, self.number, x.shape[1], x.shape[1], dtype=x.dtype, device=x.device)
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.out(mixed.transpose(1, 2).flatten(2)), bias


class Pair(nn.Module):
    """Two blocks, each of which hands the bias of its attention on."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = AsManyHeadsAsFeatures()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            mixed, bias = self.attention(x)
            return x + mixed, bias

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, _ = layer(x)
        return x


class ChannelsFirst(nn.Module):
    """Layers that take and give (batch, channels, sequence), so that their results lie transposed in memory."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.norm = nn.Linear(WIDTH, 96), nn.Linear(96, WIDTH), nn.LayerNorm(WIDTH)

        def turned(self, y: Tensor) -> Tensor:
            return self.norm(y + self.down(torch.relu(self.up(y))))

        def forward(self, x: Tensor) -> Tensor:
            return self.turned(x.permute(0, 2, 1)).permute(0, 2, 1)

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(self.Layer() for _ in range(3)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.permute(0, 2, 1))


class WithoutPadding(ChannelsFirst):
    """Layers that pad and cut the padding off again, so that their results have gaps in memory."""

    class Layer(ChannelsFirst.Layer):
        def forward(self, x: Tensor) -> Tensor:
            return functional.pad(self.turned(x), (0, 0, 0, 2))[:, :-2]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.mark.parametrize(
    ("kind", "ranks"), in_turns([SequenceFirst, BiasesByHead, Pair, ChannelsFirst, WithoutPadding], [2, 4])
)
@pytest.mark.one_in(3)
def test_it_is_sharded_whole_and_computes_the_same(kind: type[nn.Module], ranks: int) -> None:
    model = nn.Sequential(kind(), kind()) if kind in (SequenceFirst, BiasesByHead) else kind()
    plan = tpplan.load_plan(suggest_text(model, ranks, False, (SAMPLE,)))
    assert block_share(tpplan.compile_plan(model, plan, ranks, (SAMPLE,))).percent > 97
    report = tpplan.verify(model, plan, ranks, inputs=(SAMPLE,))
    assert report.ok, report.problems


@pytest.mark.one_in(3)
@pytest.mark.parametrize("ranks", [2, 8])
def test_heads_are_not_gathered_for_their_norm(ranks: int) -> None:
    model = nn.Sequential(OneKey(), OneKey())
    plan = tpplan.load_plan(suggest_text(model, ranks, False, (SAMPLE,)))
    program = tpplan.compile_plan(model, plan, ranks, (SAMPLE,))
    assert "all-gather" not in program.count_collectives()
    assert {"0.q.weight", "0.out.weight"} <= {p.name for p in program.parameters if p.layout.is_sharded}
    assert tpplan.verify(model, plan, ranks, inputs=(SAMPLE,)).ok


class KeptBiases(BiasesByHead):
    """Looks biases up once in evaluation, and keeps what it found."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(8, 16))
        self.kept: dict[str, Tensor] = {}

    def train(self, mode: bool = True) -> KeptBiases:
        self.kept = {}
        return super().train(mode)

    def biases(self, length: int) -> Tensor:
        places = torch.arange(length)
        places = (places[:, None] - places).abs()
        if self.training:
            return self.table[:, places]
        if "biases" not in self.kept:
            self.kept["biases"] = self.table[:, places]
        return self.kept["biases"]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(self.all(x)).chunk(3, -1)
        weights = functional.softmax(q @ k.transpose(-1, -2) + self.biases(x.shape[1]), -1)
        return self.out((weights @ v).permute(0, 2, 1, 3).flatten(2))


class Beside(nn.Module):
    """Such a module, and layers."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.up, self.down = KeptBiases(), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.down(self.up(x).relu())


@pytest.mark.one_in(3)
@pytest.mark.parametrize("training", [True, False])
def test_a_plan_serves_the_mode_that_the_model_is_in(training: bool) -> None:
    model = Beside().double().train(training)
    call = ((SAMPLE.detach().double().requires_grad_(),), {})
    plan = suggest_text(model, 2, False, call[0])
    assert ("attention.out: rowwise" in plan) is training and "up: colwise" in plan
    assert max(worst(model, plan, 2, call, [call])) < 1e-12
