"""A call is taken for one that was decided only if its key is the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from tests.runtime.simulated import on_ranks
from tpplan.calls.key import KeyReader
from tpplan.calls.repeat import Repeats
from tpplan.compiler.ir.program import Program

PROGRAM = cast("Program", object())


class Layer:
    """A layer of a cache."""

    def __init__(self, length: int) -> None:
        self.keys, self.values = torch.zeros(2, 3, length), torch.zeros(2, 3, length)
        self.length, self.is_sliding, self.dtype = length, False, torch.float32


class Cache:
    """A cache."""

    def __init__(self, *lengths: int) -> None:
        self.layers = [Layer(length) for length in lengths]
        self.kind: type = Layer
        self.sizes: dict[str, Any] = {"window": 8, "heads": (2, 4)}
        self.offloads = False


class Other(Cache):
    """Another class."""


class Model(nn.Module):
    def forward(self, ids: Tensor, mask: Tensor | None = None, cache: Cache | None = None, flag: bool = True) -> Tensor:
        return ids


READ = KeyReader(Model.forward)


def call() -> dict[str, Any]:
    return {"ids": torch.zeros(2, 1, dtype=torch.long), "mask": torch.ones(2, 6), "cache": Cache(5, 5), "flag": True}


def change(write: Callable[[Any], object]) -> dict[str, Any]:
    made = call()
    write(made)
    return made


def swap(held: dict[str, Any]) -> None:
    held["cache"].layers.reverse()


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "flag": lambda c: c.update(flag=False),
    "flag as a number": lambda c: c.update(flag=1),
    "no flag": lambda c: c.pop("flag"),
    "no mask": lambda c: c.update(mask=None),
    "dtype": lambda c: c.update(mask=c["mask"].double()),
    "dims": lambda c: c.update(mask=c["mask"][0]),
    "size": lambda c: c.update(mask=torch.ones(2, 7)),
    "gradient": lambda c: c["mask"].requires_grad_(),
    "parameter": lambda c: c.update(mask=nn.Parameter(c["mask"])),
    "note on a tensor": lambda c: setattr(c["mask"], "kind", "causal"),
    "alias": lambda c: setattr(c["cache"].layers[0], "keys", c["cache"].layers[0].values),
    "order": lambda c: c.update(ids=c.pop("ids")),
    "class": lambda c: setattr(c["cache"], "__class__", Other),
    "class of a layer": lambda c: setattr(c["cache"].layers[1], "__class__", type("Layer", (Layer,), {})),
    "length of one": lambda c: setattr(c["cache"].layers[1], "length", 6),
    "length as a flag": lambda c: setattr(c["cache"].layers[1], "length", True),
    "size of one": lambda c: setattr(c["cache"].layers[1], "keys", torch.zeros(2, 3, 6)),
    "attribute": lambda c: setattr(c["cache"].layers[1], "more", None),
    "attribute gone": lambda c: delattr(c["cache"].layers[1], "is_sliding"),
    "sliding": lambda c: setattr(c["cache"].layers[0], "is_sliding", True),
    "dtype noted": lambda c: setattr(c["cache"].layers[0], "dtype", torch.float16),
    "layers": lambda c: c["cache"].layers.pop(),
    "a tuple": lambda c: setattr(c["cache"], "layers", tuple(c["cache"].layers)),
    "number in a dict": lambda c: c["cache"].sizes.update(window=9),
    "name in a dict": lambda c: c["cache"].sizes.update(width=9),
    "number in a tuple": lambda c: c["cache"].sizes.update(heads=(2, 5)),
    "class noted": lambda c: setattr(c["cache"], "kind", Cache),
    "a function": lambda c: setattr(c["cache"], "kind", swap),
    "a tensor for a number": lambda c: setattr(c["cache"].layers[0], "length", torch.tensor([5, 5])),
    "a tensor for a flag": lambda c: setattr(c["cache"].layers[0], "is_sliding", torch.tensor([True, True])),
    "a tensor for a mark": lambda c: setattr(c["cache"], "offloads", torch.tensor([True, True])),
    "none there": lambda c: setattr(c["cache"].layers[0], "keys", None),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_call_that_differs_is_not_taken_for_one_that_was_decided(name: str) -> None:
    with torch.no_grad():
        repeats = Repeats(READ.devices)
        assert repeats.find((), (), call()) is None
        repeats.note((), (), call(), PROGRAM)
        assert repeats.find((), (), call()) is PROGRAM
        other = change(CHANGES[name])
        if name not in ("gradient", "order"):  # which the key takes for the same, and the form doesn't
            assert READ(False, (), other) != READ(False, (), call())
        assert repeats.find((), (), other) is None


def test_a_cache_that_was_cut_meanwhile_counts_as_it_is_then() -> None:
    with torch.no_grad():
        repeats, whole = Repeats(READ.devices), call()
        repeats.note((), (), call(), PROGRAM)
        whole["cache"].layers[0].keys = torch.zeros(2, 6, 5)
        assert repeats.find((), (), whole) is None
        whole["cache"].layers[0].keys = torch.zeros(2, 3, 5)  # as the guard does
        repeats.note((), (), whole, PROGRAM)
        again = call()
        again["cache"].layers[0].keys = torch.zeros(2, 6, 5)
        assert repeats.find((), (), again) is None


def test_what_was_decided_is_by_sizes() -> None:
    with torch.no_grad():
        repeats, other = Repeats(READ.devices), cast("Program", object())
        longer = call() | {"cache": Cache(5, 7)}
        for held, program in ((call(), PROGRAM), (longer, other)):
            assert repeats.find((), (), held) is None
            repeats.note((), (), held, program)
        assert len(repeats._forms) == 1
        assert repeats.find((), (), call()) is PROGRAM and repeats.find((), (), longer) is other
        assert repeats.find((), (), call() | {"cache": Cache(7, 5)}) is None


@pytest.mark.parametrize(
    "around",
    [
        lambda: torch.inference_mode(),
        lambda: torch.enable_grad(),
        lambda: torch.autocast("cpu", torch.bfloat16),
    ],
)
def test_what_surrounds_a_call_counts(around: Callable[[], Any]) -> None:
    with torch.no_grad():
        repeats = Repeats(READ.devices)
        repeats.find((), (), call())
        repeats.note((), (), call(), PROGRAM)
        assert repeats.find((True,), (), call()) is None
        held = call()
        with around():
            assert repeats.find((), (), held) is None


@pytest.mark.parametrize("held", [{1, 2}, nn.Linear(1, 1), 1.5, swap, torch.Generator()])
def test_what_a_form_does_not_know_is_read_by_its_key(held: Any) -> None:
    with torch.no_grad():
        repeats = Repeats(READ.devices)
        for more in (held, [held], {"a": held}):
            repeats.find((), (), call() | {"more": more})
            repeats.note((), (), call() | {"more": more}, PROGRAM)
            assert repeats.find((), (), call() | {"more": more}) is None


class Setting:
    """An object with a flag."""

    def __init__(self) -> None:
        self.centred = False


class Picky(nn.Module):
    """A model whose caller says which way it goes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, setting: Setting) -> Tensor:
        hidden = self.up(x)
        if setting.centred:
            hidden = hidden - hidden.mean(-1, keepdim=True)  # of all features
        return self.down(hidden)


def test_a_flag_that_steers_is_seen_at_each_call() -> None:
    torch.manual_seed(0)
    stock = Picky().double().eval()
    x = torch.randn(2, 3, 8, dtype=torch.float64)

    def work(model: nn.Module, _: object = None) -> list[Tensor]:
        setting = Setting()
        found: list[Tensor] = []
        with torch.no_grad():
            for setting.centred in (False, False, False, True, True, True, False):
                found.append(model(x, setting))
        return found

    expected = work(copy.deepcopy(stock))
    for found in on_ranks(stock, {"up": "colwise", "down": "rowwise"}, 2, ((x, Setting()), {}), work):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
