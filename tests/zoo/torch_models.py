"""Models from outside transformers: GPTs in the manner of nanoGPT, one with experts; torch's encoder and decoder."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class CausalSelfAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.n_head = heads
        self.n_embd = width

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (t.view(batch, length, self.n_head, width // self.n_head).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(batch, length, width))


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width)
        self.c_proj = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = CausalSelfAttention(width, heads)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    def __init__(self, vocabulary: int, width: int, heads: int, layers: int = 2, longest: int = 64) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocabulary, width),
                "wpe": nn.Embedding(longest, width),
                "h": nn.ModuleList(Block(width, heads) for _ in range(layers)),
                "ln_f": nn.LayerNorm(width),
            }
        )
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(0, ids.size(1), dtype=torch.long, device=ids.device)
        x = self.transformer["wte"](ids) + self.transformer["wpe"](positions)
        for block in self.transformer["h"]:  # pyright: ignore[reportGeneralTypeIssues]
            x = block(x)
        return self.lm_head(self.transformer["ln_f"](x))


def torch_encoder(width: int, heads: int, feed: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, heads, feed, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def torch_decoder(width: int, heads: int, feed: int) -> nn.Module:
    layer = nn.TransformerDecoderLayer(width, heads, feed, dropout=0.0, batch_first=True, norm_first=True)
    return nn.TransformerDecoder(layer, 2)


class Expert(nn.Module):
    def __init__(self, width: int, feed: int) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(width, feed), nn.Linear(feed, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)))


class Mixture(nn.Module):
    """Experts in a list, each called with the tokens that are routed to it."""

    def __init__(self, width: int, feed: int, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(Expert(width, feed) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        weights, chosen = torch.topk(self.gate(tokens).softmax(-1), 2)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == number)
            if rows.numel() > 0:
                out[rows] += weights[rows, place, None] * expert(tokens[rows])
        return out.view_as(x)


def mixture_of_experts(vocabulary: int, width: int, heads: int, feed: int) -> nn.Module:
    """A GPT in the manner of nanoGPT, with experts in lists for its feed-forward layers."""
    model = NanoGPT(vocabulary, width, heads)
    for block in model.transformer["h"]:  # pyright: ignore[reportGeneralTypeIssues]
        block.mlp = Mixture(width, feed)
    return model
