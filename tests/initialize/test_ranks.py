"""Real ranks: whole tensors, gradients and calls of an initialised model; ranks that differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import tpplan
from tests.checkpoint.subjects import Tied
from tests.initialize.compare import SEED, stock_of
from tests.initialize.test_plain import GPT_PLAN, IDS, STACK_PLAN, Gpt, Stack
from tests.marking import slow_but, sweep_but
from tests.plans.parity import PLANS
from tests.runtime.world import Member, world
from tests.zoo.architectures import ARCHITECTURES, model_of
from tpplan.compat.dtensors import local_of
from tpplan.plan import PlanError

pytestmark = pytest.mark.processes


class Once(nn.Module):
    """Weights of which a body computes more than a product: the bias is added on one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.up(x))
        return torch.nn.functional.linear(hidden, self.down.weight, self.down.bias)


Subject = tuple[Callable[[], nn.Module], Any, dict[str, torch.Tensor], Callable[[], nn.Module] | None]
X = {"x": torch.ones(2, 5, 8)}
TIED = {"table": "vocab", "up": "colwise", "down": "rowwise", "head": "colwise"}


def _family(name: str) -> Subject:
    inputs = {key: torch.ones_like(held, device="cpu") for key, held in ARCHITECTURES[name].inputs().items()}
    return lambda: model_of(ARCHITECTURES[name]), str(PLANS / f"{name}.yaml"), inputs, None


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "stack": lambda: (Stack, STACK_PLAN, IDS, None),
    "nanogpt": lambda: (Gpt, GPT_PLAN, IDS, Gpt),
    "tied": lambda: (Tied, TIED, {"x": torch.ones(2, 3, dtype=torch.long)}, Tied),
    "once": lambda: (Once, {"up": "colwise", "down": "rowwise"}, X, Once),
    "gpt2": lambda: _family("gpt2"),
    "llama": lambda: _family("llama"),
    "mixtral": lambda: _family("mixtral"),
}


def _plan(rules: Any) -> tpplan.Plan:
    return tpplan.load_plan({"version": 1, "modules": rules} if isinstance(rules, dict) else rules)


def _model(member: Member, name: str) -> tuple[nn.Module, Subject]:
    """A subject on `meta`, parallelized; with FSDP around it on four ranks."""
    subject = SUBJECTS[name]()
    make, rules, inputs, _ = subject
    with torch.device("meta"):
        model = make()
    two = member.size == 4
    mesh = member.mesh(2, 2, names=("dp", "tp")) if two else member.mesh()
    tpplan.parallelize(model, _plan(rules), mesh, inputs)
    if two:
        fully_shard(model, mesh=mesh["dp"])
    return model, subject


def _numbers(result: Any) -> torch.Tensor:
    held = result.full_tensor() if isinstance(result, DTensor) else result
    return held if isinstance(held, torch.Tensor) else next(t for t in held.values() if isinstance(t, torch.Tensor))


def _wrong(member: Member, name: str) -> list[str]:
    model: Any
    model, (make, _, inputs, build) = _model(member, name)
    stock, after = stock_of(make)
    torch.manual_seed(SEED)
    tpplan.init_weights(model, build=build)
    wrong = [] if torch.equal(torch.get_rng_state(), after) else ["the generator"]
    ours: dict[str, Any] = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    theirs = {**dict(stock.named_parameters(remove_duplicate=False)), **dict(stock.named_buffers())}
    for key, held in theirs.items():
        whole = ours[key].full_tensor() if isinstance(ours[key], DTensor) else ours[key]
        if not torch.equal(whole, held) or ours[key].requires_grad != held.requires_grad:
            wrong.append(key)
        wrong += [f"{key} and {k}" for k, other in theirs.items() if (held is other) != (ours[key] is ours[k])]
    for held in (model.eval(), stock.eval()):
        _numbers(held(**inputs)).sum().backward()
    for key, held in stock.named_parameters():
        gradient: Any = model.get_parameter(key).grad
        whole = None if gradient is None else gradient.full_tensor()
        if held.grad is None or whole is None or not torch.allclose(whole, held.grad, atol=1e-4):
            wrong += [] if held.grad is None and whole is None else [f"the gradient of {key}"]
    if not torch.allclose(_numbers(model(**inputs)), _numbers(stock(**inputs)), atol=1e-5):
        wrong.append("a call")
    return wrong


@pytest.mark.parametrize("name", slow_but(["nanogpt"], SUBJECTS))
def test_every_rank_has_its_parts(name: str) -> None:
    assert world(2).run(_wrong, name) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("name", sweep_but(["gpt2", "tied", "mixtral"], SUBJECTS))
def test_fsdp_around_it(name: str) -> None:
    assert world(4).run(_wrong, name) == [[]] * 4


def _says(member: Member, seeds: list[int], layers: list[int], meta: bool) -> str:
    with torch.device("meta" if meta else "cpu"):
        model = Stack()
    tpplan.parallelize(model, _plan(STACK_PLAN), member.mesh(), IDS)
    before = {name: local_of(held).clone() for name, held in model.named_parameters()}
    torch.manual_seed(seeds[member.rank])
    state = torch.get_rng_state()

    def build() -> nn.Module:
        made = Stack(abs(layers[member.rank]))
        if layers[member.rank] < 0:
            raise ZeroDivisionError("on purpose")
        return made

    try:
        tpplan.init_weights(model, build=build)
    except (PlanError, ZeroDivisionError) as error:
        for name, held in model.named_parameters():
            assert local_of(held).is_meta == meta and (meta or torch.equal(local_of(held), before[name])), name
        assert torch.equal(torch.get_rng_state(), state)
        return f"{type(error).__name__} {error}"
    finally:
        dist.barrier()
    return ""


@pytest.mark.parametrize("meta", [True, False])
def test_ranks_with_other_seeds(meta: bool) -> None:
    ours, theirs = world(2).run(_says, [1, 2], [2, 2], meta)
    assert ours == theirs and "TP145" in ours and "rank 0 and rank 1 are in different states" in ours
    assert world(2).run(_says, [2, 2], [2, 2], meta) == ["", ""]


def test_ranks_with_other_builds() -> None:
    ours, theirs = world(2).run(_says, [1, 1], [2, 1], True)
    assert ours == theirs and "TP144" in ours and "on rank 1 of 2" in ours and "`blocks.1.up.weight`" in ours


def test_a_build_that_fails_on_one_rank() -> None:
    ours, theirs = world(2).run(_says, [1, 1], [2, -2], True)
    assert ours.startswith("InitializationError") and "TP143" in ours and "on purpose" in ours
    assert theirs == "ZeroDivisionError on purpose"


def _same_shapes(member: Member) -> str:
    with torch.device("meta"):
        model = Stack()
    tpplan.parallelize(model, _plan(STACK_PLAN), member.mesh(), IDS)
    torch.manual_seed(1)

    def build() -> nn.Module:
        made: Any = Stack()
        nn.init.constant_(made.head[0].bias, float(member.rank))
        return made

    try:
        tpplan.init_weights(model, build=build)
    except PlanError as error:
        return str(error)
    return ""


def test_ranks_that_would_do_different_things() -> None:
    ours, theirs = world(2).run(_same_shapes)
    assert ours == theirs and "TP145" in ours and "rank 0 and rank 1 would initialise different models" in ours
