"""Quantised caches of transformers on real processes: the unsharded model's tokens, or a refusal that says why."""

from __future__ import annotations

import copy
import functools
import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import tpplan
from tests.caching import cache_of
from tests.marking import in_thirds
from tests.runtime.test_caches import SETTINGS, tiny, tokens
from tests.runtime.world import Member, world
from tpplan.compiler.ir.kept_tensors import inner_tensors

pytest.importorskip("optimum.quanto")
RANKS = 2
HEAD = 6  # features of a head of the tiny Llama


@functools.cache
def _nothing_is_built() -> None:
    """This process unpacks what quanto packs in Python: its extension in C++ takes a minute to build."""
    extension: Any = importlib.import_module("optimum.quanto.library.extensions.cpp").ext
    extension._lib = SimpleNamespace(unpack=_unpacked)


def _unpacked(packed: Tensor, bits: int) -> Tensor:
    return torch.cat([packed >> bits * place & 2**bits - 1 for place in range(8 // bits)])


def generated(model: Any, batch: int, length: int, **options: Any) -> Any:
    """A prompt, and as many tokens as the cache is quantised anew twice."""
    _nothing_is_built()
    config = {"nbits": 4, "q_group_size": HEAD, "residual_length": 3, **options}
    settings = {**SETTINGS, "max_new_tokens": 8, "return_dict_in_generate": True}
    settings["num_beams"] = config.pop("num_beams", 1)
    return model.generate(tokens(batch, length), cache_implementation="quantized", cache_config=config, **settings)


def differing(member: Member, plan: str, ways: list[dict[str, Any]]) -> list[str]:
    """The ways of generating that don't give the stock model's tokens, or whose cache isn't a rank's part."""
    stock, example = tiny(plan.removesuffix("-sequence"))
    stock = stock.float()
    sharded = tpplan.parallelize(copy.deepcopy(stock), f"plans/{plan}.yaml", member.mesh(), example)
    found: list[str] = []
    for way in ways:
        expected = generated(stock, **way)
        made = generated(sharded, **way)
        if not torch.equal(made.sequences, expected.sequences):
            found.append(f"{way}: other tokens")
        part, whole = (_held(cache_of(held)) for held in (made, expected))
        if [(a, b // RANKS, *rest) for a, b, *rest in _shapes(whole)] != _shapes(part):
            found.append(f"{way}: {_shapes(part)}, of {_shapes(whole)}")
        sizes = [sum(inner.nbytes for tensor in held for inner in inner_tensors(tensor)) for held in (part, whole)]
        row = HEAD * 2  # of what is packed, the last one may be empty in part
        if sizes[0] * RANKS > sizes[1] + RANKS * len(part) * row:
            found.append(f"{way}: {sizes[0]} bytes, of {sizes[1]}")
    return found


def _held(cache: Any) -> list[Tensor]:
    return [tensor for layer in cache.layers for tensor in (layer._quantized_keys, layer._quantized_values)]


def _shapes(held: list[Tensor]) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape) for tensor in held]


INT4: dict[str, Any] = {"batch": 2, "length": 8}
EVERY: list[dict[str, Any]] = [
    INT4,
    {"batch": 2, "length": 7},
    {"batch": 2, "length": 8, "nbits": 2},
    {"batch": 1, "length": 8},
    {"batch": 2, "length": 1, "nbits": 2, "residual_length": 2},
    {"batch": 3, "length": 6, "q_group_size": 3},
    {"batch": 2, "length": 8, "residual_length": 1},
    {"batch": 2, "length": 8, "residual_length": 64},
    {"batch": 2, "length": 5, "num_beams": 3},
    {"batch": 2, "length": 5, "num_beams": 2, "residual_length": 1},
    {"batch": 2, "length": 8, "q_group_size": 4, "residual_length": 2},
]
CASES = [("llama", [INT4]), ("llama", EVERY), ("llama-sequence", EVERY)]


@pytest.mark.processes
@pytest.mark.parametrize(("plan", "ways"), in_thirds([], CASES[:1], CASES))
def test_a_quantised_cache_gives_the_stock_models_tokens(plan: str, ways: list[dict[str, Any]]) -> None:
    assert world(RANKS).run(differing, plan, ways) == [[]] * RANKS


def straddling(member: Member) -> list[str]:
    """What comes of groups that may lie in two heads: at even lengths they don't, at odd ones they do."""
    stock, example = tiny("llama")
    stock = stock.float()
    sharded = tpplan.parallelize(copy.deepcopy(stock), "plans/llama.yaml", member.mesh(), example)
    found: list[str] = []
    across = {"axis_key": -1, "axis_value": -1, "q_group_size": 2, "residual_length": 64}
    for length in (8, 7, 6):
        expected = generated(stock, 2, length, **across).sequences
        try:
            found.append(str(torch.equal(generated(sharded, 2, length, **across).sequences, expected)))
        except tpplan.TpplanError as error:
            found.append(str(error))
    return found


@pytest.mark.sweep
@pytest.mark.processes
def test_groups_that_lie_in_two_heads_are_refused_at_the_lengths_at_which_they_do() -> None:
    for even, odd, other in world(RANKS).run(straddling):
        assert (even, other) == ("True", "True")
        assert "TP117" in odd
        assert "`q_group_size` that divides the size of a head" in odd


def one_group(member: Member) -> list[str]:
    """What comes of a prompt of one token after a longer one: quanto groups a single group, of which a rank is left,
    in another way than two of them."""
    stock, example = tiny("llama")
    stock = stock.float()
    sharded = tpplan.parallelize(copy.deepcopy(stock), "plans/llama.yaml", member.mesh(), example)
    assert torch.equal(generated(sharded, 1, 8).sequences, generated(stock, 1, 8).sequences)
    with pytest.raises(tpplan.TpplanError, match="TP117") as caught:
        generated(sharded, 1, 1)
    return str(caught.value).splitlines()[:1]


@pytest.mark.sweep
@pytest.mark.processes
def test_a_size_that_has_dims_exchanged_on_a_rank_alone_is_refused() -> None:
    for said in world(RANKS).run(one_group):
        assert said


def by_another_backend(member: Member) -> str:
    """What is said of a cache that rounds until the mean error of all heads grows; no call has succeeded before."""
    stock, example = tiny("llama")
    stock = stock.float()
    sharded = tpplan.parallelize(copy.deepcopy(stock), "plans/llama.yaml", member.mesh(), example)
    calls: list[object] = []
    sharded.register_forward_hook(lambda *_: calls.append(None))
    with pytest.raises(tpplan.TpplanError, match="TP117") as caught:
        generated(sharded, 2, 8, backend="hqq", axis_key=1, axis_value=1)
    assert not calls
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.processes
def test_a_cache_that_rounds_by_the_numbers_of_all_heads_is_refused_at_once() -> None:
    pytest.importorskip("hqq")
    for said in world(RANKS).run(by_another_backend):
        assert "reads a tensor's values" in said
        assert "hqq" in said
        assert "`quanto`" in said


def test_what_a_packed_tensor_shows_has_no_part_in_its_bytes() -> None:
    """Why packing is followed bit by bit: a rank's bytes are no stretch of the whole's."""
    _nothing_is_built()
    PackedTensor: Any = importlib.import_module("optimum.quanto.tensor.packed").PackedTensor
    whole = torch.arange(16, dtype=torch.uint8).reshape(8, 2) % 16
    parts = [PackedTensor.pack(half, 4) for half in whole.chunk(2)]
    assert torch.equal(torch.cat([part.unpack() for part in parts]), whole)
    packed: Tensor = PackedTensor.pack(whole, 4)._data
    assert not torch.equal(torch.cat([part._data for part in parts]), packed)
