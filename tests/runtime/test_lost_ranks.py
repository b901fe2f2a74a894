"""A rank that dies, raises in a step, or calls alone what is a collective: the others are told within the timeout."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard  # pyright: ignore
from torch.distributed.tensor import DTensor

import tpplan
from tests.marking import slow_but
from tests.runtime.test_recompute import PLANS, stack, x
from tests.runtime.world import start_forked
from tpplan.runtime.parameters.saved_models import whole_state_of

SECONDS = 4.0
GATHERING = "TP176 lost-rank: the gathering of `layers.0.body.up.weight`"


def bad(*_: object) -> None:
    raise ValueError("a bad batch")


def dies(model: nn.Module) -> None:
    model.get_submodule("layers.1.body").__dict__["forward"] = lambda _: os._exit(0)  # pyright: ignore
    model(x())


def is_killed(model: nn.Module) -> None:
    model(x()).register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL)).sum().backward()  # pyright: ignore


def raises(model: nn.Module) -> None:
    model.get_submodule("layers.1.body").__dict__["forward"] = bad
    model(x())


def raises_and_goes_on(model: nn.Module) -> None:
    """A loop that leaves out a batch: its next call would be taken for what the others are in the middle of."""
    body = model.get_submodule("layers.0.body")
    body.__dict__["forward"] = bad
    with contextlib.suppress(ValueError):
        model(x())
    del body.__dict__["forward"]
    model(x())


def raises_in_backward(model: nn.Module) -> None:
    made = model(x())
    made.register_hook(bad)
    try:
        made.sum().backward()
    except ValueError:
        sys.excepthook(*sys.exc_info())  # pyright: ignore
        raise


def replaces(model: nn.Module) -> None:
    model.get_submodule("layers.0").norm = nn.LayerNorm(16)  # pyright: ignore
    model(x())


def registers(model: nn.Module) -> None:
    """What changes calls is proved by all ranks, or by none."""
    model.get_submodule("layers.0").register_forward_hook(lambda *_: None)
    model(x())


def sleeps(model: nn.Module) -> None:
    time.sleep(2 * SECONDS)


def gathers_alone(model: nn.Module) -> None:
    weight = model.get_parameter("layers.0.body.up.weight")
    assert isinstance(weight, DTensor)
    weight.full_tensor()


def saves_pretrained_alone(model: nn.Module) -> None:
    whole_state_of(model, keep=True)


def saves_alone(model: nn.Module) -> None:
    with tempfile.TemporaryDirectory() as folder:
        tpplan.save_weights(model, folder)


def evaluates(model: nn.Module) -> None:
    """A call of a kind that the others don't make."""
    model.eval()
    with torch.no_grad():
        model(x())


Fault = tuple[Callable[[nn.Module], None], str, str]
FAULTS: dict[str, Fault] = {
    "dies": (dies, "stopped or left the step", ""),
    "is killed": (is_killed, "stopped or left the step", ""),
    "raises": (raises, "note: rank 1 raised ValueError: a bad batch", "TP176 that has this error"),
    "raises and goes on": (
        raises_and_goes_on,
        "note: rank 1 raised ValueError: a bad batch",
        "the ranks' comparison of a call of a new kind",
    ),
    "registers a hook": (registers, "at the ranks' comparison of their programs", "TP176"),
    "raises in a backward": (raises_in_backward, "note: rank 1 ended by ValueError: a bad batch", ""),
    "replaces": (replaces, "note: rank 1 raised UnprovedCallError: TP130", "TP176 that has this error"),
    "sleeps": (sleeps, "didn't come in time", ""),
    "gathers alone": (gathers_alone, "`full_tensor`", f"{GATHERING} failed"),
    "saves alone as transformers do": (saves_pretrained_alone, "`save_pretrained`", f"{GATHERING} failed"),
    "saves alone": (saves_alone, "`save_weights`", ""),
    "evaluates": (evaluates, "at the ranks' comparison of a call of a new kind", "TP176"),
}


def one(rank: int, fault: str, folder: str, rows: int = 1, overlap: bool = False) -> None:
    torch.set_num_threads(1)
    seconds = timedelta(seconds=SECONDS)
    ranks = 2 * rows
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks, timeout=seconds)
    model = stack()
    mesh = init_device_mesh("cpu", (rows, 2), mesh_dim_names=("dp", "tp"))
    plan: dict[str, object] = {"version": 1, "modules": PLANS["sequence" if overlap else "tensor"]}
    if overlap:
        plan["overlap"] = ["gather_linear", "linear_reduce"]
        assert len(tpplan.compile_plan(model, plan, 2, (x(),)).overlaps) > 1
    tpplan.parallelize(model, plan, mesh["tp"], (x(),))
    if rows > 1:
        fully_shard(model, mesh=mesh["dp"])  # pyright: ignore
    model(x()).sum().backward()
    began = time.monotonic()
    try:
        if rank == 1:
            FAULTS[fault][0](model)
        else:
            for _ in range(3):
                model(x()).sum().backward()
    except Exception as error:
        text = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
        Path(folder, f"{fault}.{rank}").write_text(f"{time.monotonic() - began}\n{text}")
    os._exit(0)


@pytest.mark.processes
@pytest.mark.parametrize("fault", slow_but(["raises"], list(FAULTS)))
def test_the_others_are_told_within_the_timeout(fault: str, tmp_path: Path) -> None:
    start_forked(one, (fault, str(tmp_path)), 2, True)
    seconds, text = (tmp_path / f"{fault}.0").read_text().split("\n", 1)
    assert text.startswith("LostRankError: TP176 lost-rank: "), text
    assert re.search(r" at |, in `| in a backward|comparison", text), text
    assert FAULTS[fault][1] in text, text
    assert float(seconds) < 3 * SECONDS
    own = tmp_path / f"{fault}.1"
    assert FAULTS[fault][2] in (own.read_text() if own.exists() else ""), own.read_text()


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("fault", ["dies", "raises", "sleeps"])
def test_so_they_are_where_parts_travel_beside_products(fault: str, tmp_path: Path) -> None:
    start_forked(one, (fault, str(tmp_path), 1, True), 2, True)
    seconds, text = (tmp_path / f"{fault}.0").read_text().split("\n", 1)
    assert text.startswith("LostRankError: TP176 lost-rank: ") and FAULTS[fault][1] in text, text
    assert "pairwise" in text, text
    assert float(seconds) < 3 * SECONDS


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("fault", ["dies", "raises"])
def test_beside_a_data_parallel_axis_those_of_its_row_are_told_and_the_others_end(fault: str, tmp_path: Path) -> None:
    start_forked(one, (fault, str(tmp_path), 2), 4, True)
    _, text = (tmp_path / f"{fault}.0").read_text().split("\n", 1)
    assert text.startswith("LostRankError: TP176 lost-rank: ") and FAULTS[fault][1] in text, text
    for rank in (0, 2, 3):
        assert float((tmp_path / f"{fault}.{rank}").read_text().split("\n", 1)[0]) < 3 * SECONDS
