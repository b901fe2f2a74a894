"""A Llama on plain torch.nn, with as little Python around its operators as there can be: the hardest case for overhead.

Module names are those of transformers, so that the shipped plan `llama` fits. Shapes: B batch, S sequence, H hidden,
N heads, D head size, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class PlainAttention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.head_size = hidden // heads
        self.q_proj = nn.Linear(hidden, hidden, bias=False)
        self.k_proj = nn.Linear(hidden, hidden, bias=False)
        self.v_proj = nn.Linear(hidden, hidden, bias=False)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x_BSH: Tensor, cosine_SD: Tensor, sine_SD: Tensor) -> Tensor:
        """X (B, S, H) to (B, S, H)."""
        shape = (*x_BSH.shape[:2], -1, self.head_size)
        q_BNSD = _rotated(self.q_proj(x_BSH).view(shape).transpose(1, 2), cosine_SD, sine_SD)
        k_BNSD = _rotated(self.k_proj(x_BSH).view(shape).transpose(1, 2), cosine_SD, sine_SD)
        v_BNSD = self.v_proj(x_BSH).view(shape).transpose(1, 2)
        mixed_BNSD = functional.scaled_dot_product_attention(q_BNSD, k_BNSD, v_BNSD, is_causal=True)
        return self.o_proj(mixed_BNSD.transpose(1, 2).flatten(2))


def _rotated(x_BNSD: Tensor, cosine_SD: Tensor, sine_SD: Tensor) -> Tensor:
    first, second = x_BNSD.chunk(2, -1)
    return x_BNSD * cosine_SD + torch.cat((-second, first), -1) * sine_SD


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x_BSH: Tensor) -> Tensor:
        """X (B, S, H) to (B, S, H)."""
        return self.down_proj(functional.silu(self.gate_proj(x_BSH)) * self.up_proj(x_BSH))


class PlainBlock(nn.Module):
    """Pre-norm attention and feed-forward."""

    def __init__(self, hidden: int, intermediate: int, heads: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(hidden, eps=1e-6)
        self.self_attn = PlainAttention(hidden, heads)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=1e-6)
        self.mlp = FeedForward(hidden, intermediate)

    def forward(self, x_BSH: Tensor, cosine_SD: Tensor, sine_SD: Tensor) -> Tensor:
        """X (B, S, H) to (B, S, H)."""
        x_BSH = x_BSH + self.self_attn(self.input_layernorm(x_BSH), cosine_SD, sine_SD)
        return x_BSH + self.mlp(self.post_attention_layernorm(x_BSH))


class Decoder(nn.Module):
    """Embedding, blocks and the last norm."""

    cosine_SD: Tensor
    sine_SD: Tensor

    def __init__(self, vocabulary: int, hidden: int, intermediate: int, layers: int, heads: int, sequence: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(PlainBlock(hidden, intermediate, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden, eps=1e-6)
        frequencies = 10_000.0 ** (-torch.arange(0, hidden // heads, 2) / (hidden // heads))
        angles_SD = torch.outer(torch.arange(sequence), frequencies).repeat(1, 2)
        self.register_buffer("cosine_SD", angles_SD.cos(), persistent=False)
        self.register_buffer("sine_SD", angles_SD.sin(), persistent=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Ids (B, S) to hidden states (B, S, H)."""
        x_BSH = self.embed_tokens(input_ids)
        for layer in self.layers:
            x_BSH = layer(x_BSH, self.cosine_SD, self.sine_SD)
        return self.norm(x_BSH)


class PlainLlama(nn.Module):
    """The model with its head; every call has the sequence length that it was made for."""

    def __init__(self, vocabulary: int, hidden: int, intermediate: int, layers: int, heads: int, sequence: int) -> None:
        super().__init__()
        self.model = Decoder(vocabulary, hidden, intermediate, layers, heads, sequence)
        self.lm_head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Ids (B, S) to logits (B, S, V)."""
        return self.lm_head(self.model(input_ids))
