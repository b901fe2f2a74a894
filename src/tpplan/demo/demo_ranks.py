"""The ranks of the demo: real processes that talk through gloo, each with the stock model and `tpplan.parallelize`.

in:  the weights' folder, a batch, plans
out: what each rank computed under each plan; a rank that fails, dies or hangs ends the others and is raised here
"""

from __future__ import annotations

import datetime
import multiprocessing
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.multiprocessing.spawn import (
    ProcessExitedException,
    ProcessRaisedException,
    start_processes,  # pyright: ignore[reportUnknownVariableType]
)

from tpplan.api import parallelize
from tpplan.demo.embedding import Batch, embed, load_model
from tpplan.plan import TpplanError, load_plan

_COLLECTIVES = {
    "allreduce_": "all-reduce",
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "alltoall_base_": "all-to-all",
}
_BATCH = "batch.pt"


class RanksError(TpplanError):
    """The ranks couldn't finish; the message says which failed and how."""


@dataclass(frozen=True, slots=True)
class RankRun:
    """What one rank did under one plan.

    Attributes:
        embeddings: (sentences, hidden), whole.
        collectives: how often each ran in one forward, as torch's CommDebugMode counted them.
        parameter_bytes: the memory of the rank's parameters.
    """

    embeddings: Tensor
    collectives: Counter[str]
    parameter_bytes: int


@dataclass(frozen=True, slots=True)
class _Job:
    folder: Path
    weights: Path
    size: int
    plans: tuple[str, ...]
    timeout: float


def run_ranks(weights: Path, batch: Batch, size: int, plans: tuple[str, ...], timeout: float) -> list[list[RankRun]]:
    """Embed `batch` on `size` processes.

    Args:
        weights: the model's folder.
        batch: the tokens.
        size: number of processes.
        plans: what to shard by, one after the other.
        timeout: seconds for all of it.

    Returns:
        For each plan what each rank did, in rank order.

    Raises:
        RanksError: a rank raised, its process died, or the time is up.
    """
    with tempfile.TemporaryDirectory(prefix="tpplan-demo-") as name:
        job = _Job(Path(name), weights, size, plans, timeout)
        torch.save(batch, job.folder / _BATCH)
        _run_processes(_rank, job)
        by_rank = [torch.load(_result(job, rank), weights_only=False) for rank in range(size)]
    return [list(runs) for runs in zip(*by_rank, strict=True)]


def _run_processes(target: Callable[[int, _Job], None], job: _Job) -> None:
    # Daemons, so that they end with this process however it ends.
    ranks: Any = start_processes(target, (job,), job.size, join=False, daemon=True, start_method=_start_method())
    try:
        _join(ranks, job)
    finally:
        _end(ranks)


def _start_method() -> str:
    """`forkserver` where there is one: torch and transformers, which take seconds, are then imported only once."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return "spawn"
    multiprocessing.set_forkserver_preload([__name__, "transformers.models.bert.modeling_bert"])
    return "forkserver"


def _join(ranks: Any, job: _Job) -> None:
    deadline = time.monotonic() + job.timeout
    try:
        while not ranks.join(timeout=0.2):
            if time.monotonic() > deadline:
                raise RanksError(f"{job.size} processes took longer than {job.timeout:g} s")
    except (ProcessRaisedException, ProcessExitedException) as error:
        raise _failure(job, error) from None


def _failure(job: _Job, error: Exception) -> RanksError:
    """What the first rank that failed wrote down: the others then fail for want of it."""
    written = sorted(job.folder.glob("*.error"), key=lambda path: path.stat().st_mtime_ns)
    if not written:
        return RanksError(f"a process died: {str(error).strip()}")
    headline, _, detail = written[0].read_text(encoding="utf-8").partition("\n")
    failure = RanksError(f"rank {written[0].stem} of {job.size} failed: {headline}")
    failure.add_note(detail)
    return failure


def _end(ranks: Any) -> None:
    for process in ranks.processes:
        if process.is_alive():
            process.kill()
    for process in ranks.processes:
        process.join()


def _result(job: _Job, rank: int) -> Path:
    return job.folder / f"{rank}.result"


def _rank(rank: int, job: _Job) -> None:
    try:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{job.folder / 'rendezvous'}",
            rank=rank,
            world_size=job.size,
            timeout=datetime.timedelta(seconds=job.timeout),
        )
        batch = torch.load(job.folder / _BATCH, weights_only=True)
        torch.save([_run(job, plan, batch) for plan in job.plans], _result(job, rank))
        dist.barrier()
        dist.destroy_process_group()
    except Exception as error:
        message = str(error).strip().splitlines() or [""]
        text = f"{type(error).__name__}: {message[0]}\n{traceback.format_exc()}"
        (job.folder / f"{rank}.error").write_text(text, encoding="utf-8")
        raise


def _run(job: _Job, name: str, batch: Batch) -> RankRun:
    plan = load_plan(name)
    mesh = init_device_mesh("cpu", (job.size,), mesh_dim_names=(plan.axis,))
    model = parallelize(load_model(job.weights), plan, mesh, inputs=batch)
    # The first call in evaluation mode is proved before it runs; the counted one is like all that follow.
    embed(model, batch)
    with warnings.catch_warnings(), CommDebugMode() as counter:
        # Of the counter's own hooks: results that are dataclasses and calls without a gradient upset them.
        warnings.simplefilter("ignore", UserWarning)
        embeddings = embed(model, batch)
    return RankRun(embeddings, _named(counter), _parameter_bytes(model))


def _named(counter: CommDebugMode) -> Counter[str]:
    counted: Counter[str] = Counter()
    for operator, count in counter.get_comm_counts().items():
        name = str(operator).rpartition(".")[2]
        counted[_COLLECTIVES.get(name, name)] += count
    return counted


def _parameter_bytes(model: nn.Module) -> int:
    held = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    return sum(tensor.numel() * tensor.itemsize for tensor in held)
