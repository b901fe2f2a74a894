"""Averaging: the mean of gradients over the ranks of a data-parallel axis, as they arrive.

in:  parameters, plain ones and DTensors, and the process group of the axis
out: after each backward that was announced, gradients that are equal on all ranks of the group

Parameters are in buckets, in the reverse of their order in the model. A bucket is sent when all of its gradients have
arrived and those before it are sent, so all ranks send in one order. The rest is sent when the backward ends: a
parameter without a gradient there counts as zero, and stays without one if no rank has any. For that a bucket has one
more number for each of its parameters, the share of ranks that have its gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tpplan.compat.autograd import after_backward, runs_backward
from tpplan.compat.dtensors import local_of, make_gradient
from tpplan.compat.modules import copy_all
from tpplan.compat.tensors import as_bytes
from tpplan.plan import TpplanError
from tpplan.runtime.ranks.faults import naming_ranks

MEBIBYTE = 1024**2


class DataParallelError(TpplanError):
    """What was asked of a sharded model can't be combined with data parallelism, or not in this way."""


class _Bucket:
    """Parameters whose gradients are sent together.

    Attributes:
        parameters: of one dtype and device.
        arrived: the places of those whose gradient has arrived in the round under way.
        sent: the gradients on their way, one after the other, and the shares; None before they are sent.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = tuple(parameters)
        self.sizes = [local_of(parameter).numel() for parameter in parameters]
        self.arrived: set[int] = set()
        self.sent: Tensor | None = None
        self._work: dist.Work | None = None

    def send(self, group: dist.ProcessGroup) -> None:
        """Begin the sum over the group."""
        locals_ = [local_of(parameter) for parameter in self.parameters]
        sent = locals_[0].new_zeros(sum(self.sizes) + len(locals_))
        *pieces, shares = _split(sent, [*self.sizes, len(locals_)])
        present = [(n, parameter.grad) for n, parameter in enumerate(self.parameters) if parameter.grad is not None]
        targets = [piece.view(held.shape) for piece, held in zip(pieces, locals_, strict=True)]
        if present:
            copy_all([targets[n] for n, _ in present], [local_of(g).detach() for _, g in present])
        if len(present) == len(locals_):
            shares.fill_(1)
        else:
            for n, _ in present:
                shares[n] = 1
        sent.div_(group.size())
        real = torch.view_as_real(sent) if sent.is_complex() else sent
        self.sent, self._work = sent, dist.all_reduce(real, group=group, async_op=True)

    def receive(self) -> None:
        """Wait for the sums, and put them into the gradients."""
        if self._work is not None:
            self._work.wait()
        if self.sent is not None:
            *pieces, shares = _split(self.sent, [*self.sizes, len(self.sizes)])
            written: list[Tensor] = []
            means: list[Tensor] = []
            for parameter, piece, share in zip(self.parameters, pieces, shares.unbind(), strict=True):
                mean = piece.view(local_of(parameter).shape)
                if parameter.grad is not None:
                    written.append(local_of(parameter.grad))
                    means.append(mean)
                elif bool(share != 0):
                    parameter.grad = make_gradient(mean.clone(), parameter)
            if written:
                copy_all(written, means)
        self.forget()

    def forget(self) -> None:
        """Be ready for the next round."""
        self.arrived.clear()
        self.sent = self._work = None


class Averager:
    """Averages gradients over a group.

    Rounds begin when a gradient arrives at an output of an announced forward (`begin`), or at a parameter, and end with
    that backward.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], group: dist.ProcessGroup, limits: tuple[int, int]) -> None:
        """Average the gradients of `parameters` over `group`.

        Args:
            parameters: that require grad, in the model's order.
            group: the ranks.
            limits: how many bytes go into the first bucket, and into each other.
        """
        self._group = group
        self._announced = self._open = False
        self._next = 0
        self.buckets = [_Bucket(held) for held in _in_buckets([*parameters][::-1], limits)]
        for bucket in self.buckets:
            for place, parameter in enumerate(bucket.parameters):
                parameter.register_post_accumulate_grad_hook(functools.partial(self._arrive, bucket, place))

    # -- a round --------------------------------------------------------------------------------------------------
    def announce(self, wanted: bool) -> None:
        """Say whether the backward of the forward that has ended is to be averaged."""
        self._announced = wanted
        if self._open and not runs_backward():  # a backward that raised has left it
            self._close()
            self._announced = wanted

    def begin(self, gradient: Tensor | None = None) -> None:
        """Begin a round, which ends with the backward under way."""
        if not self._open:
            self._open = True
            after_backward(self._end)

    def _arrive(self, bucket: _Bucket, place: int, parameter: Tensor) -> None:
        if not self._open:
            if not self._announced:
                return
            self.begin()
        if bucket.sent is not None:
            raise DataParallelError.of(
                "TP173",
                "in one backward a parameter's gradient arrived once more after its average over the data-parallel "
                "ranks had begun",
                help="let activation checkpoints have `use_reentrant=False`; or accumulate in `no_sync()`, and average "
                "in a backward of its own",
            )
        bucket.arrived.add(place)
        while self._next < len(self.buckets):
            bucket = self.buckets[self._next]
            if len(bucket.arrived) < len(bucket.parameters):
                break
            self._send_next()

    @torch.no_grad()
    def _send_next(self) -> None:
        self.buckets[self._next].send(self._group)
        self._next += 1

    @torch.no_grad()
    def _end(self) -> None:
        if not self._open:
            return
        with naming_ranks("the average of gradients over the data-parallel ranks", self._group):
            while self._next < len(self.buckets):
                self._send_next()
            for bucket in self.buckets:
                bucket.receive()
        self._close()

    def _close(self) -> None:
        for bucket in self.buckets:
            bucket.forget()
        self._open = self._announced = False
        self._next = 0


@torch.no_grad()
def equalise(parameters: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Give all ranks of the group the first rank's numbers."""
    for parameter in parameters:
        local = local_of(parameter).detach()
        sent = local.contiguous()
        dist.broadcast(torch.view_as_real(sent) if sent.is_complex() else as_bytes(sent), group=group, group_src=0)
        if sent is not local:
            local.copy_(sent)


def _split(tensor: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    return cast("Any", tensor).split(sizes)


def _in_buckets(parameters: list[nn.Parameter], limits: tuple[int, int]) -> list[list[nn.Parameter]]:
    """Parameters in order, together if they are of one kind, and no more than the limits allow."""
    found: list[list[nn.Parameter]] = []
    open_ones: dict[object, tuple[list[nn.Parameter], int]] = {}
    for parameter in parameters:
        local = local_of(parameter)
        kind, size = (local.dtype, local.device), local.numel() * local.itemsize
        bucket, filled = open_ones.get(kind, ([], 0))
        if bucket and filled + size > limits[0 if bucket is found[0] else 1]:
            bucket, filled = [], 0
        if not bucket:
            found.append(bucket)
        bucket.append(parameter)
        open_ones[kind] = bucket, filled + size
    return found


__all__ = ["MEBIBYTE", "Averager", "DataParallelError", "equalise"]
