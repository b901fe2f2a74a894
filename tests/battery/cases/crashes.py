"""Plain code that the compiler or the runtime has stumbled over."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.battery.case import ATTENTION, HEADS, MLP, WIDE, Attention, D, Mlp, add, call, case, ids, t

CALLS = (call(), call(lambda: (t(2, 3, D),)), call(lambda: (t(3, 6, D),), train=False, under=torch.no_grad))


def table(length: int, width: int) -> Tensor:
    """Cosines and sines by position and pair: [length, width/2, 2]."""
    angles = torch.arange(length)[:, None] / 10.0 ** torch.arange(width // 2)
    return torch.stack([angles.cos(), angles.sin()], -1).double()


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """torchtune and gpt-fast: pairs of real numbers, of [batch, length, heads, width]."""
    pairs = x.reshape(*x.shape[:-1], -1, 2)
    turns = table[: x.shape[1]].view(1, x.shape[1], 1, pairs.shape[3], 2)
    turned = torch.stack(
        [
            pairs[..., 0] * turns[..., 0] - pairs[..., 1] * turns[..., 1],
            pairs[..., 1] * turns[..., 0] + pairs[..., 0] * turns[..., 1],
        ],
        -1,
    )
    return turned.flatten(3).type_as(x)


def halves(x: Tensor, table: Tensor) -> Tensor:
    """The other spelling: halves of a head."""
    one, other = x.chunk(2, -1)
    cosines, sines = table[: x.shape[1], None, :, 0], table[: x.shape[1], None, :, 1]
    return torch.cat([one * cosines - other * sines, other * cosines + one * sines], -1)


def indexed(x: Tensor, table: Tensor) -> Tensor:
    """Every other column, written into an empty tensor."""
    cosines, sines = table[: x.shape[1], None, :, 0], table[: x.shape[1], None, :, 1]
    result = torch.empty_like(x)
    result[..., ::2] = x[..., ::2] * cosines - x[..., 1::2] * sines
    result[..., 1::2] = x[..., 1::2] * cosines + x[..., ::2] * sines
    return result


def complexes(x: Tensor, table: Tensor) -> Tensor:
    """Llama's own: complex numbers."""
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    turns = torch.view_as_complex(table[: x.shape[1]].contiguous())[None, :, None]
    return torch.view_as_real(pairs * turns).flatten(3)


class Packed(nn.Module):
    """One projection for queries, keys and values, of fewer key heads, with rotary positions."""

    def __init__(self, rotary: Any = rotate, heads: int = HEADS, keys: int = 2, bias: bool = False) -> None:
        super().__init__()
        self.heads, self.keys, self.width = heads, keys, D // HEADS
        self.wqkv = nn.Linear(D, (heads + 2 * keys) * self.width, bias)
        self.wo = nn.Linear(heads * self.width, D, bias)
        self.rotary = rotary
        self.register_buffer("table", table(16, self.width), persistent=False)
        self.table: Tensor

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        sizes = [self.heads * self.width, self.keys * self.width, self.keys * self.width]
        q, k, v = self.wqkv(x).split(sizes, -1)
        q = q.view(batch, length, self.heads, self.width)
        k, v = (y.view(batch, length, self.keys, self.width) for y in (k, v))
        q, k = self.rotary(q, self.table), self.rotary(k, self.table)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        k, v = (y.repeat_interleave(self.heads // self.keys, 1) for y in (k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).contiguous().view(batch, length, -1))


EVEN = {"wqkv": {"style": "colwise", "packed": ["q", "k", "v"]}, "wo": "rowwise"}
UNEVEN = {"wqkv": {"style": "colwise", "packed": {"q": D, "k": D // 2, "v": D // 2}}, "wo": "rowwise"}
for way in (rotate, halves, indexed, complexes):
    add(f"rotary_packed_{way.__name__}", "crashes", lambda way=way: Packed(way), UNEVEN, CALLS)
    add(f"rotary_even_{way.__name__}", "crashes", lambda way=way: Packed(way, keys=4, bias=True), EVEN, CALLS)


class Grouped(nn.Module):
    """GPT-NeoX's and InternLM's order: each key head with its queries."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.group, self.width = 2, 2, D // HEADS
        self.wqkv, self.wo = nn.Linear(D, 2 * 4 * self.width), nn.Linear(D, D)
        self.register_buffer("table", table(16, self.width), persistent=False)
        self.table: Tensor

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        packed = self.wqkv(x).view(batch, length, self.keys, self.group + 2, self.width)
        q, k, v = packed.split([self.group, 1, 1], 3)
        q, k, v = (y.reshape(batch, length, -1, self.width) for y in (q, k, v))
        q, k = rotate(q, self.table), rotate(k, self.table)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(y.transpose(1, 2).reshape(batch, length, -1))


case("crashes", {"wqkv": "colwise", "wo": "rowwise"}, *CALLS)(Grouped)


@case("crashes", {"{q,k,v}": "colwise", "o": "rowwise"}, *CALLS, tolerance=1e-5)
class RotaryInSingle(Attention):
    """torchtune casts to float32 for the rotation."""

    def turn(self, x: Tensor) -> Tensor:
        y = x.transpose(1, 2)
        pairs = y.float().reshape(*y.shape[:-1], -1, 2)
        turns = table(16, self.width)[: y.shape[1], None].float()
        turned = torch.stack(
            [
                pairs[..., 0] * turns[..., 0] - pairs[..., 1] * turns[..., 1],
                pairs[..., 1] * turns[..., 0] + pairs[..., 0] * turns[..., 1],
            ],
            -1,
        )
        return turned.flatten(3).type_as(x).transpose(1, 2)


@case("crashes", MLP, *CALLS, expect="equal_or_refused")
class WritesFirstFeature(Mlp):
    """`h[..., 0] = 0` on split features: one rank's only."""

    def middle(self, h: Tensor) -> Tensor:
        h = h.relu()
        h[..., 0] = 0
        return h


@case("crashes", MLP, *CALLS)
class WritesFirstToken(Mlp):
    """A write along a dim that isn't split."""

    def middle(self, h: Tensor) -> Tensor:
        h = h.relu()
        h[:, 0] = 0
        return h


@case("crashes", MLP, *CALLS, expect="equal_or_refused")
class WritesColumns(Mlp):
    """Every other feature is written."""

    def middle(self, h: Tensor) -> Tensor:
        h = h * 1.0
        h[..., ::2] = h[..., 1::2].sin()
        return h


@case("crashes", MLP, *CALLS, expect="equal_or_refused")
class WritesMasked(Mlp):
    """A write by a mask."""

    def middle(self, h: Tensor) -> Tensor:
        h = h * 1.0
        h[h < 0] = -0.1
        return h


@case("crashes", MLP, *CALLS, expect="equal_or_refused")
class Trapezoid(Mlp):
    """An integral over split features."""

    def middle(self, h: Tensor) -> Tensor:
        return h * torch.trapezoid(h, dim=-1)[..., None]


@case("crashes", MLP, *CALLS, expect="equal_or_refused")
class TrapezoidOverTokens(Mlp):
    def middle(self, h: Tensor) -> Tensor:
        return h * torch.trapezoid(h, dim=1)[:, None]


@case("crashes", MLP, *CALLS, expect="equal_or_refused")
class FunctionalCall(Mlp):
    """The block's own parameters, times two."""

    def forward(self, x: Tensor) -> Any:
        if getattr(self, "inside", False):
            return super().forward(x)
        self.inside = True
        try:
            doubled = {name: parameter * 2 for name, parameter in self.named_parameters()}
            return torch.func.functional_call(self, doubled, (x,))
        finally:
            self.inside = False


@case("crashes", {"inner.up": "colwise", "inner.down": "rowwise"}, *CALLS, expect="equal_or_refused")
class FunctionalCallOfChild(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Mlp()

    def forward(self, x: Tensor) -> Any:
        state = {name: value.detach() * 0.5 for name, value in self.inner.named_parameters()}
        return self.inner(x) - torch.func.functional_call(self.inner, state, (x,))


@case("crashes", MLP, *CALLS, expect="equal_or_refused")
class CallsByState(Mlp):
    """Parameters by `state_dict` and by name."""

    def forward(self, x: Tensor) -> Any:
        parameters = dict(self.named_parameters())
        h = functional.linear(x, parameters["up.weight"], parameters["up.bias"])
        return functional.linear(h.relu(), parameters["down.weight"], parameters["down.bias"])


@case("crashes", MLP, *CALLS, expect="equal_or_refused")
class RegularisesInForward(Mlp):
    """A penalty over all parameters is part of the result."""

    def forward(self, x: Tensor) -> Any:
        penalty = sum(parameter.pow(2).sum() for parameter in self.parameters())
        return super().forward(x), penalty


SINGLE = (
    call(lambda: (t(3, 6, D, dtype=torch.float32),)),
    call(lambda: (t(2, 3, D, dtype=torch.float32),)),
)


@case("crashes", MLP, *SINGLE, dtype=torch.float32, tolerance=3e-2)
class AutocastInBody(Mlp):
    """Autocast by the argument's device."""

    def middle(self, h: Tensor) -> Tensor:
        with torch.autocast(h.device.type, torch.bfloat16):
            return h.sigmoid() * h


@case("crashes", MLP, *SINGLE, dtype=torch.float32, tolerance=3e-2, expect="equal_or_refused")
class AutocastAroundLayers(Mlp):
    """Autocast around sharded layers, by the argument's device."""

    def forward(self, x: Tensor) -> Any:
        with torch.autocast(x.device.type, torch.bfloat16):
            return super().forward(x).float()


@case("crashes", ATTENTION, *SINGLE, dtype=torch.float32, tolerance=1e-4)
class AutocastOff(Attention):
    """transformers' rotary tables: autocast is turned off by device type."""

    def forward(self, x: Tensor) -> Any:
        kind = x.device.type if x.device.type != "mps" else "cpu"
        with torch.autocast(device_type=kind, enabled=False):
            places = (torch.arange(x.shape[1], device=x.device).float() / 10).cos()
        return super().forward(x * places[:, None])


@case("crashes", MLP, *CALLS, expect="equal_or_refused")
class Einsum(Mlp):
    """Einsum over features, and over all but them."""

    def middle(self, h: Tensor) -> Tensor:
        return torch.einsum("bsf,btf,btg->bsg", h, h, h) / 100


@case("crashes", MLP, *CALLS, expect="equal_or_refused")
class InPlaceChain(Mlp):
    """Activations in place."""

    def middle(self, h: Tensor) -> Tensor:
        return functional.relu(h, inplace=True).mul_(2).add_(0.5)


@case("crashes", MLP, *CALLS, expect="equal_or_refused")
class OutArgument(Mlp):
    """`out=` into a tensor that the body makes."""

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            scale = torch.empty_like(x[..., :1])
            torch.amax(x.abs(), -1, keepdim=True, out=scale)
        return super().forward(x / (1 + scale))


@case("crashes", MLP, *CALLS, expect="equal_or_refused")
class VmapInBody(Mlp):
    """vmap over the batch."""

    def middle(self, h: Tensor) -> Tensor:
        return torch.vmap(lambda row: row.softmax(0))(h)


@case("crashes", MLP, *CALLS, expect="equal_or_refused")
class ListedLinear(Mlp):
    """A weight cut to pieces."""

    def forward(self, x: Tensor) -> Any:
        parts = [functional.linear(x, weight) for weight in self.up.weight.chunk(4)]
        return self.down(torch.cat(parts, -1).relu())


@case("crashes", {"table": "vocab", "head": "colwise"}, call(lambda: (ids(2, 6),)), call(lambda: (ids(1, 3),)))
class Tied(nn.Module):
    """A head tied to its table, and a loss inside."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(12, D), nn.Linear(D, 12, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Any:
        logits = self.head(self.table(x).tanh())
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten()), logits


@case("crashes", {"{first,mix}": "colwise", "last": "rowwise"}, *CALLS)
class ConvolutionBetween(nn.Module):
    """A depthwise convolution over time between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(D, WIDE), nn.Linear(WIDE, D)
        self.mix = nn.Conv1d(WIDE, WIDE, 3, padding=2, groups=WIDE)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).transpose(1, 2)
        return self.last(self.mix(h)[..., : x.shape[1]].transpose(1, 2))


@case("crashes", MLP, *CALLS, expect="equal_or_refused")
class TryAround(Mlp):
    """A body that falls back when it fails."""

    def middle(self, h: Tensor) -> Tensor:
        try:
            return h.view(h.shape[0], h.shape[1], 8, 4).softmax(-1).flatten(2)
        except RuntimeError:
            return h.relu()


@case("crashes", MLP, *CALLS, expect="equal_or_refused")
class DeepRecursion(Mlp):
    """A forward that calls itself on halves."""

    def forward(self, x: Tensor) -> Any:
        if x.shape[1] <= 2:
            return super().forward(x)
        half = x.shape[1] // 2
        return torch.cat([self.forward(x[:, :half]), self.forward(x[:, half:])], 1)


@case("crashes", MLP, *CALLS, expect="equal_or_refused")
class ScaledByParameterSum(Mlp):
    """A number from all of a split weight."""

    def middle(self, h: Tensor) -> Tensor:
        return h / math.sqrt(self.up.weight.numel()) + self.up.weight.mean()


@case("crashes", MLP, *CALLS, expect="equal_or_refused")
class LowRankInForward(Mlp):
    """A weight made from two, by an outer product in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(WIDE, 2)), nn.Parameter(torch.randn(2, D))

    def forward(self, x: Tensor) -> Any:
        return self.down(functional.linear(x, self.up.weight + self.a @ self.b, self.up.bias).relu())


@case("crashes", MLP, call(lambda: (t(6, D),)), call(lambda: (t(6, D),)))
class SparseBuffer(Mlp):
    """A graph's edges, as a sparse matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("edges", torch.randn(6, 6).relu().to_sparse())

    def middle(self, h: Tensor) -> Tensor:
        return torch.sparse.mm(self.edges, h.relu())


@case("crashes", {"1.up": "colwise", "1.down": "rowwise"}, *CALLS)
class LargestAnywhere(nn.Sequential):
    """Whether any of the features is large, which ranks tell each other in flags."""

    class Inner(Mlp):
        def middle(self, h: Tensor) -> Tensor:
            return torch.where((h > 1).any(-1, keepdim=True), 2 * h, h)

    def __init__(self) -> None:
        super().__init__(nn.Identity(), self.Inner())
