"""What a forward writes in one call, and what steers calls of another kind or size: these are proved in that state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.runtime.simulated import Call, Change, on_ranks, worst
from tpplan.calls.guard import CallGuard

TOLERANCE = 1e-12
PLAN = {"up": "colwise", "down": "rowwise"}


class Body(nn.Module):
    """A column and a row; `middle` says what is between."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, flag: bool | None = None) -> Tensor:
        return self.down(self.middle(self.up(x), x.shape[1], flag))

    def middle(self, h: Tensor, length: int, flag: bool | None) -> Tensor:
        raise NotImplementedError


def chosen(across: object, h: Tensor) -> Tensor:
    return h.softmax(-1) if across else h.relu()


class ByArgument(Body):
    on = False

    def middle(self, h: Tensor, length: int, flag: bool | None) -> Tensor:
        if flag is not None:
            self.on = flag
        return chosen(self.on, h)


class ByTraining(Body):
    trained = False

    def middle(self, h: Tensor, length: int, flag: bool | None) -> Tensor:
        if self.training:
            self.trained = True
        return chosen(self.trained and not self.training, h)


class ByLongest(Body):
    longest = 0

    def middle(self, h: Tensor, length: int, flag: bool | None) -> Tensor:
        self.longest = max(self.longest, length)
        return chosen(self.longest > 10, h)


class ByFirst(Body):
    first: int | None = None

    def middle(self, h: Tensor, length: int, flag: bool | None) -> Tensor:
        if self.first is None:
            self.first = length
        return chosen(length > self.first, h)


class BySet(Body):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def middle(self, h: Tensor, length: int, flag: bool | None) -> Tensor:
        self.seen.add(length)
        return chosen(len(self.seen) > 1, h)


class ByTable(Body):
    def __init__(self) -> None:
        super().__init__()
        self.table: dict[int, int] = {}

    def middle(self, h: Tensor, length: int, flag: bool | None) -> Tensor:
        if length not in self.table:
            self.table[length] = length
        return chosen(len(self.table) > 2, h)


class ByBuffer(Body):
    def __init__(self) -> None:
        super().__init__()
        self.on: Tensor
        self.register_buffer("on", torch.zeros(()))

    def middle(self, h: Tensor, length: int, flag: bool | None) -> Tensor:
        if flag is not None:
            self.on.fill_(float(flag))
        return chosen(self.on.item() > 0, h)


class ByEntry(Body):
    def __init__(self) -> None:
        super().__init__()
        self.state = {"on": False, "calls": 0}

    def middle(self, h: Tensor, length: int, flag: bool | None) -> Tensor:
        self.state["calls"] += 1
        if flag is not None:
            self.state["on"] = flag
        return chosen(self.state["on"], h)


class ByGrowth(Body):
    longest = 0
    table: Tensor | None = None

    def middle(self, h: Tensor, length: int, flag: bool | None) -> Tensor:
        if length > self.longest or self.table is None:
            self.longest, self.table = length, torch.arange(length, dtype=h.dtype)[:, None].sin()
        return h + self.table[:length]


class Counts(Body):
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.lengths: list[int] = []

    def middle(self, h: Tensor, length: int, flag: bool | None) -> Tensor:
        self.calls += 1
        self.lengths.append(length)
        return h.relu() * (2 if flag else 1)


def call(length: int = 8, flag: bool | None = None) -> Call:
    generator = torch.Generator().manual_seed(length)
    return (
        (torch.randn(2, length, 8, dtype=torch.float64, generator=generator),),
        {} if flag is None else {"flag": flag},
    )


def train(model: nn.Module) -> object:
    return model.train()


def evaluate(model: nn.Module) -> object:
    return model.eval()


LENGTHS = [call(n) for n in (8, 8, 12, 8, 10, 12, 6, 8)]
FLAGS = [call(), call(8, True), call(), call(), call(8, False), call(), call(8, True)]
CASES: dict[str, tuple[Callable[[], nn.Module], list[Call | Change]]] = {
    "an argument": (ByArgument, [*FLAGS]),
    "an entry": (ByEntry, [*FLAGS]),
    "a buffer": (ByBuffer, [*FLAGS]),
    "training": (ByTraining, [evaluate, call(), train, call(), evaluate, call(), call()]),
    "the longest": (ByLongest, [*LENGTHS]),
    "the first": (ByFirst, [*LENGTHS]),
    "a set": (BySet, [*LENGTHS]),
    "a table": (ByTable, [*LENGTHS]),
    "growth": (ByGrowth, [*LENGTHS]),
    "counts": (Counts, [*FLAGS, *LENGTHS]),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", CASES)
def test_what_a_call_writes_steers_calls_of_another_kind(name: str) -> None:
    kind, calls = CASES[name]
    torch.manual_seed(0)
    model = kind().double()
    if name == "training":
        model.eval()
    assert max(worst(model, PLAN, 2, call(), calls)) < TOLERANCE


def test_what_is_only_counted_makes_no_proof_anew() -> None:
    def work(model: nn.Module, guard: CallGuard) -> int:
        made: list[Any] = []
        proved = guard._proved
        guard._proved = lambda *args, **more: (made.append(1), proved(*args, **more))[1]
        for flag in (None, True, None, True, None, True, None):
            arguments, keywords = call(8, flag)
            model(*arguments, **keywords)
        return len(made)

    torch.manual_seed(0)
    assert on_ranks(Counts().double(), PLAN, 2, call(), work) == [1, 1]  # of the flag


class CountsInTraining(Body):
    """Counts in training what steers evaluation."""

    calls = 0

    def middle(self, h: Tensor, length: int, flag: bool | None) -> Tensor:
        if self.training:
            self.calls += 1
            return h.relu()
        return chosen(self.calls > 2, h)


def count_calls(model: nn.Module) -> None:
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    model.get_submodule("0.up").register_forward_pre_hook(count)


def test_a_counter_of_a_hook_is_none_of_a_module_that_has_its_name() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(CountsInTraining()).double()
    plan = {f"0.{name}": style for name, style in PLAN.items()}
    training: list[Call | Change] = [train, call(), call(), call(), evaluate]
    calls: list[Call | Change] = [count_calls, evaluate, call(), call(), *training, call(), *training, call()]
    assert max(worst(model, plan, 2, call(), calls)) < TOLERANCE


class Marked(Body):
    """Reads what was set on tensors that are no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.mask: Tensor
        self.register_buffer("mask", torch.ones(4))
        self.plain, self.listed = torch.ones(3), [torch.ones(2)]

    def middle(self, h: Tensor, length: int, flag: bool | None) -> Tensor:
        return chosen(any(getattr(held, "across", False) for held in (self.mask, self.plain, self.listed[0])), h)


@pytest.mark.parametrize("name", ["mask", "plain", "listed"])
def test_what_is_set_on_a_tensor_that_a_model_holds_is_followed(name: str) -> None:
    def tensor(model: Any) -> Any:
        return model.listed[0] if name == "listed" else getattr(model, name)

    def put(value: bool) -> Change:
        return lambda model: setattr(tensor(model), "across", value)

    torch.manual_seed(0)
    calls = [call(), put(True), call(), put(False), call(), put(True), lambda m: delattr(tensor(m), "across"), call()]
    assert max(worst(Marked().double(), PLAN, 2, call(), calls)) < TOLERANCE


class Ring:
    """Objects that all refer to each other."""

    def __init__(self, count: int) -> None:
        self.number, self.others = 0, list[Ring]()
        if count:
            made = [Ring(0) for _ in range(count)]
            for held in (self, *made):
                held.others = [other for other in (self, *made) if other is not held]


class OfRing(Body):
    def __init__(self) -> None:
        super().__init__()
        self.ring = Ring(12)

    def middle(self, h: Tensor, length: int, flag: bool | None) -> Tensor:
        return chosen(self.ring.others[3].number, h)


def test_objects_that_refer_to_each_other_are_read_once() -> None:
    def change(model: Any) -> None:
        model.ring.others[3].number = 1

    torch.manual_seed(0)
    assert max(worst(OfRing().double(), PLAN, 2, call(), [call(), change, call(), call()])) < TOLERANCE


class GivenRing(Body):
    def forward(self, x: Tensor, ring: Ring) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.down(chosen(ring.others[3].number, self.up(x)) * vars(ring)["tensor"])


def test_arguments_that_refer_to_each_other_are_read_once() -> None:
    def given(number: int) -> Call:
        ring: Any = Ring(12)
        ring.others[3].number, ring.tensor = number, torch.full((16,), 2.0, dtype=torch.float64)
        for held in ring.others:
            vars(held).update({f"next_{at}": other for at, other in enumerate(held.others)})
        return (*call()[0], ring), {}

    torch.manual_seed(0)
    assert max(worst(GivenRing().double(), PLAN, 2, given(0), [given(0), given(1), given(0)])) < TOLERANCE
