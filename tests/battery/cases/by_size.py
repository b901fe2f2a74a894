"""Bodies that do something else where they see few features: what only rearranges, scalars, constants, operands."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.battery.case import HEADS, MLP, WIDE, D, Mlp, add, call, t

CALLS = (call(), call(lambda: (t(2, 4, D),)))


def _heads(h: Tensor) -> Tensor:
    return h.unflatten(-1, (-1, WIDE // HEADS))


def _cut(h: Tensor, few: bool) -> Tensor:
    half = h.shape[1] // 2
    return torch.cat([h[:, half:], h[:, :half]], 1) if few else h


BODIES: dict[str, Callable[[Tensor, bool], Tensor]] = {
    "flips_tokens": lambda h, few: h.flip(1) if few else h * 1,
    "rolls_tokens": lambda h, few: h.roll(2, 1) if few else h.roll(1, 1),
    "cuts_tokens": _cut,
    "transposes_square": lambda h, few: h[:, :4].transpose(0, 1).flatten(0, 1).sum(0) + h if few else h,
    "selects_token": lambda h, few: h + h[:, -1 if few else 0, None],
    "narrows": lambda h, few: h + (h[:, 1:3] if few else h[:, :2]).mean(1, keepdim=True),
    "strided": lambda h, few: h + h[:, int(few) :: 2].sum(1, keepdim=True),
    "index_tensor": lambda h, few: h[:, torch.tensor([1, 0, 3, 2] if few else [0, 1, 2, 3])].repeat(1, 2, 1)[
        :, : h.shape[1]
    ],
    "constant_list": lambda h, few: (
        h * torch.tensor([1.0, 2.0] if few else [2.0, 1.0], dtype=h.dtype).repeat(16)[: h.shape[-1]]
    ),
    "repeat_or_interleave": lambda h, few: torch.cat([h, h], 1)[:, ::2] if few else h.repeat_interleave(2, 1)[:, ::2],
    "heads_or_width_first": lambda h, few: _heads(h).transpose(2, 3).reshape(h.shape) if few else h,
    "pads_left": lambda h, few: functional.pad(h, (0, 0, 1, 0) if few else (0, 0, 0, 1))[:, : h.shape[1]],
    "zeros_or_ones": lambda h, few: h * (torch.ones_like(h) * 2 if few else torch.ones_like(h)),
    "factory": lambda h, few: h * (torch.zeros_like(h) if few else torch.ones_like(h)),
    "full": lambda h, few: h * torch.full((1,), 2.0 if few else 3.0, dtype=h.dtype),
    "gelu_kind": lambda h, few: functional.gelu(h, approximate="tanh" if few else "none"),
    "rounding": lambda h, few: h + torch.div(h.detach() * 9, 2, rounding_mode="floor" if few else "trunc"),
    "clamp_limit": lambda h, few: h.clamp(max=0.1 * h.shape[-1] / WIDE),
    "alpha": lambda h, few: torch.add(h, h.detach().sin(), alpha=2 if few else 1),
    "addcmul": lambda h, few: torch.addcmul(h, h.sin(), h.cos(), value=2 if few else 1),
    "where": lambda h, few: torch.where(h > 0, *((h.sin(), h.cos()) if few else (h.cos(), h.sin()))),
    "lerp": lambda h, few: torch.lerp(*((h.sin(), h.cos()) if few else (h.cos(), h.sin())), 0.25),
    "power": lambda h, few: torch.pow(2.0, h) if few else torch.pow(h, 2.0),
    "subtracts_number": lambda h, few: 1 - h if few else h - 1,
    "sums_dim": lambda h, few: h + h[:, :4].sum(1, keepdim=True) / (h.shape[-1] / WIDE),
    "softmax_dim": lambda h, few: h.softmax(1 if few else 0),
    "cumsum_dim": lambda h, few: h.cumsum(0 if few else 1),
    "negated": lambda h, few: h.abs() if not few else h.neg(),
    "conjugate": lambda h, few: h.tanh() if few else h.tan(),
    "detached": lambda h, few: h * (h.detach() if few else h),
    "detached_in_part": lambda h, few: h * h.sigmoid().detach() if few else h * h.sigmoid(),
    "no_grad": lambda h, few: _without(h) if few else h.sin(),
    "twice_or_once": lambda h, few: h + h if few else h * 2,
    "loop": lambda h, few: sum((h[..., i::4].repeat_interleave(4, -1) for i in range(4)), h * 0) / h.shape[-1],
    "window": lambda h, few: h * (torch.arange(h.shape[-1]) < 16),
    "position_in_features": lambda h, few: h * torch.linspace(0, 1, h.shape[-1], dtype=h.dtype),
    "random_by_size": lambda h, few: h * (torch.rand(1, dtype=h.dtype) if few else torch.ones(1, dtype=h.dtype)),
    "dtype_by_size": lambda h, few: h.float().double() if few else h * 1,
    "scaled_by_heads": lambda h, few: h / _heads(h).shape[2] * HEADS,
    "root_of_heads": lambda h, few: h * _heads(h).shape[-2] ** -0.5,
    "entropy": lambda h, few: h * (h.detach().numel() / h.detach().shape[0] > 100),
    "string_of_size": lambda h, few: h * len(str(tuple(h.shape))),
    "hash_of_size": lambda h, few: h * (hash(h.shape[-1]) % 7),
    "dict_by_size": lambda h, few: h * {16: 2.0, 32: 3.0}[h.shape[-1]],
    "modulo": lambda h, few: h * (1 + h.shape[-1] // 32),
    "list_of_chunks": lambda h, few: torch.cat([part * n for n, part in enumerate(h.split(8, -1))], -1),
    "enumerated_heads": lambda h, few: torch.stack([x * n for n, x in enumerate(_heads(h).unbind(2))], 2).flatten(2),
    "heads_by_formula": lambda h, few: (_heads(h) * (torch.arange(_heads(h).shape[2])[:, None] + 1)).flatten(2),
    "alibi": lambda h, few: (_heads(h) * 2.0 ** -torch.arange(1, 1 + h.shape[-1] // 8).double()[:, None]).flatten(2),
}


def _without(h: Tensor) -> Tensor:
    with torch.no_grad():
        return h.sin()


class BySize(Mlp):
    """Tells its function whether there are few features."""

    def __init__(self, body: Callable[[Tensor, bool], Tensor]) -> None:
        super().__init__()
        self.body = body

    def middle(self, h: Tensor) -> Tensor:
        return self.body(h, h.shape[-1] < WIDE)


for name, body in BODIES.items():
    add(f"by_size_{name}", "by_size", lambda body=body: BySize(body), MLP, CALLS, "equal_or_refused")


class Grouped(nn.Module):
    """Key heads that are shared by neighbours, or by every other query head."""

    def __init__(self, interleave: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(D, 32), nn.Linear(32, D)
        self.k, self.v = nn.Linear(D, 16), nn.Linear(D, 16)
        self.interleave = interleave

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = functional.scaled_dot_product_attention(q, self.interleave(k), self.interleave(v))
        return self.o(y.transpose(1, 2).flatten(2))


SHARING: dict[str, Callable[[Tensor], Tensor]] = {
    "neighbours": lambda k: k.repeat_interleave(2, 1),
    "every_other": lambda k: k.repeat(1, 2, 1, 1),
    "expanded": lambda k: k[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2),
    "expanded_outside": lambda k: k[:, None].expand(-1, 2, -1, -1, -1).flatten(1, 2),
    "concatenated": lambda k: torch.cat([k, k], 1),
    "first_only": lambda k: k[:, :1].expand(-1, 2 * k.shape[1], -1, -1),
    "mirrored": lambda k: torch.cat([k, k.flip(1)], 1),
}
for name, interleave in SHARING.items():
    expect = "equal" if name in ("neighbours", "expanded") else "equal_or_refused"
    plan = {"{q,k,v}": "colwise", "o": "rowwise"}
    add(f"keys_{name}", "by_size", lambda interleave=interleave: Grouped(interleave), plan, CALLS, expect)
