"""Layers that are skipped by chance: each call computes what the unsharded model computes that draws the same."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import tpplan
from tests.runtime.world import Member, world
from tpplan.plan import CompileError, TpplanError

pytestmark = pytest.mark.processes

HIDDEN, LENGTH, STEPS = 16, 6, 4
FEATURES = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}


def imported(draw: Callable[[], float] = random.random) -> float:
    return draw()


SKIPS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.rand([]) < 0.5,
    "torch kept": lambda: not torch.rand(1) > 0.5,
    "bernoulli": lambda: torch.empty(1).bernoulli_(0.5).bool(),
    "python": lambda: random.random() < 0.5,
    "python kept": lambda: not 1 - random.random() >= 0.5,
    "numpy": lambda: np.random.rand() < 0.5,
    "choice": lambda: random.choice([True, False]),
    "whole numbers": lambda: np.random.randint(2),
    "imported": lambda: imported() < 0.5,
}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Skipping(nn.Module):
    """A loop that leaves layers out, and ends in one that it runs or not."""

    def __init__(self, skip: Callable[[], Any], count: int = 3) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(count))
        self.skip = skip

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            if self.training and self.skip():
                continue
            x = layer(x)
        return self.last(x)


class Either(Skipping):
    """One layer or another, and a third by a number of its own."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x) if self.skip() else self.layers[1](x)
        return self.layers[2](x) if self.skip() else x


class OfData(Skipping):
    """As by chance, by the numbers that a call is passed."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for index, layer in enumerate(self.layers):
            if x[index, 0, 0] > 0:
                h = layer(h)
        return self.last(h)


def seeded(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def stepped(model: nn.Module, call: dict[str, Any], seed: int) -> tuple[Tensor, dict[str, Tensor], list[float]]:
    """What a step shows: the result, the gradients, and what is drawn after it."""
    seeded(seed)
    model.zero_grad()
    output = model(**call)
    output = output if isinstance(output, Tensor) else output.loss
    output.square().sum().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    whole = {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in found.items()}
    return output.detach(), whole, [torch.rand(1).item(), random.random(), np.random.rand()]


def assert_equal_steps(stock: nn.Module, model: nn.Module, calls: list[dict[str, Any]]) -> None:
    for seed, call in enumerate(calls):
        (output, gradients, drawn), (ours, own, also) = (stepped(held, call, seed) for held in (stock, model))
        torch.testing.assert_close(ours, output)
        assert own.keys() == gradients.keys() and also == drawn
        for name, gradient in gradients.items():
            torch.testing.assert_close(own[name], gradient, msg=lambda text, name=name: f"{name}: {text}")


def sharded(member: Member, stock: nn.Module, rules: dict[str, Any], call: dict[str, Any], seed: int) -> nn.Module:
    model = copy.deepcopy(stock)
    seeded(seed)
    return tpplan.parallelize(model, {"version": 1, "modules": rules}, member.mesh(), inputs=call)


def _steps(member: Member, kind: type[Skipping], skips: list[str], rules: dict[str, Any], seed: int) -> None:
    for skip in skips:
        torch.manual_seed(1)
        stock, x = kind(SKIPS[skip]), torch.randn(3, LENGTH, HIDDEN)
        model = sharded(member, stock, rules, {"x": x}, seed)
        assert_equal_steps(stock, model, [{"x": x}] * STEPS)


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("kind", "skips"),
    [
        (Skipping, ["torch kept", "python"]),
        (Skipping, ["numpy", "choice", "imported"]),
        (Either, ["bernoulli", "python kept", "whole numbers"]),
    ],
)
def test_any_choice_of_layers_equals_the_unsharded_model(kind: type[Skipping], skips: list[str]) -> None:
    world(2).run(_steps, kind, skips, FEATURES, 0)


@pytest.mark.slow
def test_layers_between_which_a_sequence_is_split_may_be_skipped() -> None:
    world(2).run(_steps, Skipping, ["torch", "python", "whole numbers"], {"layers.*.norm": "sequence", **FEATURES}, 3)


def test_what_was_drawn_in_the_example_does_not_matter() -> None:
    model, call = Skipping(SKIPS["python"]), (torch.randn(3, LENGTH, HIDDEN),)
    programs: set[str] = set()
    for seed in range(4):
        seeded(seed)
        programs.add(tpplan.compile_plan(model, {"version": 1, "modules": FEATURES}, tp=2, inputs=call).digest)
        assert random.random() == random.Random(seed).random()
    assert len(programs) == 1


def test_layers_that_numbers_in_tensors_skip_keep_their_layouts() -> None:
    world(2).run(_of_data)


def _of_data(member: Member) -> None:
    torch.manual_seed(1)
    stock = OfData(bool)
    calls = [{"x": torch.randn(3, LENGTH, HIDDEN)} for _ in range(STEPS)]
    model = sharded(member, stock, {"layers.*.norm": "sequence", **FEATURES}, calls[0], 0)
    assert_equal_steps(stock, model, calls)


@pytest.mark.slow
def test_opt_in_training_skips_layers() -> None:
    world(2).run(_opt)


def _opt(member: Member) -> None:
    from transformers import OPTConfig, OPTForCausalLM

    sizes: dict[str, Any] = {
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "hidden_size": 32,
        "word_embed_proj_dim": 32,
        "ffn_dim": 64,
        "max_position_embeddings": 32,
    }
    torch.manual_seed(1)
    stock = OPTForCausalLM(OPTConfig(vocab_size=64, num_hidden_layers=3, num_attention_heads=4, layerdrop=0.5, **sizes))
    ids = torch.randint(0, 64, (2, 8))
    layer, call = "model.decoder.layers.*", {"input_ids": ids, "labels": ids}
    rules = {f"{layer}.self_attn.{name}_proj": "colwise" for name in "qkv"}
    rules |= {f"{layer}.self_attn.out_proj": "rowwise", f"{layer}.fc1": "colwise", f"{layer}.fc2": "rowwise"}
    assert_equal_steps(stock.train(), sharded(member, stock, rules, call, 0), [call] * 10)


class Drawing(nn.Module):
    def __init__(self, draw: Any) -> None:
        super().__init__()
        self.layer, self.draw = Layer(), draw

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if self.draw.random() < 0.5 else x


@pytest.mark.parametrize("draw", [random.Random(0), np.random.default_rng(0)])
def test_a_generator_of_the_model_s_own_is_refused(draw: Any) -> None:
    plan = {"version": 1, "modules": {"layer.up": "colwise", "layer.down": "rowwise"}}
    with pytest.raises(CompileError, match="draws from `draw`, a generator of its own"):
        tpplan.compile_plan(Drawing(draw), plan, tp=2, inputs=(torch.randn(3, LENGTH, HIDDEN),))


def test_ranks_that_would_skip_other_layers_are_told_so() -> None:
    for told in world(2).run(_apart):
        assert told.startswith("TP192 different-inputs: ") and "the state of Python's `random`" in told
        assert "`random.seed(seed)`" in told


def _apart(member: Member) -> str:
    torch.manual_seed(1)
    call = {"x": torch.randn(3, LENGTH, HIDDEN)}
    model = sharded(member, Skipping(SKIPS["python"]), FEATURES, call, 0)
    model(**call)
    random.seed(member.rank)
    try:
        model(**call)
    except TpplanError as error:
        return str(error)
    return ""
