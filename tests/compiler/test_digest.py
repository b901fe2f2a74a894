"""Ranks that take the same steps in another order, as over a set, have one digest where order means nothing."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.compiler.toys import HIDDEN, MLP, Mlp, plan_of, x_BSH
from tpplan.compiler.emit.digest import Digest
from tpplan.compiler.pipeline import compile_call
from tpplan.compiler.request import Request

KINDS = ("full", "sliding", "chunked")
RULES = {f"**.{name}": style for name, style in MLP.items()}
SCRIPT = """
from tests.compiler.test_digest import Masks, digest
print(digest(Masks, {"full", "sliding", "chunked"}).work)
"""


class Ordered(nn.Module):
    """Does something for each kind, in any order."""

    def __init__(self, order: tuple[str, ...], factor: float = 2.0) -> None:
        super().__init__()
        self.order, self.factor = order, factor
        self.mlps = nn.ModuleDict({kind: Mlp() for kind in KINDS})
        self.norms = nn.ModuleDict({kind: nn.LayerNorm(HIDDEN) for kind in KINDS})
        self.scales = nn.ParameterDict({kind: nn.Parameter(torch.ones(HIDDEN)) for kind in KINDS})


class Masks(Ordered):
    """As transformers makes masks, some entries of which it writes in place."""

    def forward(self, x: Tensor) -> Tensor:
        masks: dict[str, Tensor] = {}
        for kind in self.order:
            near = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(-KINDS.index(kind))
            masks[kind] = torch.ones(x.shape[1], x.shape[1], dtype=x.dtype).tril()
            masks[kind].view(-1).masked_fill_(near.view(-1), self.factor)
        for kind in KINDS:
            x = self.mlps[kind](masks[kind] @ x)
        return x


class Scaled(Ordered):
    def forward(self, x: Tensor) -> Tensor:
        x = self.mlps["full"](x)
        made = {kind: self.scales[kind] * self.norms[kind](x) for kind in self.order}
        return made["full"] + made["sliding"] * made["chunked"]


class Branches(Ordered):
    def forward(self, x: Tensor) -> Tensor:
        made: dict[str, Tensor] = {}
        for kind in self.order:
            made[kind] = x > KINDS.index(kind)
            if made[kind].all():
                made[kind] = made[kind] * self.factor
        return self.mlps["full"](x) * (made["full"] + made["sliding"])


class Sums(Ordered):
    def forward(self, x: Tensor) -> Tensor:
        x, found = self.mlps["full"](x), torch.zeros((), dtype=x.dtype)
        for kind in self.order:
            found = found + self.scales[kind] * x
        return found


class Draws(Ordered):
    def forward(self, x: Tensor) -> Tensor:
        x = self.mlps["full"](x)
        made = {kind: functional.dropout(x, 0.5, self.training) for kind in self.order}
        return made["full"] - made["sliding"]


class Exchanges(Ordered):
    def forward(self, x: Tensor) -> Tensor:
        made = {kind: self.mlps[kind](x) for kind in self.order}
        return made["full"] + made["sliding"] * made["chunked"]


def digest(model: Callable[..., nn.Module], order: object, **settings: object) -> Digest:
    request = Request(model(tuple(order), **settings), plan_of(RULES), 2, (x_BSH(),), {})  # pyright: ignore
    return compile_call(request).digest


@pytest.mark.parametrize("model", [Masks, Scaled, Branches])
def test_where_nothing_is_exchanged_in_between_any_order_is_the_same(model: type[nn.Module]) -> None:
    assert len({digest(model, order).work for order in itertools.permutations(KINDS)}) == 1


@pytest.mark.parametrize("model", [Sums, Draws, Exchanges])
def test_where_order_counts_another_one_differs_and_is_told_from_other_work(model: type[nn.Module]) -> None:
    one, other = digest(model, KINDS), digest(model, KINDS[::-1])
    assert one.work != other.work and one.differs_in_order(other)


def test_other_numbers_are_a_difference_in_any_order() -> None:
    one = digest(Masks, KINDS)
    for order in (KINDS, KINDS[::-1]):
        other = digest(Masks, order, factor=3.0)
        assert one.work != other.work and not one.differs_in_order(other)


@pytest.mark.slow
def test_the_order_of_a_set_is_another_one_in_each_process() -> None:
    root = Path(__file__).parents[2]
    made = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT], cwd=root, capture_output=True, text=True, check=True,
            env={"PYTHONPATH": f"{root / 'src'}:{root}", "PYTHONHASHSEED": seed},
        ).stdout.strip()
        for seed in ("1", "2")
    }  # fmt: skip
    assert made == {digest(Masks, KINDS).work}
