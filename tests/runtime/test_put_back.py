"""What a forward changes around its model: captures put it back, so that the first call meets what the user left."""

from __future__ import annotations

import array
import collections
import contextvars
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tpplan

COUNT: contextvars.ContextVar[int] = contextvars.ContextVar("count", default=0)
LOCAL = threading.local()
BANK = torch.zeros(70_000)
BYTES, NUMBERS, ARRAY = bytearray(1), np.zeros(2), array.array("i", [0])


class Slotted:
    """An object without a dict."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Key:
    """A key that sees whether its tables are empty when it is put back."""

    tables: ClassVar[list[Any]] = []
    missed: ClassVar[bool] = False

    def __hash__(self) -> int:
        Key.missed |= not all(self.tables)
        return 7


class Single:
    """A class that keeps one of its objects."""

    one: ClassVar[Any] = None
    count_of_all: ClassVar[int] = 0

    class Inner:
        count = 0

    def __init__(self) -> None:
        self.count = 0


Single.one = Single()
KEYS: list[Any] = [Key(), Key(), Key()]
KEYED, TOLD, QUEUE, ROWS = dict[Any, Any].fromkeys(KEYS), set[Any](KEYS[:1]), collections.deque([3], 2), [3]
Key.tables += [KEYED, TOLD]
SMALL, SIZED, GROWN = torch.zeros(3), np.ones(3), bytearray(2)
SLOTTED = Slotted()
UNNAMED: Any = type("Unnamed", (), {"count": 0})()
DATES = np.array(["2026-01-01"], dtype="datetime64[D]")  # which shows nobody its memory


@dataclass(frozen=True, slots=True)
class Frozen:
    """An object that nobody can write to."""

    count: int = 0


FROZEN = Frozen()


def by_attribute() -> None:
    by_attribute.count = getattr(by_attribute, "count", 0) + 1  # pyright: ignore[reportFunctionMemberAccess]


def by_default(held: dict[str, int] = {"count": 0}) -> int:  # noqa: B006
    held["count"] += 1
    return held["count"]


def by_context() -> None:
    COUNT.set(COUNT.get() + 1)


def by_thread() -> None:
    LOCAL.count = getattr(LOCAL, "count", 0) + 1


def by_bytes() -> None:
    BYTES[0] += 1


def by_numbers() -> None:
    NUMBERS[0] += 1


def by_array() -> None:
    ARRAY[0] += 1


def by_slot() -> None:
    SLOTTED.count += 1


def by_single() -> None:
    Single.one.count += 1


def by_class() -> None:
    Single.count_of_all += 1


def by_inner_class() -> None:
    Single.Inner.count += 1


def by_unnamed_class() -> None:
    type(UNNAMED).count += 1


def by_environment() -> None:
    os.environ["TESTS_COUNT"] = str(int(os.environ.get("TESTS_COUNT", "0")) + 1)


def by_data() -> None:
    SMALL.data.fill_(float(len(SMALL)))


def by_dates() -> None:
    DATES[0] += 1


def by_size() -> None:
    GROWN.append(1)


def by_order() -> None:
    KEYED[KEYS[0]] = KEYED.pop(KEYS[0])


def by_other_items() -> None:
    for held in (KEYED, TOLD, QUEUE, ROWS):
        held.clear()
    KEYED["other"] = TOLD.add("other")
    QUEUE.extend((1, 2))
    ROWS.extend((1, 2))


SEEN: dict[Callable[[], object], Callable[[], object]] = {
    by_attribute: lambda: dict(vars(by_attribute)),
    by_default: lambda: dict((by_default.__defaults__ or ({},))[0]),
    by_context: lambda: COUNT.get(),
    by_thread: lambda: dict(vars(LOCAL)),
    by_bytes: lambda: bytes(BYTES),
    by_numbers: lambda: NUMBERS.tolist(),
    by_array: lambda: ARRAY.tolist(),
    by_slot: lambda: SLOTTED.count,
    by_single: lambda: Single.one.count,
    by_class: lambda: Single.count_of_all,
    by_inner_class: lambda: Single.Inner.count,
    by_unnamed_class: lambda: UNNAMED.count,
    by_environment: lambda: os.environ.get("TESTS_COUNT"),
    by_data: lambda: (SMALL.tolist(), SMALL._version),
    by_dates: lambda: DATES.tolist(),
    by_size: lambda: bytes(GROWN),
    by_order: lambda: [*KEYED.items()],
    by_other_items: lambda: ([*KEYED.items()], [*TOLD], [*QUEUE], [*ROWS], Key.missed),
}


class Counting(nn.Module):
    """Counts its calls elsewhere."""

    count: ClassVar[Any] = None

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.held: Any = [type("Held", (), {"count": 0})()]

    def forward(self, x: Tensor) -> Tensor:
        type(self).count()
        type(self.held[0]).count += 1
        return self.down(self.up(x).relu())


PLAN = {"version": 1, "modules": {"up": "colwise", "down": "rowwise"}}


def counting(count: Callable[[], object]) -> nn.Module:
    return type("Counting", (Counting,), {"count": staticmethod(count), "__module__": __name__})()


@pytest.mark.one_in(5)
@pytest.mark.parametrize("count", SEEN, ids=lambda count: count.__name__)
def test_what_a_capture_changes_is_put_back(count: Callable[[], object]) -> None:
    before = SEEN[count]()
    model: Any = counting(count)
    tpplan.compile_plan(model, PLAN, 2, (torch.ones(2, 4, 8),))
    assert SEEN[count]() == before
    assert model.held[0].count == 0


def test_an_array_of_another_size_is_put_back() -> None:
    with pytest.raises(tpplan.CompileError, match=r"TP129.*`tests\.runtime\.test_put_back\.SIZED`"):
        tpplan.compile_plan(
            counting(lambda: SIZED.resize(len(SIZED) + 1, refcheck=False)), PLAN, 2, torch.ones(2, 4, 8)
        )
    assert SIZED.tolist() == [1, 1, 1]


@pytest.mark.parametrize("write", [lambda: BANK.add_(1), lambda: BANK.data[2:4].fill_(1)], ids=["whole", "part"])
def test_what_is_too_large_to_be_put_back_is_not_written_to(write: Callable[[], object]) -> None:
    with pytest.raises(tpplan.CompileError, match=r"TP110.*tensor of 70,000 numbers(.|\n)*`register_buffer`"):
        tpplan.compile_plan(counting(write), PLAN, 2, torch.ones(2, 4, 8))
    assert not BANK.any()


with torch.inference_mode():
    TABLE = torch.ones(8)


@pytest.mark.parametrize("read", [lambda: None, lambda: TABLE.sum()], ids=["beside", "read"])
def test_what_was_made_in_inference_mode_may_lie_around_a_model(read: Callable[[], object]) -> None:
    with torch.inference_mode():
        model = counting(read)
        model.register_buffer("table", torch.ones(8))
    assert tpplan.compile_plan(model, PLAN, 2, torch.ones(2, 4, 8)).count_collectives() == {"all-reduce": 1}
    assert tpplan.verify(model, PLAN, 2, torch.ones(2, 4, 8)).ok
