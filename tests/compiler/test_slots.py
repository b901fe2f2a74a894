"""Places around a model are looked through once, and again where something there has changed."""

from __future__ import annotations

import builtins
import functools
import gc
import logging
import sys
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, MutableMapping
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import tpplan
from tpplan.compiler.trace import slots, surroundings
from tpplan.compiler.trace.left_state import is_same
from tpplan.compiler.trace.slots import ITEMS, LENGTH, ORDER, slots_of
from tpplan.compiler.trace.surroundings import Surroundings
from tpplan.state.reads import note_reads, reads


class Kept:
    """An object of the user's."""

    def __init__(self) -> None:
        self.count = 0
        self.inner: list[Any] = [0]


class Slotted:
    __slots__ = ("__dict__", "count")

    def __init__(self) -> None:
        self.count = 0
        self.first = True


class Pairs(MutableMapping[str, int]):
    """A table of the user's own, which keeps its names where nobody looks."""

    kept: ClassVar = bytearray(b"a")

    def __getitem__(self, name: str) -> int:
        return self.kept.index(name.encode())

    def __setitem__(self, name: str, value: int) -> None:
        self.kept[value] = ord(name)

    def __delitem__(self, name: str) -> None:
        self.kept.remove(ord(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self.kept.decode())

    def __len__(self) -> int:
        return len(self.kept)


TABLE: dict[str, Any] = {"a": 1, "inner": {"b": 2}}
LIST: list[Any] = [1, [2]]
QUEUE = deque([1, 2])
KEPT = Kept()
BY_TENSOR: dict[Tensor, int] = {torch.zeros(3): 1}
IN_A_TUPLE = ([0], SimpleNamespace(count=0))
IN_A_TABLE: dict[str, Any] = {"slotted": Slotted(), "pairs": Pairs(), "call": (lambda held: lambda: held)([0])}
IN_A_TABLE["alias"] = list[Kept]  # its `__dict__` is another one each time
TENSORS: dict[str, Tensor] = {}
NUMBER = 0
LARGE, MANY, PAIRS = dict.fromkeys(range(2000), 0), set(range(2000)), {(1, 2)}
RECORDS: list[Any] = [None, *(("row", n) for n in range(2000))]
ROWS: list[Any] = [{"text": "a", "n": n, "ids": [n, (n,)]} for n in range(2000)]
PARTIAL, WITH_DEFAULT = functools.partial(dict, a=0), defaultdict[str, int](functools.partial(int, 0))


class Model(nn.Module):
    """Shares one of the file's tables."""

    def __init__(self) -> None:
        super().__init__()
        self.table = TABLE
        self.up = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x)


def counting() -> Callable[[], object]:
    count = 0

    def more() -> int:
        nonlocal count
        count += 1
        return count

    return more


MORE = counting()


def noting(held: list[Any] = [0]) -> list[Any]:  # noqa: B006
    return held


def put_another() -> None:
    BY_TENSOR.clear()
    BY_TENSOR[torch.ones(3)] = 2


def rename() -> None:
    held = vars(IN_A_TABLE["slotted"])
    held["second"] = held.pop("first")


def count() -> None:
    global NUMBER
    NUMBER += 1


CHANGES: dict[str, tuple[Callable[[], object], str]] = {
    "a number": (count, "NUMBER"),
    "a list": (lambda: LIST.append(3), f"LIST{LENGTH}"),
    "a list in a list": (lambda: LIST[1].append(3), f"LIST[1]{LENGTH}"),
    "a queue": (lambda: QUEUE.rotate(1), "QUEUE[0]"),
    "an object": (lambda: setattr(KEPT, "count", KEPT.count + 1), "KEPT.count"),
    "an object that is given another dict": (
        lambda: setattr(KEPT, "__dict__", {"count": -1, "inner": []}),
        "KEPT.count",
    ),
    "what a tensor is the key of": (put_another, "BY_TENSOR[tensor([1., 1., 1.])]"),
    "what an object holds": (lambda: KEPT.inner.append(1), f"KEPT.inner{LENGTH}"),
    "what a tuple holds": (lambda: IN_A_TUPLE[0].append(1), f"IN_A_TUPLE[0]{LENGTH}"),
    "a namespace": (lambda: setattr(IN_A_TUPLE[1], "count", IN_A_TUPLE[1].count + 1), "IN_A_TUPLE[1].count"),
    "slots": (lambda: setattr(IN_A_TABLE["slotted"], "count", 1 + IN_A_TABLE["slotted"].count), "['slotted'].count"),
    "what a function of the file closes over": (lambda: MORE(), "more.count"),
    "what a default holds": (lambda: noting().append(1), f"noting.__defaults__[0]{LENGTH}"),
    "a function's attribute": (lambda: setattr(noting, "count", 1), "noting.count"),
    "a name of a table": (lambda: TABLE["inner"].update(c=TABLE["inner"].pop("b")), "['inner']['c']"),
    "names beside slots": (rename, "['slotted'].second"),
    "names of a table of the user's": (lambda: IN_A_TABLE["pairs"].update(b=0), "['pairs'].b"),
    "the order of a table": (lambda: IN_A_TABLE.update(slotted=IN_A_TABLE.pop("slotted")), f"IN_A_TABLE{ORDER}"),
    "what a function closes over": (lambda: IN_A_TABLE["call"]().append(1), f"['call'].held{LENGTH}"),
    "an item of a large table": (lambda: LARGE.update({1500: LARGE[1500] + 1}), f"LARGE{ITEMS}"),
    "a key of a large table": (lambda: LARGE.update({-1: LARGE.pop(1500)}), f"LARGE{ORDER}"),
    "a row of a long list": (lambda: RECORDS.__setitem__(1500, ("row", -1)), f"RECORDS{ITEMS}"),
    "what a row of many holds": (lambda: ROWS[1500].update(n=-1), f"ROWS{ITEMS}"),
    "what is deep in a row": (lambda: ROWS[1500]["ids"].append(1), f"ROWS{ITEMS}"),
    "rows that change places": (lambda: ROWS.append(ROWS.pop(1500)), f"ROWS{ITEMS}"),
    "a row that is another's": (lambda: ROWS.__setitem__(1500, ROWS[1]), f"ROWS{ITEMS}"),
    "an item of a large set": (lambda: (MANY.remove(1500), MANY.add(-1)), f"MANY{ITEMS}"),
    "a pair in a set": (lambda: (PAIRS.remove((1, 2)), PAIRS.add((1, 3))), "PAIRS{(1, 3)}"),
    "what a partial is passed": (lambda: PARTIAL.keywords.update(a=1), "PARTIAL.keywords['a']"),
    "a table's default": (lambda: setattr(WITH_DEFAULT, "default_factory", functools.partial(int, 1)), ".args[0]"),
    "a tensor": (lambda: TENSORS.update(new=torch.ones(len(TENSORS) + 1)), "TENSORS['new']"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_what_changes_is_found_again(case: str) -> None:
    change, name = CHANGES[case]
    model = Model()
    around = Surroundings(model)
    before = slots_of(model, around)
    same = slots_of(model, around)
    assert before.keys() == same.keys()
    try:
        change()
        after = slots_of(model, around)
        changed = {n for n, slot in after.items() if n not in before or before[n].value is not slot.value}
        assert [held for held in changed if held.endswith(name)], changed
    finally:
        around.restore()
    back = slots_of(model, around)
    assert back.keys() == before.keys() and all(is_same(back[n].value, slot.value) for n, slot in before.items())


def test_what_the_model_holds_goes_by_its_names_there() -> None:
    model = Model()
    slots = slots_of(model, Surroundings(model))
    assert {"table['a']", "table['inner']['b']"} <= slots.keys()
    assert not [name for name in slots if "TABLE['" in name and "IN_A" not in name]
    alone = slots_of(nn.Module(), Surroundings(model))
    assert [name for name in alone if name.endswith("TABLE['inner']['b']")]


def test_what_all_files_share_is_left_alone() -> None:
    """Threads may be running: a table of all builtins that is emptied and filled again takes their names away."""
    around = Surroundings(Model())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builtins, "put_by_another", 1, raising=False)
        around.restore()
        assert builtins.put_by_another  # pyright: ignore


def test_it_is_looked_through_once_while_nothing_changes() -> None:
    model = Model()
    around = Surroundings(model)
    slots_of(model, around)
    known = {**around.remembered}
    slots_of(model, around)
    assert all(around.remembered[key] is held for key, held in known.items())


@pytest.mark.parametrize("of_the_model", [False, True])
def test_each_logger_leads_to_all(of_the_model: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, name = Model(), "logging.getLogger('tests.another').count"
    around = Surroundings(model)
    assert not [each for each in slots_of(model, around) if each.startswith("logging.")]
    holder: Any = model if of_the_model else KEPT
    monkeypatch.setattr(holder, "log", logging.getLogger("tests.one"), raising=False)
    logger: Any = logging.getLogger("tests.another")
    for count in range(2):
        logger.count = count
        assert slots_of(model, around)[name].value == count


def test_of_libraries_a_later_compilation_finds_what_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    activations = pytest.importorskip("transformers.activations")
    model = activations.NewGELUActivation()
    table: dict[str, Any] = {"a": [1], "b": 2}
    monkeypatch.setattr(activations, "TABLE", table, raising=False)

    def found() -> dict[str, Any]:
        slots = slots_of(model, Surroundings(model))
        return {name.partition("TABLE")[2]: slot.value for name, slot in slots.items() if ".TABLE" in name}

    first = found()
    assert first == found() and first["['b']"] == 2
    table["b"] = 3
    table["a"].append(4)
    later = found()
    assert later["['b']"] == 3 and later["['a'][1]"] == 4
    monkeypatch.setattr(activations, "TABLE", {"c": 5})
    assert found() == {f"{LENGTH}": 1, "['c']": 5}


def test_what_the_users_files_held_is_not_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    model, kept = Model(), Kept()
    monkeypatch.setattr(sys.modules[__name__], "HELD", [kept], raising=False)
    assert any(".HELD[0].count" in name for name in slots_of(model, Surroundings(model)))
    monkeypatch.undo()
    reference = weakref.ref(kept)
    del kept
    gc.collect()
    assert reference() is None


SOURCE = """
from torch import nn
TABLE = {"a": [1]}
class Alone(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
    def forward(self, x):
        return self.down(self.up(x)) * TABLE["a"][0]
"""


@pytest.fixture
def own_file(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A file of the user's, with a model in it."""
    made = ModuleType("a_file_of_the_users")
    monkeypatch.setitem(sys.modules, made.__name__, made)
    exec(SOURCE, vars(made))
    return made


def noted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often anything was looked through, from now on."""
    found = Counter[str]()
    for kind in (surroundings._Noted, slots._Section):
        plain = kind.__init__

        def init(self: Any, *args: Any, plain: Any = plain, name: str = kind.__name__) -> None:
            found[name] += 1
            plain(self, *args)

        monkeypatch.setattr(kind, "__init__", init)
    return found


def compiled(model: nn.Module) -> tpplan.Program:
    plan = {"version": 1, "modules": {"up": "colwise", "down": "rowwise"}}
    return tpplan.compile_plan(model, plan, 2, (torch.randn(2, 4),))


def test_a_second_compilation_looks_again_only_at_what_has_changed(
    own_file: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = own_file.Alone()
    compiled(model)
    compiled(model)  # the first may have imported what it needs
    found = noted(monkeypatch)
    compiled(model)
    assert not found
    changes: list[Callable[[], object]] = [
        lambda: own_file.TABLE["a"].append(2),
        lambda: vars(own_file).update(FURTHER=[1]),
        lambda: setattr(own_file.Alone, "kept", [1]),
        lambda: vars(own_file).pop("FURTHER"),
    ]
    for change in changes:
        change()
        compiled(model)
        assert found["_Noted"] and found["_Section"]
        found.clear()
        compiled(model)
        assert not found


def test_what_a_cache_has_returned_since_is_looked_through(own_file: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    exec("import functools\n@functools.lru_cache\ndef table(size):\n    return [size]", vars(own_file))
    model = own_file.Alone()
    own_file.table(1)
    compiled(model)
    compiled(model)
    found = noted(monkeypatch)
    compiled(model)
    assert not found
    own_file.table(2)
    compiled(model)
    assert found["_Noted"]


class Told:
    """What does something when it is freed."""

    def __del__(self) -> None: ...


FREED: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "large tensor": (lambda: torch.zeros(1 << 17), lambda held: held),
    "module": (lambda: nn.Linear(2, 2), lambda held: held),
    "module in a list": (lambda: nn.Linear(2, 2), lambda held: [held]),
    "object of the user's": (Kept, lambda held: {"a": [held]}),
    "what is told that it is freed": (Told, lambda held: held),
    "weak reference": (Kept, weakref.ref),
    "weak table": (Kept, lambda held: weakref.WeakValueDictionary({"a": held})),
}
"""Objects, and how a file holds them."""


@pytest.mark.parametrize("kind", FREED)
def test_what_may_be_noticed_is_not_kept_from_one_compilation_to_the_next(own_file: Any, kind: str) -> None:
    make, hold = FREED[kind]
    held = make()
    own_file.HELD = hold(held)
    compiled(own_file.Alone())
    reference = weakref.ref(held)
    del own_file.HELD, held
    gc.collect()
    assert reference() is None


class Refusing(type):
    """A class of classes that take no more attributes."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise AttributeError(name)


class Frozen(nn.Module, metaclass=Refusing):
    """A module whose class can't be written to."""


def test_reads_of_a_class_that_refuses_attributes_are_told() -> None:
    module = Frozen()
    with reads() as read:
        note_reads([module])
        assert module.training
    assert read == {"training"} and "__getattribute__" not in vars(Frozen)
