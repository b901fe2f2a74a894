"""Gloo processes of this machine on which forms of a model are timed side by side."""

from __future__ import annotations

import gc
import itertools
import json
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.multiprocessing.spawn import spawn  # pyright: ignore[reportUnknownVariableType]
from torch.profiler import ProfilerActivity, profile

from tpplan.compat.modes import TorchDispatchMode

Seconds = tuple[float, float]
"""By the clock, and of the process's processor."""


def run_on_ranks(main: Callable[..., None], ranks: int, *arguments: Any) -> list[dict[str, Any]]:
    """Run `main(rank, ranks, folder, *arguments)` in as many processes; returns what each of them told."""
    with tempfile.TemporaryDirectory(prefix="tpplan-bench-") as folder:
        spawn(main, (ranks, folder, *arguments), ranks)  # pyright: ignore[reportUnknownArgumentType]
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]


@contextmanager
def joined(rank: int, size: int, folder: str, device: str = "cpu") -> Generator[DeviceMesh]:
    """The mesh of all ranks, each of which has one thread, or one GPU."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size)
    warnings.simplefilter("ignore")
    yield init_device_mesh(device, (size,), mesh_dim_names=("tp",))
    dist.barrier()
    dist.destroy_process_group()


def tell(rank: int, folder: str, told: dict[str, Any]) -> None:
    """Leave what a rank has to tell for `run_on_ranks`."""
    Path(folder, f"{rank}.json").write_text(json.dumps(told))


def timed(run: Callable[[], object]) -> Seconds:
    """The seconds from when all ranks begin to when this one is done, and those of its processor."""
    gc.collect()
    dist.barrier()
    synchronize()
    began, busy = time.perf_counter(), time.process_time()
    run()
    synchronize()
    return time.perf_counter() - began, time.process_time() - busy


def synchronize() -> None:
    """Wait for this process's GPU, if it has used one."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def peak_mib(run: Callable[[], object]) -> float:
    """The most MiB that tensors take at once beside those that are there, by torch's allocator."""
    if torch.cuda.is_initialized():
        synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return round((torch.cuda.max_memory_allocated() - before) / 2**20, 3)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    with tempfile.TemporaryDirectory(prefix="tpplan-bench-") as folder:
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("name") == "[memory]"]
    sizes = [event["args"]["Bytes"] for event in sorted(events, key=lambda event: event["ts"])]
    return round(max(itertools.accumulate(sizes), default=0) / 2**20, 3)


def sent(run: Callable[[], object]) -> dict[str, float]:
    """How many collectives this rank takes part in, and the MiB that it hands to them."""
    traffic = RankTraffic()
    with traffic:
        run()
    return {"collectives": traffic.counted.total(), "mib": round(traffic.bytes / 2**20, 3)}


class RankTraffic(TorchDispatchMode):
    """Counts collectives, and the bytes of what a rank hands to them.

    Attributes:
        counted: by the operator's name.
        bytes: of all.
    """

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


__all__ = ["RankTraffic", "Seconds", "joined", "peak_mib", "run_on_ranks", "sent", "synchronize", "tell", "timed"]
