"""Numbers that a forward's Python reads elsewhere than in its model, and that change between two calls: followed."""

from __future__ import annotations

import builtins
import contextvars
import copy
import functools
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy
import pytest
import torch
from torch import Tensor, nn

import tests.runtime.steering
from tests.runtime import steering
from tests.runtime.simulated import on_ranks, stepped
from tpplan.calls.guard import CallGuard
from tpplan.plan import TpplanError

TOLERANCE = 1e-12
PLAN = {"up": "colwise", "down": "rowwise"}
STATE = {"flag": False}
CONTEXT: contextvars.ContextVar[bool] = contextvars.ContextVar("flag")
LOCAL = threading.local()
LOG = logging.getLogger(__name__)
OWN = False
NUMBERS = torch.zeros(3)


class Chooser:
    """An object whose methods read what steers."""

    def __call__(self) -> bool:
        return OWN

    def chosen(self) -> bool:
        return OWN

    @property
    def flag(self) -> bool:
        return STATE["flag"]


class Holder:
    """An object that holds a file of Python."""

    def __init__(self) -> None:
        self.settings = steering


class ByKey(dict[str, bool]):
    """Whose items are its attributes, as many settings are; it has no other."""

    __getattr__ = dict.__getitem__


class Worker(threading.Thread):
    """A thread that holds a setting."""

    flag = False


class Counting(list[Tensor]):
    """Counts its readers where a model looks."""

    def __iter__(self) -> Iterator[Tensor]:
        COUNTS[0] += 1
        return super().__iter__()


def referred() -> Any:
    held: Any = Holder()
    weakref.finalize(torch, id, held)  # keeps it
    held.flag = False
    return weakref.ref(held)


CHOOSER, HOLDER, BY_KEY, WORKER = Chooser(), Holder(), ByKey(flag=False), Worker()
ARRAY, COUNTS = numpy.zeros(3), [0]
OF_ARRAY, REFERENCE = torch.from_numpy(ARRAY), referred()
KEPT: bool | None = None
builtins.TESTS_FLAG = False  # pyright: ignore


@functools.lru_cache
def cached() -> bool:
    return OWN


def once() -> bool:
    """What is found out at the first call."""
    global KEPT
    if KEPT is None:
        KEPT = OWN
    return KEPT


def set_kept(value: bool) -> None:
    global KEPT
    KEPT = value


def set_cached(value: bool) -> None:
    set_own(value)
    cached.cache_clear()


def imported() -> bool:
    from tests.runtime.steering import FLAG

    return FLAG


def imported_module() -> bool:
    import tests.runtime.steering as settings

    return settings.FLAG


def imported_function() -> bool:
    from .steering import flag

    return flag()


def beside_a_list_that_is_filled() -> bool:
    filled: list[int] = []
    filled.append(1)
    return STATE["flag"]


def from_a_context() -> bool:
    return CONTEXT.get(False)


def from_a_thread() -> bool:
    return getattr(LOCAL, "flag", False)


def from_the_environment() -> bool:
    return os.environ.get("TESTS_FLAG") == "1" or os.getenv("TESTS_FLAG") == "1"


def put(name: str, value: bool) -> None:
    setattr(steering, name, value)


def set_own(value: bool) -> None:
    global OWN
    OWN = value


def fill(value: bool) -> None:
    STATE["flag"] = value


def set_level(value: bool) -> None:
    LOG.setLevel(logging.DEBUG if value else logging.WARNING)


def set_variable(value: bool) -> None:
    os.environ.pop("TESTS_FLAG", None)
    if value:
        os.environ["TESTS_FLAG"] = "1"


READ: dict[str, tuple[Callable[[], bool], Callable[[bool], object]]] = {
    "imported": (imported, lambda value: put("FLAG", value)),
    "module": (imported_module, lambda value: put("FLAG", value)),
    "function": (imported_function, lambda value: put("FLAG", value)),
    "getattr": (lambda: getattr(steering, "FLAG"), lambda value: put("FLAG", value)),  # noqa: B009
    "modules": (lambda: sys.modules["tests.runtime.steering"].FLAG, lambda value: put("FLAG", value)),
    "globals": (lambda: globals()["OWN"], set_own),
    "filled": (beside_a_list_that_is_filled, fill),
    "context": (from_a_context, lambda value: CONTEXT.set(value)),
    "thread": (from_a_thread, lambda value: setattr(LOCAL, "flag", value)),
    "logger": (lambda: LOG.isEnabledFor(logging.DEBUG), set_level),
    "environment": (from_the_environment, set_variable),
    "called": (lambda: CHOOSER(), set_own),
    "method": (lambda: CHOOSER.chosen(), set_own),
    "made": (lambda: Chooser().chosen(), set_own),
    "cached": (cached, set_cached),
    "cached in a function": (lambda: cached(), set_cached),
    "held": (lambda: HOLDER.settings.FLAG, lambda value: put("FLAG", value)),
    "dotted": (lambda: tests.runtime.steering.FLAG, lambda value: put("FLAG", value)),
    "dotted table": (lambda: tests.runtime.steering.TABLE["flag"], lambda value: steering.TABLE.update(flag=value)),
    "a tensor": (lambda: NUMBERS[1].item() > 0, lambda value: NUMBERS.fill_(float(value))),
    "a tensor's data": (lambda: NUMBERS[1].item() > 0, lambda value: NUMBERS.data.fill_(float(value))),
    "an array's tensor": (lambda: OF_ARRAY[1].item() > 0, lambda value: ARRAY.__setitem__(1, value)),
    "an array": (lambda: ARRAY[1] > 0, lambda value: ARRAY.__setitem__(1, value)),
    "behind a weak reference": (lambda: REFERENCE().flag, lambda value: setattr(REFERENCE(), "flag", value)),
    "a logger's attribute": (lambda: LOG.flag, lambda value: setattr(LOG, "flag", value)),  # pyright: ignore
    "property": (lambda: CHOOSER.flag, fill),
    "by key": (lambda: BY_KEY.flag, lambda value: BY_KEY.update(flag=value)),
    "a thread's attribute": (lambda: WORKER.flag, lambda value: setattr(WORKER, "flag", value)),
    "kept by its reader": (once, set_kept),
    "builtins": (lambda: TESTS_FLAG, lambda value: setattr(builtins, "TESTS_FLAG", value)),  # noqa: F821  # pyright: ignore
}


class Settings(nn.Module):
    """Finds what it doesn't have in this file."""

    def __getattr__(self, name: str) -> Any:
        return OWN if name == "flag" else super().__getattr__(name)


class Net(nn.Module):
    """Computes by features, or across them."""

    read: ClassVar[Any] = None

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.settings = nn.Linear(8, 16), nn.Linear(16, 8), Settings()

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(h.softmax(-1) if self.read() or self.settings.flag else h.relu())


def net_that(read: Callable[[], bool]) -> nn.Module:
    torch.manual_seed(0)
    return type("Net", (Net,), {"read": staticmethod(read), "__module__": __name__})().double()


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", READ)
def test_what_is_read_elsewhere_is_followed(name: str) -> None:
    read, change = READ[name]
    stock = net_that(read)
    call = ((torch.randn(2, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)),), {})
    meeting = threading.Barrier(2)

    def work(model: nn.Module, _: CallGuard) -> list[tuple[Tensor, dict[str, Tensor]]]:
        found: list[tuple[Tensor, dict[str, Tensor]]] = []
        for value in (False, True, True, False):
            meeting.wait(30)
            change(value)  # the ranks are threads, and share what all but one of these set
            meeting.wait(30)
            found.append(stepped(model, call))
        return found

    try:
        change(False)
        ranks = on_ranks(stock, PLAN, 2, call, work)
        for number, value in enumerate((False, True, True, False)):
            change(value)
            output, gradients = stepped(copy.deepcopy(stock), call)
            for found in ranks:
                torch.testing.assert_close(found[number][0], output, rtol=0, atol=TOLERANCE)
                own = found[number][1]["down.bias"]
                torch.testing.assert_close(own, gradients["down.bias"], rtol=0, atol=TOLERANCE)
    finally:
        change(False)


class Listed(Net):
    read = staticmethod(lambda: COUNTS[0] < 0)

    def forward(self, held: list[Tensor]) -> Tensor:  # pyright: ignore
        return super().forward(list.__getitem__(held, 0))


def test_reading_an_argument_that_changes_what_steers_is_refused() -> None:
    x = torch.randn(2, 4, 8)

    def work(model: nn.Module, guard: CallGuard) -> None:
        read: Any = lambda call, _: [*call.arguments[0]]  # noqa: E731
        guard._require_alike = read  # where ranks compare arguments
        with pytest.raises(TpplanError, match=r"TP130.* whenever this call's arguments are looked at"):
            model(Counting([x]))

    on_ranks(Listed(), PLAN, 2, (([x],), {}), work)
