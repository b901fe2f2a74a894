"""FSDP2, DistributedDataParallel and `replicate` around sharded models: as the unsharded model, or refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

import tpplan
from tests.marking import slow_but
from tests.plans.parity import PLANS, counted
from tests.runtime import data_parallel_toys as toys
from tests.runtime.data_parallel_cells import CASES, LENGTH, ROWS, layers_of, llama, loss_of, run_cases
from tests.runtime.world import world
from tpplan.compat.process_groups import fake_process_group

QUICK = ["ddp accumulated", "replicate", "replicate by fsdp"]
HSDP = ["hsdp"]
SLOW = ["of everything", "half, packs"]
SWEPT = [name for name in CASES if name not in (*SLOW, *HSDP)]


@pytest.mark.sweep
@pytest.mark.processes
def test_two_replicas_of_whole_models_are_the_unsharded_one() -> None:
    for found in world(2).run(run_cases, QUICK, (2, 1)):
        assert found == dict.fromkeys(QUICK, "")


@pytest.mark.processes
@pytest.mark.parametrize(
    "names", [pytest.param(SLOW, marks=pytest.mark.slow), pytest.param(SWEPT, marks=pytest.mark.sweep)], ids=len
)
def test_two_replicas_of_two_parts_are_the_unsharded_model(names: list[str]) -> None:
    for found in world(4).run(run_cases, names, (2, 2), seconds=900):
        assert found == dict.fromkeys(names, "")


@pytest.mark.sweep
@pytest.mark.processes
def test_so_they_are_with_collectives_beside_products() -> None:
    names = [*QUICK, *SLOW, *SWEPT]
    for found in world(4).run(run_cases, names, (2, 2), ("dp", "tp"), True, seconds=900):
        assert found == dict.fromkeys(names, "")


@pytest.mark.sweep
@pytest.mark.processes
@pytest.mark.parametrize("shape", [(2, 1, 2), pytest.param((1, 2, 2), marks=pytest.mark.sweep)], ids=str)
def test_replicas_of_replicas_that_cut_their_parameters(shape: tuple[int, ...]) -> None:
    for found in world(4).run(run_cases, HSDP, shape, ("replicate", "dp", "tp"), seconds=600):
        assert found == dict.fromkeys(HSDP, "")


@pytest.mark.processes
@pytest.mark.parametrize("shape", [(2, 1), pytest.param((2, 2), marks=pytest.mark.slow)], ids=str)
def test_what_differs_between_replicas(shape: tuple[int, ...], tmp_path: Path) -> None:
    for found in world(shape[0] * shape[1]).run(toys.run_toys, shape, str(tmp_path)):
        assert found == dict.fromkeys(toys.TOYS, "")


@pytest.mark.parametrize(("units", "sums"), slow_but([("layers", 3)], [("none", 1), ("root", 1), ("layers", 3)]))
def test_gradients_are_summed_together_where_fsdp_reduces_them(units: str, sums: int, mesh: DeviceMesh) -> None:
    model = llama()
    tpplan.parallelize(model, PLANS / "llama-sequence.yaml", mesh["tp"])
    if units != "none":
        for layer in layers_of(model) if units == "layers" else ():
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    for _ in range(2):
        loss = loss_of(model, torch.zeros(ROWS, LENGTH, dtype=torch.int64))
        with CommDebugMode() as mode:
            loss.backward()
        assert counted(mode)["all-reduce"] == sums


# -- mistakes ---------------------------------------------------------------------------------------------------------
@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with fake_process_group(4):
        yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def of_all(name: str | None = None) -> DeviceMesh:
    return init_device_mesh("cpu", (4,), mesh_dim_names=None if name is None else (name,))


def replicate_by_fsdp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    from torch.distributed._composable.replicate_with_fsdp import replicate

    return replicate(model, mesh=mesh)  # pyright: ignore


def unnamed(mesh: DeviceMesh) -> DeviceMesh:
    return DeviceMesh("cpu", mesh["dp"].mesh, mesh_dim_names=None)


def runs(model: nn.Module) -> Any:
    return model(torch.rand(2, 8))


def apart(model: nn.Module, mesh: DeviceMesh) -> Any:
    held: Any = fully_shard(model, mesh=mesh["dp"])
    return held.up(torch.rand(2, 8))


Mistake = Callable[[nn.Module, DeviceMesh], object]
MISTAKES: dict[str, tuple[str, Mistake]] = {
    "cut over the parts": ("TP170", lambda m, mesh: fully_shard(m, mesh=mesh["tp"])),
    "cut over everything": ("TP170", lambda m, mesh: fully_shard(m, mesh=of_all("dp"))),
    "HSDP over the parts": ("TP170", lambda m, mesh: fully_shard(m, mesh=mesh)),
    "a list over the parts": ("TP170", lambda m, mesh: fully_shard([*m.children()], mesh=mesh["tp"])),
    "more, over the parts": ("TP170", lambda m, mesh: fully_shard(nn.Sequential(m, nn.Linear(8, 8)), mesh=mesh["tp"])),
    "replicas of the parts": ("TP170", lambda m, mesh: replicate_by_fsdp(m, mesh["tp"])),
    "averaged over the parts": ("TP170", lambda m, mesh: DistributedDataParallel(m, device_mesh=mesh["tp"])),
    "averaged over everything": ("TP170", lambda m, mesh: DistributedDataParallel(m)),
    "averaged around more": ("TP170", lambda m, mesh: DistributedDataParallel(nn.Sequential(m, nn.Linear(8, 8)))),
    "averaged over cuts": (
        "TP170",
        lambda m, mesh: DistributedDataParallel(fully_shard(m, mesh=mesh["dp"]), device_mesh=mesh["dp"]),  # pyright: ignore
    ),
    "replicate over everything": ("TP170", lambda m, mesh: runs(replicate(m))),
    "a module inside": ("TP171", apart),
    "a mesh without names": ("TP172", lambda m, mesh: fully_shard(m, mesh=unnamed(mesh))),
    "cut less": ("TP172", lambda m, mesh: fully_shard(m, mesh=of_all("dp"), reshard_after_forward=2)),
    "a hook": (
        "TP172",
        lambda m, mesh: DistributedDataParallel(m, device_mesh=mesh["dp"]).register_comm_hook(None, print),  # pyright: ignore
    ),
    "join": ("TP172", lambda m, mesh: DistributedDataParallel(m, device_mesh=mesh["dp"]).join_hook()),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told(name: str, mesh: DeviceMesh) -> None:
    code, mistake = MISTAKES[name]
    model = toys.sharded(single() if name == "cut less" else mesh["tp"])
    with pytest.raises(tpplan.DataParallelError, match=f"^{code} "):
        mistake(model, mesh)


def single() -> DeviceMesh:
    """An axis of one rank, with three replicas."""
    return init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "tp"))["tp"]


def test_a_refusal_leaves_the_model_as_it_was(mesh: DeviceMesh) -> None:
    model = toys.sharded(mesh["tp"])
    with pytest.raises(tpplan.DataParallelError):
        fully_shard(model.up, mesh=mesh["tp"])  # pyright: ignore
    assert all(len(parameter.placements) == 1 for parameter in model.parameters())  # pyright: ignore
    assert not model.up._forward_pre_hooks and not model.up._forward_hooks  # pyright: ignore


def test_what_was_made_data_parallel_before_is_refused(mesh: DeviceMesh) -> None:
    for wrap in (lambda m: fully_shard(m, mesh=mesh["dp"]), lambda m: DistributedDataParallel(m)):
        with pytest.raises(tpplan.CompileError, match="TP108"):
            tpplan.parallelize(wrap(toys.Mlp()), toys.PLAN, mesh["tp"], toys.EXAMPLE)
    with pytest.raises(tpplan.CompileError, match="TP115"):
        tpplan.parallelize(toys.Mlp(), toys.PLAN, mesh["dp"], toys.EXAMPLE)


def test_a_gradient_in_pieces_is_refused(mesh: DeviceMesh) -> None:
    model = DistributedDataParallel(toys.sharded(mesh["tp"], toys.Twice()), device_mesh=mesh["dp"], bucket_cap_mb=1e-4)
    x = torch.rand(2, 8, requires_grad=True)
    with pytest.raises(tpplan.DataParallelError, match="TP173"):
        model(x, True).sum().backward()
    model.zero_grad()
    model(x, False).sum().backward()


def test_other_models_are_averaged_by_torch(mesh: DeviceMesh) -> None:
    toys.sharded(mesh["tp"])  # from now on, wrappers are looked at
    model = DistributedDataParallel(nn.Linear(2, 2))
    assert type(model) is DistributedDataParallel
    assert type(model.reducer).__module__.startswith("torch")


def test_gradients_are_sent_while_others_are_computed(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    from tpplan.runtime.data_parallel import averaging

    events: list[str] = []
    model = toys.sharded(mesh["tp"], toys.Deep())
    send = averaging._Bucket.send  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(averaging._Bucket, "send", lambda *held: (events.append("sent"), send(*held)))  # pyright: ignore
    wrapped = DistributedDataParallel(model, device_mesh=mesh["dp"], bucket_cap_mb=0.0001)
    first: Any = next(iter(model.parameters()))
    first.register_post_accumulate_grad_hook(lambda _: events.append("first layer"))
    wrapped(torch.rand(2, 8)).sum().backward()
    assert events.index("first layer") >= 3 and events.count("sent") > 4
