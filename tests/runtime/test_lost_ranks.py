"""A rank that dies, raises in a step, or calls alone what is a collective: the others are told within the timeout."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import tpplan
from tests.marking import slow_but
from tests.runtime.test_recompute import PLANS, stack, x
from tests.runtime.world import start_forked

SECONDS = 4.0


def dies(model: nn.Module) -> None:
    model.get_submodule("layers.1.body.up").register_forward_pre_hook(lambda *_: os._exit(0))
    model(x())


def raises(model: nn.Module) -> None:
    def hook(*_: object) -> None:
        raise ValueError("a bad batch")

    made = model(x())
    made.register_hook(hook)
    made.sum().backward()


def sleeps(model: nn.Module) -> None:
    time.sleep(2 * SECONDS)


def gathers_alone(model: nn.Module) -> None:
    weight = model.get_parameter("layers.0.body.up.weight")
    assert isinstance(weight, DTensor)
    weight.full_tensor()


FAULTS: dict[str, Callable[[nn.Module], None]] = {
    "dies": dies,
    "raises": raises,
    "sleeps": sleeps,
    "gathers alone": gathers_alone,
}


def one(rank: int, fault: str, folder: str) -> None:
    torch.set_num_threads(1)
    seconds = timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2, timeout=seconds)
    model = stack()
    tpplan.parallelize(
        model, {"version": 1, "modules": PLANS["tensor"]}, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), (x(),)
    )
    model(x()).sum().backward()
    began = time.monotonic()
    try:
        if rank == 1:
            FAULTS[fault](model)
        else:
            for _ in range(3):
                model(x()).sum().backward()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        Path(folder, f"{fault}.{rank}").write_text(f"{time.monotonic() - began}\n{text}")
    os._exit(0)


@pytest.mark.processes
@pytest.mark.parametrize("fault", slow_but(["dies"], list(FAULTS)))
def test_the_others_are_told_within_the_timeout(fault: str, tmp_path: Path) -> None:
    start_forked(one, (fault, str(tmp_path)), 2, True)
    seconds, text = (tmp_path / f"{fault}.0").read_text().split("\n", 1)
    assert text.startswith("LostRankError: TP176 lost-rank: "), text
    assert "help: look for the first error in the other ranks' logs" in text
    assert float(seconds) < 3 * SECONDS
