"""Pairwise exchanges: an all-gather and a reduce-scatter in steps, beside which parts are worked on.

In step d a rank sends to the rank d places after it, and receives from the one d places before. All sends of an
all-gather begin at once; each of a reduce-scatter begins when its term is made. Bytes are those of the collective:
`(size - 1) / size` of the whole tensor, sent and received.

    all-gather       work on this rank's own part, then on those of the ranks before it, some at a time
    reduce-scatter   make the terms of the parts of the ranks after this one, some at a time, and this rank's own last;
                     a part is summed in the order r, r - 1, r - 2, ... of the ranks

Communicators that can't wait apart (simulated ranks, shapes, ranks that compare each collective) run the collective
itself and do the work at once: the same rows in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from tpplan.compat.autograd import inside_transform
from tpplan.compat.modes import has_substituting_modes, is_autocast
from tpplan.compiler.ir.layout import Collective
from tpplan.runtime.ranks.communicator import Communicator, ProcessGroupCommunicator

Waiting = Callable[[], Tensor]
"""Waits for a collective that was begun, and returns its result."""


def gather_with(
    axis: Communicator, part: Tensor, dim: int, groups: Sequence[int], work: Callable[[Tensor], Sequence[Tensor]]
) -> tuple[Tensor, list[Tensor]]:
    """The ranks' parts joined along `dim`, and what `work` makes of them, joined likewise.

    Args:
        axis: the ranks.
        part: this rank's, of the same shape on each.
        dim: of `part`, and of what is made of it.
        groups: of how many parts `work` is given at a time, in order; as many as there are ranks in all.
        work: makes as many tensors of parts that are joined.
    """
    if not (isinstance(axis, ProcessGroupCommunicator) and axis.begins):
        whole = axis.all_gather(part, dim)
        return whole, list(work(whole))
    size, rank, own = axis.size, axis.rank, part.contiguous()
    parts: list[Tensor] = [own] * size
    made: list[Sequence[Tensor]] = [()] * size
    with axis.pairwise(Collective.ALL_GATHER) as swap:
        arriving = [swap(own, distance) for distance in range(1, size)]
        first = 0
        for group in groups:
            for distance in range(max(first, 1), first + group):
                parts[rank - distance] = arriving[distance - 1]()
            if group == 1:
                made[rank - first] = work(parts[rank - first])
            else:
                places = [rank - distance for distance in range(first, first + group)]
                results = work(torch.cat([parts[place] for place in places], dim))
                pieces = zip(*[result.chunk(group, dim) for result in results], strict=True)
                for place, each in zip(places, pieces, strict=True):
                    made[place] = each
            first += group
    return torch.cat(parts, dim), [torch.cat(each, dim) for each in zip(*made, strict=True)]


def scatter_with(axis: Communicator, dim: int, groups: Sequence[int], work: Callable[[list[int]], Tensor]) -> Tensor:
    """This rank's part along `dim` of the sum of the ranks' terms.

    Args:
        axis: the ranks.
        dim: of the terms.
        groups: how many parts' terms are made at a time, in order; as many as there are ranks in all.
        work: makes this rank's terms of some ranks' parts, joined along `dim`; the tensor is nobody else's.
    """
    size, rank = axis.size, axis.rank
    if not (isinstance(axis, ProcessGroupCommunicator) and axis.begins):
        return axis.reduce_scatter(work(list(range(size))), dim)
    arriving: list[Waiting] = []
    made: Sequence[Tensor] = []
    with axis.pairwise(Collective.REDUCE_SCATTER) as swap:
        first = 1
        for group in groups:
            distances = range(first, first + group)
            terms = work([(rank + distance) % size for distance in distances])
            made = terms.chunk(group, dim) if group > 1 else (terms,)
            arriving += [swap(term.contiguous(), d) for term, d in zip(made, distances, strict=True) if d < size]
            first += group
        total = made[-1] + arriving[0]()  # a tensor of its own, which callers may write to
        for wait in arriving[1:]:
            total.add_(wait())
    return total.contiguous()


def sum_with(
    axis: Communicator, whole: Tensor, given: Tensor, groups: Sequence[int], work: Callable[[Tensor, Tensor], object]
) -> None:
    """The ranks' sum, in the place of this rank's terms; some rows are summed while others are made.

    Args:
        axis: the ranks.
        whole: to write to, contiguous; as long as on each other rank.
        given: what it is made of, row by row.
        groups: the shares of its rows that are made at a time, in order.
        work: makes the terms of some rows of `given`, in those of `whole`.
    """
    arriving: list[tuple[Tensor, Waiting]] = []
    if not (isinstance(axis, ProcessGroupCommunicator) and axis.begins):
        groups = (sum(groups),)
    rows, shares = whole.shape[0], sum(groups)
    ends = [last * rows // shares for last in accumulate(groups)]
    lengths = [end - start for start, end in zip((0, *ends[:-1]), ends, strict=True)]
    for part, made in zip(given.split_with_sizes(lengths), whole.split_with_sizes(lengths), strict=True):
        work(part, made)
        arriving.append((made, begin(axis, Collective.ALL_REDUCE, made)))
    for made, wait in arriving:
        total = wait()
        if total is not made:
            made.copy_(total)


def begin(axis: Communicator, collective: Collective, tensor: Tensor, dim: int = 0) -> Waiting:
    """Begin a collective, which may write to `tensor`; where a communicator can't, it is done at once."""
    if isinstance(axis, ProcessGroupCommunicator) and axis.begins:
        return axis.begin_collective(collective, tensor, dim)
    if collective is Collective.ALL_REDUCE:
        done = axis.all_reduce(tensor)
    elif collective is Collective.ALL_GATHER:
        done = axis.all_gather(tensor, dim)
    else:
        done = axis.reduce_scatter(tensor, dim)
    return lambda: done


def runs_as_written() -> bool:
    """Whether nobody replaces operations: no autocast, no transform, no mode.

    The answer is the same when an activation checkpoint runs a call once more.
    """
    return not (has_substituting_modes() or inside_transform() or is_autocast())


__all__ = ["begin", "gather_with", "runs_as_written", "scatter_with", "sum_with"]
