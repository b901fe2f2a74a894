"""Bodies in which the size of a split dim chooses what is passed, returned or kept, all of it of the right shape.

Ranks would choose otherwise than the unsharded model: the program that comes out must not split that dim.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tpplan

WIDTH, INNER = 16, 32
PLAN = {"version": 1, "modules": {"up": "colwise", "down": "rowwise"}}


class Mix(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a.sin() - b


class Divide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = INNER

    def forward(self, x: Tensor, count: Any = None) -> Tensor:
        return x.tanh() / (getattr(count, "count", count) or self.count)


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.mix, self.divide = Mix(), Divide()
        self.last: Tensor
        self.register_buffer("last", torch.zeros(2, 6, WIDTH))


class Number(Body):
    """The second call of a module is passed a number that the first is passed as well."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.divide(self.up(x), INNER)
        return self.down(self.divide(h, h.shape[-1]))


class NumberInObject(Body):
    def forward(self, x: Tensor) -> Tensor:
        told = SimpleNamespace(count=INNER)
        h = self.divide(self.up(x), told)
        told.count = h.shape[-1]
        return self.down(self.divide(h, told))


class NumberForAWhile(Body):
    """It is set on the module, and put back."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.divide(self.up(x))
        self.divide.count = h.shape[-1]
        h = self.divide(h)
        self.divide.count = INNER
        return self.down(h)


class Exchanged(Body):
    """The second call is passed its tensors in another order."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        a, b = h.relu(), h.tanh()
        first = self.mix(a, b)
        return self.down(first + (self.mix(a, b) if h.shape[-1] == INNER else self.mix(b, a)))


class Detached(Body):
    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        a, b = h.relu(), h.tanh()
        first = self.mix(a, b)
        return self.down(first + self.mix(a, b if h.shape[-1] == INNER else b.detach()))


class Returned(Body):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.up(x)
        y = self.down(h.relu())
        a, b = y.sin(), y.cos()
        return (a, b) if h.shape[-1] == INNER else (b, a)


class ReturnedInput(Body):
    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        y = self.down(h.relu())
        return y if h.shape[-1] == INNER else x


class ReturnedDetached(Body):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.up(x)
        y = self.down(h.relu())
        return y, y.sin() if h.shape[-1] == INNER else y.sin().detach()


class ReturnedElsewhere(Body):
    def forward(self, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
        h = self.up(x)
        y = self.down(h.relu())
        return (y, None) if h.shape[-1] == INNER else (None, y)


class Kept(Body):
    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        y = self.down(h.relu())
        a, b = y.sin(), y.cos()
        self.last = (a if h.shape[-1] == INNER else b).detach()
        return a + b


class Picked(Body):
    """The same numbers pick among the first dim, or among the second, which is as long."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        y, picks = self.down(h.relu())[:, :2], torch.tensor([1, 0])
        return y[picks] if h.shape[-1] == INNER else y[:, picks]


class Turned(Body):
    """A matrix is turned where it doesn't fit as it is; a rank's part of it is square."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.up.weight
        return self.down(x @ (weight if weight.shape[0] == WIDTH else weight.t()))


KINDS = (
    Number, NumberInObject, NumberForAWhile, Exchanged, Detached, Returned, ReturnedInput, ReturnedDetached,
    ReturnedElsewhere, Kept, Picked,
)  # fmt: skip


class LeftInDict(Body):
    def forward(self, x: Tensor, left: dict[str, Tensor]) -> Tensor:
        h = self.up(x)
        y = self.down(h.relu())
        a, b = y.sin(), y.cos()
        left["a"], left["b"] = (a, b) if h.shape[-1] == INNER else (b, a)
        return a + b


def made(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


def test_a_matrix_that_is_turned_only_where_it_is_whole_is_refused() -> None:
    x = torch.randn(2, 6, WIDTH, dtype=torch.float64)
    with pytest.raises(tpplan.CompileError, match="another order"):
        tpplan.compile_plan(made(Turned), PLAN, 2, (x,))
    assert tpplan.verify(made(Turned), PLAN, 4, (x,)).ok


class Layer(Body):
    """Every second one divides by what it has of the features."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx

    def forward(self, x: Tensor, place: int) -> Tensor:
        h = self.up(x)
        h = h.tanh() * (h.shape[-1] if place % 2 else INNER)
        if self.layer_idx % 2:
            return x + self.down(h / h.shape[-1])
        return x + self.down(h / INNER)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer(number) for number in range(4))

    def forward(self, x: Tensor, places: tuple[int, ...] = (0, 0, 0, 0)) -> Tensor:
        x = self.first(x)
        for layer, place in zip(self.layers, places, strict=True):
            x = layer(x, place)
        return x


@pytest.mark.parametrize("places", [(0, 0, 0, 0), (0, 1, 2, 3)])
def test_a_layers_place_chooses_its_code(places: tuple[int, ...]) -> None:
    x = torch.randn(2, 6, WIDTH, dtype=torch.float64)
    rules = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
    model = made(Stack)
    if any(places):
        for layer in model.get_submodule("layers").children():
            vars(layer)["layer_idx"] = 0
    report = tpplan.verify(model, {"version": 1, "modules": rules}, 2, (x, places))
    assert report.ok, report.problems


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.one_in(5)
def test_what_a_size_chooses_is_right(kind: Callable[[], nn.Module], tp: int) -> None:
    x = torch.randn(2, 6, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    report = tpplan.verify(made(kind), PLAN, tp, (x,))
    assert report.ok, report.problems


def test_what_a_size_leaves_in_an_argument_is_right() -> None:
    x = torch.randn(2, 6, WIDTH, dtype=torch.float64)
    program = tpplan.compile_plan(made(LeftInDict), PLAN, 2, (x, {}))
    assert {"TP104", "TP105"} <= {finding.code for finding in program.diagnostics}


def test_the_call_of_a_repeated_module_is_to_blame() -> None:
    """The module that is passed other tensors isn't what has to change."""
    program = tpplan.compile_plan(made(Exchanged), PLAN, 2, (torch.randn(2, 6, WIDTH, dtype=torch.float64),))
    assert {"TP104", "TP105"} <= {finding.code for finding in program.diagnostics}
