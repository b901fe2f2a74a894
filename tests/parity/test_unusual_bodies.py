"""Bodies that treat parameters in their own way: chosen by size, replaced for a call, written to."""

from __future__ import annotations

import copy
from abc import ABC
from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import tpplan
from tests.runtime import simulated
from tpplan.compat.dtensors import local_of
from tpplan.parity.rank import SimulatedDistributor
from tpplan.parity.threads import ThreadCommunicator, run_ranks
from tpplan.parity.verification import verify_program
from tpplan.plan import CompileError
from tpplan.runtime.lower import lower
from tpplan.suggest import search

T = TypeVar("T")
PLAN = {"version": 1, "modules": {"up": "colwise", "down": "rowwise"}}


class Body(nn.Module):
    def __init__(self, how: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)
        self.how = how
        self.a, self.b = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))

    def pair(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self, x)


def chooses_by_size(m: Any, x: Tensor) -> Tensor:
    return m.pair(x) * (m.a if x.shape[1] > 3 else m.b)


def replaces_columns(m: Any, x: Tensor) -> Tensor:
    return m.down(functional_call(m.up, {"weight": m.up.weight * 2}, (x,)).relu())


def replaces_rows(m: Any, x: Tensor) -> Tensor:
    return functional_call(m.down, {"weight": m.down.weight * 2}, (m.up(x).relu(),))


def replaces_a_norm(m: Any, x: Tensor) -> Tensor:
    return functional_call(m.norm, {"weight": m.norm.weight + 1}, (m.pair(x),)) * m.norm.weight


def reads_after_the_call(m: Any, x: Tensor) -> Tensor:
    return m.norm(m.pair(x)) * m.norm.weight + m.norm.bias


def clamps(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.up.weight.clamp_(-0.1, 0.1)
        m.up.bias.clamp_(-0.01, 0.01)
        m.a.clamp_(max=0.5)
    return m.pair(x) * m.a


def clamps_data(m: Any, x: Tensor) -> Tensor:
    m.a.data.clamp_(max=0.5)
    return m.pair(x) * m.a


def clamps_split_data(m: Any, x: Tensor) -> Tensor:
    m.up.weight.data.clamp_(-0.1, 0.1)
    return m.pair(x)


def shrinks(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.up.weight.copy_(m.up.weight * 0.5)
    return m.pair(x)


RIGHT = [
    chooses_by_size, replaces_columns, replaces_rows, replaces_a_norm, reads_after_the_call, clamps, clamps_data,
    shrinks,
]  # fmt: skip


def stepped(model: nn.Module, inputs: list[Tensor]) -> list[Tensor]:
    """Results of calls with backwards between them."""
    results: list[Tensor] = []
    for x in inputs:
        results.append(model(x))
        results[-1].square().sum().backward()
    return [y.detach() for y in results]


def worst(how: Callable[[Any, Tensor], Tensor]) -> float:
    """The largest error of a result, a parameter or a gradient on two ranks."""
    torch.manual_seed(0)
    stock = Body(how).double()
    inputs = [torch.randn(2, length, 8, dtype=torch.float64) for length in (3, 5, 3)]
    program = tpplan.compile_plan(stock, PLAN, 2, inputs[0])
    whole = copy.deepcopy(stock)
    expected = stepped(whole, inputs)
    after = dict(whole.named_parameters())

    def work(axis: ThreadCommunicator) -> list[float]:
        distributor = SimulatedDistributor(axis)
        own = lower(copy.deepcopy(stock), program, distributor)
        errors = [float((a - b).abs().max()) for a, b in zip(stepped(own, inputs), expected, strict=True)]
        held = dict(own.named_parameters())
        for placement in program.parameters:
            mine, theirs = held[placement.name], after[placement.name]
            for a, b in ((mine.data, theirs.data), (mine.grad, theirs.grad)):
                if b is not None:
                    assert a is not None, placement.name
                    part = local_of(distributor.distribute(b, placement))
                    errors.append(float((local_of(a) - part).abs().max() / b.abs().max().clamp(min=1)))
        return errors

    return max(error for errors in run_ranks(2, work) for error in errors)


@pytest.mark.parametrize("how", RIGHT)
def test_a_body_may_treat_its_parameters_so(how: Callable[[Any, Tensor], Tensor]) -> None:
    assert worst(how) < 1e-12


def normalizes(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.up.weight.div_(m.up.weight.norm())
    return m.pair(x)


def normalizes_data(m: Any, x: Tensor) -> Tensor:
    m.up.weight.data.div_(m.up.weight.data.norm())
    return m.pair(x)


def clamps_what_is_added_once(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.down.bias.clamp_(-0.01, 0.01)
    return m.pair(x)


@pytest.mark.parametrize("how", [normalizes, normalizes_data, clamps_split_data, clamps_what_is_added_once])
def test_what_needs_a_whole_parameter_is_refused(how: Callable[[Any, Tensor], Tensor]) -> None:
    with pytest.raises(CompileError, match=r"TP107|TP113"):
        worst(how)


class WritesToItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x.add_(1), (8,), self.weight)


def test_a_body_may_write_to_the_part_that_it_gets() -> None:
    """Autograd allows no writes to a view that a function of its own has made, as a slice is."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.norm = nn.Embedding(20, 8), WritesToItsInput()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, ids: Tensor) -> Tensor:
            return self.down(self.up(self.norm(self.table(ids) * 2)).relu())

    torch.manual_seed(0)
    plan = {"version": 1, "modules": PLAN["modules"] | {"norm": "sequence"}}  # pyright: ignore
    report = tpplan.verify(Net().double(), plan, 2, (torch.randint(20, (2, 6)),))
    assert report.ok
    assert report.collectives == report.predicted


def writes_a_part(m: Any, x: Tensor) -> Tensor:
    kept = torch.zeros(x.shape, dtype=x.dtype)
    kept[:, 1:] = x[:, 1:]
    return m.pair(x) + kept


def writes_and_passes(m: Any, x: Tensor) -> Tensor:
    kept = torch.full(x.shape, 0.5, dtype=x.dtype)
    kept.copy_(x)
    return m.pair(kept)


@pytest.mark.parametrize("how", [writes_a_part, writes_and_passes])
def test_what_is_made_without_a_device_has_the_gradient_of_what_is_written_to_it(how: Any) -> None:
    torch.manual_seed(0)
    calls = [((torch.randn(3, 6, 8, dtype=torch.float64, requires_grad=grad),), {}) for grad in (True, False)]
    rules = {"norm": "sequence", "up": "colwise", "down": "rowwise"}
    stock = Body(lambda m, x: how(m, m.norm(x))).double()
    assert max(simulated.worst(stock, rules, 2, calls[0], calls)) < 1e-12


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"pooled": self.down(self.up(x).relu())}


class Counts:
    """An object that bodies write to: they can't run from their records."""

    calls = 0


class TakenApart(nn.Module):
    """Attention that is cut by sizes which the module keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.width, self.qkv, self.out = 16, nn.Linear(16, 64, bias=False), nn.Linear(32, 16, bias=False)

    def forward(self, x: Tensor, counts: Counts) -> Tensor:
        counts.calls += 1
        query, key, value = self.qkv(x).split([self.width, self.width, 2 * self.width], -1)
        query, key = (t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in (query, key))
        value = value.unflatten(-1, (-1, 8)).transpose(1, 2)
        return x + self.out((query @ key.transpose(2, 3) @ value).transpose(1, 2).flatten(2))


class Rewriting(nn.Module):
    """A model writes to the container that its tower returned."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.layers = Tower(), nn.ModuleList([TakenApart(), TakenApart()])

    def forward(self, x: Tensor, pictures: Tensor) -> Tensor:
        seen = self.tower(pictures)
        seen["pooled"] = seen["pooled"].split([4, 4])
        x, counts = x + torch.stack(seen["pooled"]).mean(1, keepdim=True), Counts()
        for layer in self.layers:
            x = layer(x, counts)
        return x


def test_a_caller_may_write_to_the_container_that_it_gets() -> None:
    torch.manual_seed(0)
    stock = Rewriting().double()
    call = ((torch.randn(2, 6, 16, dtype=torch.float64), torch.randn(8, 16, dtype=torch.float64)), {})
    found = search(stock, 2, *call, False)
    assert {"layers.0.qkv", "layers.1.out", "tower.up"} <= found.settings.keys()
    parity = verify_program(stock, found.program, call)
    assert not parity.problems and parity.max_error < 1e-12


class Abstract(ABC, nn.Linear):
    """Of no class with a `__dict__` first, so that Python gives its objects other memory than `nn.Linear`'s."""

    derived: ClassVar[list[str]] = []

    def __init_subclass__(cls) -> None:
        Abstract.derived.append(cls.__name__)


class Typed(Generic[T], nn.Linear):
    pass


class Model(ABC, Body):
    pass


class Sealed(nn.Linear):
    def __init_subclass__(cls) -> None:
        raise TypeError("nobody derives from this")


@pytest.mark.parametrize("kind", [Abstract, Typed])
def test_a_class_may_have_a_base_without_attributes_first(kind: type[nn.Linear]) -> None:
    model = Model(Body.pair)
    model.up, model.down = kind(8, 16), kind(16, 8)
    report = tpplan.verify(model, PLAN, 2, torch.randn(2, 4, 8, requires_grad=True))
    assert report.ok, report.problems
    assert len(Abstract.derived) == len({*Abstract.derived})  # a registry has each class once


def test_a_class_that_nobody_derives_from_is_refused_by_name() -> None:
    model = Body(Body.pair)
    model.up = Sealed(8, 16)
    with pytest.raises(CompileError, match=r"TP112.*`tests.*Sealed`.*nobody derives(.|\n)*__init_subclass__"):
        tpplan.compile_plan(model, PLAN, 2, torch.randn(2, 4, 8))
