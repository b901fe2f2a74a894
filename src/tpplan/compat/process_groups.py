# pyright: reportPrivateUsage=false
"""Collectives: those of a process group, those of a graph, and memory that ranks share."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions

# The names since torch 2.13, which warns of the old ones.
_renamed = hasattr(dist, "all_gather_single")


_GATHER = "all_gather_single" if _renamed else "_allgather_base"
_SCATTER = "reduce_scatter_single" if _renamed else "_reduce_scatter_base"


def _options(kind: Callable[[], Any], later: bool) -> Any:
    """How a collective is to run: whether it is only begun."""
    made = kind()
    made.asyncOp = later
    return made


_GATHER_LATER, _SCATTER_LATER = _options(AllgatherOptions, True), _options(dist.ReduceScatterOptions, True)
_REDUCE_LATER = _options(dist.AllreduceOptions, True)
all_gather_single: Callable[..., object] = getattr(dist, "all_gather_single" if _renamed else "all_gather_into_tensor")


def collectives_without_dispatch(
    group: dist.ProcessGroup, device: torch.device
) -> tuple[Callable[[list[Tensor], Any], dist.Work | None], Callable[[Tensor, Tensor], dist.Work | None]]:
    """The all-reduce and the all-gather of a group's backend for `device`: what the group's own end in.

    For every torch.
    """
    options = _options(AllgatherOptions, False)
    try:
        backend = _backend(group, device)
        gather = backend._allgather_base
        return backend.allreduce, lambda gathered, tensor: gather(gathered, tensor, options)
    except (AttributeError, RuntimeError):  # a group that is written in Python
        return group.allreduce, group_all_gather(group)


def _backend(group: Any, device: torch.device) -> Any:
    """The group's backend for a device; its name is public since torch 2.14."""
    return group.get_backend(device) if hasattr(group, "get_backend") else group._get_backend(device)


def group_all_gather(group: dist.ProcessGroup) -> Callable[[Tensor, Tensor], dist.Work | None]:
    """The group's own all-gather, which is waited for: of an output and an input. For every torch."""
    gather = getattr(group, _GATHER)
    options = _options(AllgatherOptions, False)
    return lambda gathered, tensor: gather(gathered, tensor, options)


def group_reduce_scatter(group: dist.ProcessGroup) -> Callable[[Tensor, Tensor], dist.Work | None]:
    """The group's own reduce-scatter of a sum, which is waited for: of an output and an input.

    For torch before 2.13.
    """
    scatter = getattr(group, _SCATTER)
    options = _options(dist.ReduceScatterOptions, False)
    return lambda scattered, tensor: scatter(scattered, tensor, options)


def begun(group: dist.ProcessGroup, collective: str, tensor: Tensor, size: int) -> tuple[Tensor, dist.Work | None]:
    """A collective of a group that is under way, and its result, of which an all-reduce's is `tensor`.

    For torch before 2.13.
    """
    if collective == "all-reduce":
        return tensor, group.allreduce([tensor], _REDUCE_LATER)
    if collective == "all-gather":
        made = tensor.new_empty((size * tensor.shape[0], *tensor.shape[1:]))
        return made, getattr(group, _GATHER)(made, tensor, _GATHER_LATER)
    made = tensor.new_empty((tensor.shape[0] // size, *tensor.shape[1:]))
    return made, getattr(group, _SCATTER)(made, tensor, _SCATTER_LATER)


def swapped(group: Any, sent: Tensor, received: Tensor, distance: int) -> list[dist.Work]:
    """Send a tensor to the rank so many places after this one, and receive one from as many before.

    What `batch_isend_irecv` ends in, whose Python takes three times as long as the rest. For every torch.
    """
    rank, size, device = group.rank(), group.size(), sent.device
    together = device.type != "cpu" and type(group) is dist.ProcessGroup and _backend(group, device).supports_coalescing
    if together:
        group._start_coalescing(device)
    works = [group.send([sent], (rank + distance) % size, 0), group.recv([received], (rank - distance) % size, 0)]
    return [group._end_coalescing(device)] if together else works


def group_timeout(group: dist.ProcessGroup) -> timedelta:
    """How long a collective of a group may take. For every torch."""
    from torch.distributed import distributed_c10d

    device = torch.device("cuda" if "nccl" in dist.get_backend(group) else "cpu")
    options: Any = getattr(_backend(group, device), "options", None)
    return getattr(options, "_timeout", None) or distributed_c10d.default_pg_timeout


def default_store() -> Any:
    """Where the processes met; None for a backend that needs none. For every torch."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


@contextmanager
def fake_process_group(size: int, rank: int = 0) -> Generator[None]:
    """A default process group of `size` ranks, seen from `rank`, whose collectives move nothing. For every torch."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def wait_for(result: Any) -> None:
    """Wait until what an operation of torch.distributed has begun, which it returns last, is done. For every torch."""
    work: Any = cast("Sequence[Any]", result)[-1] if isinstance(result, (list, tuple)) else result
    dist.Work.unbox(work).wait()  # pyright: ignore


def symmetric_empty(size: int, device: torch.device) -> Tensor:
    """So many bytes that other ranks' GPUs can read, once all have met (`rendezvous`). For every torch."""
    import torch.distributed._symmetric_memory as symmetric

    return symmetric.empty(size, dtype=torch.uint8, device=device)


def rendezvous(memory: Tensor, group: dist.ProcessGroup) -> None:
    """Let the ranks of a group read each other's memory; each calls this with its own, all of one size.

    For every torch.
    """
    import torch.distributed._symmetric_memory as symmetric

    symmetric.rendezvous(memory, group.group_name)


def one_shot_sum(place: Tensor, own: Tensor, group: str) -> None:
    """The sum over the ranks of a group, in place of `own`; `place` is as large, in memory that they all read.

    For every torch.
    """
    cast("Any", torch.ops.symm_mem).one_shot_all_reduce_copy_out(place, own, "sum", group, own)


def fused_gather(part: Tensor, dim: int, matrices: Sequence[Tensor], group: str) -> tuple[Tensor, list[Tensor]]:
    """The parts of a group's ranks joined along `dim`, and what that is multiplied by each matrix. For every torch."""
    return cast("Any", torch.ops.symm_mem).fused_all_gather_matmul(part, [*matrices], dim, group)


def fused_scatter(tensor: Tensor, matrix: Tensor, dim: int, group: str) -> Tensor:
    """This rank's part along `dim` of the sum of the ranks' products. For every torch."""
    return cast("Any", torch.ops.symm_mem).fused_matmul_reduce_scatter(tensor, matrix, "sum", dim, group)


def traced_all_reduce(tensor: Tensor, group: str) -> Tensor:
    """The sum over the ranks of a group, in code that Dynamo reads. For every torch."""
    ops: Any = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(tensor, "sum", group))


def over_ranks(tensor: Tensor, group: dist.ProcessGroup, operation: str = "sum") -> Tensor:
    """The sum or the maximum ("max") over the ranks of a group; a node of the graph where a compiler looks.

    The tensor is written to where none does. For every torch.
    """
    if _is_plain(tensor):
        dist.all_reduce(tensor, dist.ReduceOp.MAX if operation == "max" else dist.ReduceOp.SUM, group)
        return tensor
    ops: Any = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(tensor, operation, group.group_name))


def gathered_over_ranks(tensor: Tensor, size: int, group: dist.ProcessGroup) -> Tensor:
    """The ranks' tensors along the first dim; a node of the graph where a compiler looks. For every torch."""
    if not _is_plain(tensor):
        return traced_all_gather(tensor, size, group.group_name)
    received = tensor.new_empty((size * tensor.shape[0], *tensor.shape[1:]))
    all_gather_single(received, tensor, group=group)
    return received


def _is_plain(tensor: Tensor) -> bool:
    return not type(tensor).__module__.startswith("torch._subclasses")


def traced_all_gather(tensor: Tensor, size: int, group: str) -> Tensor:
    """The ranks' tensors along the first dim, in code that Dynamo reads. For every torch."""
    ops: Any = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_gather_into_tensor(tensor, size, group))


def traced_reduce_scatter(tensor: Tensor, size: int, group: str) -> Tensor:
    """This rank's part of the sum along the first dim, in code that Dynamo reads. For every torch."""
    ops: Any = torch.ops._c10d_functional
    return ops.wait_tensor(ops.reduce_scatter_tensor(tensor, "sum", size, group))


def traced_all_to_all(tensor: Tensor, size: int, group: str) -> Tensor:
    """The ranks' parts for this one along the first dim, which counts the ranks, in code that Dynamo reads.

    For every torch.
    """
    ops: Any = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_to_all_single(tensor, [1] * size, [1] * size, group))
