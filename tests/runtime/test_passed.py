"""What a call passes is put back to what it was, or it is said that it can't be."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree  # registers a class, as transformers does with its caches for an export

from tpplan.calls.passed import Passed


class Cache:
    """A cache of one layer."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.length = 0


class Registered(Cache):
    """One that is registered with torch."""


pytree.register_pytree_node(Registered, lambda held: ([held.keys], held.length), lambda items, length: Registered())


def write(cache: Any, log: list[Any], names: dict[str, Any]) -> None:
    cache.keys, cache.length, cache.more = torch.ones(2), 2, True
    log.append(cache)
    names["a"], names["b"] = 1, 2


def test_lists_dicts_and_objects_are_put_back() -> None:
    cache, log, names = Cache(), [1], collections.OrderedDict(b=0)
    before = Passed((cache, log), {"names": names})
    write(cache, log, names)
    assert before.is_restorable
    before.restore()
    assert vars(cache) == {"keys": None, "length": 0} and log == [1] and names == {"b": 0}


def test_a_tensor_that_was_written_to_is_not_put_back() -> None:
    cache = Cache()
    cache.keys = torch.zeros(2)
    before = Passed((cache,), {})
    cache.keys.add_(1)
    assert not before.is_restorable


@pytest.mark.parametrize("held", [Registered(), {1, 2}, torch.Generator(), iter([1])])
def test_what_keeps_more_than_is_known_is_not_put_back(held: Any) -> None:
    before = Passed((held,), {})
    if isinstance(held, Registered):
        assert before.is_restorable  # nothing was written yet
        held.keys = torch.ones(2)
    assert not before.is_restorable
