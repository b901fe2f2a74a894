"""Functions that are replaced after `parallelize`, of torch, of libraries or the user: followed, or refused by name."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tpplan
from tests.runtime.simulated import on_ranks, stepped, verdicts

TOLERANCE = 1e-12
PLAN = {"up": "colwise", "down": "rowwise"}
softmax = functional.softmax


class Net(nn.Module):
    """Calls functions of torch by its modules and by a name of this file, and methods."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = functional.gelu(self.up(x)).sigmoid()
        return softmax(self.down(torch.tanh(h)), -1)


stock_linear, stock_gelu, stock_tanh = functional.linear, functional.gelu, torch.tanh
HERE = sys.modules[__name__]
PLACES: dict[str, tuple[Any, str, Callable[..., Tensor]]] = {
    "of a layer": (functional, "linear", lambda x, w, b=None: stock_linear(x, w, b) * 2),
    "of a body": (functional, "gelu", lambda h: stock_gelu(h) * 2),
    "over split features": (functional, "gelu", lambda h: h.softmax(-1)),
    "of torch": (torch, "tanh", lambda h: stock_tanh(h * 3)),
    "by a name in the user's file": (HERE, "softmax", lambda h, dim: h.softmax(dim) + 1),
    "a module in the user's file": (HERE, "functional", type("Other", (), {"gelu": staticmethod(lambda h: h * 3)})),  # pyright: ignore
}


def call() -> Any:
    x = torch.randn(2, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return (x.requires_grad_(),), {}


def model() -> nn.Module:
    torch.manual_seed(0)
    return Net().double()


def on_both(work: Callable[[nn.Module], Any], change: Callable[[], None], undo: Callable[[], None]) -> list[list[Any]]:
    """What is found before a change, after it, once more, and after it was undone; ranks are threads."""
    barrier = threading.Barrier(2)

    def turn(own: nn.Module, _: object) -> list[Any]:
        found = [work(own)]
        for step in (change, lambda: None, undo):
            if barrier.wait() == 0:
                step()
            barrier.wait()
            found.append(work(own))
        return found

    return on_ranks(model(), PLAN, 2, call(), turn)


@pytest.mark.parametrize("where", PLACES)
def test_a_function_that_is_replaced_is_followed(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    space, name, new = PLACES[where]
    stock = copy.deepcopy(model())
    before, _ = stepped(stock, call())
    with monkeypatch.context() as patched:
        patched.setattr(space, name, new)
        after, _ = stepped(stock, call())
    assert not torch.allclose(before, after)
    change = lambda: monkeypatch.setattr(space, name, new)  # noqa: E731
    for found in on_both(lambda own: own(*call()[0]).detach(), change, monkeypatch.undo):
        for ours, whole in zip(found, (before, after, after, before), strict=True):
            torch.testing.assert_close(ours, whole.detach(), rtol=0, atol=TOLERANCE)


def test_a_method_that_is_replaced_is_refused_while_it_is() -> None:
    def work(own: nn.Module) -> object:
        try:
            return float(own(*call()[0]).detach().sum())
        except tpplan.TpplanError as error:
            return str(error)

    stock = torch.Tensor.sigmoid
    change = lambda: setattr(torch.Tensor, "sigmoid", lambda h: stock(h) * 2)  # noqa: E731
    try:
        for found in on_both(work, change, lambda: delattr(torch.Tensor, "sigmoid")):
            assert found[0] == found[3]
            for told in found[1:3]:
                assert told.startswith("TP130")
                assert "`torch.Tensor.sigmoid` is or holds a function in place of torch's" in told
    finally:
        if "sigmoid" in vars(torch.Tensor):
            delattr(torch.Tensor, "sigmoid")


def test_what_replaces_a_function_later_may_not_fit_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal names the function, what it was and what it is."""

    def work(own: nn.Module) -> object:
        try:
            return float(own(*call()[0]).detach().sum())
        except tpplan.TpplanError as error:
            return str(error)

    def linear(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        return x @ w.T.sort(-1).values

    for found in on_both(work, lambda: monkeypatch.setattr(functional, "linear", linear), monkeypatch.undo):
        assert found[1].startswith("TP117")
        assert "`torch.nn.functional.linear` was" in found[1]
        assert found[0] == found[3]


class InASet(nn.Module):
    """Modules in an order that nobody knows."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.scales = {self.up, self.down}

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.scales:
            x = x * len(layer.weight)
        return self.down(self.up(x))


def test_a_set_of_modules_is_refused() -> None:
    with pytest.raises(tpplan.CompileError, match=r"TP129.*`scales` is or holds a set of modules or tensors"):
        verdicts(InASet().double(), PLAN, 2, call(), [])
