"""Activation checkpoints: each recomputes as its call ran, whatever calls of other kinds came between."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import tpplan
from tests.compiler.toys import HIDDEN, Block, Mlp
from tests.runtime.world import Member, world

TOLERANCE = 1e-11
TENSOR: dict[str, Any] = {"**.{q,k,v,up}": "colwise", "**.{o,down}": "rowwise"}
PLANS = {"tensor": TENSOR, "sequence": TENSOR | {"**.norm": "sequence"}}
Run = Callable[[nn.Module, Tensor], Tensor]
reentrant: Run = partial(checkpoint, use_reentrant=True)  # pyright: ignore[reportAssignmentType]
direct: Run = partial(checkpoint, use_reentrant=False)  # pyright: ignore[reportAssignmentType]


def plainly(module: nn.Module, x: Tensor) -> Tensor:
    return module(x)


class Scaled(nn.Module):
    """A block with a parameter of its own, which `run` may read."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.body = Mlp()
        self.scale = nn.Parameter(torch.ones(HIDDEN))
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.inner(x) if self.run is plainly else self.run(self.inner, x))  # pyright: ignore

    def inner(self, x: Tensor) -> Tensor:
        return self.scale * self.body(self.norm(x))


class Stack(nn.Module):
    """Blocks, each run by `run`; with `outer`, pairs of them by that as well."""

    def __init__(self, run: Run = plainly, outer: Run | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(Mlp()), Block(Mlp()), Scaled(run)])
        self.run, self.outer = run, outer

    def forward(self, x: Tensor) -> Tensor:
        if self.outer is None:
            for layer in self.layers:
                x = self.run(layer, x)
            return x
        return self.outer(self.pair, x)  # pyright: ignore[reportArgumentType]

    def pair(self, x: Tensor) -> Tensor:
        return self.run(self.layers[2], self.run(self.layers[1], self.run(self.layers[0], x)))


def stack(run: Run = plainly, outer: Run | None = None) -> Stack:
    torch.manual_seed(0)
    made = Stack(run, outer).double()
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3)
    return made


def x(length: int = 8, batch: int = 2) -> Tensor:
    made = torch.randn(batch, length, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(length))
    return made.requires_grad_()


def whole(held: Tensor) -> Tensor:
    return held.full_tensor() if isinstance(held, DTensor) else held


def shown(model: nn.Module, loop: Callable[[nn.Module], list[Tensor]]) -> dict[str, Tensor]:
    """What a loop returns, and all gradients."""
    for parameter in model.parameters():
        parameter.grad = None
    found = {str(i): made.detach() for i, made in enumerate(loop(model))}
    grads = {n.replace("_checkpoint_wrapped_module.", ""): p.grad for n, p in model.named_parameters()}
    return found | {n: whole(g) for n, g in grads.items() if g is not None}


def worst(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[n] - theirs[n]).abs().max() / theirs[n].abs().max().clamp(min=1e-3)) for n in theirs)


# -- loops ------------------------------------------------------------------------------------------------------------
def step(model: nn.Module) -> list[Tensor]:
    made = model(given := x())
    made.square().mean().backward()
    assert given.grad is not None
    return [made, given.grad]


def evaluated_between(model: nn.Module) -> list[Tensor]:
    """Calls of three other kinds between a forward and its backward."""
    model.train()
    made = model(given := x())
    with torch.no_grad():
        odd = model(x(7))
    model.eval()
    with torch.inference_mode():
        other = model(x(4, 3))
    model.train()
    made.square().mean().backward()
    assert given.grad is not None
    return [made, odd, other, given.grad]


def two(model: nn.Module, order: tuple[int, int]) -> list[Tensor]:
    """Two forwards of different kinds, and their backwards in either order."""
    given = [x(8), x(7, 3)]
    made = [model(held) for held in given]
    for which in order:
        made[which].square().mean().backward()
    return [*made, *(held.grad for held in given if held.grad is not None)]


def together(model: nn.Module) -> list[Tensor]:
    """One backward through two calls of different kinds, the second of which takes the result of the first."""
    made = model(given := x())
    other = model(made[:, :5])
    (made.square().mean() + other.square().mean()).backward()
    assert given.grad is not None
    return [made, other, given.grad]


def by_hand(model: nn.Module, run: Run) -> list[Tensor]:
    """A loop that calls the layers by itself, each in a checkpoint, before and after calls of the model."""
    made = model(x(6))
    hidden = given = x()
    for layer in model.get_submodule("layers").children():
        hidden = run(layer, hidden)
    other = model(x(4))
    (made.square().mean() + hidden.square().mean() + other.square().mean()).backward()
    assert given.grad is not None
    return [made, hidden, other, given.grad]


def around(model: nn.Module, run: Run) -> list[Tensor]:
    """The model itself in a checkpoint, and another call of it."""
    made = run(model, given := x())
    other = model(x(7))
    made.square().mean().backward()
    other.square().mean().backward()
    assert given.grad is not None
    return [made, other, given.grad]


def sequential(model: nn.Module, use_reentrant: bool) -> list[Tensor]:
    layers = list(model.get_submodule("layers").children())
    made = checkpoint_sequential(layers, 2, given := x(), use_reentrant=use_reentrant)  # pyright: ignore
    model(x(5))
    made.square().mean().backward()
    assert given.grad is not None
    return [made, given.grad]


def offloaded(model: nn.Module) -> list[Tensor]:
    with save_on_cpu():
        return two(model, (0, 1))


def policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def selective(module: nn.Module, x: Tensor) -> Tensor:
    made = checkpoint(module, x, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, policy))
    assert isinstance(made, Tensor)
    return made


def saving(module: nn.Module, x: Tensor) -> Tensor:
    """Nothing is recomputed, but what wasn't an operation of torch's."""
    made = checkpoint(
        module,
        x,
        use_reentrant=False,
        context_fn=partial(create_selective_checkpoint_contexts, lambda *_a, **_k: CheckpointPolicy.MUST_SAVE),  # pyright: ignore
    )
    assert isinstance(made, Tensor)
    return made


LOOPS: dict[str, Callable[[nn.Module], list[Tensor]]] = {
    "evaluated between": evaluated_between,
    "first then second": partial(two, order=(0, 1)),
    "second then first": partial(two, order=(1, 0)),
    "one backward": together,
    "offloaded": offloaded,
}
WAYS: dict[str, tuple[Run, Run | None]] = {
    "reentrant": (reentrant, None),
    "direct": (direct, None),
    "selective": (selective, None),
    "saving": (saving, None),
    "reentrant twice": (reentrant, reentrant),
    "direct twice": (direct, direct),
    "direct in reentrant": (direct, reentrant),
    "reentrant in direct": (reentrant, direct),
    "plainly in direct": (plainly, direct),
}
OUTSIDE: dict[str, Callable[[nn.Module], list[Tensor]]] = {
    "by hand, reentrant": partial(by_hand, run=reentrant),
    "by hand, direct": partial(by_hand, run=direct),
    "around, reentrant": partial(around, run=reentrant),
    "around, direct": partial(around, run=direct),
    "sequential, reentrant": partial(sequential, use_reentrant=True),
    "sequential, direct": partial(sequential, use_reentrant=False),
}


def parallel(member: Member, model: nn.Module, plan: str) -> nn.Module:
    source = {"version": 1, "modules": PLANS[plan]}
    return tpplan.parallelize(model, source, member.mesh(), (x(),))


def ways(member: Member, plan: str) -> dict[str, float]:
    errors: dict[str, float] = {}
    import os

    for name, way in WAYS.items():
        if not name.startswith(os.environ.get("WAY", "")):
            continue
        model, stock = parallel(member, stack(*way), plan), stack(*way)
        for loop in LOOPS:
            try:
                import os
                import sys
                import time

                os.environ.get("TALK") and member.rank == 0 and print(name, loop, time.time() % 1000, file=sys.stderr)
                errors[f"{name}: {loop}"] = worst(shown(model, LOOPS[loop]), shown(stock, LOOPS[loop]))
            except Exception as error:
                raise AssertionError(f"{name}: {loop}") from error
    return errors


def outside(member: Member, plan: str) -> dict[str, float]:
    model, stock = parallel(member, stack(), plan), stack()
    errors: dict[str, float] = {}
    for name, loop in OUTSIDE.items():
        try:
            errors[name] = worst(shown(model, loop), shown(stock, loop))
        except Exception as error:
            raise AssertionError(name) from error
    return errors


@pytest.mark.processes
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("function", [ways, outside])
def test_a_checkpoint_recomputes_as_its_call_ran(plan: str, function: Any) -> None:
    for errors in world(2).run(function, plan, seconds=60):
        assert {name: error for name, error in errors.items() if not error < TOLERANCE} == {}
