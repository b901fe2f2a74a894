"""Layers that look equal in a trace, or operands that do, and aren't."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from tests.battery.case import HEADS, MLP, WIDE, D, Mlp, call, case, t

PLAN = {f"layers.*.{name}": style for name, style in MLP.items()}
CALLS = (call(), call(lambda: (t(1, 9, D),)))


class HoldsFunction(Mlp):
    """A block that does what a function says."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def middle(self, h: Tensor) -> Tensor:
        return self.function(h)


class Stack(nn.Module):
    """Blocks that differ by what they hold."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def by_number(h: Tensor) -> Tensor:
    return h / 32


def by_size(h: Tensor) -> Tensor:
    return h / h.shape[-1]


@case("layers", PLAN, *CALLS, expect="equal_or_refused")
class NumberThenSize(Stack):
    def __init__(self) -> None:
        super().__init__(HoldsFunction(by_number), HoldsFunction(by_size))


@case("layers", PLAN, *CALLS, expect="equal_or_refused")
class SizeThenNumber(Stack):
    def __init__(self) -> None:
        super().__init__(HoldsFunction(by_size), HoldsFunction(by_number))


@case("layers", PLAN, *CALLS, expect="equal_or_refused")
class Lambdas(Stack):
    """The same name, the same module, another closure."""

    def __init__(self) -> None:
        def make(counts: bool) -> Callable[[Tensor], Tensor]:
            return lambda h: h / (h.shape[-1] if counts else 32)

        super().__init__(HoldsFunction(make(False)), HoldsFunction(make(True)))


def _divide(h: Tensor, how: str) -> Tensor:
    return h / (h.size(-1) if how == "size" else 32)


@case("layers", PLAN, *CALLS, expect="equal_or_refused")
class Partials(Stack):
    def __init__(self) -> None:
        super().__init__(*(HoldsFunction(functools.partial(_divide, how=how)) for how in ("number", "size")))


class HoldsConfig(Mlp):
    """A block that looks into a config."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def middle(self, h: Tensor) -> Tensor:
        return h / (h.shape[-1] if self.config.count else 32)


@case("layers", PLAN, *CALLS, expect="equal_or_refused")
class Configs(Stack):
    """Blocks that hold config objects of one class."""

    def __init__(self) -> None:
        super().__init__(*(HoldsConfig(SimpleNamespace(count=count)) for count in (False, True)))


class Nested(HoldsConfig):
    def middle(self, h: Tensor) -> Tensor:
        return h / (h.shape[-1] if self.config["inner"].count else 32)


@case("layers", PLAN, *CALLS, expect="equal_or_refused")
class NestedConfigs(Stack):
    """A config inside of a dict."""

    def __init__(self) -> None:
        super().__init__(*(Nested({"inner": SimpleNamespace(count=count)}) for count in (False, True)))


class HoldsList(Mlp):
    def __init__(self, steps: list[Callable[[Tensor], Tensor]]) -> None:
        super().__init__()
        self.steps = steps

    def middle(self, h: Tensor) -> Tensor:
        for step in self.steps:
            h = step(h)
        return h


@case("layers", PLAN, *CALLS, expect="equal_or_refused")
class FunctionLists(Stack):
    def __init__(self) -> None:
        super().__init__(HoldsList([by_number]), HoldsList([by_size]))


class HoldsParent(Mlp):
    """A block that asks its owner."""

    owner: Any

    def middle(self, h: Tensor) -> Tensor:
        return h / (h.shape[-1] if self.owner[0].second is self else 32)


@case("layers", {"{first,second}.up": "colwise", "{first,second}.down": "rowwise"}, *CALLS, expect="equal_or_refused")
class BlocksThatAskTheirOwner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = HoldsParent(), HoldsParent()
        self.first.owner = self.second.owner = (self,)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


@case("layers", PLAN, *CALLS, expect="equal_or_refused")
class PatchedForward(Stack):
    """One layer's forward is patched on the instance."""

    def __init__(self) -> None:
        super().__init__(Mlp(), Mlp())
        layer: Any = self.layers[1]
        layer.forward = lambda x: layer.down(by_size(layer.up(x)) * 32 / WIDE)


@case("layers", PLAN, *CALLS, expect="equal_or_refused")
class PatchedMiddle(Stack):
    """A method that both bodies call is patched on one instance."""

    def __init__(self) -> None:
        super().__init__(HoldsFunction(by_number), HoldsFunction(by_number))
        layer: Any = self.layers[1]
        layer.middle = by_size


@case("layers", PLAN, *CALLS)
class LayersByIndex(Stack):
    """Each layer's number is a factor."""

    def __init__(self) -> None:
        super().__init__(*(HoldsFunction(functools.partial(torch.mul, other=0.5 + n)) for n in range(3)))


class Counts(Mlp):
    """Takes another path each second time that any block is called."""

    count = 0

    def middle(self, h: Tensor) -> Tensor:
        Counts.count += 1
        return h / (h.shape[-1] if Counts.count % 2 else 32)


@case("layers", PLAN, *CALLS, expect="equal_or_refused")
class CountedBlocks(Stack):
    """Blocks that differ by the order in which they're called."""

    def __init__(self) -> None:
        super().__init__(Counts(), Counts())

    def forward(self, x: Tensor) -> Tensor:
        Counts.count = 0
        return super().forward(x)


class Shares(nn.Module):
    """One block called twice, with another argument."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, WIDE), nn.Linear(WIDE, D)

    def run(self, x: Tensor, how: str) -> Tensor:
        return self.down(_divide(self.up(x), how))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.run(x, "number"), "size")


case("layers", MLP, *CALLS, expect="equal_or_refused")(Shares)

TWO = {"a": "colwise", "b": "colwise", "down": "rowwise"}


class Pair(nn.Module):
    """Two split tensors that meet; which is which depends on a size."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.down = nn.Linear(D, WIDE), nn.Linear(D, WIDE), nn.Linear(WIDE, D)

    def meet(self, a: Tensor, b: Tensor) -> Tensor:
        return a - b

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.meet(self.a(x), self.b(x)))


@case("layers", TWO, *CALLS, expect="equal_or_refused")
class ExchangedBySize(Pair):
    """`a - b`, or `b - a` where the features are few."""

    def meet(self, a: Tensor, b: Tensor) -> Tensor:
        return a - b if a.shape[-1] >= WIDE else b - a


@case("layers", TWO, *CALLS, expect="equal_or_refused")
class ChosenBySize(Pair):
    """One of two tensors, by their size."""

    def meet(self, a: Tensor, b: Tensor) -> Tensor:
        return (a if a.shape[-1] >= WIDE else b).relu()


@case("layers", TWO, *CALLS, expect="equal_or_refused")
class ConcatenatedBySize(Pair):
    """Two rows of a stack, in the order of a size."""

    def meet(self, a: Tensor, b: Tensor) -> Tensor:
        pair = torch.stack([a, b])
        return pair[0 if a.shape[-1] >= WIDE else 1] / (1 + pair[1].abs())


@case("layers", TWO, *CALLS, expect="equal_or_refused")
class FlippedBySize(Pair):
    """A view that is there for few features only."""

    def meet(self, a: Tensor, b: Tensor) -> Tensor:
        return a * (b if b.shape[-1] >= WIDE else b.flip(-1))


@case("layers", TWO, *CALLS, expect="equal_or_refused")
class TransposedBySize(nn.Module):
    """Halves of the heads' width change places where there are few heads."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.down = nn.Linear(D, WIDE), nn.Linear(D, WIDE), nn.Linear(WIDE, D)

    def forward(self, x: Tensor) -> Tensor:
        a, b = (layer(x).unflatten(-1, (-1, WIDE // HEADS)) for layer in (self.a, self.b))
        one, other = a.chunk(2, -1)
        turned = torch.cat([one, other] if a.shape[2] >= HEADS else [other, one], -1)
        return self.down((turned * b).flatten(2))


@case("layers", MLP, *CALLS, expect="equal_or_refused")
class ParameterBySize(Mlp):
    """One of two parameters, by the size of the features."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.tensor(3.0))

    def middle(self, h: Tensor) -> Tensor:
        return h * (self.one if h.shape[-1] >= WIDE else self.other)


@case("layers", MLP, *CALLS, expect="equal_or_refused")
class FactorBySize(Mlp):
    """A scalar that comes from the number of features by way of a tensor."""

    def middle(self, h: Tensor) -> Tensor:
        return h * torch.tensor(float(h.shape[-1]), dtype=h.dtype).rsqrt()


@case("layers", MLP, *CALLS, expect="equal_or_refused")
class NumelFactor(Mlp):
    """A count of all elements."""

    def middle(self, h: Tensor) -> Tensor:
        return h / h.numel() * 600


@case("layers", MLP, *CALLS, expect="equal_or_refused")
class StrideFactor(Mlp):
    """A stride tells the features' size."""

    def middle(self, h: Tensor) -> Tensor:
        return h / h.stride(1)


@case("layers", MLP, *CALLS, expect="equal_or_refused")
class LengthOfRow(Mlp):
    """`len` of a row of features, and of an unbound list."""

    def middle(self, h: Tensor) -> Tensor:
        return h / len(h[0, 0]) + len(h.unbind(-1)) / 64


@case("layers", MLP, *CALLS, expect="equal_or_refused")
class BytesFactor(Mlp):
    """The size in bytes."""

    def middle(self, h: Tensor) -> Tensor:
        return h / h.nbytes * 1000


@case("layers", MLP, *CALLS, expect="equal_or_refused")
class OnesCounted(Mlp):
    """The number of features, from a sum of ones."""

    def middle(self, h: Tensor) -> Tensor:
        return h / torch.ones(h.shape[-1], dtype=h.dtype).sum()


@case("layers", MLP, *CALLS, expect="equal_or_refused")
class OwnAttributeOfLinear(Mlp):
    """The number of features from the layer itself, and from its weight."""

    def middle(self, h: Tensor) -> Tensor:
        return h / self.up.out_features + h / self.up.weight.shape[0]
