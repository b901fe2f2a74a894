"""The floor: Megatron's tensor parallelism, written by hand on plain tensors, with nothing that a compiler adds.

The linears of a stock Llama are exchanged for these, its embedding and its head too; the rest runs as it is. Parameters
are plain tensors of a rank's part, collectives are torch's public functions, and nothing is checked.
Source: Shoeybi et al., 2019, section 3. Shapes: B batch, S sequence, H hidden, F features, V vocabulary, T ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from tpplan.compat.process_groups import all_gather_single

_COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_ROWS = ("o_proj", "down_proj")


class _MegatronSum(torch.autograd.Function):
    """The same forward, a sum of gradients over the ranks: Megatron's f."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        gradient = gradients[0].contiguous()
        dist.all_reduce(gradient)
        return gradient


class _Reduced(torch.autograd.Function):
    """A sum over the ranks, the same gradient: Megatron's g."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class _Gathered(torch.autograd.Function):
    """The ranks' parts of the last dim, one after the other; the gradient is cut."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.rank, ctx.size = dist.get_rank(), dist.get_world_size()
        gathered = x.new_empty((ctx.size * x.shape[0], *x.shape[1:]))
        all_gather_single(gathered, x.contiguous())
        return torch.cat(gathered.chunk(ctx.size), -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        parts = torch.chunk(gradients[0], int(ctx.size), -1)
        return parts[int(ctx.rank)]


class _Linear(nn.Module):
    def __init__(self, weight: Tensor, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().chunk(dist.get_world_size(), dim)[dist.get_rank()].clone())


class Columns(_Linear):
    """Split by output features; f is the caller's, since several of them share an input."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.weight, 0)

    def forward(self, x_BSH: Tensor) -> Tensor:
        """X (B, S, H) to (B, S, F/T)."""
        return functional.linear(x_BSH, self.weight)


class MegatronRows(_Linear):
    """Split by input features, then g."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.weight, 1)

    def forward(self, x_BSF: Tensor) -> Tensor:
        """X (B, S, F/T) to (B, S, H)."""
        return _Reduced.apply(functional.linear(x_BSF, self.weight))  # pyright: ignore


class Head(_Linear):
    """Split by the vocabulary, gathered."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.weight, 0)

    def forward(self, x_BSH: Tensor) -> Tensor:
        """X (B, S, H) to logits (B, S, V)."""
        summed: Tensor = _MegatronSum.apply(x_BSH)  # pyright: ignore
        return _Gathered.apply(functional.linear(summed, self.weight))  # pyright: ignore


class MegatronTable(_Linear):
    """An embedding split by rows."""

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__(table.weight, 0)
        self._first = dist.get_rank() * self.weight.shape[0]

    def forward(self, ids_BS: Tensor) -> Tensor:
        """Ids (B, S) to rows (B, S, H)."""
        local = ids_BS - self._first
        foreign = (local < 0) | (local >= self.weight.shape[0])
        rows = functional.embedding(local.masked_fill(foreign, 0), self.weight)
        return _Reduced.apply(rows.masked_fill(foreign.unsqueeze(-1), 0))  # pyright: ignore


def split_by_hand(model: Any) -> nn.Module:
    """A stock Llama, of transformers or of `plain_llama`, split in place over all ranks.

    The hidden states enter each attention and feed-forward by way of f, as `input_layernorm` and
    `post_attention_layernorm` return them.
    """
    decoder = model.model
    decoder.embed_tokens = MegatronTable(decoder.embed_tokens)
    for layer in decoder.layers:
        for block in (layer.self_attn, layer.mlp):
            for name in (*_COLUMNS, *_ROWS):
                if hasattr(block, name):
                    setattr(block, name, (Columns if name in _COLUMNS else MegatronRows)(getattr(block, name)))
        layer.input_layernorm = _Entrance(layer.input_layernorm)
        layer.post_attention_layernorm = _Entrance(layer.post_attention_layernorm)
    model.lm_head = Head(model.lm_head)
    return model


class _Entrance(nn.Module):
    """A norm, and f."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x_BSH: Tensor) -> Tensor:
        return _MegatronSum.apply(self.norm(x_BSH))  # pyright: ignore


__all__ = ["split_by_hand"]
