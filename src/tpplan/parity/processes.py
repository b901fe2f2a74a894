"""The sharded run on real ranks: a process each, which communicate through gloo.

The model, the program and the call travel in a file of a temporary folder, and so do the results. A child that fails
takes the others with it, and what it raised is raised here.
"""

from __future__ import annotations

import contextlib
import datetime
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn  # pyright: ignore[reportUnknownVariableType]

from tpplan.compiler.ir.layout import Collective
from tpplan.compiler.ir.program import Program
from tpplan.compiler.trace.stock_again import stock_again
from tpplan.parity.call import Call
from tpplan.parity.drawn import Draws, DrawsOfRank
from tpplan.parity.parity_errors import RankError, RankTimeoutError, VerifyError, describe
from tpplan.parity.rank import RankResult, run_rank
from tpplan.parity.threads import TIMEOUT
from tpplan.runtime.parameters.taken_apart import take_apart
from tpplan.runtime.ranks.communicator import ProcessGroupCommunicator

_JOB = "job.pt"


def run_in_processes(
    model: nn.Module,
    program: Program,
    call: Call,
    cotangents: Mapping[str, Tensor],
    timeout: float = TIMEOUT,
    draws: Draws | None = None,
) -> list[RankResult]:
    """Run `program` on all ranks at once and return what each shows, in rank order.

    With `draws`, each rank draws random numbers as the unsharded model did.

    Raises:
        RankError: a rank raised, or its process died.
        RankTimeoutError: the ranks took longer than `timeout` seconds.
        VerifyError: the model can't travel to another process.
    """
    with tempfile.TemporaryDirectory(prefix="tpplan-verify-") as name:
        folder = Path(name)
        _send((model, program, call, dict(cotangents), draws), folder)
        threads = max(1, torch.get_num_threads() // program.size)
        ranks: Any = spawn(_run_child, (program.size, name, threads, timeout), nprocs=program.size, join=False)
        try:
            _join(ranks, folder, timeout)
        finally:
            _end(ranks)
        return [torch.load(_result(folder, rank), weights_only=False) for rank in range(program.size)]


def _send(job: tuple[nn.Module, Program, Call, dict[str, Tensor], Draws | None], folder: Path) -> None:
    try:
        with stock_again(job[0].modules()):  # pickle knows the classes of modules, and none that is made here
            torch.save(job, folder / _JOB)
    except Exception as error:  # pickle raises PicklingError, AttributeError and TypeError alike
        raise VerifyError.of(
            "TP194",
            f"`{type(job[0]).__name__}` can't be sent to other processes: {describe(error)}",
            help="define its classes and functions at the top of a module, or verify with simulated ranks",
        ) from error


def _join(ranks: Any, folder: Path, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    try:
        while not ranks.join(timeout=0.2):
            if time.monotonic() > deadline:
                raise RankTimeoutError.of(
                    "TP194", f"the ranks' processes took longer than {timeout:g} s", help="give more by `timeout=`"
                )
    except (ProcessRaisedException, ProcessExitedException) as error:
        raise _failure(folder, error) from None


def _failure(folder: Path, error: Exception) -> RankError:
    """What the first rank that failed wrote down; ranks that lost a peer fail only after it."""
    written = sorted(folder.glob("*.error"), key=lambda path: path.stat().st_mtime_ns)
    if not written:
        rank: int = getattr(error, "error_index", 0)
        return RankError(rank, f"nothing, but its process died: {describe(error)}")
    headline, _, detail = written[0].read_text(encoding="utf-8").partition("\n")
    failure = RankError(int(written[0].stem), headline)
    failure.add_note(detail)
    return failure


def _end(ranks: Any) -> None:
    for process in ranks.processes:
        if process.is_alive():
            process.terminate()
    for process in ranks.processes:
        process.join(5)
        if process.is_alive():
            process.kill()
            process.join()


def _result(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.result"


def _run_child(rank: int, size: int, name: str, threads: int, timeout: float) -> None:
    folder = Path(name)
    torch.set_num_threads(threads)
    warnings.filterwarnings("ignore", category=FutureWarning)  # the parent shows what its user can act upon
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder / 'rendezvous'}",
            rank=rank,
            world_size=size,
            timeout=datetime.timedelta(seconds=timeout),
        )
        model, program, call, cotangents, draws = torch.load(folder / _JOB, weights_only=False, mmap=True)
        take_apart(model)
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=(program.axis,))
        axis = _CountingGroup(mesh.get_group())
        with contextlib.nullcontext() if draws is None else DrawsOfRank(draws, program, rank):
            result = run_rank(model, program, call, cotangents, axis, mesh)
        torch.save(result, _result(folder, rank))
        dist.barrier()
        dist.destroy_process_group()
    except Exception as error:
        (folder / f"{rank}.error").write_text(f"{describe(error)}\n{traceback.format_exc()}", encoding="utf-8")
        raise


class _CountingGroup(ProcessGroupCommunicator):
    """A process group's ranks, with a count of the collectives."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.counts: Counter[str] = Counter()

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.counts[str(Collective.ALL_REDUCE)] += 1
        return super().all_reduce(tensor)

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        self.counts[str(Collective.ALL_GATHER)] += 1
        return super().all_gather(tensor, dim)

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        self.counts[str(Collective.REDUCE_SCATTER)] += 1
        return super().reduce_scatter(tensor, dim)

    def begin_collective(self, collective: Collective, tensor: Tensor, dim: int = 0) -> Callable[[], Tensor]:
        self.counts[str(collective)] += 1
        return super().begin_collective(collective, tensor, dim)

    def pairwise(self, collective: Collective) -> Any:
        self.counts[str(collective)] += 1
        return super().pairwise(collective)

    def all_to_all(self, tensor: Tensor, split_dim: int, concatenate_dim: int) -> Tensor:
        self.counts[str(Collective.ALL_TO_ALL)] += 1
        return super().all_to_all(tensor, split_dim, concatenate_dim)

    def all_to_all_sizes(self, sizes: Tensor, most: int) -> tuple[Tensor, list[int], list[int]]:
        self.counts[str(Collective.ALL_TO_ALL)] += 1
        return super().all_to_all_sizes(sizes, most)

    def all_to_all_rows(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        self.counts[str(Collective.ALL_TO_ALL)] += 1
        return super().all_to_all_rows(rows, sent, received)
