"""What is around a call, on simulated ranks: modes, caches of torch's, checkpoints, methods that are replaced."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

import tpplan
from tests.runtime.simulated import Call, Change, on_ranks, plan_of, stepped, worst
from tests.runtime.test_ambience import Functions
from tpplan.calls.guard import CallGuard
from tpplan.compat.dtensors import local_of
from tpplan.compiler.request import Request
from tpplan.rehearsal.prove import prove

TOLERANCE = 1e-12
PLAN = {"up": "colwise", "down": "rowwise"}


class Body(nn.Module):
    """A column and a row."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.middle(self.up(x)))

    def middle(self, h: Tensor) -> Tensor:
        return h.relu()


class Mapped(Body):
    def middle(self, h: Tensor) -> Tensor:
        return torch.func.vmap(lambda row: row.tanh() * 2)(h)  # pyright: ignore


class Normed(Body):
    def __init__(self) -> None:
        super().__init__()
        weight_norm(self.up)


class Recorded(Body):
    def middle(self, h: Tensor) -> Tensor:
        h = h * 1.5 if torch.is_grad_enabled() else h
        return h.softmax(-1) if h.requires_grad else h.relu()


class Offloading(Body):
    """Keeps what its backward reads on the CPU."""

    def forward(self, x: Tensor) -> Tensor:
        with save_on_cpu():
            h = self.up(x)
            return self.down(h.tanh() * h.sigmoid())


def test_a_body_may_keep_on_the_cpu_what_its_backward_reads() -> None:
    stock = made(Offloading)
    prove(Request(stock, plan_of(PLAN), 2, *call()))
    assert max(worst(stock, PLAN, 2, call(), [call(), call(12)])) < TOLERANCE


class InnerGradient(Body):
    def middle(self, h: Tensor) -> Tensor:
        with torch.enable_grad():
            inner = h.detach().requires_grad_()
            (slope,) = torch.autograd.grad(inner.tanh().sum(), inner)
        return h * slope


def call(length: int = 8) -> Call:
    x = torch.randn(2, length, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(length))
    return ((x,), {})


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


AROUND: dict[str, tuple[type[nn.Module], Callable[[], AbstractContextManager[Any]]]] = {
    "a mode around a body that maps": (Mapped, Functions),
    "cached weights": (Normed, parametrize.cached),
    "no gradients": (Recorded, torch.no_grad),
    "inference": (Recorded, torch.inference_mode),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", AROUND)
def test_a_call_computes_the_same_inside_of(name: str) -> None:
    kind, around = AROUND[name]
    stock = made(kind)

    def run(model: nn.Module) -> list[Tensor]:
        found: list[Tensor] = []
        for length in (8, 12, 8):
            with around():
                found.append(stepped(model, call(length))[0])
            found.append(stepped(model, call(length))[0])
        return found

    expected = run(stock)
    for found in on_ranks(stock, PLAN, 1 if "mode" in name or "cached" in name else 2, call(), lambda m, _: run(m)):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCE)


def test_a_checkpoint_of_a_model_that_takes_gradients_recomputes_it_amid_its_forward() -> None:
    def run(model: nn.Module) -> dict[str, Tensor]:
        model.zero_grad()
        (x,), _ = call()
        result: Any = checkpoint(model, x, use_reentrant=False)
        result.square().sum().backward()
        return {name: local_of(p.grad) for name, p in model.named_parameters() if p.grad is not None}

    stock = made(InnerGradient)
    expected = run(stock)
    for found in on_ranks(stock, PLAN, 2, call(), lambda model, _: [run(model), run(model)]):
        for gradients in found:
            torch.testing.assert_close(gradients["down.bias"], expected["down.bias"], rtol=0, atol=TOLERANCE)


class Grows(Body):
    """Makes a longer buffer where it needs one."""

    def __init__(self, registers: bool = False) -> None:
        super().__init__()
        self.registers = registers
        self.table: Tensor
        self.register_buffer("table", torch.arange(8.0)[:, None].sin())

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        if length > self.table.shape[0]:
            made = torch.arange(length, dtype=x.dtype)[:, None].sin()
            if self.registers:
                self.register_buffer("table", made, persistent=False)
            else:
                self.table = made
        return self.down((self.up(x) + self.table[:length]).relu())


@pytest.mark.parametrize("registers", [False, True])
def test_a_forward_may_replace_a_buffer(registers: bool) -> None:
    torch.manual_seed(0)
    calls: list[Call | Change] = [call(length) for length in (8, 12, 8, 10, 16, 12, 6, 16)]
    assert max(worst(Grows(registers).double(), PLAN, 2, call(), calls)) < TOLERANCE


@pytest.mark.parametrize("kind", ["root", "block"])
def test_a_method_that_is_replaced_is_followed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def across(_: Body, h: Tensor) -> Tensor:
        return h.tanh() * 3

    stock = made(Body)
    model = stock if kind == "root" else nn.Sequential(stock)
    plan = PLAN if kind == "root" else {f"0.{name}": style for name, style in PLAN.items()}

    def work(own: nn.Module, _: CallGuard) -> list[Tensor]:
        found = [stepped(own, call())[0]]
        with monkeypatch.context() as patched:
            patched.setattr(Body, "middle", across)
            found += [stepped(own, call())[0], stepped(model, call())[0]]
        return [*found, stepped(own, call())[0], stepped(model, call())[0]]

    ((before, changed, expected, after, stock_after),) = on_ranks(model, plan, 1, call(), work)
    torch.testing.assert_close([changed, after], [expected, stock_after], rtol=0, atol=TOLERANCE)
    assert torch.equal(before, after) and not torch.equal(before, changed)


class PartlyRecomputed(Body):
    """A checkpoint of a part of its body, which reads a setting and calls a module."""

    def __init__(self, reentrant: bool, scale: float = 1.0, counts: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.reentrant, self.scale, self.counts, self.count = reentrant, scale, counts, 0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + checkpoint(self.part, x, use_reentrant=self.reentrant))  # pyright: ignore

    def part(self, x: Tensor) -> Tensor:
        if self.counts:
            self.count += 1
        return self.norm(x) * self.scale


def doubling(_module: nn.Module, _arguments: Any, result: Tensor) -> Tensor:
    return result * 2


@pytest.mark.parametrize("change", ["scale", "hook"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_part_is_not_recomputed_in_another_state(reentrant: bool, change: str) -> None:
    def loop(model: nn.Module, _: CallGuard) -> str:
        result = model(call(4)[0][0].requires_grad_()).sum()
        if change == "scale":
            setattr(model, "scale", 3.0)  # noqa: B010
        else:
            model.get_submodule("norm").register_forward_hook(doubling)
        with pytest.raises(tpplan.TpplanError) as raised:
            result.backward()
        return str(raised.value)

    found = on_ranks(PartlyRecomputed(reentrant).double(), PLAN, 2, call(4), loop)
    assert all("TP175" in text and "was changed since the call" in text for text in found), found


@pytest.mark.one_in(3)
@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_part_is_recomputed_after_other_calls_and_changes_taken_back(reentrant: bool, counts: bool) -> None:
    def steps(model: Any) -> list[Tensor]:
        x, other = (call(length)[0][0].requires_grad_() for length in (4, 6))
        result = model(x).square().sum()
        model.scale = 3.0
        with torch.no_grad():
            model(other)
        model.scale = 1.0
        result = result + model(other).square().sum()
        if not counts:
            model.extra = 2  # nothing reads it
        result.backward()
        assert x.grad is not None and other.grad is not None
        return [result.detach(), x.grad, other.grad]

    def loop(model: nn.Module, _: CallGuard) -> list[Tensor]:
        return steps(model)

    stock = PartlyRecomputed(reentrant, counts=counts).double()
    found = on_ranks(stock, PLAN, 2, call(4), loop)
    expected = steps(stock)
    assert all((a - b).abs().max() < TOLERANCE for ours in found for a, b in zip(ours, expected, strict=True))
