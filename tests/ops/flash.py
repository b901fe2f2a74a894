"""Operators by the names and with the arguments of flash-attn's, which need a GPU there, in plain operations."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

LIBRARY = torch.library.Library("flash_attn", "FRAGMENT")
LIBRARY.define(
    "_flash_attn_forward(Tensor q, Tensor k, Tensor v, float dropout_p, float softmax_scale, bool causal, "
    "int window_size_left, int window_size_right, float softcap, Tensor? alibi_slopes, bool return_softmax) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
LIBRARY.define(
    "_flash_attn_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(a!)? dq, "
    "Tensor(b!)? dk, Tensor(c!)? dv, float dropout_p, float softmax_scale, bool causal, int window_size_left, "
    "int window_size_right, float softcap, Tensor? alibi_slopes, bool deterministic, Tensor? rng_state=None) -> Tensor"
)


def _scores(q: Tensor, k: Tensor, scale: float, slopes: Tensor | None) -> Tensor:
    """(b, h, s, t), of queries (b, h, s, d) and keys (b, h, t, d); no entry sees a later one."""
    made = q @ k.transpose(-1, -2) * scale
    if slopes is not None:
        places = torch.arange(made.shape[-1], device=made.device)
        made = made + slopes[:, None, None] * (places - places[: made.shape[-2], None])
    later = torch.ones(made.shape[-2:], dtype=torch.bool, device=made.device).triu(1)
    return made.masked_fill(later, float("-inf"))


def _by_heads(k: Tensor, groups: int) -> Tensor:
    return k.transpose(1, 2).repeat_interleave(groups, 1)


def _forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if q.is_meta:
        statistics = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)
        return torch.empty_like(q), statistics, q.new_empty(0), q.new_empty(2, dtype=torch.int64)
    groups = q.shape[2] // k.shape[2]
    scores = _scores(q.transpose(1, 2), _by_heads(k, groups), rest[1], rest[6])
    out = (scores.softmax(-1) @ _by_heads(v, groups)).transpose(1, 2).contiguous()
    return out, scores.logsumexp(-1).float(), q.new_empty(0), q.new_zeros(2, dtype=torch.int64)


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    *rest: Any, rng_state: Tensor | None = None,
) -> Tensor:  # fmt: skip
    if not q.is_meta:
        groups = q.shape[2] // k.shape[2]
        queries, keys, values, arrived = (
            q.transpose(1, 2),
            _by_heads(k, groups),
            _by_heads(v, groups),
            dout.transpose(1, 2),
        )
        weights = _scores(queries, keys, rest[1], rest[6]).softmax(-1)
        back = arrived @ values.transpose(-1, -2)
        scores = weights * (back - (back * weights).sum(-1, keepdim=True)) * rest[1]
        dq.copy_((scores @ keys).transpose(1, 2))
        for made, held in ((dk, scores.transpose(-1, -2) @ queries), (dv, weights.transpose(-1, -2) @ arrived)):
            made.copy_(held.unflatten(1, (-1, groups)).sum(2).transpose(1, 2))
    return q.new_empty(q.shape[0], q.shape[2], 128, dtype=torch.float32)


for _name, _function in (("_flash_attn_forward", _forward), ("_flash_attn_backward", _backward)):
    LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, dropout: float) -> Tensor:
        scale = q.shape[-1] ** -0.5
        made = torch.ops.flash_attn._flash_attn_forward(
            q, k, v, dropout, scale, causal=True, window_size_left=-1, window_size_right=-1, softcap=0.0,
            alibi_slopes=slopes, return_softmax=False,
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, made[0], made[1], made[3])
        ctx.slopes, ctx.scale, ctx.dropout = slopes, scale, dropout
        return made[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, rng_state = ctx.saved_tensors
        made = [torch.empty_like(held) for held in (q, k, v)]
        torch.ops.flash_attn._flash_attn_backward(
            gradients[0], q, k, v, out, lse, *made, ctx.dropout, ctx.scale, True, -1, -1, 0.0, ctx.slopes, False,
            rng_state=rng_state,
        )  # fmt: skip
        return (*made, None, None)


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, alibi_slopes: Tensor | None = None, **_: Any
) -> Tensor:
    """(b, s, h, d), (b, t, k, d) twice; no entry sees a later one."""
    made: Any = _Flash.apply(q, k, v, alibi_slopes, dropout_p)
    return made


class Flash(nn.Module):
    """Heads, of which some share a key, around flash-attn's operators."""

    slopes: Tensor | None

    def __init__(self, heads: int = 8, keys: int = 4, slopes: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(16, heads * 8), nn.Linear(heads * 8, 16)
        self.k, self.v = nn.Linear(16, keys * 8), nn.Linear(16, keys * 8)
        self.register_buffer("slopes", 0.5 ** torch.arange(1, heads + 1) if slopes else None)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 8)) for layer in (self.q, self.k, self.v))
        return x + self.o(flash_attn_func(q, k, v, self.dropout, self.slopes).flatten(2))


TAKES_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters  # from torch 2.12 on


class Packed(nn.Module):
    """Sequences one behind the other."""

    def __init__(self, heads: int = 8, keys: int = 4) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(16, heads * 8), nn.Linear(heads * 8, 16)
        self.k, self.v = nn.Linear(16, keys * 8), nn.Linear(16, keys * 8)
        self.settings: dict[str, Any] = {"enable_gqa": True} if keys < heads and TAKES_GROUPS else {}

    def forward(self, x: Tensor, ends: Tensor, longest: int) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 8)) for layer in (self.q, self.k, self.v))
        made: Any = varlen_attn(q, k, v, ends, ends, longest, longest, window_size=(-1, 0), **self.settings)
        return x + self.o(made.flatten(1))
