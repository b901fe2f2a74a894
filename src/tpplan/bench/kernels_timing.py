"""Timing on a GPU with its own clock, and on a CPU with a plain one to see that it all runs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_COPY_BYTES = 1 << 30
_HELD_BYTES = 8 << 30
_CALLS = 25


def microseconds(call: Callable[[], Any], device: str) -> float:
    """The median time of a call on the device, its cache cleared before each; on a CPU of a single call.

    The time that the host takes to launch isn't in it. The device is kept busy by a fill of 8 GiB (about 2.5 ms at
    3.4 TB/s), which clears its cache too; until that has ended, all of the call's kernels stand in the queue.
    """
    if device == "cuda":
        return _queued(call)
    call()
    started = time.perf_counter()
    call()
    return (time.perf_counter() - started) * 1e6


def _queued(call: Callable[[], Any]) -> float:
    held = torch.empty(_HELD_BYTES, dtype=torch.uint8, device="cuda")
    for _ in range(3):
        call()
    taken: list[float] = []
    for _ in range(_CALLS):
        started, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        held.zero_()
        started.record()
        call()
        ended.record()
        is_late = started.query()  # the fill has ended, so that the device has waited for the host
        torch.cuda.synchronize()
        if not is_late:
            taken.append(started.elapsed_time(ended) * 1e3)
    if len(taken) < _CALLS / 2:
        raise RuntimeError("the host takes longer to launch this than the device takes for the fill before it")
    return statistics.median(taken)


def wall_microseconds(call: Callable[[], Any], device: str, calls: int) -> float:
    """The time of a call among many, the host's part included, and nothing waited for in between."""
    call()
    _wait(device)
    started = time.perf_counter()
    for _ in range(calls):
        call()
    _wait(device)
    return (time.perf_counter() - started) / calls * 1e6


def copy_gigabytes_per_second(device: str) -> float:
    """How fast the device copies its own memory, read and write counted."""
    size = _COPY_BYTES if device == "cuda" else 1 << 20
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / microseconds(lambda: target.copy_(source), device) / 1e3


def step_of(form: Callable[..., Any], inputs: Sequence[Tensor]) -> Callable[[], Any]:
    """A forward with its backward to all inputs that want gradients."""
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    outputs = _outputs(form(*inputs))
    gradients = [
        torch.ones((), dtype=y.dtype, device=y.device) if not y.dim() else torch.randn_like(y) for y in outputs
    ]

    def step() -> Any:
        return torch.autograd.grad(_outputs(form(*inputs)), wanted, gradients)

    return step


def forward_of(form: Callable[..., Any], inputs: Sequence[Tensor]) -> Callable[[], Any]:
    """A forward without a backward to come."""

    def forward() -> Any:
        with torch.no_grad():
            return form(*inputs)

    return forward


def _outputs(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else [y for y in results if isinstance(y, Tensor)]


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
