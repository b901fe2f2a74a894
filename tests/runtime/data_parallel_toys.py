"""Small models of which replicas do different things: other branches, other random numbers, other calls."""

from __future__ import annotations

import copy
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import tpplan
from tests.plans.parity import whole
from tests.runtime.world import Member

PLAN = {"version": 1, "modules": {"**.up": "colwise", "**.down": "rowwise"}}
EXAMPLE = (torch.empty(2, 8, device="meta"),)


class Mlp(nn.Module):
    """Two layers."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(dropout)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(self.up(x).relu())) * self.scale


class Deep(nn.Module):
    """Four of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Mlp() for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


class Twice(nn.Module):
    """A layer in two checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.last = nn.Linear(8, 8), nn.Linear(8, 8), Mlp()

    def forward(self, x: Tensor, reentrant: bool = False) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.twice, x, use_reentrant=reentrant).tanh()  # pyright: ignore
        return self.last(x)


class Choice(nn.Module):
    """One of them always, one on demand, one never."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.asked, self.never = Mlp(), Mlp(), Mlp()

    def forward(self, x: Tensor, more: bool = False, never: bool = False) -> Tensor:
        y = self.always(x)
        y = y + self.asked(x) if more else y
        return y + self.never(x) if never else y


def sharded(mesh: DeviceMesh, model: nn.Module | None = None, inputs: Any = EXAMPLE) -> Any:
    return tpplan.parallelize(model or Mlp(), PLAN, mesh, inputs)


def _same(ours: nn.Module, theirs: nn.Module, gradients: bool = False) -> None:
    for (name, mine), other in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        one, two = (mine.grad, other[1].grad) if gradients else (mine, other[1])
        if two is None:
            assert one is None, f"{name} has a gradient"
            continue
        assert one is not None, f"{name} has no gradient"
        full = whole(one)
        assert full is not None
        torch.testing.assert_close(full, two.detach(), rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def branches(mesh: DeviceMesh, folder: Path) -> None:
    """Each replica another call, proved when it comes: none waits for another, and what one has none of is a zero."""
    rows, row = mesh["dp"].size(), mesh["dp"].get_local_rank()
    stock = Choice().double()
    example = {"x": torch.empty(2, 8, device="meta", dtype=torch.float64), "more": True, "never": True}
    model = DistributedDataParallel(sharded(mesh["tp"], copy.deepcopy(stock), example), device_mesh=mesh["dp"])
    xs = [torch.rand(2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(r)) for r in range(rows)]
    for step in range(3):
        mine = (row + step) % 2 == 0
        if step == 0 and row:
            for _ in range(2):  # kinds of calls that the other replica never sees
                model.module(xs[row][0], more=False, never=False)
        model(xs[row], more=mine, never=False).square().mean().backward()
        for r, x in enumerate(xs):
            (stock(x, more=(r + step) % 2 == 0, never=False).square().mean() / rows).backward()
        _same(model.module, stock, gradients=True)
    model.zero_grad()
    with model.no_sync():  # what is left here alone isn't averaged
        model(xs[row], more=True, never=False).sum().backward()
    held = [whole(p.grad) for p in model.module.asked.parameters()]  # pyright: ignore
    others: list[Any] = [None] * rows
    dist.all_gather_object(others, held[0], group=mesh["dp"].get_group())
    assert rows == 1 or not torch.equal(others[0], others[1])


def draws(mesh: DeviceMesh, folder: Path) -> None:
    """Dropout differs between replicas that are seeded so, and only between those."""
    model = sharded(mesh["tp"], Mlp(0.5)).train()
    wrapped = DistributedDataParallel(model, device_mesh=mesh["dp"])
    x = torch.ones(2, 8)
    for alike in (True, False):
        torch.manual_seed(5 if alike else 5 + mesh["dp"].get_local_rank())
        result = wrapped(x)
        for axis, equal in (("tp", True), ("dp", alike)):
            found: list[Any] = [None] * mesh[axis].size()
            dist.all_gather_object(found, result.detach(), group=mesh[axis].get_group())
            assert all(torch.equal(found[0], other) for other in found[1:]) == (equal or len(found) == 1), axis


def resumed(mesh: DeviceMesh, folder: Path) -> None:
    """A run that is saved and resumed in a new model ends as one that wasn't interrupted; names are the stock ones."""
    rows, row = mesh["dp"].size(), mesh["dp"].get_local_rank()
    stock = Deep().double()
    example = (torch.empty(2, 8, device="meta", dtype=torch.float64),)

    def fresh(seed: int) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        inner = copy.deepcopy(stock) if not seed else Deep().double()
        model = DistributedDataParallel(sharded(mesh["tp"], inner, example), device_mesh=mesh["dp"])
        return model, torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)

    xs = [torch.rand(rows, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(s)) for s in range(2)]
    model, optimizer = fresh(0)
    theirs = torch.optim.AdamW(stock.parameters(), lr=0.01, eps=1e-3)
    for step, x in enumerate(xs):
        model(x[row]).square().mean().backward()
        stock(x.flatten(0, 1)).square().mean().backward()
        optimizer.step()
        theirs.step()
        optimizer.zero_grad()
        theirs.zero_grad()
        if step == 0:
            state: Any = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
            assert set(state["model"]) == set(stock.state_dict())
            save(state, checkpoint_id=folder / "dcp")
            model, optimizer = fresh(1)
            state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
            load(state, checkpoint_id=folder / "dcp")
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    _same(model.module, stock)
    tpplan.save_weights(model, folder / "weights")
    again, _ = fresh(2)
    assert tpplan.load_weights(again, folder / "weights") is again
    _same(again.module, stock)


def wrapped_further(mesh: DeviceMesh, folder: Path) -> None:
    """Around a sharded model and plain layers: all are averaged, and buffers are the first rank's."""
    rows, row = mesh["dp"].size(), mesh["dp"].get_local_rank()
    torch.manual_seed(0)
    stock = nn.Sequential(Mlp().double(), nn.Linear(8, 3).double())
    ours = copy.deepcopy(stock)
    ours[0] = sharded(mesh["tp"], ours[0], (torch.empty(2, 8, device="meta", dtype=torch.float64),))
    if row:
        with torch.no_grad():
            ours[0].scale.fill_(7.0)  # pyright: ignore
            ours[1].weight.fill_(7.0)  # pyright: ignore
    model = DistributedDataParallel(ours, device_mesh=mesh["dp"])
    assert ours[0].scale == 1  # pyright: ignore
    x = torch.rand(rows, 4, 8, dtype=torch.float64)
    model(x[row]).square().mean().backward()
    stock(x.flatten(0, 1)).square().mean().backward()
    _same(ours, stock, gradients=True)


TOYS: dict[str, Callable[[DeviceMesh, Path], None]] = {
    "branches": branches,
    "draws": draws,
    "resumed": resumed,
    "wrapped further": wrapped_further,
}


def run_toys(member: Member, shape: tuple[int, ...], folder: str) -> dict[str, str]:
    """What is wrong on this rank."""
    mesh = member.mesh(*shape, names=("dp", "tp"))
    found: dict[str, str] = {}
    for name, toy in TOYS.items():
        try:
            torch.manual_seed(0)
            toy(mesh, Path(folder))
            found[name] = ""
        except Exception as error:
            found[name] = f"{type(error).__name__}: {str(error)[:600]}"
            if os.environ.get("SHOW"):
                found[name] += traceback.format_exc()[-2000:]
    return found
