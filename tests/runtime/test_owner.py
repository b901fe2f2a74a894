"""Parameters in their owner's hands: whatever is done outside of a forward gives the unsharded model's numbers."""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard  # pyright: ignore
from torch.distributed.tensor import DTensor

import tpplan
from tests.runtime.owner import CASES, Block, Shared, backward, batch
from tests.runtime.world import Member, world
from tpplan.runtime.sharded import shown
from tpplan.runtime.sharded_views import ShardedView

pytestmark = pytest.mark.processes
TOLERANCE = 1e-9  # of float64, after optimizers that divide by roots of squares
TENSOR: dict[str, Any] = {"up": "colwise", "down": "rowwise"}
SEQUENCE = {"norm": "sequence", **TENSOR}
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "even": (lambda: Block(32), TENSOR),
    "uneven": (lambda: Block(33), SEQUENCE),
    "packed": (lambda: Block(34, packed=True), {**TENSOR, "up": {"style": "colwise", "packed": ["gate", "value"]}}),
    "shared": (lambda: Shared(32), {**SEQUENCE, "second": "colwise"}),
}


def whole(tensor: Any) -> Tensor:
    """The numbers of a tensor, whatever its class."""
    held: Any = tensor.detach()
    if isinstance(held, DTensor):
        return held.full_tensor()
    return held.whole() if isinstance(held, ShardedView) else held


def difference(ours: Any, theirs: Any) -> float:
    if isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs)  # pyright: ignore
        return max((difference(*pair) for pair in zip(ours, theirs, strict=True)), default=0.0)  # pyright: ignore
    if theirs is None:
        return 0.0
    ours, theirs = whole(ours), whole(theirs)
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
    return float((ours.double() - theirs.double()).abs().max()) if theirs.numel() else 0.0


def sharded(member: Member, name: str) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    make, rules = MODELS[name]
    stock = make().double()
    model = tpplan.parallelize(
        copy.deepcopy(stock), {"version": 1, "modules": rules}, member.mesh(), inputs=(batch(0),)
    )
    return stock, model


def differences(member: Member, name: str, cases: list[str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for case in cases:
        stock, model = sharded(member, name)
        before = {parameter: made.detach().clone() for parameter, made in stock.named_parameters()}
        try:
            made = [CASES[case](held) for held in (stock, model)]
        except Exception as error:
            raise AssertionError(f"{name}, {case}") from error
        parameters = [[held.get_parameter(parameter) for parameter in before] for held in (stock, model)]
        assert made[0] is not None or difference(parameters[0], [*before.values()]) > 0, f"{case} does nothing"
        found[case] = max(difference(made[1], made[0]), difference(parameters[1], parameters[0]))
    return found


def check(size: int, name: str, cases: list[str]) -> None:
    for found in world(size).run(differences, name, cases, seconds=240):
        assert {case: error for case, error in found.items() if not error < TOLERANCE} == {}


@pytest.mark.parametrize("name", MODELS)
def test_what_is_done_to_parameters_gives_the_unsharded_models_numbers(name: str) -> None:
    place = [*MODELS].index(name)
    check(2, name, [case for at, case in enumerate(CASES) if name == "uneven" or at % 4 == place])


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_so_do_four_ranks(name: str) -> None:
    check(4, name, [*CASES])


def layers_alone(member: Member) -> dict[str, float]:
    stock, model = sharded(member, "shared")
    shapes = {"down": 32, "up": 16, "norm": 16}
    found: dict[str, float] = {}
    for name, size in shapes.items():
        for batches in ((), (2,), (2, 4), (2, 3, 5), (2, 4, 4)):
            x = torch.randn(*batches, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
            made = [held.get_submodule(name)(x) for held in (model, stock)]
            found[f"{name} of {batches}"] = difference(*made)
    return found


def test_a_layer_by_itself_takes_a_batch_of_any_dims() -> None:
    for found in world(2).run(layers_alone):
        assert {case: error for case, error in found.items() if not error < TOLERANCE} == {}


def names_after_fully_shard(member: Member) -> list[str]:
    model = MODELS["even"][0]().double()
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    tpplan.parallelize(model, {"version": 1, "modules": MODELS["even"][1]}, mesh["tp"], inputs=(batch(0),))
    fully_shard(model, mesh=mesh["dp"])
    backward(model)
    held: list[Any] = [t for p in model.parameters() for t in (p, p.grad)]
    return [shown(tensor) for tensor in held]


def test_messages_name_parameters_and_gradients_of_fsdp() -> None:
    names = [name for name, _ in MODELS["even"][0]().named_parameters()]
    for found in world(2).run(names_after_fully_shard):
        assert found == [t for name in names for t in (f"`{name}`", f"the gradient, the state or the data of `{name}`")]


def gathers(member: Member) -> list[str]:
    _, model = sharded(member, "even")
    weight: Any = model.get_parameter("up.weight")
    always: list[Any] = [lambda: weight.norm(), lambda: weight.mul(2), lambda: weight.topk(3), lambda: weight[3].sum()]
    twice: list[Any] = [lambda: weight.sort(dim=0), weight.median, weight.median]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(4):
            backward(model)
            for use in always + (twice if step < 2 else []):
                use()
    return [str(warning.message) for warning in caught if "TP140" in str(warning.message)]


def test_what_is_gathered_in_each_step_is_warned_of_once() -> None:
    for found in world(2).run(gathers):
        assert [re.sub(r".*?: `(\S+)` gathers the whole of `up\.weight` in each step.*", r"\1", text, flags=re.DOTALL)
                for text in found] == ["aten::topk", "aten::sum"]  # fmt: skip
