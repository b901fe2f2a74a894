"""A plain pre-norm transformer of torch.nn modules, as users write them: biases everywhere, dropout as modules."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(hidden, hidden)
        self.k = nn.Linear(hidden, hidden)
        self.v = nn.Linear(hidden, hidden)
        self.o = nn.Linear(hidden, hidden)
        self.probabilities_dropout = dropout

    def forward(self, x_BSH: Tensor) -> Tensor:
        batch, sequence, _ = x_BSH.shape

        def by_head(y_BSH: Tensor) -> Tensor:
            return y_BSH.view(batch, sequence, self.heads, -1).transpose(1, 2)

        dropout = self.probabilities_dropout if self.training else 0.0
        q, k, v = by_head(self.q(x_BSH)), by_head(self.k(x_BSH)), by_head(self.v(x_BSH))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        return self.o(mixed.transpose(1, 2).reshape(batch, sequence, -1))


class Mlp(nn.Module):
    def __init__(self, hidden: int, intermediate: int, dropout: float) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, intermediate)
        self.activation = nn.GELU()
        self.dropout = nn.Dropout(dropout)
        self.down = nn.Linear(intermediate, hidden)

    def forward(self, x_BSH: Tensor) -> Tensor:
        return self.down(self.dropout(self.activation(self.up(x_BSH))))


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int, intermediate: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads, dropout)
        self.attention_dropout = nn.Dropout(dropout)
        self.mlp_norm = nn.LayerNorm(hidden)
        self.mlp = Mlp(hidden, intermediate, dropout)
        self.mlp_dropout = nn.Dropout(dropout)

    def forward(self, x_BSH: Tensor) -> Tensor:
        x_BSH = x_BSH + self.attention_dropout(self.attention(self.attention_norm(x_BSH)))
        return x_BSH + self.mlp_dropout(self.mlp(self.mlp_norm(x_BSH)))


class TorchTransformer(nn.Module):
    """Token ids (batch, sequence) to logits (batch, sequence, vocabulary)."""

    def __init__(
        self,
        hidden: int = 48,
        heads: int = 8,
        intermediate: int = 80,
        vocabulary: int = 88,
        longest: int = 64,
        layers: int = 2,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, hidden)
        self.positions = nn.Embedding(longest, hidden)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(hidden, heads, intermediate, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        x_BSH = self.dropout(self.tokens(ids) + self.positions(positions))
        for block in self.blocks:
            x_BSH = block(x_BSH)
        return self.head(self.norm(x_BSH))
