"""What a forward leaves behind is what the unsharded model leaves; what calls depend on is proved, or refused."""

from __future__ import annotations

import argparse
import array
import collections
import contextlib
import contextvars
import copy
import enum
import fractions
import functools
import itertools
import logging
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import Tensor, nn

import tpplan
from tpplan.parity.materialise import copy_structure
from tpplan.parity.rank import SimulatedDistributor
from tpplan.parity.threads import ThreadCommunicator, run_ranks
from tpplan.plan import CompileError
from tpplan.runtime.lower import lower

PLAN = {"version": 1, "modules": {"up": "colwise", "down": "rowwise"}}
COUNT = 0
LOG: list[int] = []
TABLES: dict[int, Tensor] = {}
IDS = itertools.count(3, 2)
LATE: Any = None


class Counter:
    total = 0


@functools.lru_cache
def real_table(length: int, dtype: torch.dtype) -> Tensor:
    return torch.arange(length).to(dtype)[:, None]


@functools.cache
def table(length: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.arange(length, device=device, dtype=dtype)[:, None]


class Keeps(nn.Module):
    """A pair of layers, and all kinds of state for `how` to use."""

    def __init__(self, how: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.other = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 8)
        self.norm, self.inner_norm = nn.BatchNorm1d(8), nn.BatchNorm1d(16)
        self.how, self.calls, self.history, self.stats = how, 0, list[int](), {"calls": 0}
        self.seen = set[str]()
        self.kept: Tensor | None = None
        self.turned, self.own = False, itertools.count()
        self.turns = {"pair": 0, "other": 0}
        self.counter = Counter()
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("average", torch.tensor(1.0))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("inner_mean", torch.zeros(16))

    def pair(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self, x)

    def state(self) -> dict[str, Any]:
        plain = {
            name: copy.copy(getattr(self, name)) for name in ("calls", "history", "stats", "kept", "turned", "turns")
        }
        return plain | {"total": self.counter.total} | {name: b.clone() for name, b in self.named_buffers()}


def counts(m: Any, x: Tensor) -> Tensor:
    m.calls += 1
    return m.pair(x)


def keeps_the_last(m: Any, x: Tensor) -> Tensor:
    m.turns["pair"] = m.turns.pop("pair")
    return m.pair(x)


def counts_elsewhere(m: Any, x: Tensor) -> Tensor:
    global COUNT
    COUNT += 1
    m.stats["calls"] += 1
    m.counter.total += 1
    return m.pair(x)


def logs(m: Any, x: Tensor) -> Tensor:
    m.history.append(x.shape[1])
    LOG.append(x.shape[1])
    return m.pair(x)


def builds(m: Any, x: Tensor) -> Tensor:
    if m.kept is None:
        m.kept = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)[:, None]
    return m.pair(x) + m.kept


def builds_in_a_global(m: Any, x: Tensor) -> Tensor:
    if x.shape[1] not in TABLES:
        TABLES[x.shape[1]] = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)[:, None]
    return m.pair(x) + TABLES[x.shape[1]]


def leaves(m: Any, x: Tensor) -> Tensor:
    y = m.pair(x)
    m.kept = y.detach().mean()
    return y


def reads_the_last(m: Any, x: Tensor) -> Tensor:
    y = m.pair(x)
    if m.kept is not None:
        y = y + m.kept
    m.kept = y.detach().mean()
    return y


def turns_once(m: Any, x: Tensor) -> Tensor:
    if not m.turned:
        m.turned = True
    return m.pair(x)


def steps(m: Any, x: Tensor) -> Tensor:
    m.steps += 1
    return m.pair(x)


def averages(m: Any, x: Tensor) -> Tensor:
    m.average.mul_(0.9).add_(0.1 * x.mean())
    return m.pair(x) * m.average


def averages_features(m: Any, x: Tensor) -> Tensor:
    y = m.pair(x)
    m.mean.lerp_(y.detach().mean((0, 1)), 0.1)
    return y - m.mean


def replaces(m: Any, x: Tensor) -> Tensor:
    y = m.pair(x)
    m.mean = 0.9 * m.mean + 0.1 * y.detach().mean((0, 1))
    return y - m.mean


def normalizes(m: Any, x: Tensor) -> Tensor:
    return m.pair(m.norm(x.transpose(1, 2)).transpose(1, 2))


def caches(m: Any, x: Tensor) -> Tensor:
    return m.pair(x) + real_table(x.shape[1], x.dtype)


def caches_there(m: Any, x: Tensor) -> Tensor:
    return m.pair(x) + table(x.shape[1], x.device, x.dtype)


def leaves_a_part(m: Any, x: Tensor) -> Tensor:
    h = m.up(x)
    m.kept = h.detach().mean()
    return m.down(h)


def averages_a_part(m: Any, x: Tensor) -> Tensor:
    h = m.up(x)
    m.average.mul_(0.9).add_(0.1 * h.detach().mean())
    return m.down(h) * m.average


def averages_inner_features(m: Any, x: Tensor) -> Tensor:
    h = m.up(x)
    m.inner_mean.lerp_(h.detach().mean((0, 1)), 0.1)
    return m.down(h - m.inner_mean)


def normalizes_inner_features(m: Any, x: Tensor) -> Tensor:
    return m.down(m.inner_norm(m.up(x).transpose(1, 2)).transpose(1, 2))


def takes_a_number(m: Any, x: Tensor) -> Tensor:
    global LATE
    LATE = itertools.count() if LATE is None else LATE
    m.calls = (next(IDS), next(LATE), next(m.own))[2]  # ranks are threads: what is global, they share
    return m.pair(x)


RIGHT = [
    takes_a_number,
    counts, counts_elsewhere, logs, builds, builds_in_a_global, leaves, reads_the_last, turns_once, steps, averages,
    averages_features, replaces, normalizes, caches, caches_there, keeps_the_last,
]  # fmt: skip
RIGHT_OR_REFUSED = [leaves_a_part, averages_a_part, averages_inner_features, normalizes_inner_features]


@pytest.fixture(autouse=True)
def _fresh_globals() -> None:
    global COUNT, IDS, LATE
    COUNT, IDS, LATE = 0, itertools.count(3, 2), None
    LOG.clear()
    TABLES.clear()
    table.cache_clear()
    real_table.cache_clear()


def compare_calls(how: Callable[[Any, Tensor], Tensor]) -> None:
    """Several calls of two ranks and of the unsharded model: their results, and what they leave."""
    torch.manual_seed(0)
    model = Keeps(how)
    inputs = [torch.randn(2, 3, 8) for _ in range(4)]
    program = tpplan.compile_plan(model, PLAN, 2, inputs[0])

    def calls(own: nn.Module) -> list[tuple[Tensor, dict[str, Any]]]:
        return [(own(x).detach(), own.state()) for x in inputs]  # pyright: ignore

    def work(axis: ThreadCommunicator) -> list[tuple[Tensor, dict[str, Any]]]:
        own = copy.deepcopy(model)
        return calls(lower(copy_structure(own), program, SimulatedDistributor(axis)))

    expected = calls(copy.deepcopy(model))
    for rank in run_ranks(2, work):
        for (y, left), (whole, state) in zip(rank, expected, strict=True):
            assert torch.allclose(y, whole, atol=1e-5)
            for name, held in state.items():
                same = torch.allclose(left[name], held, atol=1e-5) if isinstance(held, Tensor) else left[name] == held
                assert same, name


@pytest.mark.one_in(6)
@pytest.mark.parametrize("how", RIGHT)
def test_calls_leave_what_the_unsharded_model_leaves(how: Callable[[Any, Tensor], Tensor]) -> None:
    compare_calls(how)


@pytest.mark.parametrize("how", RIGHT_OR_REFUSED)
def test_a_part_is_never_left(how: Callable[[Any, Tensor], Tensor]) -> None:
    try:
        compare_calls(how)
    except CompileError as error:
        assert {d.code for d in error.diagnostics} <= {"TP107", "TP113"}, str(error)


@pytest.mark.parametrize(
    "kept",
    [torch.tensor(float("nan")), torch.eye(2).to_sparse()],
    ids=["nan", "sparse"],
)
def test_tensors_that_cannot_be_told_in_numbers_are_no_change(kept: Tensor) -> None:
    TABLES[0] = kept
    tpplan.compile_plan(Keeps(Keeps.pair), PLAN, 2, torch.randn(2, 3, 8))


def test_the_order_of_a_set_is_no_state() -> None:
    """A copy may have another one: both of these want one place in the table, and the first one gets it."""
    model = Keeps(counts)
    model.seen = {7, 15}  # pyright: ignore[reportAttributeAccessIssue]
    assert list(copy.deepcopy(model.seen)) != list(model.seen)
    tpplan.compile_plan(model, PLAN, 2, torch.randn(2, 3, 8))


# -- what steers ------------------------------------------------------------------------------------------------------
def warms_up(m: Any, x: Tensor) -> Tensor:
    m.calls += 1
    return m.pair(x) if m.calls < 1000 else m.other(x)


def scales(m: Any, x: Tensor) -> Tensor:
    m.calls += 1
    return m.pair(x) * m.calls


def looks_back(m: Any, x: Tensor) -> Tensor:
    m.history.append(x.shape[1])
    return m.pair(x) if len(m.history) < 1000 else m.other(x)


def alternates(m: Any, x: Tensor) -> Tensor:
    m.turned = not m.turned
    return m.pair(x) if m.turned else m.other(x)


def takes_turns(m: Any, x: Tensor) -> Tensor:
    turn = next(iter(m.turns))
    m.turns[turn] = m.turns.pop(turn)
    return m.pair(x) if turn == "pair" else m.other(x)


def asks_a_buffer(m: Any, x: Tensor) -> Tensor:
    m.steps += 1
    return m.pair(x) if m.steps < 1000 else m.other(x)


def asks_a_global(m: Any, x: Tensor) -> Tensor:
    global COUNT
    COUNT += 1
    return m.pair(x) if COUNT < 1000 else m.other(x)


def asks_an_object(m: Any, x: Tensor) -> Tensor:
    m.counter.total += 1
    return m.pair(x) if m.counter.total < 1000 else m.other(x)


def collects(m: Any, x: Tensor) -> Tensor:
    m.seen.add(f"call {len(m.seen)}")
    return m.pair(x) if "call 1000" not in m.seen else m.other(x)


def asks_a_count(m: Any, x: Tensor) -> Tensor:
    return m.pair(x) if next(IDS) < 1000 else m.other(x)


def asks_a_text(m: Any, x: Tensor) -> Tensor:
    m.calls += 1
    return m.pair(x) if len(f"{m.calls}") < 4 else m.other(x)


def grows(m: Any, x: Tensor) -> Tensor:
    m.kept = x.detach() if m.kept is None else torch.cat([m.kept, x.detach()], 1)
    return m.pair(x) + m.kept.mean()


STEERS = {
    warms_up: "calls", scales: "calls", looks_back: "history", alternates: "turned", asks_a_buffer: "steps",
    asks_a_global: "COUNT", asks_an_object: "counter.total", grows: "kept",
    collects: "seen", takes_turns: "turns", asks_a_count: "IDS", asks_a_text: "calls",
}  # fmt: skip


@pytest.mark.one_in(6)
@pytest.mark.parametrize("how", STEERS)
def test_what_depends_on_earlier_calls_is_refused(how: Callable[[Any, Tensor], Tensor]) -> None:
    with pytest.raises(CompileError, match=rf"TP129 .*{STEERS[how]}"):  # pyright: ignore
        tpplan.compile_plan(Keeps(how), PLAN, 2, torch.randn(2, 3, 8))


def test_a_count_may_be_returned() -> None:
    tpplan.compile_plan(Keeps(lambda m, x: (counts(m, x), {"step": m.calls})), PLAN, 2, torch.randn(2, 3, 8))  # pyright: ignore


class Rows(list[int]):
    """A list with an attribute."""

    calls = 0


class Level(enum.Enum):
    """A member that can change."""

    LOW = 1


class Slotted:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


def by_default(count: int = 0) -> int:
    return count


def by_name(*, count: int = 0) -> int:
    return count


def given_anew(count: int) -> None:
    PARTIAL.__setstate__((PARTIAL.func, (), {"count": count}, vars(PARTIAL)))  # pyright: ignore


class Guarded(Slotted):
    """What its class has in the place of a slot, and what sets it, nobody but the user may call."""

    @property
    def count(self) -> int:  # pyright: ignore
        raise AssertionError

    @count.setter
    def count(self, count: int) -> None:
        if count:
            raise AssertionError


class Defaults(collections.defaultdict[str, int]):
    def __setattr__(self, name: str, value: object) -> None:
        raise AssertionError


class Shown:
    """A key."""

    def __repr__(self) -> str:
        raise AssertionError


class Pair(NamedTuple):
    rows: Any


def shared() -> tuple[Callable[[], int], Callable[[int], object]]:
    number = 0

    def put(n: int) -> None:
        nonlocal number
        number = n

    return lambda: number, put


def referred() -> weakref.ref[Counter]:
    held = Counter()
    weakref.finalize(torch, id, held)  # keeps it
    return weakref.ref(held)


@functools.cache
def cached_row() -> list[int]:
    return [0]


@functools.lru_cache(maxsize=8)
def kept_row() -> dict[int, int]:
    return {0: 0}


def put_elsewhere(name: str, n: Any) -> None:
    globals()[name] = n


Level.LOW.count = 0  # pyright: ignore
PARTIAL: Any = functools.partial(dict, count=0)
MARKED: Any = functools.partial(dict)
MARKED.count = 0
COUNTER, DEFAULTS = collections.Counter[str](), collections.defaultdict[str, int](int)
ORDERED: Any = collections.OrderedDict(count=0)
ROWS, QUEUE = Rows([0]), collections.deque([0] * 2000)
ORDERED.count = 0
LARGE, LONG, DEEP = dict.fromkeys(range(2000), 0), [0] * 2000, {number: [0] for number in range(2000)}
IN_A_TUPLE, NAMED, VARIABLE = ([0],), SimpleNamespace(count=0), contextvars.ContextVar("variable", default=0)
VARIABLE.set(0)
SLOTTED, GUARDED, KEYS = Slotted(), Guarded(), [Shown(), Shown()]
OF_GUARDED: Any = vars(Slotted)["count"]
OF_GUARDED.__set__(GUARDED, 0)
GUARDS, SHOWN, NAMED_TUPLE = Defaults(int), dict.fromkeys(KEYS, 0), Pair([0])
USERS, CHAINED = collections.UserDict(count=0), collections.ChainMap({"count": 0})
WEAKLY = weakref.WeakKeyDictionary({KEYS[0]: 0})
ARRAY, OBJECTS, BYTES, NUMBERS = (
    numpy.zeros((2, 2)),
    numpy.array([0], dtype=object),
    bytearray(2),
    array.array("d", [0]),
)
VIEW, NAMED_ARRAY = memoryview(bytearray(2))[1:], Pair(numpy.zeros(1))
OPTIONS = argparse.Namespace(count=0)
ADAPTER: Any = logging.LoggerAdapter(logging.getLogger(__name__), {"count": 0})
LOGGER: Any = logging.getLogger(__name__)
REFERENCE: Any = referred()
FRACTION, NUMPYS, HALVES = fractions.Fraction(0), {"count": numpy.int64(0)}, itertools.count(fractions.Fraction(1, 2))
PLACES: dict[str, tuple[Callable[[], int], Callable[[int], object]]] = {
    "a partial's keyword": (lambda: PARTIAL()["count"], lambda n: PARTIAL.keywords.update(count=n)),
    "what a partial is given anew": (lambda: PARTIAL()["count"], given_anew),
    "a partial's attribute": (lambda: MARKED.count, lambda n: setattr(MARKED, "count", n)),
    "a counter": (lambda: COUNTER["count"], lambda n: COUNTER.__setitem__("count", n)),
    "a table with a default": (lambda: DEFAULTS["count"], lambda n: DEFAULTS.__setitem__("count", n)),
    "an ordered table": (lambda: ORDERED["count"], lambda n: ORDERED.__setitem__("count", n)),
    "an ordered table's attribute": (lambda: ORDERED.count, lambda n: setattr(ORDERED, "count", n)),
    "a list of the user's": (lambda: ROWS[0], lambda n: ROWS.__setitem__(0, n)),
    "an attribute of that": (lambda: ROWS.calls, lambda n: setattr(ROWS, "calls", n)),
    "a member of an Enum": (lambda: Level.LOW.count, lambda n: setattr(Level.LOW, "count", n)),  # pyright: ignore
    "a class": (lambda: Counter.total, lambda n: setattr(Counter, "total", n)),
    "a large table": (lambda: LARGE[1500], lambda n: LARGE.__setitem__(1500, n)),
    "what a large table holds": (lambda: DEEP[1500][0], lambda n: DEEP[1500].__setitem__(0, n)),
    "a long list": (lambda: LONG[999], lambda n: LONG.__setitem__(999, n)),
    "a long queue": (lambda: QUEUE[999], lambda n: QUEUE.__setitem__(999, n)),
    "a default": (by_default, lambda n: setattr(by_default, "__defaults__", (n,))),
    "a named default": (by_name, lambda n: setattr(by_name, "__kwdefaults__", {"count": n})),
    "what a tuple holds": (lambda: IN_A_TUPLE[0][0], lambda n: IN_A_TUPLE[0].__setitem__(0, n)),
    "a namespace": (lambda: NAMED.count, lambda n: setattr(NAMED, "count", n)),
    "slots": (lambda: SLOTTED.count, lambda n: setattr(SLOTTED, "count", n)),
    "a slot behind a property": (lambda: OF_GUARDED.__get__(GUARDED), lambda n: OF_GUARDED.__set__(GUARDED, n)),
    "a table that can't be set": (lambda: GUARDS["count"], lambda n: GUARDS.__setitem__("count", n)),
    "at a key that can't be shown": (lambda: SHOWN[KEYS[0]], lambda n: SHOWN.__setitem__(KEYS[0], n)),
    "a named tuple": (lambda: NAMED_TUPLE.rows[0], lambda n: NAMED_TUPLE.rows.__setitem__(0, n)),
    "a UserDict": (lambda: USERS["count"], lambda n: USERS.__setitem__("count", n)),
    "a ChainMap": (lambda: CHAINED["count"], lambda n: CHAINED.__setitem__("count", n)),
    "a weak table": (lambda: WEAKLY[KEYS[0]], lambda n: WEAKLY.__setitem__(KEYS[0], n)),
    "what two functions close over": shared(),
    "a fraction": (lambda: FRACTION, lambda n: put_elsewhere("FRACTION", fractions.Fraction(n))),
    "a number of numpy's": (lambda: NUMPYS["count"], lambda n: NUMPYS.__setitem__("count", numpy.int64(n))),
    "a variable of the context": (VARIABLE.get, VARIABLE.set),
    "an array of numpy's": (lambda: ARRAY[1, 0], lambda n: ARRAY.__setitem__((1, 0), n)),
    "an array of objects": (lambda: OBJECTS[0], lambda n: OBJECTS.__setitem__(0, n)),
    "bytes": (lambda: BYTES[1], lambda n: BYTES.__setitem__(1, n)),
    "an array of Python's": (lambda: NUMBERS[0], lambda n: NUMBERS.__setitem__(0, n)),
    "a view of memory": (lambda: VIEW[0], lambda n: VIEW.__setitem__(0, n)),
    "an array in a tuple": (lambda: NAMED_ARRAY.rows[0], lambda n: NAMED_ARRAY.rows.__setitem__(0, n)),
    "behind a weak reference": (lambda: REFERENCE().total, lambda n: setattr(REFERENCE(), "total", n)),
    "a logger's attribute": (lambda: LOGGER.count, lambda n: setattr(LOGGER, "count", n)),
    "a library's namespace": (lambda: OPTIONS.count, lambda n: setattr(OPTIONS, "count", n)),
    "what a logger is given": (lambda: ADAPTER.extra["count"], lambda n: ADAPTER.extra.update(count=n)),
    "what a cache has returned": (lambda: cached_row()[0], lambda n: cached_row().__setitem__(0, n)),
    "what a bounded cache has returned": (lambda: kept_row()[0], lambda n: kept_row().__setitem__(0, n)),
}


# Nobody can put another number there, or one that is watched.
UNWATCHED = {"what a partial is given anew", "a fraction", "a number of numpy's"}
UNWATCHED |= {"what a cache has returned", "what a bounded cache has returned"}


def test_a_slot_that_a_forward_fills_is_emptied_again() -> None:
    OF_GUARDED.__delete__(SLOTTED)
    how = lambda m, x: (setattr(SLOTTED, "count", 1), m.pair(x))[1]  # noqa: E731
    with contextlib.suppress(CompileError):
        tpplan.compile_plan(Keeps(how), PLAN, 2, torch.randn(2, 3, 8))  # pyright: ignore
    assert not hasattr(SLOTTED, "count")


@pytest.mark.one_in(6)
@pytest.mark.parametrize("place", PLACES)
def test_a_count_is_followed_wherever_it_stands(place: str) -> None:
    get, put = PLACES[place]

    def count(m: Any, x: Tensor) -> Tensor:
        put(get() + 1)
        return m.pair(x)

    def steer(m: Any, x: Tensor) -> Tensor:
        return count(m, x) if get() < 1000 else m.other(x)

    put(0)
    with pytest.raises(CompileError, match=r"TP129 .*changes with each call"):
        tpplan.compile_plan(Keeps(steer), PLAN, 2, torch.randn(2, 3, 8))
    assert get() == 0
    if place not in UNWATCHED:
        tpplan.compile_plan(Keeps(count), PLAN, 2, torch.randn(2, 3, 8))
    assert get() == 0


# -- nothing is changed -----------------------------------------------------------------------------------------------
def fails(m: Any, x: Tensor) -> Tensor:
    counts_elsewhere(m, x)
    m.steps += 1
    m.kept = table(x.shape[1], x.device, x.dtype)
    torch.rand(3)
    raise ValueError("no")


def snapshot(model: nn.Module) -> dict[str, Any]:
    """All that a model and its surroundings hold, with the identity of what is mutable."""
    found: dict[str, Any] = {"mode": [m.training for m in model.modules()]}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        found[name] = (id(tensor), tensor._version, tensor.detach().clone(), tensor.grad)
    for name, module in model.named_modules():
        held = {key: id(item) for key, item in vars(module).items()}
        tables = {key: list(item) for key, item in vars(module).items() if isinstance(item, dict)}
        found[f"{name}.vars"] = (type(module), held, tables)
    found["state"] = (model.calls, list(model.history), dict(model.stats), model.counter.total)  # pyright: ignore
    counts = (COUNT, repr(IDS), repr(LATE), repr(model.own))
    found["around"] = (counts, list(LOG), dict(TABLES), Counter.total, table.cache_info().currsize)
    found["random"] = (torch.get_rng_state(), __import__("random").getstate())
    return found


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return one == other


@pytest.mark.one_in(6)
@pytest.mark.parametrize("how", [*RIGHT, *RIGHT_OR_REFUSED, *STEERS, fails])
@pytest.mark.parametrize("what", ["compile", "suggest", "verify"])
def test_nothing_changes_a_model(how: Callable[[Any, Tensor], Tensor], what: str) -> None:
    model, x = Keeps(how), torch.randn(2, 3, 8)
    before = snapshot(model)
    run: dict[str, Callable[[], object]] = {
        "compile": lambda: tpplan.compile_plan(model, PLAN, 2, x),
        "suggest": lambda: tpplan.suggest_plan(model, 2, inputs=x),
        "verify": lambda: tpplan.verify(model, PLAN, 2, x, dtype=torch.float32),
    }
    with contextlib.suppress(tpplan.TpplanError):
        run[what]()
    after = snapshot(model)
    assert not [name for name in before if not same(before[name], after[name])]


@pytest.mark.parametrize("cached", [caches, caches_there])
def test_a_warm_cache_makes_the_same_program(cached: Callable[[Any, Tensor], Tensor]) -> None:
    model, x = Keeps(cached), torch.randn(2, 3, 8)
    cold = tpplan.compile_plan(model, PLAN, 2, x)
    expected = model(x)
    assert tpplan.compile_plan(model, PLAN, 2, x).digest == cold.digest
    assert torch.equal(model(x), expected)
