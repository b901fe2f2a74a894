"""Parameters in their owner's hands: whatever is done outside of a forward gives the unsharded model's numbers."""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard  # pyright: ignore
from torch.distributed.tensor import DTensor
from torch.nn.utils import prune

import tpplan
from tests.runtime.owner import CASES, Block, Shared, backward, batch, detached, gradients, train
from tests.runtime.world import Member, world
from tpplan.rehearsal.prove import prove
from tpplan.runtime.parameters.sharded_tensors import shown
from tpplan.runtime.parameters.sharded_views import ShardedView

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


_proofs: dict[tuple[str, int], Any] = {}


def sharded(member: Member, name: str, replicas: int = 1) -> tuple[Any, Any]:
    """A stock model and its sharded copy, proved once; of several replicas, which have the same batch, cut by FSDP."""
    torch.manual_seed(0)
    make, rules = MODELS[name]
    stock = make().double()
    mesh = member.mesh(*(replicas, member.size // replicas)[replicas == 1 :], names=("dp", "tp")[replicas == 1 :])

    def proved(request: Any) -> Any:
        key = name, request.size
        if key not in _proofs:
            _proofs[key] = prove(request)
        return _proofs[key]

    with mock.patch("tpplan.api.prove", proved):
        model = tpplan.parallelize(
            copy.deepcopy(stock), {"version": 1, "modules": rules}, mesh["tp"], inputs=(batch(0),)
        )
    return stock, model if replicas == 1 else fully_shard(model, mesh=mesh["dp"])  # pyright: ignore


def differences(member: Member, name: str, cases: list[str], replicas: int) -> dict[str, float]:
    found: dict[str, float] = {}
    for case in cases:
        stock, model = sharded(member, name, replicas)
        before = {parameter: made.detach().clone() for parameter, made in stock.named_parameters()}
        try:
            made = [CASES[case](held) for held in (stock, model)]
        except Exception as error:
            raise AssertionError(f"{name}, {case}") from error
        parameters = [[held.get_parameter(parameter) for parameter in before] for held in (stock, model)]
        assert made[0] is not None or difference(parameters[0], [*before.values()]) > 0, f"{case} does nothing"
        with torch.no_grad():
            results = [held(batch(9)) for held in (stock, model)]
        found[case] = max(
            difference(made[1], made[0]),
            difference(parameters[1], parameters[0]),
            difference(results[1], results[0]) / max(1.0, float(results[0].abs().max())),
        )
    return found


def check(size: int, name: str, cases: list[str], replicas: int = 1) -> None:
    for found in world(size).run(differences, name, cases, replicas, seconds=240):
        assert {case: error for case, error in found.items() if not error < TOLERANCE} == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_what_is_done_to_parameters_gives_the_unsharded_models_numbers(name: str) -> None:
    place = [*MODELS].index(name)
    check(2, name, [case for at, case in enumerate(CASES) if name == "uneven" or at % 4 == place])


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_so_do_four_ranks(name: str) -> None:
    check(4, name, [*CASES])


# FSDP calls no hooks of tensors, copies no models, and doesn't gather what a functional call puts in place.
OF_FSDP = {
    "gradient: hooks", "gradient: of changed ones",
    *(case for case in CASES if "average" in case or case.startswith("read: a call")),
}  # fmt: skip


@pytest.mark.slow
def test_so_do_replicas_that_fsdp_cuts() -> None:
    check(4, "uneven", [case for at, case in enumerate(CASES) if at % 4 == 1 and case not in OF_FSDP], replicas=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_so_do_all_uses_of_replicas(name: str) -> None:
    check(4, name, [case for case in CASES if case not in OF_FSDP], replicas=2)


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


SHARED = {
    "a flat gradient": lambda m, flat: setattr(m.up.weight, "grad", flat[: m.up.weight.numel()].view_as(m.up.weight)),
    "flat data": lambda m, flat: setattr(m.up.weight, "data", flat[: m.up.weight.numel()].view_as(m.up.weight)),
    "another's column": lambda m, _: setattr(m.up.bias, "data", m.up.weight.data[:, 0]),
    "sparse": lambda m, _: setattr(m.up.weight, "grad", torch.ones(m.up.weight.shape).double().to_sparse()),
    "storage": lambda m, _: m.up.weight.data.storage()[0],
    "shared memory": lambda m, _: m.share_memory(),
    "of a view": lambda m, _: m.up.weight.data[3].share_memory_(),
    "dlpack": lambda m, _: torch.from_dlpack(m.up.weight.detach()),
    "dlpack of a view": lambda m, _: torch.from_dlpack(m.up.weight.detach()[3]),
}


def of_shared_memory(member: Member) -> list[str]:
    for use in SHARED.values():
        _, model = sharded(member, "even")
        with pytest.raises(tpplan.StateError, match="TP140"):
            use(model, torch.zeros(4096, dtype=torch.float64))
    return [*SHARED]


def test_memory_that_would_be_shared_is_refused() -> None:
    assert world(2).run(of_shared_memory) == [[*SHARED]] * 2


BETWEEN = {
    "in place": lambda m: m.down.weight.mul_(2),
    "by a view": lambda m: m.down.weight[3].zero_(),
    "drawn": lambda m: nn.init.normal_(m.down.weight),
    "in a list": lambda m: torch._foreach_mul_([*m.parameters()], 2.0),  # pyright: ignore
    "rolled": lambda m: m.down.weight.masked_scatter_(m.down.weight > 0, torch.ones(999).double()),
    "loaded": lambda m: m.load_state_dict({name: held * 2 for name, held in m.state_dict().items()}),
}


def edited_before_backward(member: Member) -> list[str]:
    for edit in BETWEEN.values():
        for model in sharded(member, "even"):
            loss = model(batch(0)).square().mean()
            with torch.no_grad():
                edit(model)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
    return [*BETWEEN]


def test_an_edit_between_forward_and_backward_is_told_as_of_the_stock_model() -> None:
    assert world(2).run(edited_before_backward) == [[*BETWEEN]] * 2


def of_fsdp(member: Member, before: Any = None) -> Any:
    made = MODELS["even"][0]().double()
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    tpplan.parallelize(made, {"version": 1, "modules": MODELS["even"][1]}, mesh["tp"], inputs=(batch(0),))
    kept = None if before is None else before(made)
    fully_shard(made, mesh=mesh["dp"])
    return made, kept


def names_after_fully_shard(member: Member) -> list[str]:
    model, _ = of_fsdp(member)
    backward(model)
    held: list[Any] = [t for p in model.parameters() for t in (p, p.grad)]
    return [shown(tensor) for tensor in held]


def test_messages_name_parameters_and_gradients_of_fsdp() -> None:
    names = [name for name, _ in MODELS["even"][0]().named_parameters()]
    for found in world(2).run(names_after_fully_shard):
        assert found == [t for name in names for t in (f"`{name}`", f"the gradient, the state or the data of `{name}`")]


def while_gathered(edit: Any) -> Any:
    """FSDP keeps the root's parameters gathered from a forward to the next backward."""

    def use(model: Any) -> None:
        with torch.no_grad():
            model(batch(0))
            edit(model)

    return use


def used_when_freed(model: Any) -> None:
    loss = model(batch(0)).sum()
    weight, row = model.up.weight, model.up.weight[3]
    loss.backward()
    with pytest.raises(tpplan.StateError, match=r"TP140.*`up\.weight` was taken from the model while FSDP"):
        row.sum()
    weight.sum()


LOST: dict[str, Any] = {
    r"`up\.weight` without calling hooks": lambda m: m.up.weight.register_hook(lambda gradient: gradient * 0),
    r"`up\.weight` was written to while FSDP": while_gathered(lambda m: m.up.weight.mul_(2)),
    r"data of `up\.weight` was written to while FSDP": while_gathered(lambda m: m.up.weight.data.mul_(2)),
    r"`down\.weight` was written to while FSDP": while_gathered(lambda m: m.down.weight[3].zero_()),
    r"`norm\.weight` was written to while FSDP": while_gathered(lambda m: torch._foreach_mul_([*m.parameters()], 2.0)),  # pyright: ignore
    r"`up\.weight` was taken from the model while FSDP": used_when_freed,
}


def lost_under_fsdp(member: Member) -> None:
    for text, use in LOST.items():
        model, _ = of_fsdp(member)
        with pytest.raises(tpplan.StateError, match=f"TP140.*{text}"):
            use(model)
    model, _ = of_fsdp(member)
    while_gathered(lambda m: (m.up.weight.norm(), m.reshard(), m.up.weight.mul_(2)))(model)
    for kind in (torch.optim.AdamW, torch.optim.Muon):
        model, optimizer = of_fsdp(member, lambda m, kind=kind: kind([m.up.weight]))
        with pytest.raises(tpplan.StateError, match=r"TP140.*an optimizer has `up\.weight` as it was before"):
            train(model, optimizer, 1)


def test_what_fsdp_would_lose_is_refused() -> None:
    world(2).run(lost_under_fsdp)


def gathers(member: Member) -> list[str]:
    _, model = sharded(member, "even")
    weight: Any = model.up.weight
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


def swapped(member: Member) -> float:
    """Tensors of one geometry change places; a plain one and a sharded one don't."""
    stock, model = sharded(member, "uneven")
    for held in (stock, model):
        other = copy.deepcopy(held.up.weight)
        with torch.no_grad():
            other.mul_(2)
        torch.utils.swap_tensors(held.up.weight, other)
        backward(held)
    found = difference([*model.parameters(), *gradients(model)], [*stock.parameters(), *gradients(stock)])
    plain = nn.Parameter(torch.ones_like(stock.up.weight))
    with pytest.raises((RuntimeError, tpplan.StateError)):
        torch.utils.swap_tensors(model.up.weight, plain)
    assert type(plain) is nn.Parameter and bool((plain == 1).all())
    return max(found, difference(model.up.weight, stock.up.weight), difference(model(batch(1)), stock(batch(1))))


def test_two_sharded_tensors_can_be_swapped() -> None:
    assert max(world(2).run(swapped)) < TOLERANCE


def swap_weights(model: Any) -> None:
    """Of one shape, where one's rows are split and the other's columns."""
    torch.utils.swap_tensors(model.up.weight, model.down.weight)


def swapped_otherwise(member: Member) -> str:
    model: Any = Block(16).double()
    rules = {"version": 1, "modules": {"up": "colwise", "down": "rowwise"}}
    tpplan.parallelize(model, rules, member.mesh(), inputs=(batch(0),))
    swap_weights(model)
    with pytest.raises(tpplan.UnprovedCallError, match=r"TP130.*weight` was replaced") as caught:
        model(batch(1))
    swap_weights(model)
    model(batch(1))
    return str(caught.value)


def test_tensors_that_lie_otherwise_are_told_when_they_are_swapped() -> None:
    world(2).run(swapped_otherwise)


CHANGES: dict[str, tuple[str, Any]] = {
    "weight_norm": ("TP130", lambda m: nn.utils.parametrizations.weight_norm(m.up)(batch(1))),
    "a mask": ("TP130", lambda m: prune.l1_unstructured(m.up, "weight", 0.3) and m(batch(1))),
    "plain ones in a call": (
        "TP130",
        lambda m: torch.func.functional_call(m, {"up.weight": torch.ones(m.up.weight.shape).double()}, (batch(1),)),
    ),
    "a transform of the model": (
        "TP117",
        lambda m: torch.func.grad(lambda held: torch.func.functional_call(m, held, (batch(1),)).sum())(detached(m)),
    ),
}


def refused(member: Member) -> list[str]:
    for code, change in CHANGES.values():
        with pytest.raises(tpplan.TpplanError, match=code):
            change(sharded(member, "even")[1])
    return [*CHANGES]


def test_what_changes_the_model_is_refused_by_name() -> None:
    assert world(2).run(refused) == [[*CHANGES]] * 2
