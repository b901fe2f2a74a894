"""What a body may ask for beside sizes, dtypes and flags: part of a call's kind if it asks, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tpplan
from tests.compiler.toys import HIDDEN, MLP, plan_of
from tests.runtime.simulated import on_ranks, worst
from tpplan.calls.guard import CallGuard

TOLERANCE = 1e-12


class Body(nn.Module):
    """A column and a row; where `asks` says so, all features are needed at once."""

    def __init__(self, asks: Callable[[Any, Tensor], object]) -> None:
        super().__init__()
        self.up, self.down, self.asks = nn.Linear(HIDDEN, 24), nn.Linear(24, HIDDEN), asks

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(h.softmax(-1) if self.asks(self, x) else h.relu())


def x() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(3, 12, HIDDEN, dtype=torch.float64, generator=generator).requires_grad_()


def turned() -> Tensor:
    return x().detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()


def gapped() -> Tensor:
    return torch.cat([x().detach()] * 2, -1)[..., :HIDDEN].requires_grad_()


def noted() -> Tensor:
    made = x()
    made.wide = True  # pyright: ignore
    return made


def body(asks: Callable[[Any, Tensor], object]) -> Body:
    torch.manual_seed(0)
    return Body(asks).double()


def freeze(model: Any) -> None:
    model.up.weight.requires_grad_(False)


def thaw(model: Any) -> None:
    model.up.weight.requires_grad_(True)


ASKED: dict[str, tuple[Callable[[Any, Tensor], object], list[Any]]] = {
    "contiguous": (lambda _, x: not x.is_contiguous(), [x, turned, x, gapped, turned]),
    "stride": (lambda _, x: x.stride(0) != 12 * HIDDEN, [x, turned, x, gapped, turned]),
    "frozen": (lambda own, _: not own.up.weight.requires_grad, [x, freeze, x, x, thaw, x]),
    "any frozen": (lambda own, _: not all(p.requires_grad for p in own.parameters()), [x, freeze, x, thaw, x]),
}


@pytest.mark.parametrize(("asks", "steps"), ASKED.values(), ids=ASKED)
def test_what_a_body_asks_for_is_part_of_the_kind(asks: Any, steps: list[Any]) -> None:
    calls = [step if step in (freeze, thaw) else ((step(),), {}) for step in steps]
    assert max(worst(body(asks), MLP, 2, ((x(),), {}), calls)) < TOLERANCE


def test_what_is_noted_on_a_tensor_is_seen() -> None:
    """A reshard makes another tensor, without the note: the call is refused."""

    def work(model: nn.Module, _: CallGuard) -> str:
        model(x())
        with pytest.raises(tpplan.UnprovedCallError) as raised:
            model(noted())
        return str(raised.value)[:5]

    assert on_ranks(body(lambda _, x: getattr(x, "wide", False)), MLP, 2, ((x(),), {}), work) == ["TP117"] * 2


def test_what_no_body_asks_for_makes_no_other_kind() -> None:
    def work(model: nn.Module, guard: CallGuard) -> int:
        for made in (x, turned, gapped):
            model(made())
        return len(guard._paths._paths)

    assert on_ranks(body(lambda *_: False), MLP, 2, ((x(),), {}), work) == [1, 1]


REFUSED: dict[str, Callable[[Any, Tensor], object]] = {
    "grad": lambda own, _: own.up.weight.grad is not None,
    "is_leaf": lambda own, x: not x.is_leaf,
    "_version": lambda own, x: x._version > 0,
    "storage_offset()": lambda own, x: x.storage_offset() > 0,
    "_base": lambda own, x: x._base is not None,
    "_is_view()": lambda own, x: x._is_view(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_says_nothing_on_a_rank_is_refused(name: str) -> None:
    with pytest.raises(tpplan.CompileError) as raised:
        tpplan.compile_plan(body(REFUSED[name]), plan_of(MLP), 2, (x(),))
    assert f"it reads `{name}`" in str(raised.value)


class Column(nn.Linear):
    """A layer that asks its own weight, under another mode of recording as well."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self.weight.requires_grad
        return super().forward(x) * (2 if wanted and self.weight.requires_grad else 3)


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_parameter_says_if_it_requires_grad_where_none_is_recorded(around: Callable[[], Any]) -> None:
    model: Any = body(lambda *_: False)
    model.up = Column(HIDDEN, 24).double()
    changes: list[Callable[[Any], None]] = [lambda _: None, freeze, thaw]

    def work(own: nn.Module, _: CallGuard) -> list[Tensor]:
        found: list[Tensor] = []
        for change in changes:
            change(own)
            with around():
                found += [own(x().detach()).detach(), own(x().detach()).detach()]
        return found

    expected = work(copy.deepcopy(model), None)  # pyright: ignore
    assert not torch.equal(expected[0], expected[2])
    for found in on_ranks(model, MLP, 2, ((x(),), {}), work):
        torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_a_hook_on_a_parameter_stays_for_later_calls_and_is_refused() -> None:
    def asks(own: Any, _: Tensor) -> bool:
        own.up.weight.register_hook(lambda gradient: gradient * 2)
        return False

    with pytest.raises(tpplan.CompileError, match=r"registers a hook on a parameter(.|\n)*register it once"):
        tpplan.compile_plan(body(asks), plan_of(MLP), 2, (x(),))
