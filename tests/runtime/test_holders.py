"""What keeps a model's parameters beside its modules, made before `parallelize`, goes on with the sharded ones."""

from __future__ import annotations

import copy
import operator
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.swa_utils import AveragedModel
from torch.utils.dlpack import from_dlpack, to_dlpack  # pyright: ignore[reportPrivateImportUsage]

import tpplan
from tests.runtime.owner import batch, train
from tests.runtime.test_owner import MODELS, TOLERANCE, difference
from tests.runtime.world import Member, world
from tpplan.compat.process_groups import fake_process_group

pytestmark = pytest.mark.processes
Shard = Callable[[], object]


def optimizer(model: Any, shard: Shard) -> None:
    made = torch.optim.AdamW(model.parameters(), lr=0.01)
    shard()
    train(model, made)


def filled_optimizer(model: Any, shard: Shard) -> None:
    made = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, made)
    shard()
    for held, state in made.state.items():  # each rank's part, on which a step of a rank's parts goes on
        assert {type(kept) for kept in state.values() if kept.dim()} == {type(held.detach())} or not held.dim()
    train(model, made)


def groups(model: Any, shard: Shard) -> None:
    every = [*model.parameters()]
    matrices, vectors = ([p for p in every if (p.dim() > 1) == wide] for wide in (True, False))
    made = torch.optim.SGD([{"params": matrices, "lr": 0.1}, {"params": vectors, "lr": 0.01}], momentum=0.9)
    shard()
    train(model, made)


def schedule(model: Any, shard: Shard) -> None:
    made = torch.optim.Adam(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(made, 1)
    shard()
    for _ in range(2):
        train(model, made, 1)
        schedule.step()


def lbfgs(model: Any, shard: Shard) -> None:
    made = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    shard()

    def closure() -> Tensor:
        made.zero_grad()
        loss = model(batch(1)).square().mean()
        loss.backward()
        return loss

    made.step(closure)  # pyright: ignore


def listed(model: Any, shard: Shard) -> list[Any]:
    held = [*model.parameters()]
    shard()
    model(batch(1)).sum().backward()
    return [nn.utils.clip_grad_norm_(held, 0.1), *[p.grad for p in held]]


def named(model: Any, shard: Shard) -> list[Any]:
    pairs, table = [*model.named_parameters()], dict(model.named_parameters())
    shard()
    assert all(table[name] is held for name, held in pairs) and table["up.weight"] is model.up.weight
    return [held.norm() for held in table.values()]


def attribute(model: Any, shard: Shard) -> list[Any]:
    held, several = SimpleNamespace(weight=model.up.weight), {model.up.weight, model.up.bias}
    shard()
    assert held.weight is model.up.weight and model.up.weight in several and len(several) == 2
    return [held.weight.norm()]


def closure(model: Any, shard: Shard) -> list[Any]:
    weight = model.up.weight

    def read() -> Tensor:
        return weight.norm()

    shard()
    return [read()]


def average(model: Any, shard: Shard) -> list[Any]:
    held, made = AveragedModel(model), torch.optim.SGD(model.parameters(), lr=0.1)
    shard()
    for _ in range(2):
        train(model, made)
        held.update_parameters(model)
    return [*held.parameters()]


def shadow(model: Any, shard: Shard) -> list[Any]:
    held = {name: p.detach().clone() for name, p in model.named_parameters()}
    shard()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with torch.no_grad():
        for name, p in model.named_parameters():
            held[name].mul_(0.9).add_(p, alpha=0.1)
    return [*held.values()]


def marked(model: Any, shard: Shard) -> None:
    model.up.weight.decays = False
    shard()
    assert model.up.weight.decays is False


def with_gradients(model: Any, shard: Shard) -> list[Any]:
    model(batch(1)).sum().backward()
    shard()
    model(batch(2)).sum().backward()
    return [p.grad for p in model.parameters()]


def beside(model: Any, shard: Shard) -> list[Any]:
    """A layer outside of the model that shares a weight with it."""
    layer = nn.Linear(16, 32, bias=False).double()
    layer.weight = model.up.weight
    shard()
    made = layer(batch(1))
    made.square().sum().backward()
    return [made, model.up.weight.grad]


HOLDERS = [
    optimizer, filled_optimizer, groups, schedule, lbfgs, listed, named, attribute, closure, average, shadow, marked,
    with_gradients, beside,
]  # fmt: skip


def differences(member: Member, name: str) -> dict[str, float]:
    found: dict[str, float] = {}
    make, rules = MODELS[name]
    for use in HOLDERS:
        torch.manual_seed(0)
        stock = make().double()
        model = copy.deepcopy(stock)

        def shard(model: nn.Module = model) -> None:
            tpplan.parallelize(model, {"version": 1, "modules": rules}, member.mesh(), inputs=(batch(0),))

        theirs, ours = use(stock, lambda: None), use(model, shard)
        parameters = [[*held.parameters()] for held in (model, stock)]
        found[use.__name__] = max(difference(ours, theirs), difference(*parameters))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_what_was_made_before_goes_on(name: str) -> None:
    for found in world(2).run(differences, name):
        assert len(found) == len(HOLDERS)
        assert {case: error for case, error in found.items() if not error < TOLERANCE} == {}


def kept_in_a_variable(member: Member) -> str:
    make, rules = MODELS["even"]
    model = make().double()
    weight = model.up.weight
    tpplan.parallelize(model, {"version": 1, "modules": rules}, member.mesh(), inputs=(batch(0),))
    assert "up.weight" in repr(weight)
    uses: list[Callable[[Any], Any]] = [torch.norm, lambda t: t.grad, lambda t: t + 1, lambda t: t.data]
    for use in uses:
        with pytest.raises(tpplan.StateError, match=r"TP140.*`up\.weight` as it was before `parallelize`"):
            use(weight)
    with pytest.raises(tpplan.StateError, match=r"TP140.*`\.data` of `up\.weight` was set to a tensor of shape \[3\]"):
        model.up.weight.data = torch.ones(3)
    with pytest.raises(tpplan.StateError, match=r"TP140.*`set_` gives "):
        model.up.weight.data.set_(torch.ones(3, dtype=torch.float64))  # pyright: ignore[reportArgumentType]
    with pytest.raises(tpplan.StateError, match=r"TP140.*changes the shape of `up\.weight`"), torch.no_grad():
        model.up.weight.t_()
    return "raised"


def test_a_variable_that_kept_a_stock_parameter_raises_by_name() -> None:
    assert world(2).run(kept_in_a_variable) == ["raised"] * 2


class Scaled(nn.Parameter):
    """A parameter of a user's own class."""


def of_a_class_of_its_own(member: Member) -> str:
    make, rules = MODELS["even"]
    model = make().double()
    weight = model.up.weight = Scaled(model.up.weight.detach())
    tpplan.parallelize(model, {"version": 1, "modules": rules}, member.mesh(), inputs=(batch(0),))
    assert isinstance(weight, Scaled)
    with pytest.raises(tpplan.StateError, match=r"TP140.*`up\.weight` as it was before `parallelize`"):
        weight.norm()
    return "raised"


def test_so_does_one_of_a_users_class() -> None:
    assert world(2).run(of_a_class_of_its_own) == ["raised"] * 2


def not_followed(member: Member) -> str:
    """What can't be given the sharded parameter is refused, with nothing changed."""
    made: list[tuple[str, Callable[[nn.Parameter], Any]]] = [
        (r"a view of `up\.weight` is alive", lambda weight: weight[3]),
        (r"a view of `up\.weight` is alive", lambda weight: [weight.detach_().requires_grad_().view(-1)]),
        (r"a weak dict or set has `up\.weight`", lambda weight: weakref.WeakKeyDictionary({weight: 1})),
        (r"a weak dict or set has `up\.weight`", lambda weight: weakref.WeakSet([weight])),
    ]
    for kind, make_holder in made:
        make, rules = MODELS["even"]
        stock = make().double()
        holder, before = make_holder(stock.up.weight), [*stock.parameters()]
        expected = stock(batch(1)).detach()
        with pytest.raises(tpplan.StateError, match=f"TP140.*{kind}"):
            tpplan.parallelize(stock, {"version": 1, "modules": rules}, member.mesh(), inputs=(batch(0),))
        assert all(now is held for now, held in zip(stock.parameters(), before, strict=True)), "it was changed"
        assert type(stock) is type(make()) and torch.equal(stock(batch(1)), expected)
        del holder
        model = tpplan.parallelize(stock, {"version": 1, "modules": rules}, member.mesh(), inputs=(batch(0),))
        assert difference(model(batch(1)), expected) < TOLERANCE
    return "refused"


KEPT: dict[str, Any] = {}


class Aliased(nn.Module):
    """A layer that keeps something in the memory of its weight."""

    def __init__(self, alias: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.kept = alias(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x))


@pytest.mark.parametrize("alias", [
    lambda weight: weight.data,
    lambda weight: weight.detach().view(-1)[7:9],
    lambda weight: [{"a": weight.detach().t()}],
    lambda weight: weight.detach().numpy()[::-1],
    lambda weight: torch.from_numpy(weight.detach().numpy()),
    lambda weight: SimpleNamespace(w=weight.data),
    lambda weight: type("Held", (), {"w": weight.data}),
    lambda weight: [type("Held", (type("Base", (), {"w": weight.data}),), {})()],
    lambda weight: setattr(Aliased, "of_class", weight.data),
    lambda weight: KEPT.update(w=weight.detach().numpy()),
    lambda weight: KEPT.update(w=(lambda data: lambda: data)(weight.data)),
    lambda weight: weight.data.mean,
    lambda weight: from_dlpack(to_dlpack(weight.detach())),
    lambda weight: from_dlpack(to_dlpack(weight)),
])  # fmt: skip
def test_what_has_a_parameters_memory_is_refused_before_anything_is_changed(alias: Any) -> None:
    stock = Aliased(alias)
    before = [*stock.parameters()]
    plan = {"version": 1, "modules": {"up": "colwise", "down": "rowwise"}}
    told = r"TP140.*`.+` has the memory of `up\.weight`"
    with fake_process_group(2), pytest.raises(tpplan.StateError, match=told):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        tpplan.parallelize(stock, plan, mesh, inputs=(torch.ones(2, 3, 16),))
    assert all(map(operator.is_, stock.parameters(), before)) and type(stock) is Aliased


@pytest.mark.slow
def test_views_and_weak_containers_are_refused_before_anything_is_changed() -> None:
    assert world(2).run(not_followed) == ["refused"] * 2


def backward_later(member: Member) -> str:
    make, rules = MODELS["even"]
    model = make().double()
    made = model(batch(1))
    tpplan.parallelize(model, {"version": 1, "modules": rules}, member.mesh(), inputs=(batch(0),))
    with pytest.raises(tpplan.StateError, match=r"TP140.*a backward of a call from before `parallelize` reached `"):
        made.sum().backward()
    model(batch(1)).sum().backward()
    return "raised"


def test_a_backward_of_a_call_from_before_raises() -> None:
    assert world(2).run(backward_later) == ["raised"] * 2


def test_what_holds_a_buffers_memory_goes_on_with_it() -> None:
    model: Any = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
    model.register_buffer("table", torch.zeros(3))
    model.register_buffer("wide", model.table[:1].expand(4))
    model.view, model.array = model.table[1:], model.table.numpy()
    with fake_process_group(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        tpplan.parallelize(model, {"version": 1, "modules": {"0": "colwise", "1": "rowwise"}}, mesh, torch.ones(2, 8))
    model.table.add_(1)
    assert [*model.view, *model.array, *model.wide] == [1] * 9
