"""The key of a call: all that could steer a model's Python is in it, and nothing that couldn't."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tpplan.calls.key import CallKey, CallKind, KeyReader


def forward(self: Any, x: Any, y: Any = None, flag: Any = True, **more: Any) -> None: ...


READ = KeyReader(forward)
X = torch.zeros(2, 3)


def kind(*arguments: Any, training: bool = True, **keywords: Any) -> CallKind:
    return READ(training, arguments, keywords).kind


class Colour(Enum):
    RED = 1
    BLUE = 2


class Number(Enum):
    RED = 1


class Settings:
    def __init__(self, **held: Any) -> None:
        vars(self).update(held)


class Other(Settings): ...


class Hidden:
    __slots__ = ("value",)


class Marked(Tensor): ...


def scaled(by: float) -> Callable[[float], float]:
    return lambda y: by * y


VALUES = [
    True, 1, 1.0, 0.0, -0.0, None, "1", 1j, b"1", torch.float32, torch.device("cpu"), (1, 2), [1, 2], (1, True), {1, 2},
    {"a": 1}, {"a": 2}, Colour.RED, Colour.BLUE, Number.RED, torch.relu, torch.sigmoid, Settings, Other, slice(1, 2),
    Settings(a=1), Settings(a=True), Settings(a=2), Other(a=1), SimpleNamespace(a=1), Hidden(), scaled(2.0),
    scaled(3.0), functools.partial(scaled, 1.0), functools.partial(scaled, 2.0), "a".join, "b".join,
    Settings(a=scaled(1)), X, X.double(), X.int(), X.bool(), torch.zeros(2), nn.Parameter(X), X.as_subclass(Marked),
    [X], [X, X], (X,), {"a": X},
]  # fmt: skip


def test_values_that_could_take_another_path_have_another_kind() -> None:
    kinds = [kind(X, flag=value) for value in VALUES]
    for one, first in enumerate(kinds):
        for other, second in enumerate(kinds):
            assert (first == second) == (one == other), (VALUES[one], VALUES[other])
    assert len(set(kinds)) == len(VALUES)


@pytest.mark.parametrize("make", [lambda: Settings(a=[1, (2.0, None)]), lambda: scaled(2.0), lambda: float("nan")])
def test_what_is_made_anew_alike_is_of_one_kind(make: Callable[[], Any]) -> None:
    assert kind(X, flag=make()) == kind(X, flag=make())


def test_an_object_that_is_written_to_is_of_another_kind() -> None:
    settings = Settings(a=Settings(b=1))
    before = kind(X, settings)
    settings.a.b = 2  # pyright: ignore
    assert kind(X, settings) != before


def test_an_argument_may_be_spelled_in_any_way() -> None:
    assert kind(X, X.int()) == kind(X, y=X.int()) == kind(x=X, y=X.int())
    assert kind(X) == kind(X, None) == kind(X, y=None)
    assert kind(X, flag=None) != kind(X) and kind(X, more=None) != kind(X)


class Layers:
    """A cache of several layers, each with a tensor and its length."""

    def __init__(self, *lengths: int) -> None:
        self.layers = [Layer(length) for length in lengths]


class Layer:
    """One of them."""

    def __init__(self, length: int) -> None:
        self.length, self.keys = length, torch.zeros(1)


def test_each_length_that_a_cache_notes_is_one_of_its_sizes() -> None:
    one, other, third = (READ(True, (X, Layers(*lengths)), {}) for lengths in ((8, 8, 9), (8, 9, 9), (8, 8, 9)))
    assert one.kind == other.kind and one.sizes != other.sizes and one == third


def test_a_number_beside_a_tensor_that_may_name_a_dim_is_no_length() -> None:
    kinds = [READ(True, (X, Layers(number)), {}).kind for number in (-2, -1, 0, 1, 2, 3, 4, 5, 6)]
    assert len(set(kinds)) == len(kinds)
    assert READ(True, (X, Layers(7)), {}).kind == kinds[-1]


def test_sizes_are_apart() -> None:
    one, other = READ(True, (X,), {}), READ(True, (torch.zeros(4, 3),), {})
    assert one.kind == other.kind and one.sizes != other.sizes
    assert READ(True, (X, [torch.zeros(5)]), {}).sizes == (((2, 3), 1), ((5,), 1))


def test_one_tensor_in_two_places_is_not_two() -> None:
    assert kind(X, X) != kind(X, X.clone())


def test_modes_and_the_state_of_torch_count() -> None:
    found = [kind(X), kind(X, training=False)]
    with torch.no_grad():
        found.append(kind(X))
    with torch.inference_mode():
        found.append(kind(X))
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            found.append(kind(X))
    torch.set_default_dtype(torch.float64)
    try:
        found.append(kind(X))
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(set(found)) == len(found)
    assert kind(X) == found[0]


def test_what_a_capture_cannot_see_is_apart() -> None:
    with torch.no_grad():
        unrecorded = kind(X)
    assert unrecorded.traced == kind(X).traced and unrecorded.ambient != kind(X).ambient
    assert kind(X.to("meta")).traced == kind(X).traced and kind(X.to("meta")) != kind(X)
    wanted = X.clone().requires_grad_()
    assert kind(wanted).traced != kind(X).traced
    with torch.no_grad():
        assert kind(wanted) == unrecorded


def test_a_key_holds_what_it_tells_apart_by_identity() -> None:
    kinds = {kind(X, flag=threading.Lock()) for _ in range(50)}
    assert len(kinds) == 50, "an identity was used again"


def test_a_copy_of_a_key_is_equal() -> None:
    key = READ(True, (X, Hidden(), scaled(1.0)), {})
    assert copy.deepcopy(key) == key and isinstance(key, CallKey)
