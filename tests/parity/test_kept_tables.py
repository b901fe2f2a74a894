"""Tables that a forward keeps for its next call, wherever they are: in caches, dicts and names, empty or filled."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator, MutableMapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tpplan
from tests.runtime.simulated import worst
from tpplan.compiler.trace import surroundings
from tpplan.state import parts

WIDTH = 16
RULES = {"up": "colwise", "down": "rowwise"}
PLAN = {"version": 1, "modules": RULES}
TABLES: dict[int, Tensor] = {}
LONGEST: Tensor | None = None


def made(length: int, device: torch.device) -> Tensor:
    return torch.arange(length, device=device, dtype=torch.float64).cos()[:, None]


@functools.lru_cache
def cached(length: int, device: torch.device) -> Tensor:
    return made(length, device)


class Pair(nn.Module):
    """A column and a row on a stream that is scaled by position."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def table(self, x: Tensor) -> Tensor:
        return cached(x.shape[1], x.device)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x * self.table(x)).relu())


class OfMethod(Pair):
    @functools.lru_cache  # noqa: B019 -- as users do
    def kept(self, length: int, device: torch.device) -> Tensor:
        return made(length, device)

    def table(self, x: Tensor) -> Tensor:
        return self.kept(x.shape[1], x.device)


class OfInstance(Pair):
    def __init__(self) -> None:
        super().__init__()
        self.kept = functools.lru_cache(made)

    def table(self, x: Tensor) -> Tensor:
        return self.kept(x.shape[1], x.device)


class OfClosure(Pair):
    def __init__(self) -> None:
        super().__init__()
        kept = functools.lru_cache(made)
        self.kept = lambda x: kept(x.shape[1], x.device)

    def table(self, x: Tensor) -> Tensor:
        return self.kept(x)


class OfDict(Pair):
    def table(self, x: Tensor) -> Tensor:
        if x.shape[1] not in TABLES:
            TABLES[x.shape[1]] = made(x.shape[1], x.device)
        return TABLES[x.shape[1]]


class OfOwnDict(Pair):
    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[int, Tensor] = {}

    def table(self, x: Tensor) -> Tensor:
        if x.shape[1] not in self.tables:
            self.tables[x.shape[1]] = made(x.shape[1], x.device)
        return self.tables[x.shape[1]]


class OfName(Pair):
    def table(self, x: Tensor) -> Tensor:
        global LONGEST
        if LONGEST is None or LONGEST.shape[0] < x.shape[1]:
            LONGEST = made(x.shape[1], x.device)
        return LONGEST[: x.shape[1]]


class Closed(MutableMapping[int, Tensor]):
    """A mapping that nobody may look through, as pools of connections are."""

    def __init__(self) -> None:
        self.held: dict[int, Tensor] = {}

    def __getitem__(self, key: int) -> Tensor:
        return self.held[key]

    def __setitem__(self, key: int, value: Tensor) -> None:
        self.held[key] = value

    def __delitem__(self, key: int) -> None:
        del self.held[key]

    def __len__(self) -> int:
        return len(self.held)

    def __iter__(self) -> Iterator[int]:
        raise NotImplementedError


CLOSED = Closed()


class OfClosedMapping(Pair):
    def table(self, x: Tensor) -> Tensor:
        if x.shape[1] not in CLOSED.held:
            CLOSED[x.shape[1]] = made(x.shape[1], x.device)
        return CLOSED[x.shape[1]]


class BesideNothing(OfDict):
    """With constants of no entries, and of no number."""

    def table(self, x: Tensor) -> Tensor:
        empty = torch.cat([torch.tensor([]), torch.tensor(float("nan")).reshape(1)])[1:]
        beside = 1.0 if torch.tensor([x.shape[1]]).item() > 0 else empty.sum()
        return super().table(x) + beside


KINDS = (BesideNothing, OfClosedMapping, Pair, OfMethod, OfInstance, OfClosure, OfDict, OfOwnDict, OfName)


def x_of(length: int) -> Tensor:
    return torch.randn(2, length, WIDTH, dtype=torch.float64)


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    global LONGEST
    LONGEST = None
    TABLES.clear()
    CLOSED.held.clear()
    cached.cache_clear()


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.one_in(8)
def test_calls_of_other_lengths_fill_them(kind: Callable[[], nn.Module], warm: bool) -> None:
    model = kind().double()
    if warm:
        model(x_of(6))
    example, *calls = [((x_of(length),), {}) for length in (6, 6, 4, 9, 6)]
    assert max(worst(model, RULES, 2, example, calls)) < 1e-12


@pytest.mark.one_in(5)
@pytest.mark.parametrize("kind", KINDS)
def test_a_capture_leaves_nothing_in_them(kind: Callable[[], nn.Module]) -> None:
    model = kind().double()
    for _ in range(2):
        tpplan.compile_plan(model, PLAN, 2, (x_of(6),))
        assert not model(x_of(6)).is_meta


TABLES_FILE = """
import functools, torch

KEPT = {}


def made(length, x):
    if length not in KEPT:
        KEPT[length] = torch.arange(length, device=x.device).double().cos()[:, None]
    return KEPT[length]


@functools.lru_cache
def _cached(length, device):
    return torch.arange(length, device=device).double().cos()[:, None]


def cached(length, x):
    return _cached(length, x.device)
"""
MODEL_FILE = """
from torch import nn
import {package}.tables as tables
from {package}.tables import {function}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return self.down(self.up(x * {called}(x.shape[1], x)).relu())
"""


@pytest.mark.parametrize("called", ["made", "cached", "tables.made", "tables.cached"])
@pytest.mark.parametrize("where", ["of the library", "of the user"])
@pytest.mark.one_in(5)
def test_those_of_a_library_are_found(where: str, called: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, users = f"kept_{tmp_path.name}", f"user_of_{tmp_path.name}"
    library = tmp_path / "library"
    (library / package).mkdir(parents=True)
    (library / package / "__init__.py").touch()
    (library / package / "tables.py").write_text(TABLES_FILE)
    text = MODEL_FILE.format(package=package, function=called.rpartition(".")[2], called=called)
    file, name = (library / package / "model.py", f"{package}.model")
    if where == "of the user":
        file, name = tmp_path / f"{users}.py", users
    file.write_text(text)
    monkeypatch.setattr(sys, "path", [str(library), str(tmp_path), *sys.path])
    monkeypatch.setattr(parts, "LIBRARIES", (*parts.LIBRARIES, str(library)))
    model: Any = importlib.import_module(name).Model().double()
    example, *calls = [((x_of(length),), {}) for length in (6, 6, 4)]
    for _ in range(2):
        assert max(worst(model, RULES, 2, example, calls)) < 1e-12
        assert not model(x_of(6)).is_meta


def test_of_a_package_only_files_are_looked_at_that_code_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package has a name for each of its files that was ever imported."""
    package = f"asked_{tmp_path.name}"
    (tmp_path / package).mkdir()
    for name in ("__init__", "other", "unasked"):
        (tmp_path / package / f"{name}.py").write_text("TABLE = {}")
    (tmp_path / package / "tables.py").write_text(TABLES_FILE)
    called = f"{package}.tables.made"
    text = MODEL_FILE.format(package=package, function="made", called=called).replace("as tables", "")
    (tmp_path / package / "model.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("other", "unasked"):
        importlib.import_module(f"{package}.{name}")
    spaces = {name for name, _ in surroundings.Surroundings(importlib.import_module(f"{package}.model").Model()).spaces}
    assert {f"{package}.model", f"{package}.tables", package} <= spaces
    assert not {f"{package}.other", f"{package}.unasked"} & spaces
