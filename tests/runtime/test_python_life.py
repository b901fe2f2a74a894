"""What Python does to a sharded model around its calls: as to the stock model, or a typed error."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import tpplan
from tests.runtime.test_recompute import parallel, shown, stack, step, whole, worst, x
from tests.runtime.world import Member, world

pytestmark = pytest.mark.processes

Loop = Callable[[Any], list[Tensor]]


def data_set(model: nn.Module) -> list[Tensor]:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5
    return step(model)


def by_vector(model: nn.Module) -> list[Tensor]:
    vector_to_parameters(parameters_to_vector(model.parameters()) * 0.5, model.parameters())
    return step(model)


def drawn(model: nn.Module) -> list[Tensor]:
    torch.manual_seed(5)
    for parameter in model.parameters():
        nn.init.trunc_normal_(parameter, std=0.2)
    model.layers[0].body.apply(lambda m: nn.init.kaiming_uniform_(m.weight) if isinstance(m, nn.Linear) else None)  # pyright: ignore
    return step(model)


def anomalies(model: nn.Module) -> list[Tensor]:
    with torch.autograd.set_detect_anomaly(True):
        return step(model)


def hooked(model: Any) -> list[Tensor]:
    handles = [
        model.layers[0].body.register_forward_pre_hook(lambda m, a, k: ((a[0] * 1.5,), k), with_kwargs=True),
        model.layers[1].register_forward_hook(lambda m, a, k, result: result * 0.7, with_kwargs=True),
        model.layers[1].body.register_full_backward_hook(lambda m, into, out: tuple(g * 2 for g in into)),
        model.layers[1].body.up.register_full_backward_pre_hook(lambda m, out: (out[0] * 2,)),
        *(parameter.register_hook(lambda gradient: gradient * 2) for parameter in model.parameters()),
    ]
    made = step(model)
    for handle in handles:
        handle.remove()
    return made + step(model)


def hooked_everywhere(model: nn.Module) -> list[Tensor]:
    import torch.nn.modules.module as modules

    of_all: Any = modules

    handles = [
        of_all.register_module_forward_pre_hook(lambda m, a: (a[0] * 0.5,) if isinstance(m, nn.LayerNorm) else None),
        of_all.register_module_forward_hook(lambda m, a, r: r * 1.25 if isinstance(m, nn.LayerNorm) else None),
        of_all.register_module_full_backward_hook(lambda m, i, o: (i[0] * 2,) if isinstance(m, nn.LayerNorm) else None),
    ]
    try:
        made = step(model)
    finally:
        for handle in handles:
            handle.remove()
    return made + step(model)


def stepped_in_backward(model: nn.Module) -> list[Tensor]:
    def update(parameter: Tensor) -> None:
        assert parameter.grad is not None
        with torch.no_grad():
            parameter.add_(parameter.grad, alpha=-0.1)
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    return step(model) + step(model)


def frozen_for_a_while(model: Any) -> list[Tensor]:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" not in name)
    model.layers[0].eval()
    made = step(model)
    model.requires_grad_(True).train()
    return made + step(model)


def by_hand(model: nn.Module) -> list[Tensor]:
    """Averages, gradients and steps that are written out."""
    average = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    made = step(model)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad * 2 + parameter.detach()
        parameter.data.add_(parameter.grad, alpha=-0.1)
        average[name].lerp_(parameter.detach(), 0.1)
        parameter.grad = None
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(average[name])
    return made + step(model)


def copied(model: nn.Module) -> list[Tensor]:
    step(model)
    other = copy.deepcopy(model)
    made = step(other)
    torch.optim.SGD(other.parameters(), 0.1).step()
    made += step(other)
    model.zero_grad()
    return made + [whole(p.grad) for p in other.parameters() if p.grad is not None] + step(model)


def functional(model: nn.Module) -> list[Tensor]:
    held = {name: (p.detach() * 0.5).requires_grad_() for name, p in model.named_parameters()}
    made = torch.func.functional_call(model, held, (x(),))
    made.square().mean().backward()
    return [made, *(whole(p.grad) for p in held.values() if p.grad is not None)]


def differentiated_twice_over(model: nn.Module) -> list[Tensor]:
    made = model(given := x())
    made.square().mean().backward(retain_graph=True)
    found = torch.autograd.grad(made.mean(), [given, *model.parameters()])
    with torch.autograd.graph.saved_tensors_hooks(Tensor.clone, lambda saved: saved):
        return [made, *map(whole, found), *step(model)]


QUICK: tuple[Loop, ...] = (data_set, by_vector, drawn, anomalies)
LOOPS: tuple[Loop, ...] = (
    hooked,
    hooked_everywhere,
    stepped_in_backward,
    frozen_for_a_while,
    by_hand,
    copied,
    functional,
    differentiated_twice_over,
)


def errors(member: Member, loops: tuple[Loop, ...], plan: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for loop in loops:
        try:
            found[loop.__name__] = worst(shown(parallel(member, stack(), plan), loop), shown(stack(), loop))
        except Exception as error:
            error.add_note(loop.__name__)
            raise
    return found


def check(found: list[dict[str, float]], loops: tuple[Loop, ...]) -> None:
    for held in found:
        assert len(held) == len(loops)
        assert {name: error for name, error in held.items() if not error < 1e-11} == {}


def test_numbers_are_written_into_parameters_as_into_whole_ones() -> None:
    check(world(2).run(errors, QUICK, "sequence"), QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["tensor", "sequence"])
def test_each_use_is_as_of_the_stock_model(plan: str) -> None:
    check(world(2).run(errors, LOOPS, plan), LOOPS)


@pytest.mark.slow
def test_a_transform_of_torch_func_is_refused() -> None:
    world(2).run(_transformed)


def _transformed(member: Member) -> None:
    model, given = parallel(member, stack(), "sequence"), x().detach()
    transforms: list[Callable[[], object]] = [
        lambda: torch.func.vmap(lambda row: model(row[None])[0])(given),
        lambda: torch.func.jvp(model, (given,), (given,)),
        lambda: torch.func.grad(lambda a: model(a).square().mean())(given),
    ]
    for transform in transforms:
        with pytest.raises(tpplan.TpplanError, match=r"TP117 .*torch.func"):
            transform()
    assert worst(shown(model, step), shown(stack(), step)) < 1e-11
