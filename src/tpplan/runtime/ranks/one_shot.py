"""One-shot all-reduces: each rank copies its tensor to memory that all others read, and adds what they all have there.

in:  a process group, and the largest tensors that are summed so, in bytes
out: `SharedMemory`, or the reason why its ranks share none

A ring takes 2(N-1) steps, which of a decoded token's few KiB cost all, and the bytes nothing. torch has the kernel, on
memory that GPUs of one host map into each other (`torch.distributed._symmetric_memory`). It waits for the other ranks
on the device, where no timeout of the group's ends it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from tpplan.compat.process_groups import one_shot_sum, rendezvous, symmetric_empty
from tpplan.compiler.ir.layout import Collective, all_reduce_of
from tpplan.runtime.ranks.agreement import any_rank

_ALIGNMENT = 16


class SharedMemory:
    """Memory of a group's ranks that all of them read; one sum uses it at a time."""

    def __init__(self, memory: Tensor, group: dist.ProcessGroup, largest: int) -> None:
        """Sum tensors of up to `largest` bytes in `memory`, which has met the other ranks' own."""
        self._memory, self._name, self._largest = memory, group.group_name, largest
        self._stream = _current_stream(memory)

    def sums(self, tensor: Tensor) -> bool:
        """Sum a contiguous tensor over the ranks, in place, if it is one of those that are summed here."""
        if all_reduce_of(tensor.nbytes, tensor.dtype, self._largest) is not Collective.ONE_SHOT:
            return False
        if tensor.device != self._memory.device:
            return False
        self._wait()
        own = tensor if _is_aligned(tensor) else tensor.clone()
        place = self._memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        one_shot_sum(place, own, self._name)
        if own is not tensor:
            tensor.copy_(own)
        return True

    def _wait(self) -> None:
        """Wait for the sum before, where that ran on another stream; what a graph captures begins after all of them."""
        stream = _current_stream(self._memory)
        if stream is None or stream == self._stream:
            return
        assert self._stream is not None
        if not torch.cuda.is_current_stream_capturing():
            stream.wait_stream(self._stream)
        self._stream = stream


def share_memory(group: dist.ProcessGroup, largest: int, device: torch.device) -> SharedMemory | str:
    """Let the ranks of a group share memory; each of them calls this.

    Args:
        group: the ranks.
        largest: bytes of the largest tensor that is summed there.
        device: this rank's.

    Returns:
        The memory; or why there is none, on any rank.
    """
    if dist.get_backend(group) == "fake":
        return "the other ranks aren't there"
    memory, reason = None, ""
    try:
        memory = symmetric_empty(-(-largest // _ALIGNMENT) * _ALIGNMENT, device)
    except (RuntimeError, ImportError) as error:
        reason = _first_line(error)
    if any_rank(group, memory is None):  # or the others would wait for this one
        return reason or "another rank has no such memory"
    assert memory is not None
    try:
        rendezvous(memory, group)
    except RuntimeError as error:
        reason = _first_line(error)
    if any_rank(group, bool(reason)):
        return reason or "another rank can't read the memory of all others"
    return SharedMemory(memory, group, largest)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0] or type(error).__name__


def _current_stream(memory: Tensor) -> torch.cuda.Stream | None:
    return torch.cuda.current_stream(memory.device) if memory.is_cuda else None


def _is_aligned(tensor: Tensor) -> bool:
    return not tensor.data_ptr() % _ALIGNMENT and not tensor.storage_offset() * tensor.itemsize % _ALIGNMENT


__all__ = ["SharedMemory", "share_memory"]
