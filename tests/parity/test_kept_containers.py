"""Plain Python containers that a module keeps in an attribute, and writes to."""

from __future__ import annotations

import queue
import threading
import types
from collections import ChainMap, Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tpplan
from tests.runtime.simulated import worst
from tpplan.plan import CompileError

RULES = {"up": "colwise", "down": "rowwise"}
Use = Callable[[Any, Tensor], Any]


class Keeps(nn.Module):
    def __init__(self, kept: Any, use: Use) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)
        self.kept, self.use = kept, use

    def forward(self, x: Tensor) -> Tensor:
        found = self.use(self.kept, x)
        return x + self.down(self.up(x if found is None else x * found).relu())


class Locked:
    """An object that can't be pickled."""

    def __init__(self) -> None:
        self.lock, self.count = threading.Lock(), 0

    def count_up(self) -> None:
        with self.lock:
            self.count += 1


def x_of() -> Tensor:
    return torch.randn(2, 6, 16, dtype=torch.float64)


FOLLOWED: dict[str, tuple[Callable[[], Any], Use]] = {
    "numbers": (lambda: deque([1, 2], maxlen=2), lambda held, x: held.append(x.shape[1])),
    "growing": (deque, lambda held, x: held.appendleft(x.shape[1] / 2)),
    "turned": (lambda: deque([1, 2]), lambda held, x: held.rotate()),
    "tensors": (lambda: deque(maxlen=2), lambda held, x: held.append(x.detach().mean((0, 1)))),
    "read tensors": (
        lambda: deque([torch.ones(16)], maxlen=1),
        lambda held, x: (held.append(x.mean((0, 1))), held[0])[1],
    ),
    "inside": (lambda: types.SimpleNamespace(last=deque([1], maxlen=1)), lambda held, x: held.last.append(len(x))),
    "read": (lambda: deque([3]), lambda held, x: held[0]),
    "tables": (lambda: ChainMap(OrderedDict(a=1), Counter("bb")), lambda held, x: held["a"] + held["b"]),
    "defaults": (lambda: defaultdict(lambda: 2), lambda held, x: held["new"]),
}


@pytest.mark.parametrize("name", FOLLOWED)
@pytest.mark.one_in(5)
def test_a_container_may_be_kept(name: str) -> None:
    made, use = FOLLOWED[name]
    torch.manual_seed(0)
    call = ((x_of(),), {})
    assert max(worst(Keeps(made(), use).double(), RULES, 2, call, [call] * 4)) < 1e-12


REFUSED: dict[str, tuple[Callable[[], Any], Use, str]] = {
    "mean": (lambda: deque([1.0], maxlen=9), lambda held, x: (held.append(2.0), sum(held))[1], "TP129.*reads `kept`"),
    "oldest": (
        lambda: deque([1, 2], maxlen=2),
        lambda held, x: (held.append(held[0] + 1), 1)[1],
        "TP129.*reads `kept`",
    ),
    "taken": (lambda: deque(range(9)), lambda held, x: held.popleft(), "TP129.*reads `kept`"),
    "yielded": (lambda: (n for n in range(9)), lambda held, x: next(held), "TP110.*takes from a generator"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_each_call_finds_otherwise_is_refused_for_what_it_is(name: str) -> None:
    made, use, told = REFUSED[name]
    with pytest.raises(CompileError, match=told):
        tpplan.compile_plan(Keeps(made(), use), {"version": 1, "modules": RULES}, tp=2, inputs=(torch.randn(2, 6, 16),))


def test_a_capture_writes_to_nothing_that_is_the_user_s() -> None:
    kept: Any = {"own": Locked(), "listed": [threading.Lock(), deque([1])]}
    model: Any = Keeps(kept, lambda held, x: (held["own"].count_up(), held["listed"][1].append(2), None)[2])
    model.next = (n for n in range(9))
    tpplan.compile_plan(model, {"version": 1, "modules": RULES}, tp=2, inputs=(torch.randn(2, 6, 16),))
    assert kept["own"].count == 0 and list(kept["listed"][1]) == [1] and next(model.next) == 0


def taken(held: Any, _: Tensor) -> None:
    """A turn with what is put and taken, or entered and left; or nothing."""
    if hasattr(held, "put"):
        held.put(1)
        held.get()
    elif hasattr(held, "__enter__") and not hasattr(held, "submit"):
        with held:
            pass


@pytest.mark.parametrize(
    "made",
    [threading.Semaphore, threading.Condition, threading.Event, queue.Queue, queue.PriorityQueue, ThreadPoolExecutor],
)
def test_what_has_a_lock_in_it_is_copied_or_shared_as_a_whole(made: Callable[[], Any]) -> None:
    model = Keeps(made(), taken)
    for _ in range(2):
        tpplan.compile_plan(model, {"version": 1, "modules": RULES}, tp=2, inputs=(torch.randn(2, 6, 16),))
        taken(model.kept, torch.zeros(()))
