"""Suggestions beside parameters that a body computes with, and calls whose results nobody reads."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tpplan
from tests.marking import slow_but
from tests.runtime.simulated import Call, worst
from tpplan.api import suggest_text
from tpplan.plan import Style
from tpplan.suggest import search, write_plan

WIDTH, HEADS, WIDE = 24, 4, 16


class Cosine(nn.Module):
    """Scores of unit vectors, by a factor for each head that is clamped and raised."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.heads = HEADS
        self.scale = nn.Parameter(torch.linspace(1.0, 6.0, HEADS).view(HEADS, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for m in (self.q, self.k, self.v))
        scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-1, -2)
        scores = scores * torch.clamp(self.scale, max=math.log(100)).exp()
        return x + self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Retention(nn.Module):
    """Decays by head that are raised to each distance, and kept for what came before alone."""

    decay: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.heads, self.norm = HEADS, nn.GroupNorm(HEADS, WIDTH)
        self.register_buffer("decay", 1 - 2.0 ** (-2 - torch.arange(HEADS)))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for m in (self.q, self.k, self.v))
        steps = torch.arange(x.shape[1], device=x.device)
        distance = steps[:, None] - steps
        weights = torch.where(distance >= 0, self.decay[:, None, None] ** distance.clamp(min=0), 0.0)
        mixed = ((q @ k.transpose(-1, -2) * weights) @ v).transpose(1, 2).flatten(2)
        return x + self.o(self.norm(mixed.flatten(0, 1)).unflatten(0, (x.shape[0], -1)))


class Unread(nn.Module):
    """A layer and a table, called a first time for nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.table = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH), nn.Embedding(5, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.up(x)
        self.table(torch.arange(3, device=x.device))
        return x + self.down(self.up(x).relu())


def sharded(model: nn.Module) -> str:
    """The suggested plan of a model, which is right."""
    torch.manual_seed(0)
    model, x = model.double(), torch.randn(2, 6, WIDTH, dtype=torch.float64)
    plan = suggest_text(model, 2, inputs=(x,))
    assert max(worst(model, plan, 2, ((x,), {}), [((x,), {})])) < 1e-12
    return plan


def test_a_factor_by_head_is_split_whatever_is_done_to_each_entry() -> None:
    plan = sharded(Cosine())
    assert 'scale}": colwise' in plan
    assert "o: rowwise" in plan


def test_decays_by_head_are_split_whatever_is_made_of_them_and_of_distances() -> None:
    plan = sharded(Retention())
    assert "decay" in plan
    assert "o: rowwise" in plan


def test_layers_whose_first_results_nobody_reads_are_a_pair() -> None:
    assert "down: rowwise" in sharded(Unread())


class NormsWithin(nn.Module):
    """Norms of all features stand before the second layers of the attention and of the feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.first, self.inner, self.second, self.wide = (nn.LayerNorm(n) for n in (WIDTH, WIDTH, WIDTH, 32))
        self.heads = HEADS

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        q, k, v = (m(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for m in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.o(self.inner(mixed))
        return x + self.down(self.wide(self.up(self.second(x)).relu()))


def test_layers_on_both_sides_of_a_norm_are_a_pair_where_both_would_be_whole() -> None:
    plan = sharded(NormsWithin())
    assert "o: rowwise" in plan
    assert "down: rowwise" in plan


def test_layers_that_no_call_reaches_say_so() -> None:
    class Aside(NormsWithin):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(WIDTH, 64)])

    assert "blocks.* (" in (plan := sharded(Aside()))
    assert "the call doesn't reach it" in plan


class Modulated(nn.Module):
    """A block whose norm is shifted and scaled by what another layer makes of a condition."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.modulation = nn.Linear(WIDTH, 2 * WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.heads = HEADS

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale = self.modulation(condition).chunk(2, -1)
        y = self.norm(x) * (1 + scale) + shift
        q, k, v = (m(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for m in (self.q, self.k, self.v))
        return x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Conditioned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedder = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Modulated() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        condition = x.mean(1, keepdim=True)
        x = self.embedder(x)
        for block in self.blocks:
            x = block(x, condition)
        return x


def test_what_makes_a_modulated_stream_stays_whole_and_heads_are_split() -> None:
    plan = sharded(Conditioned())
    assert "{q,k,v}: colwise" in plan
    assert "o: rowwise" in plan
    assert "embedder: colwise" not in plan


class Routed(nn.Module):
    """As Llama 4: what the experts make is added in place to what the shared one does."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.ModuleDict({"up": nn.Linear(WIDE, WIDE), "down": nn.Linear(WIDE, WIDE)})
        self.router = nn.Linear(WIDE, 4)
        self.up = nn.Parameter(torch.randn(4, WIDE, 4 * WIDE) / 10)
        self.down = nn.Parameter(torch.randn(4, 4 * WIDE, WIDE) / 10)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, WIDE)
        scores = self.router(flat).softmax(-1).t().reshape(-1, 1)
        made = torch.bmm(torch.bmm((flat.repeat(4, 1) * scores).view(4, -1, WIDE), self.up).relu(), self.down)
        out = self.shared["down"](self.shared["up"](flat).relu())
        out.add_(made.sum(0))
        return out.view_as(x)


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDE, WIDE, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Streams(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList((Mixing(), Routed())) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for mixing, routed in self.layers:  # pyright: ignore[reportGeneralTypeIssues]
            x = x + mixing(x)
            x = x + routed(x)
        return x


def test_the_stream_is_no_branch_beside_heavier_layers() -> None:
    """The experts weigh more than the attention before them, whose row they don't stand beside."""
    found = search(Streams(), 2, (torch.randn(2, 6, WIDE),), {}, False)
    styles = {name.rpartition("layers.0.")[2]: held.style for name, held in found.settings.items() if ".0." in name}
    assert {name for name, style in styles.items() if style is Style.ROWWISE} >= {"0.o", "1.shared.down", "1.down"}
    assert {name for name, style in styles.items() if style is Style.COLWISE} >= {"0.q", "0.k", "0.v", "1.shared.up"}


class JoinedBias(nn.Module):
    """As BEiT in timm: the bias of the packed projection is joined of two parameters and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = HEADS, nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.q_bias, self.v_bias = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(WIDTH))
        self.k_bias: Tensor
        self.register_buffer("k_bias", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        bias = torch.cat((self.q_bias, self.k_bias, self.v_bias))
        parts = F.linear(x, self.qkv.weight, bias).reshape(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind(0)
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_vectors_that_are_joined_to_a_bias_go_with_its_packs() -> None:
    stock, x = JoinedBias().double(), torch.randn(2, 5, WIDTH, dtype=torch.float64)
    text = suggest_text(stock, 2, False, (x,))
    assert "q_bias" in text and "v_bias" in text and "k_bias" in text and "rowwise" in text
    assert max(worst(stock, text, 2, ((x,), {}), [((x,), {}), ((x[:1],), {})])) < 1e-13


class TiedDecoder(nn.Module):
    """An autoencoder that reads its encoder's weight the other way round (Bricken et al., 2023)."""

    def __init__(self, biased: bool) -> None:
        super().__init__()
        self.up, self.bias = nn.Linear(WIDTH, 4 * WIDTH), nn.Parameter(torch.randn(WIDTH)) if biased else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.up(x).relu(), self.up.weight.t(), self.bias)


@pytest.mark.parametrize(("biased", "tp"), [(False, 2), (True, 2), (True, 4)])
def test_a_layer_that_reads_its_own_weight_back_is_a_pair(biased: bool, tp: int) -> None:
    stock, x = TiedDecoder(biased).double(), torch.randn(2, 5, WIDTH, dtype=torch.float64)
    found = search(stock, tp, (x,), {}, False)
    styles = {name: held.style.value for name, held in found.settings.items()}
    assert styles == {"up": "colwise"} | ({"bias": "rowwise"} if biased else {})
    assert found.program.count_collectives() == {"all-reduce": 1}
    assert max(worst(stock, write_plan(found, "tied"), tp, ((x,), {}), [((x,), {}), ((x[:1],), {})])) < 1e-13


class OwnLowRank(nn.Module):
    """A weight of its own, and a low rank beside it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / 4)
        self.down, self.up = nn.Parameter(torch.randn(2, inputs) / 4), nn.Parameter(torch.randn(outputs, 2) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) + 2 * (x @ self.down.T @ self.up.T)


class PackedLowRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o, self.heads = OwnLowRank(WIDTH, 3 * WIDTH), OwnLowRank(WIDTH, WIDTH), HEADS

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_a_low_rank_is_packed_as_the_weight_that_it_stands_beside() -> None:
    plan = sharded(nn.Sequential(PackedLowRank()))
    assert "qkv.weight" in plan
    assert "qkv.up" in plan
    assert "o.{weight,down}" in plan


class Appended(nn.Module):
    """Torch's attention with a key and a value of its own behind those of the tokens; its weights are used, too."""

    def __init__(self, zeros: bool) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, HEADS, add_bias_kv=True, add_zero_attn=zeros, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        made, weights = self.inner(x, x, x)
        return x + made + weights.square().sum(-1, keepdim=True)


@pytest.mark.parametrize(("zeros", "tp"), slow_but([(False, 2)], [(False, 2), (True, 4)]))
def test_rows_of_features_that_are_concatenated_are_split_with_these(zeros: bool, tp: int) -> None:
    torch.manual_seed(0)
    model = Appended(zeros).double()
    calls: list[Call] = [((torch.randn(*size, WIDTH, dtype=torch.float64),), {}) for size in ((2, 6), (3, 5))]
    plan = suggest_text(model, tp, inputs=calls[0][0])
    assert "inner.bias_{k,v}: colwise" in plan
    program = tpplan.compile_plan(model, plan, tp, calls[0][0])
    assert program.count_collectives(backward=False) == {"all-reduce": 2}
    assert max(worst(model, plan, tp, calls[0], calls)) < 1e-12
