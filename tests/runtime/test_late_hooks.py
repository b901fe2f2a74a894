"""Hooks that are registered after `parallelize`: calls are proved with them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import tpplan
from tests.compiler.toys import HIDDEN, MLP
from tests.runtime.simulated import on_ranks, worst
from tests.runtime.test_caches import tiny, tokens
from tpplan.calls.guard import CallGuard
from tpplan.calls.proofs import Proofs

TOLERANCE = 1e-12
WIDTH = 24


class Body(nn.Module):
    """A column and a row."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, WIDTH), nn.Linear(WIDTH, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


def x() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(3, 12, HIDDEN, dtype=torch.float64, generator=generator).requires_grad_()


CALL = ((x(),), {})


def stock() -> nn.Module:
    torch.manual_seed(0)
    return Body().double()


def normalised(module: nn.Module, arguments: Any, result: Any) -> Tensor:
    return torch.softmax(result, -1)


def normalized(module: nn.Module, arguments: Any, result: Any) -> Tensor:
    return result * 2


def softmax(model: nn.Module) -> None:
    model.get_submodule("up").register_forward_hook(normalised)


def added(module: Any, arguments: tuple[Tensor], result: Tensor) -> Tensor:
    return result + torch.nn.functional.linear(arguments[0], module.weight)


def read(model: nn.Module) -> None:
    model.get_submodule("up").register_forward_hook(added)


def sharing(model: nn.Module) -> None:
    kept: dict[str, Tensor] = {}

    def keep(module: nn.Module, arguments: Any, result: Tensor) -> None:
        kept["result"] = result

    def use(module: nn.Module, arguments: Any, result: Tensor) -> Tensor:
        return result * kept["result"].mean()

    model.get_submodule("up").register_forward_hook(keep)
    model.get_submodule("down").register_forward_hook(use)


def centred(model: nn.Module) -> None:
    def centre(module: nn.Module, arguments: tuple[Tensor], keywords: dict[str, Any]) -> Any:
        return (arguments[0] - arguments[0].mean(-1, keepdim=True),), keywords

    model.get_submodule("down").register_forward_pre_hook(centre, with_kwargs=True)


def half_gradient(model: nn.Module) -> None:
    def halve(module: nn.Module, inputs: Any, outputs: Any) -> Any:
        return tuple(None if held is None else held / (1 + held.norm()) for held in inputs)

    model.get_submodule("down").register_full_backward_hook(halve)


def with_own_module(model: nn.Module) -> None:
    """The hook holds the model itself."""
    down: Any = model.get_submodule("down")
    model.get_submodule("up").register_forward_hook(lambda module, _, result: result * down.in_features / 24)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("register", [softmax, centred, half_gradient, with_own_module, read, sharing])
def test_a_hook_is_part_of_each_later_call(register: Callable[[nn.Module], None]) -> None:
    calls = [CALL, register, CALL, CALL]
    assert max(worst(stock(), MLP, 2, CALL, calls)) < TOLERANCE


def test_a_removed_hook_is_gone() -> None:
    handles: list[Any] = []

    def register(model: nn.Module) -> None:
        handles.append(model.get_submodule("up").register_forward_hook(normalised))

    def remove(model: nn.Module) -> None:
        while handles:
            handles.pop().remove()

    assert max(worst(stock(), MLP, 2, CALL, [register, CALL, remove, CALL])) < TOLERANCE


def test_a_hook_that_was_there_before_may_be_removed() -> None:
    model = stock()
    softmax(model)

    def remove(model: nn.Module) -> None:
        model.get_submodule("up")._forward_hooks.clear()

    assert max(worst(model, MLP, 2, CALL, [CALL, remove, CALL])) < TOLERANCE


def test_without_following_the_old_program_would_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tpplan.calls.module_hooks.Hooks.look", lambda self, modules=(): False)
    assert max(worst(stock(), MLP, 2, CALL, [CALL, softmax, CALL])) > 1e-6


def test_a_statistic_that_a_hook_keeps_is_that_of_all_features() -> None:
    def work(model: nn.Module, _: CallGuard) -> Tensor:
        kept: list[Tensor] = []
        model.get_submodule("up").register_forward_hook(lambda m, a, result: kept.append(result.mean()))
        model(x())
        return kept[-1]

    expected = stock().get_submodule("up")(x()).mean()
    for seen in on_ranks(stock(), MLP, 2, CALL, work):
        assert abs(seen - expected) < TOLERANCE


def test_a_hook_that_reads_a_value_is_refused_with_the_reason() -> None:
    def work(model: nn.Module, _: CallGuard) -> str:
        model(x())
        model.get_submodule("up").register_forward_hook(
            lambda m, a, result: print(cast("Tensor", result).mean().item())
        )
        with pytest.raises(tpplan.UnprovedCallError) as raised:
            model(x())
        return str(raised.value)

    for text in on_ranks(stock(), MLP, 2, CALL, work):
        assert text.startswith("TP117 unproved-call: hooks or wrappers changed after `parallelize`: it can't be proved")
        assert "TP110" in text


def test_torchs_own_hooks_and_the_roots_need_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    changes: list[int] = []
    forget = Proofs.forget
    monkeypatch.setattr("tpplan.calls.proofs.Proofs.forget", lambda self: (changes.append(1), forget(self)))

    def work(model: nn.Module, _: CallGuard) -> None:
        model(x())
        model.register_forward_hook(normalized)
        profiled = lambda module, arguments, result: None  # noqa: E731
        profiled.__module__ = "torch.profiler"
        model.get_submodule("up").register_forward_hook(profiled)
        model(x())

    on_ranks(stock(), MLP, 2, CALL, work)
    assert not changes


class HooksItself(Body):
    """Registers a hook in its first call, as models do that collect what their layers return."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "hooked"):
            self.up.register_forward_hook(normalized)
            self.hooked = True
        return super().forward(x)


def test_a_hook_that_a_forward_registers_counts_once() -> None:
    torch.manual_seed(0)
    model = HooksItself().double()
    calls = [CALL, lambda m: m.eval(), CALL, lambda m: m.up.register_forward_hook(to_softmax), CALL]
    assert max(worst(model, MLP, 2, CALL, cast("Any", calls))) < 1e-12


def to_softmax(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output.softmax(-1)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("plan", "recorded"), [("llama", True), ("llama-sequence", False)])
def test_a_hook_that_a_forward_registers_is_registered_once(plan: str, recorded: bool) -> None:
    """transformers registers hooks at the first call that asks for attentions, and notes that in an attribute.

    Later calls are proved with both.
    """
    pytest.importorskip("transformers")
    stock, example = tiny("llama")
    stock.config._attn_implementation = "eager"
    ids = tokens(2, 8)
    asked: list[dict[str, Any]] = [{}, {"use_cache": False}, {"attention_mask": torch.ones_like(ids)}]
    wanted = {"output_attentions": True, "output_hidden_states": True}
    calls: list[dict[str, Any]] = [{"input_ids": ids, **wanted, **more} for more in asked]

    def shown(model: nn.Module, call: dict[str, Any], record: bool) -> list[Tensor]:
        with torch.set_grad_enabled(record):
            result = model(**call)
        return [held.detach() for held in (*result.attentions, *result.hidden_states)]

    expected = [shown(copy.deepcopy(stock), call, True) for call in calls]

    def work(own: nn.Module, _: CallGuard) -> list[Any]:
        own.eval()
        return [shown(own, call, recorded if number < 2 else not recorded) for number, call in enumerate(calls)]

    for found in on_ranks(stock, f"plans/{plan}.yaml", 2, ((), example), work):
        for ours, theirs in zip(found, expected, strict=True):
            assert len(ours) == len(theirs) and all(map(torch.allclose, ours, theirs))


class Remembers:
    """A hook that adds what it has kept of the call before."""

    def __init__(self, kept: Tensor | None) -> None:
        self.kept = {"result": kept}

    def __call__(self, module: nn.Module, arguments: Any, result: Tensor) -> Tensor:
        before = self.kept["result"]
        self.kept["result"] = result.detach()
        return result if before is None else result + before.mean()


@pytest.mark.parametrize("kept", [None, torch.zeros(3, 12, WIDTH, dtype=torch.float64)], ids=["nothing", "zeros"])
def test_a_part_that_a_hook_has_kept_isnt_read_by_the_next_call(kept: Tensor | None) -> None:
    model = stock()
    model.get_submodule("up").register_forward_hook(Remembers(kept))
    with pytest.raises(tpplan.CompileError, match=r"TP107.*leaves a tensor of layout S\(2\) in `a hook of up.kept"):
        tpplan.compile_plan(model, {"version": 1, "modules": MLP}, 2, CALL[0])

    def work(model: nn.Module, _: CallGuard) -> None:
        model(x())
        model.get_submodule("up").register_forward_hook(Remembers(kept))
        for _number in range(2):
            with pytest.raises(tpplan.UnprovedCallError, match="TP107"):
                model(x())

    on_ranks(stock(), MLP, 2, CALL, work)


def test_a_hook_in_a_backward_sees_parameters_as_they_are() -> None:
    def work(model: nn.Module, _: CallGuard) -> bool:
        found: list[bool] = []

        def look(gradient: Tensor) -> None:
            with torch.enable_grad():
                model(x() * 2)
                up: Any = model.get_submodule("up")
                found.append(up.weight is up._parameters["weight"])

        result = model(x())
        result.register_hook(look)
        result.sum().backward()
        return all(found)

    assert on_ranks(stock(), MLP, 2, CALL, work) == [True, True]
