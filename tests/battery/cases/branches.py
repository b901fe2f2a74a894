"""Branches on data: a trace sees one side only."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.battery.case import ATTENTION, MLP, Attention, D, Mlp, call, case, ids, t

BIG = call(lambda: (t(3, 6, D, scale=5.0),))
SMALL = call(lambda: (t(3, 6, D, scale=0.1),))
CALLS = (SMALL, BIG, SMALL, call(lambda: (t(2, 4, D, scale=5.0),)))


def wide(h: Tensor) -> Tensor:
    return h - h.mean(-1, keepdim=True)


@case("branches", MLP, *CALLS, expect="equal_or_refused")
class LargeInput(Mlp):
    """Large inputs take another path, in another body."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(wide(h) if x.abs().max() > 3 else h.relu())


@case("branches", MLP, *CALLS)
class LargeInputHarmless(Mlp):
    """Both sides run by the same program."""

    def forward(self, x: Tensor) -> Tensor:
        if x.abs().max() > 3:
            x = x.clamp(-3, 3)
        return super().forward(x)


@case("branches", MLP, *CALLS, expect="equal_or_refused")
class LargeFeatures(Mlp):
    """Split features decide, of which each rank sees its own."""

    def middle(self, h: Tensor) -> Tensor:
        return h.clamp(-3, 3) if h.abs().max() > 3 else h.relu()


@case("branches", MLP, *CALLS, expect="equal_or_refused")
class RankSeesItsOwn(Mlp):
    """One element of the split features decides."""

    def middle(self, h: Tensor) -> Tensor:
        return h * 2 if bool(h[0, 0, 0] > 0) else h * 3


@case("branches", MLP, *CALLS, expect="equal_or_refused")
class ItemAsFactor(Mlp):
    """A number that is read from the data and used."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x / (1 + x.abs().max().item()))


@case("branches", MLP, *CALLS, expect="equal_or_refused")
class ItemOfSplitAsFactor(Mlp):
    """The same of split features."""

    def middle(self, h: Tensor) -> Tensor:
        return h / (1 + h.abs().max().item())


@case("branches", MLP, *CALLS, expect="equal_or_refused")
class WhileLoop(Mlp):
    """As many steps as the data need."""

    def forward(self, x: Tensor) -> Tensor:
        steps = 0
        while x.abs().max() > 1 and steps < 20:
            x, steps = x / 2, steps + 1
        return super().forward(x)


@case("branches", MLP, *CALLS, expect="equal_or_refused")
class RaisesOnNumbers(Mlp):
    """A check that raises."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.isfinite(x).all() or x.abs().max() > 9:
            raise ValueError("numbers are too large")
        return super().forward(x)


@case("branches", MLP, *CALLS, expect="equal_or_refused")
class AssertsOnSplit(Mlp):
    """An assertion on split features."""

    def middle(self, h: Tensor) -> Tensor:
        assert h.abs().max() < 3, "too large"
        return h.relu()


@case("branches", MLP, *CALLS, expect="equal_or_refused")
class NonzeroRows(Mlp):
    """Only the rows that are large."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        rows = (flat.norm(dim=-1) > 4).nonzero().squeeze(-1)
        return flat.index_add(0, rows, super().forward(flat[rows])).view_as(x)


@case("branches", MLP, *CALLS, expect="equal_or_refused")
class EarlyExit(nn.Module):
    """The second layer runs only if the first one's result is small."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.last = nn.Linear(D, 32), nn.Linear(32, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.up(x).relu())
        return y if y.abs().mean() > 0.5 else self.last(y)


@case("branches", {"{first,second}.up": "colwise", "{first,second}.down": "rowwise"}, *CALLS, expect="equal_or_refused")
class ChoosesModule(nn.Module):
    """The data choose which of two sharded blocks is called."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Mlp(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) if x.abs().max() > 3 else self.second(x)


@case(
    "branches",
    ATTENTION,
    call(lambda: (t(3, 6, D), torch.ones(3, 6))),
    call(lambda: (t(3, 6, D), _holes())),
    expect="equal_or_refused",
)
class MaskThatIsAllOnes(Attention):
    """A mask of ones is dropped, as transformers does."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        self.mask = None if mask is None or bool((mask == 1).all()) else mask
        return super().forward(x)

    def score(self, scores: Tensor) -> Tensor:
        return scores if self.mask is None else scores.masked_fill(self.mask[:, None, None] == 0, -1e4)


def _holes() -> Tensor:
    mask = torch.ones(3, 6)
    mask[1, :3] = 0
    return mask


@case(
    "branches",
    MLP | {"table": "vocab"},
    call(lambda: (ids(3, 6),)),
    call(lambda: (ids(3, 6, below=3),)),
    expect="equal_or_refused",
)
class CountsIds(Mlp):
    """A length that is read from the ids."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, D)

    def forward(self, x: Tensor) -> Tensor:
        longest = int((x > 2).sum(1).max())
        return super().forward(self.table(x))[:, : max(longest, 1)]


@case("branches", MLP, *CALLS, expect="equal_or_refused")
class TolistBranch(Mlp):
    """Data in a list."""

    def middle(self, h: Tensor) -> Tensor:
        return wide(h) if sum(h.flatten()[:4].tolist()) > 0 else h.relu()


@case("branches", MLP, *CALLS, expect="equal_or_refused")
class AllcloseBranch(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(h.relu() if torch.allclose(x, x.clamp(-3, 3)) else wide(h))


@case("branches", MLP, *CALLS, expect="equal_or_refused")
class EqualBranch(Mlp):
    """Two split tensors are compared."""

    def middle(self, h: Tensor) -> Tensor:
        return wide(h) if not torch.equal(h, h.clamp(-3, 3)) else h.relu()


@case("branches", MLP, *CALLS, expect="equal_or_refused")
class WhereOnSplit(Mlp):
    """No branch of Python: a choice by elements, and one by a number over all of them."""

    def middle(self, h: Tensor) -> Tensor:
        return torch.where(h.abs().amax() > 3, h.tanh(), h)


@case("branches", MLP, *CALLS, expect="equal_or_refused")
class MaskedSelectOfSplit(Mlp):
    """As many elements as are positive."""

    def middle(self, h: Tensor) -> Tensor:
        return h * h[h > 0].mean()


@case("branches", MLP, *CALLS, expect="equal_or_refused")
class ParameterBranch(Mlp):
    """A number of a split parameter decides."""

    def middle(self, h: Tensor) -> Tensor:
        return wide(h) if float(self.up.weight[20].sum().detach()) > 0 else h.relu()


def _turn(model: nn.Module) -> None:
    with torch.no_grad():
        model.get_parameter("gate").neg_()


@case("branches", MLP, call(), call(before=_turn), call(before=_turn), expect="equal_or_refused")
class WholeParameterBranch(Mlp):
    """A number of a whole parameter decides, and is changed."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.tensor(0.5))

    def middle(self, h: Tensor) -> Tensor:
        return wide(h) if self.gate > 0 else h.relu() * self.gate
