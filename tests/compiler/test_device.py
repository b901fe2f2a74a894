"""A body sees the device that it will run on; a value that it reads is never swallowed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tpplan
from tpplan.compiler.pipeline import compile_call
from tpplan.compiler.request import Request
from tpplan.plan import CompileError, load_plan

PLAN = {"version": 1, "modules": {"up": "colwise", "down": "rowwise"}}
X = torch.randn(2, 3, 8)


class Asks(nn.Module):
    """It runs its pair of layers, or another one, as `how` says."""

    def __init__(self, how: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.other = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 8)
        self.how = how

    def pair(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self, x)


ON_CPU: dict[str, Callable[[Any, Tensor], bool]] = {
    "type": lambda m, x: x.device.type == "cpu",
    "not cuda": lambda m, x: not x.is_cuda,
    "cpu": lambda m, x: x.is_cpu,
    "not meta": lambda m, x: not x.is_meta,
    "number": lambda m, x: x.get_device() == -1,
    "parameter's": lambda m, x: m.up.weight.device == torch.device("cpu"),
    "text": lambda m, x: str(m.up(x).device) == "cpu",
    "not in torch.cuda": lambda m, x: x.device.type != "cuda",
}


@pytest.mark.parametrize("question", ON_CPU)
def test_a_body_takes_the_side_of_the_device_that_it_runs_on(question: str) -> None:
    ask = ON_CPU[question]
    model = Asks(lambda m, x: m.pair(x) if ask(m, x) else m.other(x))
    assert tpplan.verify(model, PLAN, 2, X).ok
    assert "up" in called(model, "cpu")


CUDA = {name: ask for name, ask in ON_CPU.items() if name != "not meta"}


@pytest.mark.parametrize("question", CUDA)
def test_a_body_takes_the_other_side_on_another_device(question: str) -> None:
    ask = CUDA[question]
    assert "other" not in called(Asks(lambda m, x: m.other(m.pair(x)) if ask(m, x) else m.pair(x)), "cuda:0")


def called(model: nn.Module, device: str) -> set[str]:
    plan = load_plan(PLAN)
    program = compile_call(Request(model, plan, 2, (X,), {}, device=torch.device(device))).program
    assert program.device == device
    return {module.name for module in program.modules if module.calls}


def with_default(m: Any, x: Tensor) -> Tensor:
    with torch.device(x.device):
        scale = torch.ones(8)
    return m.pair(x) * scale


def in_full(m: Any, x: Tensor) -> Tensor:
    h = m.up(x)
    with torch.autocast(x.device.type, enabled=False):
        return m.down(h.float())


@torch.autocast("cpu", enabled=False)
def decorated(m: Any, x: Tensor) -> Tensor:
    return m.pair(x) if torch.is_autocast_enabled(x.device.type) else m.pair(x).relu()


class Tanh(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * (1 - x.tanh() ** 2)


PLACED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "made there": lambda m, x: m.pair(x) + torch.arange(3, device=x.device)[:, None],
    "moved there": lambda m, x: m.pair(x) + torch.arange(3).to(x.device)[:, None],
    "made by name": lambda m, x: m.pair(x) + torch.ones(3, device=x.device.type)[:, None],
    "moved by name": lambda m, x: m.pair(x.to(x.device.type)),
    "moved and cast": lambda m, x: m.pair(x.to(x.device, torch.float32)),
    "moved by keyword": lambda m, x: m.pair(x.to(device=x.device, dtype=torch.float32)),
    "moved to the cpu": lambda m, x: m.pair(x.cpu()) if x.is_cpu else m.pair(x),
    "a module": lambda m, x: m.pair(x) + m.other.to(x.device)(x),
    "a module by name": lambda m, x: m.pair(x) + m.other.to(x.device.type)(x),
    "by default": with_default,
    "numbers": lambda m, x: m.pair(x) * torch.tensor([2.0], device=x.device),
    "like another": lambda m, x: m.pair(x) + torch.zeros_like(x, device=x.device),
    "filled": lambda m, x: m.pair(x) + torch.full((8,), 1.5, device=x.device),
    "without autocast": in_full,
    "decorated": decorated,
    "custom forwards": lambda m, x: m.down(Tanh.apply(m.up(x))),
}


@pytest.mark.parametrize("how", PLACED)
def test_tensors_may_be_made_and_moved_where_others_lie(how: str) -> None:
    report = tpplan.verify(Asks(PLACED[how]), PLAN, 2, X, dtype=torch.float32)
    assert report.ok, report.problems


@pytest.mark.parametrize("how", sorted(PLACED.keys() - {"by default"}))
def test_so_they_may_on_a_device_that_this_machine_lacks(how: str) -> None:
    assert {"up", "down"} <= called(Asks(PLACED[how]), "cuda:0")


def sum_of(x: Tensor) -> int:
    try:
        return int(x.sum())
    except Exception:
        return 1


def length_of(x: Tensor) -> int:
    try:
        return len(x.tolist())
    except Exception:
        return 1


@pytest.mark.parametrize("read", [sum_of, length_of])
def test_a_value_that_is_read_inside_of_try_is_no_secret(read: Callable[[Tensor], int]) -> None:
    model = Asks(lambda m, x: m.pair(x) * read(x))
    line = read.__code__.co_firstlineno + 2
    with pytest.raises(CompileError, match=rf"(?s)TP110 .*reads a tensor's values.*test_device\.py:{line}"):
        tpplan.compile_plan(model, PLAN, 2, X)
