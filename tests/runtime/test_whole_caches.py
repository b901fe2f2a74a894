"""Caches that hold all heads when a sharded model first gets them: each rank's part is cut out, or the call refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tpplan
from tests.caching import cache_name, passing
from tests.marking import slow_but
from tests.runtime.simulated import on_ranks
from tests.runtime.test_caches import made_whole, tiny, tokens
from tpplan.compiler.ir.hidden import hidden_tensors

transformers = pytest.importorskip("transformers")
RANKS = 2


class Upright(transformers.DynamicLayer):
    """Keys and values as (batch, sequence, heads, features): of the two dims that may be heads, the first isn't."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        new = [held.transpose(1, 2) for held in (key_states, value_states)]
        if self.is_initialized:
            new = [torch.cat([old, more], 1) for old, more in zip((self.keys, self.values), new, strict=True)]
        self.keys, self.values = new
        self.is_initialized = True
        return self.keys.transpose(1, 2), self.values.transpose(1, 2)

    def get_seq_length(self) -> int:
        return self.keys.shape[1] if self.is_initialized else 0


class ByHeads(Upright):
    """Keys and values of each head turned by the number of the head, which no rank's part can tell."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = super().update(key_states, value_states)
        return keys * torch.arange(1, keys.shape[1] + 1)[:, None, None], values


def dynamic(config: Any) -> Any:
    return transformers.DynamicCache(config=config)


def layered(kind: type[Any]) -> Callable[[Any], Any]:
    return lambda config: transformers.Cache(layers=[kind() for _ in range(config.num_hidden_layers)])


def filled(stock: Any, make: Callable[[Any], Any]) -> Any:
    """A cache that the unsharded model has filled with a prompt."""
    cache = make(stock.config)
    with torch.no_grad():
        stock(tokens(2, 6), **passing(stock, cache), use_cache=True)
    return cache


def continued(model: Any, cache: Any, positional: bool = False) -> Tensor:
    """Logits after a cache's prompt; its place among the arguments is the fourth."""
    found: list[Tensor] = []
    with torch.no_grad():
        for number in range(2):
            ids = tokens(2, 1, number)
            args = (ids, None, None, cache) if positional else (ids,)
            found.append(model(*args, **({} if positional else passing(model, cache)), use_cache=True).logits)
    return torch.cat(found, 1)


def heads_of(cache: Any, dim: int) -> set[int]:
    return {tensor.shape[dim] for _, tensor in hidden_tensors(cache) if tensor.dim() > 2}


CASES = {"dynamic": (dynamic, 1), "upright": (layered(Upright), 2)}


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(["upright"], CASES))
@pytest.mark.parametrize("plan", ["llama", pytest.param("llama-sequence", marks=pytest.mark.sweep)])
def test_whole_caches_are_cut_to_parts_by_the_guess_that_can_be_proved(plan: str, name: str) -> None:
    stock, example = tiny("llama")
    make, dim = CASES[name]
    cache = filled(stock, make)
    expected = continued(stock, copy.deepcopy(cache))

    def work(model: Any, _: object) -> tuple[list[Tensor], set[int]]:
        model.eval()
        caches = [copy.deepcopy(cache) for _ in range(3)]
        found = [continued(model, caches[i], positional=i == 1) for i in range(3)]
        return found, heads_of(caches[0], dim)

    for logits, heads in on_ranks(stock, f"plans/{plan}.yaml", RANKS, ((), example), work):
        assert heads == {stock.config.num_key_value_heads // RANKS}
        for one in logits:
            torch.testing.assert_close(one, expected)


@pytest.mark.sweep
def test_a_cache_made_for_all_heads_is_cut_by_the_first_call() -> None:
    stock, example = tiny("llama")
    expected = made_whole(stock)
    for found in on_ranks(stock, "plans/llama.yaml", RANKS, ((), example), lambda m, _: made_whole(m.eval())):
        assert torch.equal(found, expected)


@pytest.mark.slow
def test_a_cache_that_tells_heads_apart_is_refused() -> None:
    stock, example = tiny("llama")
    cache = filled(stock, layered(ByHeads))

    def work(model: Any, _: object) -> str:
        with pytest.raises(tpplan.TpplanError, match="TP117") as caught:
            continued(model.eval(), copy.deepcopy(cache))
        return str(caught.value)

    for said in on_ranks(stock, "plans/llama.yaml", RANKS, ((), example), work):
        assert "operations that treat all heads alike" in said


FILLED = [("gpt2", 2), ("gemma3_text", 2), ("llama", 4)]


@pytest.mark.parametrize(("name", "ranks"), slow_but(FILLED[:1], FILLED))
@pytest.mark.sweep
def test_a_cache_that_a_module_inside_has_filled_serves_the_model(name: str, ranks: int) -> None:
    stock, example = tiny(name)

    def generated(model: Any) -> list[Tensor]:
        cache, inner = dynamic(stock.config), model.base_model
        kept: dict[str, Any] = passing(inner, cache) | {"use_cache": True}
        with torch.no_grad():
            found = [inner(tokens(2, length, length), **kept).last_hidden_state for length in (6, 1, 3)]
        return [*found, continued(model, cache)]

    expected = generated(stock)
    for found in on_ranks(stock, f"plans/{name}.yaml", ranks, ((), example), lambda m, _: generated(m.eval())):
        torch.testing.assert_close(found, expected)


def in_tuples(model: Any, first: Any, keyword: str) -> list[Tensor]:
    """Logits of a prompt and of the tokens behind it, each called with the cache in the tuple before."""
    found: list[Tensor] = []
    cache, ids = first, tokens(2, 6)
    with torch.no_grad():
        for number in range(4):
            logits, cache = model(ids, **({} if cache is None else {keyword: cache}), use_cache=True, return_dict=False)
            found.append(logits)
            ids = tokens(2, 1, number)
    return found


@pytest.mark.one_in(6)
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("passes", ["none", "one"])
@pytest.mark.parametrize("keyword", ["its own", "past_key_values"])
def test_a_cache_in_a_tuple_is_for_the_next_call(keyword: str, passes: str) -> None:
    stock, example = tiny("llama")
    keyword = cache_name(stock) if keyword == "its own" else keyword

    def work(model: Any, _: object) -> list[Tensor]:
        return in_tuples(model.eval(), None if passes == "none" else dynamic(stock.config), keyword)

    expected = work(stock, None)
    for found in on_ranks(stock, "plans/llama.yaml", RANKS, ((), example), work):
        torch.testing.assert_close(found, expected)
