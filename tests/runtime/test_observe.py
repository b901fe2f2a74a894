"""Hooks that see whole tensors, and what else people do to a model between steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import tpplan
from tests.marking import slow_but
from tests.runtime.test_recompute import parallel, stack, step, whole, x
from tests.runtime.world import Member, world

TOLERANCE = 1e-11


def leaves(held: Any) -> list[Tensor]:
    if isinstance(held, Tensor):
        return [held]
    return [leaf for item in held for leaf in leaves(item)] if isinstance(held, (tuple, list)) else []


def observed(model: nn.Module, register: Any) -> dict[str, list[Tensor]]:
    """What hooks on every module see in a step."""
    seen: dict[str, list[Tensor]] = {}
    handles: list[Any] = []
    for name, module in model.named_modules():
        if name and not isinstance(module, nn.ModuleList):

            def forward(_: nn.Module, args: Any, output: Any, name: str = name) -> None:
                seen.setdefault(name, []).extend(held.detach().clone() for held in leaves((args, output)))

            def backward(_: nn.Module, into: Any, out: Any, name: str = name) -> None:
                seen.setdefault(f"{name}, backward", []).extend(held.detach().clone() for held in leaves((into, out)))

            handles += register(module, forward, backward)
    step(model)
    for handle in handles:
        handle.remove()
    step(model)
    return seen


def stock_hooks(module: nn.Module, forward: Any, backward: Any) -> list[Any]:
    return [module.register_forward_hook(forward), module.register_full_backward_hook(backward)]


def whole_hooks(module: nn.Module, forward: Any, backward: Any) -> list[Any]:
    return [tpplan.observe(module, forward), tpplan.observe(module, backward, backward=True)]


def looks(member: Member, plan: str) -> dict[str, float]:
    ours, theirs = observed(parallel(member, stack(), plan), whole_hooks), observed(stack(), stock_hooks)
    assert ours.keys() == theirs.keys()
    errors: dict[str, float] = {}
    for name, tensors in theirs.items():
        assert [t.shape for t in ours[name]] == [t.shape for t in tensors], name
        errors[name] = max(float((a - b).abs().max()) for a, b in zip(ours[name], tensors, strict=True))
    return errors


@pytest.mark.processes
@pytest.mark.parametrize("plan", slow_but(["sequence"], ["tensor", "sequence"]))
def test_an_observer_sees_whole_tensors(plan: str) -> None:
    for errors in world(2).run(looks, plan, seconds=120):
        assert len(errors) > 15
        assert {name: error for name, error in errors.items() if not error < TOLERANCE} == {}


# -- between steps ----------------------------------------------------------------------------------------------------
def to_float(model: nn.Module) -> dict[str, Tensor]:
    model.float()
    return loop(model, torch.float32)


def to_bfloat16(model: nn.Module) -> dict[str, Tensor]:
    model.to(torch.bfloat16)
    model.double()
    return loop(model, torch.float64)


def halved(model: nn.Module) -> dict[str, Tensor]:
    model.half()
    assert {p.dtype for p in model.parameters()} == {torch.float16}
    model.to(torch.float64)
    return loop(model, torch.float64)


def frozen(model: nn.Module) -> dict[str, Tensor]:
    model.get_submodule("layers.0").requires_grad_(False)
    found = loop(model, torch.float64)
    model.requires_grad_(True)
    return found


def initialised(model: nn.Module) -> dict[str, Tensor]:
    def fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.1)
            nn.init.zeros_(module.bias)

    model.apply(fill)
    return loop(model, torch.float64)


def averaged(model: nn.Module) -> dict[str, Tensor]:
    """An average of the parameters, by torch's and by a copy that is updated by hand; both are evaluated."""
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    twin = copy.deepcopy(model)
    loop(model, torch.float64)
    average.update_parameters(model)
    loop(model, torch.float64)
    average.update_parameters(model)
    with torch.no_grad():
        for mine, its in zip(twin.parameters(), model.parameters(), strict=True):
            mine.lerp_(its, 0.25)
        for held in (model, average, twin):
            held.eval()
        found = {"average": average(x().detach()), "twin": twin(x().detach()), "model": model(x().detach())}
    model.train()
    return found | {n: whole(p) for n, p in average.module.named_parameters()}


def functional(model: nn.Module) -> dict[str, Tensor]:
    doubled = {name: p.detach() * 2 for name, p in model.named_parameters()}
    made = torch.func.functional_call(model, doubled, (x(),))
    return {"made": made, **loop(model, torch.float64)}


def stated(model: nn.Module) -> dict[str, Tensor]:
    state = {name: held.clone() for name, held in model.state_dict().items()}
    first = loop(model, torch.float64)
    model.load_state_dict(state)
    return {f"{n} first": held for n, held in first.items()} | loop(model, torch.float64)


def modes(model: nn.Module) -> dict[str, Tensor]:
    found = loop(model, torch.float64)
    model.eval()
    with torch.inference_mode():
        found["inference"] = model(x().detach()).clone()
    with torch.no_grad():
        found["no grad"] = model(x())
    found["evaluated with gradients"] = model(x())
    model.train()
    return found | {f"{n} again": held for n, held in loop(model, torch.float64).items()}


def loop(model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """Two steps of an optimizer."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    found: dict[str, Tensor] = {}
    for number in range(2):
        optimizer.zero_grad()
        made = model(x().detach().to(dtype))
        made.square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        found[f"step {number}"] = made
    return found | {n: whole(p).detach().clone() for n, p in model.named_parameters()}


USES = [to_float, to_bfloat16, halved, frozen, initialised, averaged, functional, stated, modes]


def lived(member: Member, plan: str) -> dict[str, Any]:
    errors: dict[str, Any] = {}
    for use in USES:
        model, stock = parallel(member, stack(), plan), stack()
        try:
            ours, theirs = use(model), use(stock)
        except Exception as error:
            errors[use.__name__] = f"{type(error).__name__}: {error}"
            continue
        bound = 1e-4 if use is to_float else 1e-9
        both = {n: (ours[n].detach(), theirs[n].detach()) for n in theirs}
        error = max(float((whole(a).double() - b.double()).abs().max()) for a, b in both.values())
        errors[use.__name__] = error / bound if ours.keys() == theirs.keys() else "other names"
    return errors


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("plan", ["tensor", "sequence"])
def test_what_is_done_between_steps_is_done_as_to_the_stock_model(plan: str) -> None:
    for errors in world(2).run(lived, plan, seconds=120):
        assert {name: error for name, error in errors.items() if not isinstance(error, float) or error > 1} == {}
