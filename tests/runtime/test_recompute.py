"""Activation checkpoints: each recomputes as its call ran, whatever calls of other kinds came between."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import tpplan
from tests.compiler.toys import HIDDEN, Block, Mlp
from tests.marking import sweep_but
from tests.models.tiny import tiny_model
from tests.plans.parity import PLANS as SHIPPED
from tests.runtime.world import Member, world
from tpplan.rehearsal.rehearse import ShapeCommunicator
from tpplan.runtime.around import recent
from tpplan.runtime.parameters.handed_out import HandedOut

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


def ways(member: Member, plan: str, names: list[str]) -> dict[str, float]:
    errors: dict[str, float] = {}
    for name in names:
        model, stock = parallel(member, stack(*WAYS[name]), plan), stack(*WAYS[name])
        for loop in LOOPS:
            try:
                errors[f"{name}: {loop}"] = worst(shown(model, LOOPS[loop]), shown(stock, LOOPS[loop]))
            except Exception as error:
                raise AssertionError(f"{name}: {loop}") from error
    return errors


def wrap(model: nn.Module, wrapper: Any) -> nn.Module:
    apply_activation_checkpointing(model, wrapper, lambda module: isinstance(module, (Block, Scaled)))
    return model


def wrapped(member: Member, plan: str) -> dict[str, float]:
    """torch's wrappers, before `parallelize` and after it."""
    kinds = {
        "direct": partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT),
        "reentrant": partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT),
        "offload": offload_wrapper,
    }
    errors: dict[str, float] = {}
    for name, kind in kinds.items():
        for model in (parallel(member, wrap(stack(), kind), plan), wrap(parallel(member, stack(), plan), kind)):
            error = worst(shown(model, partial(two, order=(0, 1))), shown(stack(), partial(two, order=(0, 1))))
            errors[name] = max(errors.get(name, 0.0), error)
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


def enabled(member: Member, plan: str) -> dict[str, float]:
    """transformers' own, and a call with a length that the axis doesn't divide before the backward."""
    errors: dict[str, float] = {}
    name = "llama" if plan == "tensor" else "llama-sequence"
    for use_reentrant in (True, False):
        models = [tiny_model("llama")[0].train() for _ in range(2)]
        ids = tiny_model("llama")[1]["input_ids"]
        tpplan.parallelize(models[0], SHIPPED / f"{name}.yaml", member.mesh(), {"input_ids": ids})
        for model in models:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})  # pyright: ignore

        def loop(model: nn.Module, ids: Tensor = ids) -> list[Tensor]:
            made = model(input_ids=ids).logits
            other = model(input_ids=ids[:1, :7]).logits
            with torch.no_grad():
                model.eval()(input_ids=ids[:, :5])
            model.train()
            (made.square().mean() + other.square().mean()).backward()
            return [made, other]

        error = worst(*(shown(model, loop) for model in models))
        errors[f"reentrant: {use_reentrant}"] = error * TOLERANCE / 1e-5  # its norms compute in float32
    return errors


class Dropped(nn.Module):
    """Dropout on what is split and on the stream, both of a part that `run` runs."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 32), nn.Linear(32, HIDDEN)
        self.drop = nn.Dropout(0.4)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.inner(x) if self.run is plainly else self.run(self.inner, x))  # pyright: ignore

    def inner(self, x: Tensor) -> Tensor:
        return self.drop(self.down(functional.dropout(self.up(self.norm(x)), 0.4, self.training)))


def dropped(member: Member, plan: str) -> dict[str, float]:
    """Masks don't change with checkpoints: of a whole layer, and of a part of one."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, (layer, part) in {
        "plain": (plainly, plainly),
        "layer, direct": (direct, plainly),
        "layer, reentrant": (reentrant, plainly),
        "part, direct": (plainly, direct),
        "part, reentrant": (plainly, reentrant),
    }.items():
        model = stack(layer)
        torch.manual_seed(0)
        model.layers = nn.ModuleList([Dropped(part), Dropped(part)]).double()
        try:
            parallel(member, model, plan)
            torch.manual_seed(3)
            found[name] = shown(model, evaluated_between)
        except tpplan.RandomnessError as error:
            assert "part" in name and "checkpoint around the whole module" in str(error)
    return {name: worst(held, found["plain"]) for name, held in found.items()}


def check(found: list[dict[str, float]], least: int) -> None:
    for errors in found:
        assert len(errors) >= least
        assert {name: error for name, error in errors.items() if not error < TOLERANCE} == {}


@pytest.mark.slow
@pytest.mark.processes
def test_a_checkpoint_recomputes_as_its_call_ran() -> None:
    check(world(2).run(ways, "sequence", ["reentrant", "selective", "direct in reentrant"], seconds=120), 15)


@pytest.mark.sweep
@pytest.mark.processes
@pytest.mark.parametrize("plan", sweep_but(["sequence"], PLANS))
def test_each_way_recomputes_as_its_call_ran(plan: str) -> None:
    check(world(2).run(ways, plan, list(WAYS)), 45)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("plan", sweep_but(["sequence"], PLANS))
@pytest.mark.parametrize(("function", "least"), [(outside, 6), (wrapped, 3), (enabled, 2), (dropped, 3)])
def test_checkpoints_elsewhere(plan: str, function: Any, least: int) -> None:
    check(world(2).run(function, plan), least)


def test_a_call_that_is_not_known_any_more_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent, "_LIMIT", 1)
    calls, programs = recent.RecentCalls(), [HandedOut(ShapeCommunicator(2, 0)) for _ in range(2)]
    texts: list[str] = []

    class Asks(torch.autograd.Function):
        """Which call a backward belongs to."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            try:
                ran = calls.running()
                texts.append("" if ran is None else str(programs.index(ran.handed_out)))
            except recent.RecomputeError as error:
                texts.append(str(error))
            return gradients[0]

    made: list[Any] = []
    for program in programs:
        made.append(Asks.apply(torch.ones(1, requires_grad=True)))
        calls.note(recent.Ran(program, None, False))
    made.append(Asks.apply(torch.ones(1, requires_grad=True)))
    for held in made:
        held.backward()
    assert texts[0].startswith("TP175 recompute-unknown: ") and texts[1:] == ["1", ""]
