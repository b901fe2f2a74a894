"""One rank of the benchmark of training steps."""

from __future__ import annotations

import gc
import json
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional

from tpplan.bench.forms import UNSHARDED, forms_of
from tpplan.bench.megatron import split_by_hand
from tpplan.bench.subjects import ToySizes, first_tensor, toy_llama
from tpplan.compat import TorchDispatchMode

FLOOR = "by hand"
FORWARD, BACKWARD, STEP = "forward without grad", "forward and backward", "with AdamW"
_WARM = 3

Way = Callable[[], object]


def rank_main(rank: int, size: int, folder: str, kind: str, sizes: dict[str, int], rounds: int) -> None:
    """Measure, and write what was measured."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size)
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    told = _measured(kind, ToySizes(**sizes), mesh, rounds)
    Path(folder, f"{rank}.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


def _measured(kind: str, sizes: ToySizes, mesh: DeviceMesh, rounds: int) -> dict[str, Any]:
    forms = {name: _ways(model, sizes) for name, model in _forms(kind, sizes, mesh).items()}
    seconds: dict[str, dict[str, list[tuple[float, float]]]] = {}
    sent: dict[str, dict[str, dict[str, float]]] = {}
    for way in (FORWARD, BACKWARD, STEP):
        runs = {name: ways[way] for name, ways in forms.items()}
        for run in runs.values():
            for _ in range(_WARM):
                run()
        sent[way] = {name: _sent(run) for name, run in runs.items()}
        seconds[way] = {name: [] for name in runs}
        for _ in range(rounds):
            for name, run in runs.items():
                seconds[way][name].append(_timed(run))
    return {"seconds": seconds, "sent": sent}


def _forms(kind: str, sizes: ToySizes, mesh: DeviceMesh) -> dict[str, nn.Module]:
    call = {"input_ids": _ids(sizes)}
    forms = forms_of(kind, sizes, mesh, call)
    forms = {UNSHARDED: forms[UNSHARDED], FLOOR: split_by_hand(toy_llama(kind, sizes)), **forms}
    expected = _results(forms[UNSHARDED], call)
    for name, model in forms.items():
        torch.testing.assert_close(_results(model, call), expected, msg=lambda text, name=name: f"{name}: {text}")
    return forms


def _results(model: Any, call: dict[str, Tensor]) -> list[Tensor]:
    """The logits, and the gradient of the first norm, in which all layers have a part."""
    logits = _whole(first_tensor(model(**call)))
    logits.square().mean().backward()
    (norm,) = model.model.layers[0].input_layernorm.parameters()
    gradient = _whole(norm.grad)
    model.zero_grad()
    return [logits.detach(), gradient]


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _ids(sizes: ToySizes) -> Tensor:
    return torch.arange(sizes.batch * sizes.sequence).view(sizes.batch, -1) * 7 % sizes.vocabulary


def _ways(model: nn.Module, sizes: ToySizes) -> dict[str, Way]:
    ids = _ids(sizes)
    # torch's foreach kernels don't take DTensors together with the plain parameters that some forms leave.
    kinds = [[p for p in model.parameters() if isinstance(p, DTensor) is split] for split in (True, False)]
    optimizer = torch.optim.AdamW([{"params": several} for several in kinds if several], lr=1e-9, foreach=True)

    def forward() -> None:
        with torch.no_grad():
            model(input_ids=ids)

    def backward() -> None:
        optimizer.zero_grad()
        logits = _whole(first_tensor(model(input_ids=ids)))
        functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()

    def step() -> None:
        backward()
        optimizer.step()

    return {FORWARD: forward, BACKWARD: backward, STEP: step}


def _timed(run: Way) -> tuple[float, float]:
    """The seconds from when all ranks begin to when this one is done, and those of its processor."""
    gc.collect()
    dist.barrier()
    began, busy = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - began, time.process_time() - busy


class _Traffic(TorchDispatchMode):
    """Counts collectives, and the bytes of what a rank hands to them."""

    def __init__(self) -> None:
        super().__init__()
        self.counted = Counter[str]()
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.__name__:
            self.counted[func.__name__] += 1
            given = _tensors((args, kwargs))
            self.bytes += min((held.nbytes for held in given), default=0)
        return func(*args, **(kwargs or {}))


def _tensors(held: Any) -> list[Tensor]:
    if isinstance(held, dict):
        return _tensors(list(cast("dict[str, Any]", held).values()))
    if isinstance(held, (list, tuple)):
        return [tensor for item in cast("list[Any]", held) for tensor in _tensors(item)]
    return [held] if isinstance(held, Tensor) else []


def _sent(run: Way) -> dict[str, float]:
    traffic = _Traffic()
    with traffic:
        run()
    return {"collectives": traffic.counted.total(), "mib": round(traffic.bytes / 2**20, 3)}


__all__ = ["BACKWARD", "FLOOR", "FORWARD", "STEP", "rank_main"]
