"""Caches that hold tensors of a class of their own: each counts as what its class shows, or the call is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import tpplan
from tests.caching import passing
from tests.marking import in_thirds
from tests.runtime.simulated import on_ranks
from tests.runtime.test_caches import tiny, tokens
from tpplan.state.reads import marks_on

transformers = pytest.importorskip("transformers")
RANKS = 2


class Rounded(Tensor):
    """Numbers as whole ones, with a scale for each row."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Any:
        made: Any = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype, device=codes.device)  # pyright: ignore
        made.codes, made.scale = codes, scale
        return made

    def __init__(self, *_: Any) -> None:  # pyright: ignore[reportInconsistentConstructor]
        super().__init__()

    @classmethod
    def of(cls, x: Tensor, dims: Sequence[int] = (-1,)) -> Any:
        with torch.no_grad():
            scale = x.abs().amax(tuple(dims), keepdim=True) / 100
            return cls((x / scale).round().to(torch.int8), scale)

    def plain(self) -> Tensor:
        return self.codes * self.scale

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Mapping[str, Tensor], *_: Any) -> Any:
        return cls(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(Rounded, lambda held: held.plain(), (args, kwargs or {}))
        return func(*args, **kwargs)


class Mute(Rounded):
    """It shows itself alone."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0]


class Layer(transformers.DynamicLayer):
    """Rounded keys and values, rounded anew with each token."""

    kind = Rounded
    dims: Sequence[int] = (-1,)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        new = [key_states, value_states]
        if self.is_initialized:
            new = [torch.cat([self.read(old), more], -2) for old, more in zip(self.held, new, strict=True)]
        self.held = [self.kind.of(held, self.dims) for held in new]
        self.is_initialized = True
        return new[0], new[1]

    def read(self, held: Any) -> Tensor:
        return held.plain()

    def get_seq_length(self) -> int:
        return self.held[0].shape[-2] if self.is_initialized else 0


class Used(Layer):
    """It leaves it to the tensor's class what the tensor is in an operation."""

    def read(self, held: Any) -> Tensor:
        return held + 0


class Shifted(Rounded):
    """What it shows is put together in place."""

    def plain(self) -> Tensor:
        shown = self.codes * self.scale
        shown += self.scale
        return shown.reshape(self.shape)


class InPlace(Layer):
    kind = Shifted


class ShiftedTwice(InPlace):
    """It does once more what the tensor's class does in place."""

    def read(self, held: Any) -> Tensor:
        shown = held.codes * held.scale
        shown += held.scale
        shown += held.scale
        return shown.reshape(held.shape)


class Unshifted(InPlace):
    """It leaves out what the tensor's class does in place."""

    def read(self, held: Any) -> Tensor:
        return (held.codes * held.scale).reshape(held.shape)


class ShiftedLater(InPlace):
    """It does in another order what the tensor's class does: the result is a copy, or it isn't."""

    def read(self, held: Any) -> Tensor:
        shown = held.codes * held.scale
        found = shown.reshape(held.shape).clone()
        shown += held.scale
        return found


class Muted(Layer):
    kind = Mute


class OneScale(Layer):
    """One scale for all heads, which no rank knows."""

    dims = (1, 2, 3)


class Peeking(Layer):
    """It reads what the tensor keeps, and not what it shows."""

    def read(self, held: Any) -> Tensor:
        return held.codes * (held.scale * 2)


class Twice(Layer):
    """It does to what the tensor shows what its class does to show it."""

    def read(self, held: Any) -> Tensor:
        return held.codes * held.scale * held.scale


class Across(Layer):
    """It makes another tensor of the same inner ones, whose rows are exchanged."""

    def read(self, held: Any) -> Tensor:
        return held.codes.flip(1) * held.scale


class Alone(Layer):
    """It reads one of the inner tensors."""

    def read(self, held: Any) -> Tensor:
        return held.plain() + held.scale


class Writing(Layer):
    """It writes to what the tensor keeps."""

    def read(self, held: Any) -> Tensor:
        held.codes.mul_(2)
        return held.plain()


def cache_of(kind: type[Any], config: Any) -> Any:
    return transformers.Cache(layers=[kind() for _ in range(config.num_hidden_layers)])


def logits_of(model: Any, kind: type[Any], batch: int = 2) -> tuple[Tensor, Any]:
    """Of a prompt and some tokens."""
    cache = cache_of(kind, model.config)
    with torch.no_grad():
        found = [
            model(tokens(batch, length, length), **passing(model, cache), use_cache=True).logits
            for length in (5, 1, 1, 2)
        ]
    return torch.cat(found, 1), cache


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["llama", pytest.param("llama-sequence", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", [Layer, *(pytest.param(kind, marks=pytest.mark.slow) for kind in (Used, InPlace))])
def test_a_rank_keeps_its_heads_and_computes_the_same(plan: str, kind: type[Any]) -> None:
    stock, example = tiny("llama")
    expected, whole = logits_of(stock, kind)
    heads = stock.config.num_key_value_heads

    def work(model: Any, _: object) -> tuple[Tensor, Any]:
        return logits_of(model.eval(), kind)

    for logits, cache in on_ranks(stock, f"plans/{plan}.yaml", RANKS, ((), example), work):
        torch.testing.assert_close(logits, expected)
        for ours, theirs in zip(cache.layers, whole.layers, strict=True):
            assert type(ours.held[0]) is type(theirs.held[0])
            assert ours.held[0].codes.shape[1] == heads // RANKS


REFUSED = {
    Muted: "doesn't show what it holds",
    OneScale: "reduces over a sharded dim",
    Peeking: "in another way than that class shows it",
    ShiftedTwice: "in another way than that class shows it",
    Unshifted: "in another way than that class shows it",
    ShiftedLater: "in another way than that class shows it",
    Twice: "in another way than that class shows it",
    Across: "in another way than that class shows it",
    Alone: "in another way than that class shows it",
    Writing: "writes to a tensor that a `Rounded` keeps",
}


@pytest.mark.parametrize("kind", in_thirds([OneScale], [Peeking, *[*REFUSED][::2]], REFUSED))
def test_what_no_proof_can_follow_is_refused(kind: type[Any]) -> None:
    stock, example = tiny("llama")

    def work(model: Any, _: object) -> str:
        with pytest.raises(tpplan.TpplanError, match="TP117") as caught:
            logits_of(model.eval(), kind)
        return str(caught.value)

    for said in on_ranks(stock, "plans/llama.yaml", RANKS, ((), example), work):
        assert REFUSED[kind] in said


def test_what_a_class_keeps_is_no_mark_on_its_tensors() -> None:
    kept = Rounded.of(torch.randn(2, 3))
    kept.wide = True
    assert marks_on(kept, {".codes", ".scale", ".wide"}) == {"wide": True}


def test_a_cache_that_the_unsharded_model_has_filled_is_refused() -> None:
    stock, example = tiny("llama")
    _, cache = logits_of(stock, Layer)

    def work(model: Any, _: object) -> str:
        with pytest.raises(tpplan.TpplanError, match="TP117") as caught, torch.no_grad():
            model.eval()(tokens(2, 1), **passing(model, cache), use_cache=True)
        return str(caught.value)

    for said in on_ranks(stock, "plans/llama.yaml", RANKS, ((), example), work):
        assert "no other model or plan has filled" in said
