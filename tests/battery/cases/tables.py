"""Tables: of positions, of categories that are reduced in bags, and those that forwards keep for their next call."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from tests.battery.case import MLP, D, Mlp, call, case, ids, t

GATHERED = {"style": "colwise", "output": "replicate"}
BAGS = tuple(call(lambda n=n: (t(4, D), ids(4, n), t(4, n)), train=n == 3) for n in (3, 1, 5))
TOKENS = (call(lambda: (ids(3, 6),)), call(lambda: (ids(2, 9),)), call(lambda: (ids(3, 6),), train=False))
KEPT: dict[int, Tensor] = {}


@case("tables", MLP | {"table": GATHERED}, *BAGS)
class Bags(Mlp):
    """Rows that are weighted and summed, split by columns."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(12, D, mode="sum")

    def forward(self, x: Tensor, rows: Tensor, weights: Tensor) -> Any:
        return super().forward(x * self.table(rows, per_sample_weights=weights))


@case("tables", MLP | {"{tokens,places}": "vocab"}, *TOKENS)
class Positions(Mlp):
    """Positions that the body makes, in a table that is split by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(12, D), nn.Embedding(17, D)

    def forward(self, given: Tensor) -> Any:
        return super().forward(self.tokens(given) + self.places(torch.arange(given.shape[1], device=given.device)))


@case("tables", MLP, call(), call(lambda: (t(2, 3, D),)), call(), call(lambda: (t(3, 9, D),), train=False))
class KeptInDict(Mlp):
    """A dict of the file keeps what it made for a length."""

    def forward(self, x: Tensor) -> Any:
        if x.shape[1] not in KEPT:
            KEPT[x.shape[1]] = torch.arange(x.shape[1], device=x.device, dtype=x.dtype).cos()[:, None]
        return super().forward(x * KEPT[x.shape[1]])


@case("tables", MLP, call(), call(lambda: (t(2, 3, D),)), call(), call(lambda: (t(3, 9, D),), train=False))
class KeptByMethod(Mlp):
    """So does a cached method."""

    @functools.lru_cache  # noqa: B019 -- as users do
    def table(self, length: int, device: torch.device) -> Tensor:
        return torch.arange(length, device=device, dtype=torch.float64).cos()[:, None]

    def forward(self, x: Tensor) -> Any:
        return super().forward(x * self.table(x.shape[1], x.device))


@case(
    "tables",
    {
        "mix.in_proj_{weight,bias}": {"style": "colwise", "packed": ["q", "k", "v"]},
        "mix.out_proj.{weight,bias}": "rowwise",
    },
    call(),
    call(lambda: (t(2, 3, D),)),
    call(train=False),
)
class DropsWeights(nn.Module):
    """Attention whose weights nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.MultiheadAttention(D, 4, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return x + self.mix(x, x, x)[0]
