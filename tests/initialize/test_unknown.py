"""Models whose initialisation isn't known, or can't be recorded: which modules, why, and the way out; no change."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tpplan
from tests.initialize.compare import SEED, differences, on_meta, stock_of, unlike
from tpplan.initialize import InitializationError


def linear() -> nn.Module:
    return nn.Linear(4, 4)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)


class Holds(nn.Module):
    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = inner


class Draws(Base):
    def __init__(self) -> None:
        super().__init__()
        nn.init.normal_(self.a.weight)


class Applies(Base):
    def __init__(self) -> None:
        super().__init__()
        self.apply(print)


class Writes(Base):
    def __init__(self) -> None:
        super().__init__()
        self.a.weight.data *= 2


class WritesData(Base):
    def __init__(self) -> None:
        super().__init__()
        weight = self.a.weight.data
        weight *= 2


class Scales(Base):
    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.a.weight *= 2


class Owns(Base):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


class Buffers(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(3))


class Ties(Base):
    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Linear(4, 4)
        self.b.weight = self.a.weight


class Turns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        first = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)
        self.a = first


class Reverses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)][::-1])


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        nn.Linear(2, 2)
        self.a = nn.Linear(4, 4)


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = len([nn.Linear(2, 2)])
        self.a = nn.Linear(4, 4)


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = [nn.Linear(2, 2)]
        self.a = nn.Linear(4, 4)


class Again(Base):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)


class Loops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for _ in range(2):
            self.a = nn.Linear(4, 4)


class Copies(Base):
    def __init__(self) -> None:
        super().__init__()
        self.b = copy.deepcopy(self.a)


class Calls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = linear()


class Wraps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.holds = Holds(nn.Linear(4, 4))


class Taken(nn.Module):
    def __init__(self, kind: Any = nn.Linear) -> None:
        super().__init__()
        self.a = kind(4, 4)


class Pretrained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Embedding.from_pretrained(torch.ones(3, 4))


class Overrides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)


class Prunes(Base):
    def __init__(self) -> None:
        super().__init__()
        self.a.requires_grad_(False)


REFUSED: dict[type[nn.Module], str] = {
    Draws: "`Draws`: its `__init__` calls `nn.init.normal_`, in line",
    Applies: "calls `self.apply`",
    Writes: "changes `self.a.weight.data`",
    WritesData: "uses `self.a.weight.data`",
    Scales: "has more than assignments (`With`)",
    Owns: "calls `nn.Parameter`",
    Buffers: "calls `self.register_buffer`",
    Ties: "changes `self.b.weight`",
    Turns: "makes modules that it doesn't keep under one name",
    Reverses: "picks out of modules that it makes",
    Drops: "makes a `Linear` that it doesn't keep",
    Counts: "makes modules that it doesn't keep under one name",
    Lists: "makes modules that it doesn't keep under one name",
    Again: "makes `a` twice",
    Loops: "makes modules that it doesn't keep under one name",
    Copies: "calls `copy.deepcopy`",
    Calls: "calls `linear`",
    Wraps: "makes a `Linear` that it doesn't keep",
    Taken: "calls `kind`",
    Pretrained: "calls `nn.Embedding.from_pretrained`",
    Overrides: "it has a `__setattr__` of its own",
    Prunes: "calls `self.a.requires_grad_`",
}


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_constructors_that_may_do_more(kind: type[nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(4, 4)).append(on_meta(kind)).to("meta")
    state = torch.get_rng_state()
    with pytest.raises(InitializationError) as raised:
        tpplan.init_weights(model)
    text = str(raised.value)
    assert REFUSED[kind] in text and "TP143" in text and "build=lambda: Model(…)" in text and "(1" in text
    assert all(held.is_meta for held in model.parameters()) and torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("kind", [kind for kind in REFUSED if kind is not Pretrained], ids=lambda kind: kind.__name__)
def test_they_are_built_by_build(kind: Callable[[], nn.Module]) -> None:
    with torch.device("cpu"):
        model = kind().to("meta") if kind not in (Ties,) else on_meta(kind)
    assert differences(kind, model, kind) == []


def test_modules_that_were_made_elsewhere() -> None:
    with pytest.raises(InitializationError, match="its `inner` was made elsewhere"):
        tpplan.init_weights(on_meta(lambda: Holds(nn.Linear(4, 4))))
    assert differences(lambda: Holds(nn.ReLU()), on_meta(lambda: Holds(nn.ReLU()))) == []


def test_ties_among_torchs_own() -> None:
    model: Any = on_meta(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    model[1].weight = model[0].weight
    with pytest.raises(InitializationError, match="tied parameters"):
        tpplan.init_weights(model)


def test_torchs_own_that_copy_or_reset_more() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True, device="meta")
    with pytest.raises(InitializationError, match=r"`TransformerEncoder`: it does more.*\(0\)"):
        tpplan.init_weights(nn.Sequential(nn.TransformerEncoder(layer, 2)))
    with pytest.raises(InitializationError, match="`Transformer`: it does more"):
        tpplan.init_weights(nn.Transformer(8, 2, 1, 1, 8, device="meta"))


def test_all_are_named_with_their_number() -> None:
    model = on_meta(lambda: nn.Sequential(*[Draws() for _ in range(5)], Owns()))
    with pytest.raises(InitializationError) as raised:
        tpplan.init_weights(model)
    assert "how 6 of the model's modules" in str(raised.value) and "(0, 1, 2 and 2 more)" in str(raised.value)


def test_a_reset_that_leaves_something() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))).to("meta")
    with pytest.raises(InitializationError, match="TP143"):
        tpplan.init_weights(model)


def test_a_build_on_meta() -> None:
    model = on_meta(linear)
    with pytest.raises(InitializationError, match=r"makes tensors on `meta` at .*test_unknown.py:"):
        tpplan.init_weights(model, build=lambda: on_meta(linear))
    torch.manual_seed(SEED)
    with torch.device("meta"):  # around the call, it's for the caller's own tensors
        tpplan.init_weights(model, build=linear)
    assert unlike(model, stock_of(linear)[0]) == []


def test_a_build_that_fails_leaves_all_as_it_was() -> None:
    def build() -> nn.Module:
        torch.manual_seed(3)
        raise ZeroDivisionError("no layers")

    model = on_meta(linear)
    state = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError, match="no layers"):
        tpplan.init_weights(model, build=build)
    assert model.weight.is_meta and torch.equal(torch.get_rng_state(), state)


def test_a_tie_that_the_stock_model_has_not() -> None:
    model: Any = on_meta(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    model[1].weight = model[0].weight
    with pytest.raises(InitializationError, match=r"TP144(.|\n)*`0.weight`, `1.weight` are one tensor in the model"):
        tpplan.init_weights(model, build=lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))


def test_what_cant_be_recorded() -> None:
    def build() -> nn.Module:
        model = nn.Linear(4, 4)
        with torch.no_grad():
            model.weight.copy_(torch.rand(4, 4).to_sparse().to_dense())
        return model

    model, state = on_meta(linear), torch.get_rng_state()
    with pytest.raises(InitializationError, match=r"TP143.*makes a sparse tensor, which can't be recorded"):
        tpplan.init_weights(model, build=build)
    assert model.weight.is_meta and torch.equal(torch.get_rng_state(), state)


class Gap(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


def test_a_module_without_a_constructor() -> None:
    make = lambda: nn.Sequential(Gap(), nn.Linear(3, 3))  # noqa: E731
    assert differences(make, on_meta(make)) == []
