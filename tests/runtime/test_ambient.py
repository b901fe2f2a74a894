"""Bodies that ask for settings of torch: each call computes what the stock model does under its own settings."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, is_inference_mode_enabled, nn

import tpplan
from tests.runtime.simulated import on_ranks, plan_of
from tpplan.compiler.pipeline import compile_call
from tpplan.compiler.request import Request

RULES = {"up": "colwise", "down": "rowwise"}
Asks = Callable[[Tensor], bool]


class Asking(nn.Module):
    """Divides split features by their number, or by one that is the same on each rank: the steps are the same."""

    def __init__(self, asks: Asks) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.asks = asks

    def forward(self, x: Tensor, asking: bool = True) -> Tensor:
        h = self.up(x)
        return self.down(h / (h.shape[-1] if asking and self.asks(x) else 5.0))


@contextmanager
def _set(setter: Callable[[Any], object], value: object, before: object) -> Generator[None]:
    setter(value)
    try:
        yield
    finally:
        setter(before)


def _tuning(on: object) -> None:
    with torch.backends.__allow_nonbracketed_mutation():  # torch's own tests end that for the process
        torch.backends.cudnn.benchmark = bool(on)


def _short(on: object) -> None:
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = bool(on)


SETTINGS: dict[str, tuple[Asks, Callable[[], AbstractContextManager[Any]]]] = {
    "inference mode": (lambda _: torch.is_inference_mode_enabled(), torch.inference_mode),
    "inference mode, by a name": (lambda _: is_inference_mode_enabled(), torch.inference_mode),
    "recording": (lambda _: not torch.is_grad_enabled(), torch.no_grad),
    "recording, in inference mode": (lambda _: not torch.is_grad_enabled(), torch.inference_mode),
    "threads of autograd": (
        lambda _: not torch.autograd.is_multithreading_enabled(),  # pyright: ignore
        lambda: torch.autograd.set_multithreading_enabled(False),
    ),
    "deterministic algorithms": (
        lambda _: torch.are_deterministic_algorithms_enabled(),
        lambda: _set(torch.use_deterministic_algorithms, True, False),
    ),
    "precision": (
        lambda _: torch.get_float32_matmul_precision() == "high",
        lambda: _set(torch.set_float32_matmul_precision, "high", "highest"),
    ),
    "a flag of a backend": (lambda _: torch.backends.cudnn.benchmark, lambda: _set(_tuning, True, False)),
    "a flag of products": (
        lambda _: not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        lambda: _set(_short, False, True),
    ),
}


def _errors(
    asks: Asks, around: Callable[[], AbstractContextManager[Any]], inputs: list[Tensor], shown: bool = True
) -> list[float]:
    """The largest error of each call; of each input there is one under the setting, one without, and one more under it.

    If it isn't `shown`, the example doesn't ask. Some settings are the process's, in which ranks are threads: all are
    under them before any makes its call.
    """
    torch.manual_seed(0)
    stock, recorded = Asking(asks).double(), torch.is_grad_enabled()

    def calls(model: nn.Module, meet: Callable[[], object]) -> list[Tensor]:
        found: list[Tensor] = []
        for x in inputs:
            for context in (around, nullcontext, around):
                meet()
                with context(), torch.set_grad_enabled(recorded and torch.is_grad_enabled()):
                    meet()
                    found.append(model(x).detach().clone())
                    meet()
        return found

    expected = calls(copy.deepcopy(stock), lambda: None)
    meeting = threading.Barrier(2)
    ranks = on_ranks(stock, RULES, 2, ((inputs[0].detach(), shown), {}), lambda own, _: calls(own, meeting.wait))
    return [float((ours - theirs).abs().max()) for seen in ranks for ours, theirs in zip(seen, expected, strict=True)]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_that_a_body_asks_for_is_a_premise(setting: str) -> None:
    assert max(_errors(*SETTINGS[setting], [torch.randn(2, 8, 16, dtype=torch.float64)])) < 1e-12


def test_it_is_one_of_calls_that_are_recognised_without_their_key() -> None:
    with torch.no_grad():
        around = SETTINGS["a flag of a backend"][1]
        assert (
            max(
                _errors(
                    lambda _: not torch.backends.cudnn.benchmark,
                    around,
                    [torch.randn(2, 8, 16, dtype=torch.float64)] * 2,
                )
            )
            < 1e-12
        )


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_it_is_one_where_later_calls_ask_for_it_first(mode: Any) -> None:
    inputs = [torch.randn(2, 8, 16, dtype=torch.float64)]
    assert max(_errors(lambda _: not torch.is_grad_enabled(), mode, inputs, shown=False)) < 1e-12


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_whether_an_argument_requires_grad_is_a_premise_of_calls_without_gradients(mode: Any) -> None:
    x = torch.randn(2, 8, 16, dtype=torch.float64)
    inputs = [x, x.clone().requires_grad_(), x, x.clone().requires_grad_()]
    assert max(_errors(lambda x: x.requires_grad, mode, inputs)) < 1e-12


def test_what_torch_asks_itself_is_no_premise_and_nothing_of_it_stays_replaced() -> None:
    before = torch.is_grad_enabled
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    call = (torch.zeros(2, 4, 16),)
    assert not compile_call(
        Request(layer, plan_of({"linear1": "colwise", "linear2": "rowwise"}), 2, call, {})
    ).asked.settings
    compiled = compile_call(Request(Asking(SETTINGS["recording"][0]), plan_of(RULES), 2, call, {}))
    assert compiled.asked.settings == {"is_grad_enabled"}
    assert torch.is_grad_enabled is before


def test_a_tensor_that_is_asked_for_inference_is_refused_by_name() -> None:
    with pytest.raises(tpplan.CompileError, match=r"TP110.*reads `is_inference\(\)`(.|\n)*is_inference_mode_enabled"):
        compile_call(Request(Asking(lambda x: x.is_inference()), plan_of(RULES), 2, (torch.zeros(2, 4, 16),), {}))
