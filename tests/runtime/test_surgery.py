"""Surgery on the modules of a sharded model: the first call after it tells, whichever way it was done, or is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import tpplan
from tests.compiler.toys import HIDDEN, MLP, Mlp
from tests.marking import in_thirds
from tests.runtime.simulated import on_ranks, worst
from tests.runtime.test_changes import EXAMPLE, RULES, TOLERANCE, Model, x
from tpplan.calls.guard import CallGuard


class Listed(Model):
    """Blocks in every kind of container."""

    def __init__(self) -> None:
        super().__init__()
        self.tail = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.GELU())
        self.named = nn.ModuleDict({"one": nn.Linear(HIDDEN, HIDDEN)})
        self.scales = nn.ParameterDict({"one": nn.Parameter(torch.ones(HIDDEN))})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tail(super().forward(x))
        for name, module in self.named.items():
            x = module(x) * self.scales[name]
        return x


def stock() -> nn.Module:
    torch.manual_seed(0)
    return Listed().double()


def linear() -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(HIDDEN, HIDDEN).double()


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def as_buffer(layer: Any) -> None:
    weight = layer.weight.detach()
    del layer.weight
    layer.register_buffer("weight", weight)


def swap(blocks: Any) -> None:
    blocks[0], blocks[1] = blocks[1], blocks[0]


SURGERY: dict[str, Callable[[Any], object]] = {
    "set": lambda m: setattr(m, "tail", linear()),
    "delete": lambda m: delattr(m.blocks[0], "act"),
    "table": lambda m: m.blocks[0]._modules.__setitem__("q", linear()),
    "append": lambda m: m.blocks.append(linear()),
    "insert": lambda m: m.blocks.insert(0, linear()),
    "pop": lambda m: m.blocks.pop(0),
    "pop the last": lambda m: m.blocks.pop(-1),
    "extend": lambda m: m.blocks.extend([linear()]),
    "sequential append": lambda m: m.tail.append(linear()),
    "sequential insert": lambda m: m.tail.insert(0, linear()),
    "sequential delete": lambda m: m.tail.__delitem__(1),
    "dict": lambda m: m.named.update({"two": linear()}),
    "dict pop": lambda m: m.named.pop("one"),
    "dict clear": lambda m: m.named.clear(),
    "submodule": lambda m: m.set_submodule("blocks.0.mlp.up", linear()),
    "register": lambda m: m.blocks[0].q.register_parameter("extra", nn.Parameter(torch.ones(1))),
    "parameter": lambda m: m.blocks[0].q._parameters.__setitem__("weight", linear().weight),
    "parameter to buffer": lambda m: as_buffer(m.blocks[0].q),
    "parameter in a dict": lambda m: m.scales.__setitem__("one", nn.Parameter(torch.ones(2))),
    "parametrization": lambda m: parametrize.register_parametrization(m.tail[0], "weight", Doubled(), unsafe=True),
    "a layer elsewhere": lambda m: setattr(m.blocks[1], "q", m.blocks[0].q),
    "swap": lambda m: swap(m.blocks),
    "swap in the table": lambda m: m.blocks._modules.update({"0": m.blocks[1], "1": m.blocks[0]}),
    "the same twice": lambda m: m.blocks.__setitem__(1, m.blocks[0]),
}


_QUICK = ("insert", "dict pop", "parameter", "parameter to buffer", "parametrization", "swap in the table")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", in_thirds(_QUICK, [*SURGERY][::2], SURGERY))
def test_surgery_is_told_at_the_next_call_and_at_each_after_it(kind: str) -> None:
    def work(model: Any, _: CallGuard) -> list[str]:
        model(x())
        SURGERY[kind](model)
        return [told(model), told(model)]

    for texts in on_ranks(stock(), RULES, 2, EXAMPLE, work):
        assert all(text.startswith("TP130") and "apply adapters first" in text for text in texts), texts


def told(model: Any) -> str:
    try:
        model(x())
    except tpplan.TpplanError as error:
        return str(error)
    return "nothing was told"


def same_again(model: Any) -> None:
    model.blocks[0]._modules["act"] = model.blocks[0].act
    model.tail[0]._parameters["weight"] = model.tail[0].weight


def scaled(model: Any) -> None:
    with torch.no_grad():
        model.blocks[0].q.weight.mul_(2)
        model.tail[0].weight.data.mul_(0.5)


@pytest.mark.parametrize("change", [same_again, scaled])
def test_what_is_no_surgery_stays_allowed(change: Callable[[Any], None]) -> None:
    assert max(worst(stock(), RULES, 2, EXAMPLE, [((x(),), {}), change, ((x(),), {})])) < TOLERANCE


def test_a_module_that_is_called_by_itself_tells_of_surgery_inside() -> None:
    def work(model: Any, _: CallGuard) -> str:
        model.blocks[0]._modules["q"] = linear()
        return told(model.blocks[0])

    assert all(text.startswith("TP130") for text in on_ranks(stock(), RULES, 2, EXAMPLE, work))


class Halved(nn.Module):
    """A step that can be undone."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight / 2

    def right_inverse(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


def halved() -> nn.Module:
    model = Mlp().double()
    parametrize.register_parametrization(model.up, "weight", Halved())
    parametrize.register_parametrization(model.down, "weight", Halved())
    return model


def assigned(model: Any) -> None:
    for layer in (model.up, model.down):
        shape = layer.weight.shape
        layer.weight = torch.linspace(-1, 1, shape.numel(), dtype=torch.float64).reshape(shape)


def test_a_parametrized_weight_may_be_assigned() -> None:
    assert max(worst(halved(), MLP, 2, EXAMPLE, [((x(),), {}), assigned, ((x(),), {})])) < TOLERANCE


@pytest.mark.parametrize("name", ["up", "down"])
@pytest.mark.parametrize("kept", [True, False])
def test_what_breaks_a_parametrization_is_refused_and_changes_nothing(name: str, kept: bool) -> None:
    def work(model: Any, _: CallGuard) -> list[str]:
        before, layer, texts = model(x()), getattr(model, name), list[str]()
        for act in (
            lambda: parametrize.remove_parametrizations(layer, "weight", leave_parametrized=kept),
            lambda: setattr(layer, "weight", torch.ones(3, dtype=torch.float64)),
        ):
            with pytest.raises(tpplan.TpplanError) as raised:
                act()
            texts.append(str(raised.value))
        assert torch.equal(model(x()), before)
        return texts

    for removed, other in on_ranks(halved(), MLP, 2, EXAMPLE, work):
        assert removed.startswith("TP130") and "before `parallelize`" in removed
        assert other.startswith("TP130") and "same shape and dtype" in other
