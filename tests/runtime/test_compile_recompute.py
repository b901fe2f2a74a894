"""torch.compile and activation checkpoints: what a backward recomputes runs as it ran, by a compiler or without."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tpplan
from tests.compiler.toys import HIDDEN
from tests.models.tiny import tiny_model
from tests.plans.parity import PLANS, assert_same_run, tolerance
from tests.runtime.test_compile import WAYS, Graphs, compile_in_place, compile_layers, fresh, layers_of, run
from tests.runtime.test_recompute import (
    TENSOR,
    TOLERANCE,
    Scaled,
    direct,
    parallel,
    plainly,
    reentrant,
    shown,
    stack,
    step,
    worst,
    x,
)
from tests.runtime.test_recompute import Run as Checkpoint
from tests.runtime.world import Member, world

pytestmark = [pytest.mark.processes, pytest.mark.slow]


@pytest.mark.sweep
def test_activation_checkpoints_around_compiled_blocks_recompute_them() -> None:
    world(2).run(_checkpoints)


def _checkpoints(member: Member) -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)  # pyright: ignore

    stock, keywords = tiny_model("torch_transformer")
    sharded = tpplan.parallelize(
        copy.deepcopy(stock), PLANS / "torch_transformer-sequence.yaml", member.mesh(), keywords
    )
    with fresh():
        layers = layers_of(sharded)
        for index, layer in enumerate(layers):
            layer.compile(backend="aot_eager", fullgraph=True)
            layers[index] = Checkpointed(layer)
        for _ in range(2):
            sharded.zero_grad()
            stock.zero_grad()
            found = run(sharded, keywords)
            found.gradients = {name.replace(".inner", ""): held for name, held in found.gradients.items()}
            assert_same_run(found, run(stock, keywords), tolerance(torch.float64))


def test_a_call_that_ran_without_a_compiler_is_recomputed_without() -> None:
    world(2).run(_hooked)


def _hooked(member: Member) -> None:
    """The first call is watched. With a hook it isn't run again for the compiler."""
    stock, model = stack(direct, reentrant), parallel(member, stack(direct, reentrant), "sequence")
    with fresh():
        compile_layers(model, backend="aot_eager")
        model.get_submodule("layers.0.norm").register_forward_hook(lambda module, args, output: None)
        for _ in range(2):
            assert worst(shown(model, step), shown(stock, step)) < TOLERANCE


@pytest.mark.parametrize("way", ["compile_layers", pytest.param("compile_in_place", marks=pytest.mark.sweep)])
def test_a_checkpoint_around_a_compiled_model_counts_what_is_saved_once(way: str) -> None:
    world(2).run(_around, way)


def _around(member: Member, way: str) -> None:
    stock, model = stack(), parallel(member, stack(), "sequence")
    with fresh():
        WAYS[way](model, backend="aot_eager")
        for _ in range(2):
            assert worst(shown(model, _step_around), shown(stock, _step_around)) < TOLERANCE


def _step_around(model: nn.Module) -> list[Tensor]:
    made = direct(model, x())
    made.square().mean().backward()
    return [made]


class Labelled(nn.Module):
    """Its body computes a loss over split classes, and so runs in Python, with checkpoints around its layers."""

    def __init__(self, run: Checkpoint) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, HIDDEN)
        self.layers = nn.ModuleList([Scaled(plainly), Scaled(plainly)])
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, 32)
        self.run = run

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = self.run(layer, x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), ids.flatten())


def test_layers_that_a_body_in_python_recomputes_are_compiled() -> None:
    world(2).run(_inside)


def _inside(member: Member) -> None:
    torch.manual_seed(0)
    stock = Labelled(direct).double()
    rules = TENSOR | {"head": {"style": "colwise", "output": "shard"}, "layers.*.norm": "sequence", "norm": "sequence"}
    ids = [torch.randint(32, (2, n), generator=torch.Generator().manual_seed(n)) for n in (8, 6)]
    model = tpplan.parallelize(copy.deepcopy(stock), {"version": 1, "modules": rules}, member.mesh(), (ids[0],))

    def loop(model: nn.Module) -> list[Tensor]:
        loss = model(ids[0])
        with torch.no_grad():
            other = model(ids[1])
        loss.backward()
        return [loss, other]

    with fresh():
        graphs = Graphs("aot_eager")
        compile_in_place(model, backend=graphs)
        for _ in range(2):
            assert worst(shown(model, loop), shown(stock, loop)) < TOLERANCE
        assert graphs.seen


def test_a_copy_of_a_compiled_model_is_compiled_by_itself() -> None:
    world(2).run(_copied)


def _copied(member: Member) -> None:
    stock, model = stack(), parallel(member, stack(), "sequence")
    with fresh():
        compile_in_place(model, backend="eager")
        step(model)
        other: Any = compile_in_place(copy.deepcopy(model), backend="eager")
        with torch.no_grad():
            for parameter in (*other.parameters(), *stock.parameters()):
                parameter.mul_(0.5)
        for _ in range(2):
            assert worst(shown(other, step), shown(stock, step)) < TOLERANCE
