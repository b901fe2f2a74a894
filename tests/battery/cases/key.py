"""Calls that differ from the proved one in something that a forward looks at."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.battery.case import ATTENTION, MLP, Attention, D, Mlp, call, case, t

LONG = call(lambda: (t(3, 12, D),))
ONE = call(lambda: (t(3, 1, D),))
SINGLE = call(lambda: (t(1, 6, D),))
SIZES = (call(), LONG, ONE, SINGLE, call(lambda: (t(2, 7, D),)), call())


def wide(h: Tensor) -> Tensor:
    """Something that split features can't do alone."""
    return h - h.mean(-1, keepdim=True)


@case("key", MLP, *SIZES, expect="equal_or_refused")
class LongBranch(Mlp):
    """Long sequences take another path."""

    def middle(self, h: Tensor) -> Tensor:
        return wide(h) if h.shape[1] > 8 else h.relu()


@case("key", MLP, *SIZES, expect="equal_or_refused")
class SingleTokenBranch(Mlp):
    """One token alone takes another path, as decoding does."""

    def middle(self, h: Tensor) -> Tensor:
        return wide(h) if h.shape[1] == 1 else h.relu()


@case("key", MLP, *SIZES, expect="equal_or_refused")
class BatchOfOneBranch(Mlp):
    def middle(self, h: Tensor) -> Tensor:
        return h.softmax(-1) if h.size(0) == 1 else h.relu()


@case("key", MLP, *SIZES, expect="equal_or_refused")
class OddLengthBranch(Mlp):
    def middle(self, h: Tensor) -> Tensor:
        return h.flip(-1).cumsum(-1) if h.shape[1] % 2 else h.relu()


@case("key", MLP, *SIZES)
class PadsShortInputs(Mlp):
    """Pads to a multiple of four, and cuts."""

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        padded = functional.pad(x, (0, 0, 0, -length % 4))
        return super().forward(padded)[:, :length]


@case("key", MLP, *SIZES, expect="equal_or_refused")
class PadsShortFeatures(Mlp):
    """Short inputs are joined by their features' mean."""

    def middle(self, h: Tensor) -> Tensor:
        if h.shape[1] < 4:
            h = torch.cat([h, h.mean(-1, keepdim=True).expand_as(h)], 1)
            return h[:, : h.shape[1] // 2] + h[:, h.shape[1] // 2 :]
        return h.relu()


@case("key", ATTENTION, *SIZES)
class ChunkedAttention(Attention):
    """Chunks of four tokens, one after another."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([Attention.forward(self, part) for part in x.split(4, 1)], 1)


@case("key", MLP, call(lambda: (t(6, D),)), call(), call(lambda: (t(2, 3, 4, D),)), call(lambda: (t(D),)))
class AnyRank(Mlp):
    """A number of dims that changes."""


@case("key", MLP, call(), call(lambda: (t(0, 6, D),)), call(lambda: (t(3, 0, D),)))
class EmptyBatch(Mlp):
    """Nothing at all."""


class Masked(Attention):
    """Attention with a mask of any type."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        self.mask = mask
        return super().forward(x)

    def score(self, scores: Tensor) -> Tensor:
        if self.mask is None:
            return scores
        if self.mask.dtype == torch.bool:
            return scores.masked_fill(~self.mask, -1e4)
        return scores + self.mask


def _mask(dtype: torch.dtype) -> Callable[[], Any]:
    return lambda: {"x": t(3, 6, D), "mask": torch.ones(6, 6).tril().to(dtype)}


NO_MASK = call(lambda: {"x": t(3, 6, D)})
FLOATS, BOOLS, INTS = (call(_mask(dtype)) for dtype in (torch.float64, torch.bool, torch.int64))


@case("key", ATTENTION, FLOATS, BOOLS, INTS, NO_MASK, BOOLS)
class FloatThenBoolMask(Masked):
    """A mask that is added, then one that is filled in."""


@case("key", ATTENTION, INTS, BOOLS, NO_MASK)
class IntThenBoolMask(Masked):
    """A mask of ints is added."""


@case("key", ATTENTION, NO_MASK, BOOLS, FLOATS)
class MaskOnlyLater(Masked):
    """The example has none."""


class KeyOfMask(Mlp):
    """A mask of bools steers; one of ints is a weight."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.up(x)
        h = wide(h) if mask.dtype == torch.bool else h * mask.unsqueeze(-1)
        return self.down(h)


def _weights(dtype: torch.dtype) -> Any:
    return call(lambda: {"x": t(3, 6, D), "mask": torch.ones(3, 6).to(dtype)})


case("key", MLP, _weights(torch.int64), _weights(torch.bool), expect="equal_or_refused")(KeyOfMask)


class Flagged(Mlp):
    """An argument of any type that chooses what is done."""

    def forward(self, x: Tensor, flag: Any = None) -> Tensor:
        self.flag = flag
        return super().forward(x)


def flags(*values: Any) -> list[Any]:
    return [call(lambda value=value: {"x": t(3, 6, D), "flag": value}) for value in values]


@case("key", MLP, *flags(1, True, 1.0, 2), expect="equal_or_refused")
class TrueAgainstOne(Flagged):
    def middle(self, h: Tensor) -> Tensor:
        return wide(h) if self.flag is True else h * self.flag


@case("key", MLP, *flags(0, False, None, -0.0), expect="equal_or_refused")
class FalseAgainstZero(Flagged):
    def middle(self, h: Tensor) -> Tensor:
        return h.softmax(-1) if self.flag is False else h.relu()


class Kind(enum.Enum):
    PLAIN = 0
    CENTRED = 1


class Number(enum.IntEnum):
    ONE = 1
    TWO = 2


@case("key", MLP, *flags(Kind.PLAIN, Kind.CENTRED, Kind.PLAIN), expect="equal_or_refused")
class EnumFlag(Flagged):
    def middle(self, h: Tensor) -> Tensor:
        return wide(h) if self.flag is Kind.CENTRED else h.relu()


@case("key", MLP, *flags(1, Number.ONE, 2, Number.TWO), expect="equal_or_refused")
class IntEnumFlag(Flagged):
    def middle(self, h: Tensor) -> Tensor:
        return wide(h) if isinstance(self.flag, Number) else h * self.flag


@case("key", MLP, *flags("relu", "centred", "gelu"), expect="equal_or_refused")
class StringFlag(Flagged):
    def middle(self, h: Tensor) -> Tensor:
        return wide(h) if self.flag == "centred" else getattr(functional, self.flag)(h)


@case("key", MLP, *flags(torch.relu, wide, torch.tanh), expect="equal_or_refused")
class CallableFlag(Flagged):
    def middle(self, h: Tensor) -> Tensor:
        return self.flag(h)


@case("key", MLP, *flags(functools.partial(torch.mul, other=2.0), functools.partial(torch.mul, other=3.0)))
class PartialFlag(Flagged):
    def middle(self, h: Tensor) -> Tensor:
        return self.flag(h)


@dataclass
class Options:
    centre: bool = False
    scale: float = 1.0


@case("key", MLP, *flags(Options(), Options(True), Options(False, 2.0)), expect="equal_or_refused")
class DataclassFlag(Flagged):
    def middle(self, h: Tensor) -> Tensor:
        return (wide(h) if self.flag.centre else h.relu()) * self.flag.scale


class Opaque:
    def __init__(self, centre: bool) -> None:
        self.centre = centre


@case("key", MLP, *flags(Opaque(False), Opaque(True)), expect="equal_or_refused")
class ObjectFlag(Flagged):
    def middle(self, h: Tensor) -> Tensor:
        return wide(h) if self.flag.centre else h.relu()


@case("key", MLP, *flags(Opaque(True), Opaque(False)), expect="equal_or_refused")
class ObjectFlagSeen(ObjectFlag):
    """The example's own flag takes the path that isn't local."""


@case("key", MLP, *flags(torch.float64, torch.float32, None), expect="equal_or_refused", tolerance=1e-5)
class DtypeFlag(Flagged):
    def middle(self, h: Tensor) -> Tensor:
        return wide(h) if self.flag is None else h.to(self.flag).relu().double()


@case("key", MLP, *flags((1, 2), [1, 2], (1, 2)), expect="equal_or_refused")
class TupleAgainstList(Flagged):
    def middle(self, h: Tensor) -> Tensor:
        return wide(h) if isinstance(self.flag, list) else h.relu()


@case("key", MLP, *flags({"a": 1}, {"a": 2}, {"b": 1}, {}), expect="equal_or_refused")
class DictFlag(Flagged):
    def middle(self, h: Tensor) -> Tensor:
        return wide(h) if self.flag.get("a", 0) == 2 else h * len(self.flag)


@case("key", MLP, *flags(slice(0, 4), slice(0, 2)))
class SliceFlag(Flagged):
    """Last tokens only."""

    def forward(self, x: Tensor, flag: Any = None) -> Tensor:
        return super().forward(x)[:, flag]


@case("key", MLP, *flags(torch.tensor(1), torch.tensor(2), torch.tensor(True)), expect="equal_or_refused")
class TensorFlag(Flagged):
    """A tensor of no dims as a factor."""

    def middle(self, h: Tensor) -> Tensor:
        return h * self.flag


@case("key", MLP, *flags(0.5, 0.25, float("nan"), float("inf")))
class FloatFlag(Flagged):
    def middle(self, h: Tensor) -> Tensor:
        return h * self.flag


@case("key", MLP, *flags(2, 3, 5, 0))
class Repeats(Flagged):
    """How often a body is run."""

    def forward(self, x: Tensor, flag: Any = None) -> Tensor:
        for _ in range(flag):
            x = x + super().forward(x)
        return x


@case("key", MLP, call(train=True), call(train=False), call(train=True), expect="equal_or_refused")
class ModeBranch(Mlp):
    def middle(self, h: Tensor) -> Tensor:
        return h.relu() if self.training else wide(h)


@case("key", MLP, call(), call(before=lambda model: model.up.eval()), expect="equal_or_refused")
class ChildModeBranch(Mlp):
    """One child alone is put into evaluation."""

    def middle(self, h: Tensor) -> Tensor:
        return h.relu() if self.up.training else wide(h)

    def train(self, mode: bool = True) -> Any:
        return self


@case("key", MLP, call(), call(under=torch.no_grad), call())
class GradModeBranch(Mlp):
    def middle(self, h: Tensor) -> Tensor:
        return h.relu() if torch.is_grad_enabled() else wide(h)


@case("key", MLP, call(), call(lambda: (t(3, 6, D, grad=False),)), call(under=torch.no_grad))
class RequiresGradBranch(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(h.relu() if x.requires_grad else wide(h))


def _set(**values: Any) -> Callable[[nn.Module], None]:
    return lambda model: [setattr(model, name, value) for name, value in values.items()]  # type: ignore


class Switched(Mlp):
    """An attribute that chooses what is done."""

    kind: Any = 0

    def __init__(self) -> None:
        super().__init__()
        self.switch = False
        self.factor = 1.0
        self.options = {"centre": False}
        self.function: Any = torch.relu

    def middle(self, h: Tensor) -> Tensor:
        h = wide(h) if self.switch or self.options["centre"] or self.kind else h
        return self.function(h) * self.factor


@case("key", MLP, call(), call(before=_set(switch=True)), call(before=_set(switch=False)), expect="equal_or_refused")
class AttributeSetLater(Switched):
    """A flag on the module is set after `parallelize`."""


@case("key", MLP, call(), call(before=_set(factor=2.0)))
class FactorSetLater(Switched):
    """A number on the module is set after `parallelize`."""


@case("key", MLP, call(), call(before=lambda model: model.options.update(centre=True)), expect="equal_or_refused")
class DictAttributeChangedLater(Switched):
    """A dict that the module holds is changed in place."""


@case("key", MLP, call(), call(before=_set(function=wide)), expect="equal_or_refused")
class FunctionSetLater(Switched):
    """A function that the module holds is exchanged."""


@case("key", MLP, call(), call(before=_set(function=torch.nn.Softmax(-1))), expect="equal_or_refused")
class ModuleSetLater(Switched):
    """A child is added in place of a function."""


def _class_kind(model: nn.Module) -> None:
    for kind in type(model).__mro__:
        if "kind" in vars(kind) and kind.__name__ == "Switched":
            kind.kind = 1  # pyright: ignore


@case("key", MLP, call(), call(before=lambda model: setattr(model, "kind", 1)), expect="equal_or_refused")
class ClassAttributeShadowed(Switched):
    """An attribute of the class is shadowed by the instance."""


class DtypeMlp(Mlp):
    """Autocast from outside, and a body that asks for it."""

    def middle(self, h: Tensor) -> Tensor:
        return wide(h) if torch.is_autocast_enabled("cpu") else h.relu()


AUTOCAST = functools.partial(torch.autocast, "cpu", torch.bfloat16)
SINGLES = functools.partial(t, 3, 6, D, dtype=torch.float32)


def _single() -> tuple[Tensor]:
    return (SINGLES(),)


case(
    "key",
    MLP,
    call(_single),
    call(_single, under=AUTOCAST),
    call(_single),
    expect="equal_or_refused",
    dtype=torch.float32,
    tolerance=3e-2,
)(DtypeMlp)


@case("key", MLP, call(_single), call(_single, under=AUTOCAST), call(_single), dtype=torch.float32, tolerance=3e-2)
class AutocastOutside(Mlp):
    """Mixed precision as most users run it."""


@case("key", MLP, call(_single), call(lambda: (SINGLES().double(),)), dtype=torch.float32, tolerance=1e-4)
class WrongDtype(Mlp):
    """The stock model raises."""


@case("key", MLP, call(), call(before=lambda model: model.to(torch.float32)), expect="equal_or_refused")
class CastLater(Mlp):
    """Parameters of another dtype, and arguments of the first one: the stock model raises."""


@case("key", MLP, call(_single, before=lambda model: model.double()), expect="equal_or_refused", dtype=torch.float32)
class CastBefore(Mlp):
    """As above."""


@case("key", {"{q,k,v}": "colwise", "o": "rowwise"}, FLOATS, NO_MASK, call(lambda: {"x": t(1, 3, D)}))
class FewKeyHeads(nn.Module):
    """As many key heads as ranks, with and without a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(D, D), nn.Linear(D, D)
        self.k, self.v = nn.Linear(D, 8), nn.Linear(D, 8)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        k, v = (y.repeat_interleave(2, 1) for y in (k, v))
        y = functional.scaled_dot_product_attention(q, k, v, mask)
        return self.o(y.transpose(1, 2).flatten(2))


@case("key", {"{q,k,v}": "colwise", "o": "rowwise"}, *SIZES)
class HeadsInBatch(Attention):
    """Bloom's: batch and heads in one dim."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            layer(x).view(batch, length, -1, self.width).transpose(1, 2).reshape(-1, length, self.width)
            for layer in (self.q, self.k, self.v)
        )
        y = (q @ k.transpose(1, 2)).softmax(-1) @ v
        return self.o(y.view(batch, -1, length, self.width).transpose(1, 2).reshape(batch, length, -1))


@case(
    "key",
    {"experts.*.up": "colwise", "experts.*.down": "rowwise"},
    call(train=True),
    call(train=False),
    call(lambda: (t(1, 2, D),), train=False),
)
class Experts(nn.Module):
    """Experts that are chosen by each token; proved in training, run in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(D, 4), nn.ModuleList(Mlp() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).topk(2)
        result = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, place = (chosen == number).nonzero(as_tuple=True)
            if self.training or rows.numel():
                result = result.index_add(0, rows, expert(flat[rows]) * weights[rows, place, None])
        return result.view_as(x)


@case(
    "key",
    MLP | {"table": "vocab"},
    call(lambda: {"ids": torch.arange(6).view(2, 3)}),
    call(lambda: {"embeds": t(2, 3, D)}),
    call(lambda: {"embeds": t(2, 3, D, grad=False)}),
    call(lambda: {"embeds": t(2, 3, D, grad=False)}, train=False, under=torch.no_grad),
)
class IdsOrEmbeds(Mlp):
    """Embedded inputs, with and without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, D)

    def forward(self, ids: Tensor | None = None, embeds: Tensor | None = None) -> Tensor:
        return super().forward(self.table(ids) if embeds is None else embeds)
