"""What is compiled and verified neither sees what is around it, nor is seen by that."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks
from torch.nn.modules import module as of_all
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import tpplan
from tests.compiler.toys import HIDDEN, Block, Mlp
from tpplan.ambience import ambience, is_users, may_return

RULES: dict[str, Any] = {"**.up": "colwise", "**.down": "rowwise", "**.norm": "sequence"}
PLAN = {"version": 1, "modules": RULES}


def stock() -> nn.Module:
    torch.manual_seed(0)
    return Block(Mlp()).double()


def x() -> Tensor:
    return torch.randn(2, 8, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Functions(TorchFunctionMode):
    """Counts what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    """Counts what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))


def anomalies() -> AbstractContextManager[Any]:
    return torch.autograd.set_detect_anomaly(True)


CONTEXTS: tuple[Callable[[], AbstractContextManager[Any]], ...] = (
    Functions, Operations, lambda: FlopCounterMode(display=False), torch.inference_mode,
    torch.no_grad, save_on_cpu, anomalies,
    lambda: torch.device("meta"), lambda: disable_saved_tensors_hooks("none here"),
)  # fmt: skip


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.one_in(5)
def test_what_is_around_changes_no_program_and_no_verdict(context: Callable[[], AbstractContextManager[Any]]) -> None:
    model, example = stock(), x()
    expected = tpplan.compile_plan(model, PLAN, 2, example)
    suggested = tpplan.suggest_plan(model, 2, inputs=example)
    with context() as around:
        program = tpplan.compile_plan(model, PLAN, 2, example)
        again = tpplan.suggest_plan(model, 2, inputs=example)
        report = tpplan.verify(model, PLAN, 2, example)
    assert program.digest == expected.digest
    assert again == suggested
    assert report.ok
    if isinstance(around, FlopCounterMode):
        assert not around.get_total_flops()
    elif isinstance(around, (Functions, Operations)):
        assert not around.seen


def test_hooks_on_saved_tensors_and_of_all_modules_see_nothing_of_it() -> None:
    seen: list[object] = []

    def note(*shown: object) -> None:
        seen.append(shown)

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor

    everywhere: Any = of_all
    model, example = stock(), x()
    handles = [
        everywhere.register_module_forward_pre_hook(note),
        everywhere.register_module_forward_hook(note),
        everywhere.register_module_full_backward_hook(note),
        everywhere.register_module_parameter_registration_hook(note),
    ]
    try:
        with saved_tensors_hooks(pack, lambda packed: packed):
            tpplan.compile_plan(model, PLAN, 2, example)
            assert tpplan.verify(model, PLAN, 2, example).ok
        assert not seen
        model(example)
        assert seen
    finally:
        for handle in handles:
            handle.remove()


def test_all_is_as_it_was_afterwards() -> None:
    with Functions() as functions, Operations() as operations, save_on_cpu(), torch.inference_mode():
        with ambience():
            made = torch.ones(2, requires_grad=True) * 2
            assert made.requires_grad
            assert not made.is_inference()
            with ambience(), Functions() as inside:
                torch.ones(2).sum()
            assert inside.seen
        before = functions.seen, operations.seen
        assert before == (0, 0)
        made = torch.ones(2) * 2
        assert made.is_inference()
        assert functions.seen
        assert operations.seen
    with pytest.raises(ZeroDivisionError), Functions() as functions:
        try:
            with ambience():
                raise ZeroDivisionError
        finally:
            torch.ones(2).sum()
            assert functions.seen


def returns_nothing(module: nn.Module, *shown: object) -> None:
    if shown:
        return
    module.train()


def returns_sometimes(module: nn.Module, *shown: object) -> object:
    return shown or None


class Callable_:
    def __call__(self, module: nn.Module, *shown: object) -> object:
        return shown if module.training else None


@pytest.mark.parametrize(
    ("hook", "expected"),
    [
        (returns_nothing, False),
        (returns_sometimes, True),
        (Callable_(), True),
        (lambda *shown: None, False),
        (lambda *shown: shown[0], True),
        (print, True),
    ],
)
def test_code_without_a_return_is_known(hook: Any, expected: bool) -> None:
    assert may_return(hook) is expected


def test_whose_a_tool_is_shows_in_where_it_is_written() -> None:
    assert is_users(returns_nothing)
    assert is_users(Callable_())
    assert not is_users(is_parametrized)
    assert not is_users(TorchDispatchMode.__torch_dispatch__)
    assert not is_users(FlopCounterMode)
