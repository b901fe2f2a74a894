"""Results in containers of any kind, and sizes among them."""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.battery.case import ATTENTION, MLP, WIDE, Attention, D, Mlp, add, call, case, ids, t

CALLS = (call(), call(lambda: (t(2, 9, D),)))


@dataclass
class Output:
    result: Tensor
    hidden: Tensor | None = None
    more: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class FrozenOutput:
    result: Tensor
    hidden: Tensor


@dataclass
class SlottedOutput:
    __slots__ = ("hidden", "result")
    result: Tensor
    hidden: Tensor


class Pair(NamedTuple):
    result: Tensor
    hidden: Tensor


class Tensors(list):
    """A subclass of list."""


class Named(dict):
    """A subclass of dict with attributes."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Bag:
    """A plain object that holds tensors."""

    is_container = True

    def __init__(self, result: Tensor, hidden: Tensor) -> None:
        self.result, self.hidden = result, hidden


MAKERS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tuple": lambda y, h: (y, h),
    "list": lambda y, h: [y, h],
    "dict": lambda y, h: {"y": y, "h": h},
    "ordered_dict": lambda y, h: collections.OrderedDict(y=y, h=h),
    "default_dict": lambda y, h: collections.defaultdict(list, y=[y], h=[h]),
    "named_tuple": Pair,
    "dataclass": lambda y, h: Output(y, h, [h * 2]),
    "frozen_dataclass": FrozenOutput,
    "slotted_dataclass": SlottedOutput,
    "namespace": lambda y, h: SimpleNamespace(y=y, inner=SimpleNamespace(h=h)),
    "list_subclass": lambda y, h: Tensors([y, h]),
    "dict_subclass": lambda y, h: Named(y=y, h=h),
    "object": Bag,
    "nested": lambda y, h: {"a": [(y, {"h": Output(y, h)})], "n": 3, "none": None},
    "int_keys": lambda y, h: {0: y, 1: h},
    "twice": lambda y, h: (y, h, h, y),
    "generator_list": lambda y, h: [*h.split(8, -1), y],
    "set_of_sizes": lambda y, h: (y, {"width": h.shape[-1], "rows": h.shape[1]}),
    "deque": lambda y, h: collections.deque([y, h]),
}


class Returned(Mlp):
    """Returns split features beside its result."""

    def __init__(self, make: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.make = [make]

    def forward(self, x: Tensor) -> Any:
        h = self.up(x).relu()
        return self.make[0](self.down(h), h)


class Passed(Mlp):
    """Passes split features in a container from one module to another."""

    class Inner(nn.Module):
        def __init__(self, make: Callable[[Tensor, Tensor], Any]) -> None:
            super().__init__()
            self.up, self.make = nn.Linear(D, WIDE), [make]

        def forward(self, x: Tensor) -> Any:
            h = self.up(x)
            return self.make[0](h.relu(), h)

    def __init__(self, make: Callable[[Tensor, Tensor], Any]) -> None:
        nn.Module.__init__(self)
        self.inner, self.down = self.Inner(make), nn.Linear(WIDE, D)

    def forward(self, x: Tensor) -> Any:
        made = self.inner(x)
        one, other = (made["y"], made["h"]) if isinstance(made, dict) else (made.result, made.hidden)
        return self.down(one * other.sigmoid())


for name, maker in MAKERS.items():
    plain = name in ("tuple", "list", "dict", "ordered_dict", "named_tuple", "int_keys", "twice")
    add(
        f"returns_{name}",
        "containers",
        lambda maker=maker: Returned(maker),
        MLP,
        CALLS,
        "equal" if plain else "equal_or_refused",
    )
for name in ("dict", "named_tuple", "dataclass", "frozen_dataclass", "object", "dict_subclass"):
    add(
        f"passes_{name}",
        "containers",
        lambda name=name: Passed(MAKERS[name]),
        {"inner.up": "colwise", "down": "rowwise"},
        CALLS,
        "equal_or_refused",
    )


@case("containers", MLP, *CALLS, expect="equal_or_refused")
class ReturnsSize(Mlp):
    """A size as a number."""

    def forward(self, x: Tensor) -> Any:
        h = self.up(x)
        return self.down(h), h.shape[-1]


@case("containers", MLP, *CALLS, expect="equal_or_refused")
class ReturnsShape(Mlp):
    """A `torch.Size`."""

    def forward(self, x: Tensor) -> Any:
        h = self.up(x)
        return self.down(h), h.shape


@case("containers", MLP, *CALLS, expect="equal_or_refused")
class ReturnsSizeProduct(Mlp):
    """A float that is made of sizes."""

    def forward(self, x: Tensor) -> Any:
        h = self.up(x)
        return self.down(h), h.shape[-1] ** 0.5, f"{h.shape[-1]} features"


@case("containers", MLP, *CALLS, expect="equal_or_refused")
class ReturnsSizeTensor(Mlp):
    """A tensor that is made of a size."""

    def forward(self, x: Tensor) -> Any:
        h = self.up(x)
        return self.down(h), torch.tensor(h.shape[-1]), torch.arange(h.shape[-1])


class CountsInner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(D, WIDE)

    def forward(self, x: Tensor) -> Any:
        h = self.up(x)
        return h, h.shape[-1]


@case("containers", {"inner.up": "colwise", "down": "rowwise"}, *CALLS, expect="equal_or_refused")
class SizeFromChild(nn.Module):
    """A size that a child returns and its caller divides by."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.down = CountsInner(), nn.Linear(WIDE, D)

    def forward(self, x: Tensor) -> Tensor:
        h, width = self.inner(x)
        return self.down(h) / width


@case("containers", ATTENTION, *CALLS, expect="equal_or_refused")
class ReturnsScores(Attention):
    """Scores by heads, whole for the caller."""

    def score(self, scores: Tensor) -> Tensor:
        self.scores = scores
        return scores

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.scores


@case("containers", MLP, *CALLS, expect="equal_or_refused")
class AppendsToArgument(Mlp):
    """Split features are appended to a list that is kept outside of the call."""

    def forward(self, x: Tensor, kept: list[Tensor] | None = None) -> Any:
        kept = [] if kept is None else kept
        h = self.up(x)
        kept.append(h)
        return self.down(sum(kept[1:], kept[0])), kept


@case("containers", MLP, call(lambda: ({"x": t(3, 6, D)},)), call(lambda: ({"x": t(1, 2, D), "more": 1},)))
class TakesDict(Mlp):
    """Arguments in a dict, of which keys come and go."""

    def forward(self, batch: dict[str, Any]) -> Any:
        return super().forward(batch["x"] * (1 + batch.get("more", 0)))


@dataclass
class Batch:
    x: Tensor
    scale: float = 1.0
    mask: Tensor | None = None


@case(
    "containers",
    MLP,
    call(lambda: (Batch(t(3, 6, D)),)),
    call(lambda: (Batch(t(3, 6, D), 2.0),)),
    call(lambda: (Batch(t(3, 6, D), 2.0, torch.ones(6, 1)),)),
    expect="equal_or_refused",
)
class TakesDataclass(Mlp):
    """Arguments in a dataclass."""

    def forward(self, batch: Batch) -> Any:
        y = super().forward(batch.x * batch.scale)
        return y if batch.mask is None else y * batch.mask


@case(
    "containers",
    MLP,
    call(lambda: (SimpleNamespace(x=t(3, 6, D)),)),
    call(lambda: (SimpleNamespace(x=t(1, 2, D)),)),
    expect="equal_or_refused",
)
class TakesNamespace(Mlp):
    """Arguments in an object."""

    def forward(self, batch: Any) -> Any:
        return super().forward(batch.x)


@case("containers", MLP, *CALLS, expect="equal_or_refused")
class ReturnsNothing(Mlp):
    """None, and a result in an attribute."""

    def forward(self, x: Tensor) -> Any:
        self.result = super().forward(x)


@case("containers", MLP, *CALLS, expect="equal_or_refused")
class ReturnsGenerator(Mlp):
    """Steps of a generator, run by the caller."""

    def forward(self, x: Tensor) -> Any:
        return tuple(self.steps(x))

    def steps(self, x: Tensor) -> Any:
        for part in x.unbind(1):
            yield super().forward(part)


@case("containers", MLP, *CALLS, expect="equal_or_refused")
class ReturnsView(Mlp):
    """A view of split features by heads, transposed."""

    def forward(self, x: Tensor) -> Any:
        h = self.up(x)
        return self.down(h), h.unflatten(-1, (4, -1)).transpose(1, 2)


@case(
    "containers",
    MLP | {"table": "vocab"},
    call(lambda: (ids(3, 6),)),
    call(lambda: (ids(2, 4),)),
    expect="equal_or_refused",
)
class TiedHead(Mlp):
    """Logits by a table that is split by rows, with the largest of them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, D)

    def forward(self, x: Tensor) -> Any:
        y = super().forward(self.table(x))
        logits = y @ self.table.weight.T
        return {"logits": logits, "best": logits.argmax(-1), "loss": logits.logsumexp(-1).mean()}
