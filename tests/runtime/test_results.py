"""What a call returns at places where its proof returned nothing, by what no premise can see."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tpplan
from tests.runtime.simulated import on_ranks, verdicts
from tpplan.calls.guard import CallGuard

RULES = {"up": "colwise", "down": "rowwise"}
Returns = Callable[[Tensor, Tensor, bool], Any]


class Returning(nn.Module):
    """Returns a whole and a split tensor, or one of them."""

    def __init__(self, returns: Returns) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.returns = returns

    def forward(self, x: Tensor, more: bool = False) -> Any:
        hidden = self.up(x)
        return self.returns(self.down(hidden), hidden, more or threading.current_thread().name == "late")


MORE: dict[str, Returns] = {
    "in a dict": lambda out, hidden, more: {"out": out, "hidden": hidden} if more else {"out": out},
    "in a tuple": lambda out, hidden, more: (out, hidden) if more else (out,),
    "in place of nothing": lambda out, hidden, more: {"out": out, "hidden": hidden if more else None},
    "instead": lambda out, hidden, more: {"hidden": hidden} if more else {"out": out},
}


def refused(returns: Returns, message: str, record: bool = True) -> None:
    x = torch.randn(2, 8, 16)

    def work(model: nn.Module, guard: CallGuard) -> None:
        with torch.set_grad_enabled(record):
            for _ in range(3):
                model(x)
            threading.current_thread().name = "late"
            with pytest.raises(tpplan.TpplanError, match=message):
                model(x)

    on_ranks(Returning(returns), RULES, 2, ((x,), {}), work)


@pytest.mark.parametrize("record", [True, False])
@pytest.mark.parametrize("name", MORE)
def test_a_tensor_at_another_place_is_refused(name: str, record: bool) -> None:
    refused(MORE[name], r"TP131.*a tensor at `(hidden|1)` of its results, where its proof has none", record)


def test_a_missing_tensor_is_no_error_of_ours() -> None:
    fewer: Returns = lambda out, hidden, more: {"out": out} if more else {"out": out, "hidden": hidden}  # noqa: E731
    refused(fewer, r"TP131.*no tensor where its proof has one: a `dict` has nothing at 'hidden'")


@pytest.mark.parametrize("name", MORE)
def test_what_arguments_tell_is_proved_for_each(name: str) -> None:
    stock, x = Returning(MORE[name]).double(), torch.randn(2, 8, 16, dtype=torch.float64)
    calls: Any = [((x, more), {}) for more in (True, False, True, False)]
    found = verdicts(stock, RULES, 2, calls[1], calls)
    assert all(isinstance(error, float) and error < 1e-12 for error in found), found
