"""What a forward leaves behind, wherever that is: what the unsharded model leaves, or a finding."""

from __future__ import annotations

import functools
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tpplan
from tests.compiler.toys import HIDDEN, MLP, plan_of
from tests.runtime.simulated import on_ranks

LOG: list[Any] = []
TABLE: dict[str, Any] = {}
COUNTS = {"calls": 0}
TOLERANCE = 1e-12


class Sink:
    """An object of the user's."""

    def __init__(self) -> None:
        self.rows: list[Any] = []
        self.last: Any = None


def keeper() -> Any:
    kept: list[Any] = []
    return lambda item: kept.clear() or kept.append(item)


class Leaves(nn.Module):
    """A column and a row; between them, `leave` puts something somewhere."""

    last: Any = None

    def __init__(self, leave: Callable[[Leaves, Tensor], None]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 24), nn.Linear(24, HIDDEN)
        self.leave, self.sink = leave, Sink()
        self.deep: dict[str, list[Any]] = {"a": [None]}
        self.size, self.calls = 0, 0
        self.function = keeper()

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        self.leave(self, h)
        return self.down(h.relu())


def to_global(own: Leaves, h: Tensor) -> None:
    LOG[:] = [h.mean()]


def to_global_dict(own: Leaves, h: Tensor) -> None:
    TABLE["mean"] = h.mean()


def to_object(own: Leaves, h: Tensor) -> None:
    own.sink.rows[:] = [(h.mean(),)]


def to_object_attribute(own: Leaves, h: Tensor) -> None:
    own.sink.last = h.mean()


def to_nested(own: Leaves, h: Tensor) -> None:
    own.deep["a"][0] = h.mean()


def to_closure(own: Leaves, h: Tensor) -> None:
    own.function(h.mean())


def to_class(own: Leaves, h: Tensor) -> None:
    Leaves.last = h.mean()


def to_number(own: Leaves, h: Tensor) -> None:
    own.size = h.shape[-1]


def to_global_number(own: Leaves, h: Tensor) -> None:
    TABLE["size"] = h.shape[-1]


def first(own: Any) -> Any:
    """What was left, wherever it is."""
    (closed,) = own.function.__closure__
    places = (
        *LOG,
        *TABLE.values(),
        *own.sink.rows,
        own.sink.last,
        *own.deep["a"],
        *closed.cell_contents,
        type(own).last,
    )
    found = [place for place in (*places, own.size or None) if place is not None]
    while isinstance(found, (list, tuple)) and found:
        found = found[0]
    return found


@pytest.fixture(autouse=True)
def _empty() -> Any:
    for held in (LOG, TABLE):
        held.clear()
    yield
    Leaves.last = None


PLACES = [
    to_global, to_global_dict, to_object, to_object_attribute, to_nested, to_closure, to_class, to_number,
    to_global_number,
]  # fmt: skip


@pytest.mark.parametrize("leave", PLACES, ids=lambda leave: leave.__name__)
def test_a_statistic_of_split_features_is_that_of_the_whole(leave: Callable[[Leaves, Tensor], None]) -> None:
    torch.manual_seed(0)
    stock, x = Leaves(leave).double(), torch.randn(2, 12, HIDDEN, dtype=torch.float64)

    def work(own: nn.Module, _: Any) -> Any:
        with torch.no_grad():
            own(x)
        return first(own)

    for seen in on_ranks(stock, MLP, 2, ((x,), {}), work):
        _empty_again()
        with torch.no_grad():
            stock(x)
        expected = first(stock)
        assert abs(float(seen) - float(expected)) < TOLERANCE


@pytest.mark.parametrize("leave", [to_number, to_global_number], ids=lambda leave: leave.__name__)
def test_a_count_that_is_there_before_stays_that_of_the_whole(leave: Callable[[Leaves, Tensor], None]) -> None:
    """A call of the stock model has left the number that a forward writes: a trace of it changes nothing."""
    torch.manual_seed(0)
    stock, x = Leaves(leave).double(), torch.randn(2, 12, HIDDEN, dtype=torch.float64)
    stock(x)
    expected = first(stock)

    def work(own: nn.Module, _: Any) -> Any:
        own(x)
        return first(own)

    try:
        assert on_ranks(stock, MLP, 2, ((x,), {}), work) == [expected] * 2
    except tpplan.CompileError as error:
        assert {d.code for d in error.diagnostics} <= {"TP107", "TP113"}


def _empty_again() -> None:
    LOG.clear()
    TABLE.clear()
    Leaves.last = None


class Counts(nn.Module):
    """Equal layers that count their calls in one place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Leaves(self.count) for _ in range(3))

    @staticmethod
    def count(own: Leaves, h: Tensor) -> None:
        COUNTS["calls"] += 1

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_layers_that_count_together_are_no_difference() -> None:
    plan = {f"layers.*.{name}": style for name, style in MLP.items()}
    tpplan.compile_plan(Counts(), plan_of(plan), 2, (torch.zeros(2, 12, HIDDEN),))
    assert COUNTS["calls"] == 0


@functools.lru_cache
def known() -> bool:
    return True


def asks_a_cache(own: Leaves, h: Tensor) -> None:
    assert known()


def test_what_a_cache_keeps_is_no_number_that_is_left() -> None:
    known.cache_clear()
    tpplan.compile_plan(Leaves(asks_a_cache), plan_of(MLP), 2, (torch.zeros(2, 12, HIDDEN),))


class CountingLinear(nn.Linear):
    calls = 0

    def forward(self, input: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(input)


class CountingNorm(nn.LayerNorm):
    calls = 0

    def forward(self, input: Tensor) -> Tensor:
        COUNTS["calls"] += 1
        return super().forward(input)


def test_bodies_that_count_run_themselves() -> None:
    stock = nn.Sequential(CountingNorm(HIDDEN), CountingLinear(HIDDEN, 24), nn.GELU(), CountingLinear(24, HIDDEN))
    x = torch.randn(2, 12, HIDDEN)
    plan = {"1": "colwise", "3": "rowwise"}

    def work(own: Any, _: Any) -> list[int]:
        for _ in range(3):
            own(x)
        return [own[1].calls, own[3].calls]

    assert on_ranks(stock, plan, 2, ((x,), {}), work) == [[3, 3]] * 2
    COUNTS["calls"] = 0
    kernels = {use.module: bool(use.refused) for use in tpplan.compile_plan(stock, plan_of(plan), 2, x).kernels}
    assert kernels == {"0": True, "2": False}


def test_a_count_in_a_closure_that_steers_is_refused() -> None:
    def counting() -> Callable[[Leaves, Tensor], None]:
        calls = 0

        def leave(own: Leaves, h: Tensor) -> None:
            nonlocal calls
            calls += 1
            if calls > 3:
                h.mul_(2)

        return leave

    with pytest.raises(tpplan.CompileError, match="TP129"):
        tpplan.compile_plan(Leaves(counting()), plan_of(MLP), 2, (torch.zeros(2, 12, HIDDEN),))


def test_a_part_that_a_hook_keeps_is_told() -> None:
    seen: list[Tensor] = []
    stock = Leaves(lambda own, h: None)
    stock.up.register_forward_hook(lambda module, arguments, result: seen.append(result.detach()))
    program = tpplan.compile_plan(stock, plan_of(MLP), 2, (torch.zeros(2, 12, HIDDEN),))
    assert [d.code for d in program.diagnostics] == ["TP125"]
    assert not seen


ELSEWHERE = """
class Log:
    def __init__(self):
        self.calls = []

    def __call__(self, module, arguments, result):
        self.calls.append(result.shape)

log, seen = Log(), []

def hook(module, arguments, result):
    seen.append(result.detach())
    log(module, arguments, result)
"""


@pytest.mark.parametrize("name", ["hook", "log"])
def test_what_a_hook_of_another_file_keeps_is_put_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file: Any = types.ModuleType("of_another_file")
    exec(ELSEWHERE, file.__dict__)
    monkeypatch.setitem(sys.modules, "of_another_file", file)
    stock = Leaves(lambda own, h: None)
    stock.down.register_forward_hook(getattr(file, name))
    tpplan.compile_plan(stock, plan_of(MLP), 2, (torch.zeros(2, 12, HIDDEN),))
    assert not file.seen and not file.log.calls


class Reads(nn.Module):
    """Bodies that look past their operations."""

    def __init__(self, look: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.look = nn.Linear(HIDDEN, 24), nn.Linear(24, HIDDEN), look

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.look(self.up(x)))


def by_name(h: Tensor) -> Tensor:
    assert h.grad_fn is not None
    return h.relu() if "Addmm" in h.grad_fn.name() else h


def packing(h: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t - t.mean(-1, keepdim=True), lambda t: t):
        return h.tanh()


def in_a_thread(h: Tensor) -> Tensor:
    norms: list[Tensor] = []
    thread = threading.Thread(target=lambda: norms.append(h.norm(dim=-1, keepdim=True)))
    thread.start()
    thread.join()
    return h / norms[0]


def as_parameter(h: Tensor) -> Tensor:
    return h / nn.Parameter(h.detach().norm(dim=-1, keepdim=True))


def seeded(h: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return h + torch.randn_like(h)


LOOKS = [
    (by_name, "grad_fn"),
    (packing, "saved_tensors_hooks"),
    (in_a_thread, "no recorded operation made"),
    (as_parameter, "no recorded operation made"),
    (seeded, "seeds the random numbers"),
]


@pytest.mark.parametrize(("look", "told"), LOOKS)
def test_what_no_record_shows_is_refused(look: Callable[[Tensor], Tensor], told: str) -> None:
    with pytest.raises(tpplan.CompileError, match=told):
        tpplan.compile_plan(Reads(look), plan_of(MLP), 2, (torch.zeros(2, 12, HIDDEN),))


class ReturnsConstant(Reads):
    """A constant among the results that counts features."""

    def forward(self, x: Tensor) -> Any:
        h = self.up(x)
        return self.down(h.relu()), torch.tensor(h.shape[-1]), torch.full((2,), h.shape[-1], device=x.device)


def test_a_constant_among_the_results_counts_all_features() -> None:
    x = torch.zeros(2, 12, HIDDEN)
    found = on_ranks(ReturnsConstant(torch.relu), MLP, 2, ((x,), {}), lambda own, _: own(x)[1:])
    assert [[t.tolist() for t in tensors] for tensors in found] == [[24, [24, 24]]] * 2


def test_seeding_for_whole_values_is_let_through() -> None:
    class Seeded(Reads):
        def forward(self, x: Tensor) -> Tensor:
            return seeded(self.down(self.up(x)))

    tpplan.compile_plan(Seeded(torch.relu), plan_of(MLP), 2, (torch.zeros(2, 12, HIDDEN),))


def test_hooks_around_the_call_are_no_matter_of_the_forward() -> None:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        tpplan.compile_plan(Reads(torch.relu), plan_of(MLP), 2, (torch.zeros(2, 12, HIDDEN),))
