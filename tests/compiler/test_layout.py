"""The table of reshards: every pair that has one, and that what's back is the adjoint of what's there."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard

from tpplan.compiler.ir.layout import (
    PARTIAL,
    REPLICATED,
    REPLICATED_PARTIAL,
    Collective,
    Collectives,
    Layout,
    Pack,
    layout_of,
    packed,
    reshard_between,
    sharded,
)

LAYOUTS = [REPLICATED, REPLICATED_PARTIAL, PARTIAL, sharded(0), sharded(1)]
NONE = Collective.NONE


@pytest.mark.parametrize(
    ("source", "target", "forward", "backward"),
    [
        (REPLICATED, REPLICATED_PARTIAL, NONE, Collective.ALL_REDUCE),
        (PARTIAL, REPLICATED, Collective.ALL_REDUCE, NONE),
        (PARTIAL, REPLICATED_PARTIAL, Collective.ALL_REDUCE, Collective.ALL_REDUCE),
        (PARTIAL, sharded(1), Collective.REDUCE_SCATTER, Collective.ALL_GATHER),
        (sharded(1), REPLICATED_PARTIAL, Collective.ALL_GATHER, Collective.REDUCE_SCATTER),
        (sharded(1), REPLICATED, Collective.ALL_GATHER, Collective.SLICE),
        (REPLICATED, sharded(1), Collective.SLICE, Collective.ALL_GATHER),
        (REPLICATED_PARTIAL, sharded(1), Collective.SLICE, Collective.PAD),
        (REPLICATED_PARTIAL, REPLICATED, NONE, Collective.FIRST),
        (sharded(0), sharded(1), Collective.ALL_TO_ALL, Collective.ALL_TO_ALL),
    ],
)
def test_a_reshard_communicates_as_the_literature_says(
    source: Layout, target: Layout, forward: Collective, backward: Collective
) -> None:
    assert reshard_between(source, target) == Collectives(forward, backward)


def test_nothing_becomes_partial() -> None:
    without = {
        (str(a), str(b)) for a, b in itertools.product(LAYOUTS, LAYOUTS) if a != b and reshard_between(a, b) is None
    }
    assert without == {(str(a), "P") for a in LAYOUTS if a != PARTIAL}


@pytest.mark.parametrize(("source", "target"), itertools.product(LAYOUTS, LAYOUTS), ids=str)
def test_what_runs_backward_is_the_adjoint_of_what_runs_forward(source: Layout, target: Layout) -> None:
    """⟨forward(x), g⟩ = ⟨x, backward(g)⟩, where a replicated or partial side counts by its value, not by its copies."""
    found = reshard_between(source, target)
    if found is None:
        return
    generator = torch.Generator().manual_seed(0)
    x, g = (torch.randn(4, 6, dtype=torch.float64, generator=generator) for _ in range(2))
    there = _run(found.forward, _spread(x, source.forward, source.dim), source, target)
    torch.testing.assert_close(_value(there, target.forward, target.dim), x)
    back = _run(found.backward, _spread(g, target.gradient, target.dim), target, source)
    torch.testing.assert_close(_value(back, source.gradient, source.dim), g)


def _spread(whole: Tensor, kind: str, dim: int | None) -> list[Tensor]:
    if kind == "S":
        return list(whole.chunk(2, dim or 0))
    if kind == "P":
        noise = torch.randn_like(whole)
        return [noise, whole - noise]
    return [whole, whole]


def _value(parts: list[Tensor], kind: str, dim: int | None) -> Tensor:
    if kind == "S":
        return torch.cat(parts, dim or 0)
    if kind == "P":
        return parts[0] + parts[1]
    torch.testing.assert_close(parts[0], parts[1])
    return parts[0]


def _run(collective: Collective, parts: list[Tensor], source: Layout, target: Layout) -> list[Tensor]:
    dim = source.dim if source.dim is not None else target.dim
    if collective is Collective.ALL_REDUCE:
        return [parts[0] + parts[1]] * 2
    if collective is Collective.ALL_GATHER:
        return [torch.cat(parts, dim or 0)] * 2
    if collective is Collective.REDUCE_SCATTER:
        return list((parts[0] + parts[1]).chunk(2, dim or 0))
    if collective is Collective.SLICE:
        return [part.chunk(2, dim or 0)[rank] for rank, part in enumerate(parts)]
    if collective is Collective.ALL_TO_ALL:
        return list(torch.cat(parts, source.dim or 0).chunk(2, target.dim or 0))
    if collective is Collective.FIRST:
        return [parts[0], torch.zeros_like(parts[1])]
    if collective is Collective.PAD:
        zeros = torch.zeros_like(parts[0])
        return [torch.cat([parts[0], zeros], dim or 0), torch.cat([zeros, parts[1]], dim or 0)]
    return parts


def test_layouts_are_distributed_tensors_placements() -> None:
    assert [held.placement for held in (REPLICATED, PARTIAL, sharded(1))] == [Replicate(), Partial(), Shard(1)]
    assert [layout_of(p) for p in (Replicate(), Partial(), Shard(1))] == [REPLICATED, PARTIAL, sharded(1)]
    assert layout_of(Partial("avg")) is None
    assert layout_of(Partial("max")) is None


def test_a_shards_shape_is_a_part_of_the_whole() -> None:
    assert sharded(1).local_shape((3, 12, 8), 4, 3) == (3, 3, 8)
    assert PARTIAL.local_shape((3, 12, 8), 4, 0) == (3, 12, 8)


@pytest.mark.parametrize("count", range(14))
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_parts_are_those_of_torch_and_of_distributed_tensors(count: int, size: int) -> None:
    whole = torch.arange(count)
    theirs, _ = Shard(0)._split_tensor(whole, size, with_padding=False, contiguous=True)
    for rank in range(size):
        start, length = Pack(count).part(size, rank)
        assert torch.equal(whole.narrow(0, start, length), theirs[rank])
        assert sharded(0).local_shape((count,), size, rank) == (length,)
        assert length <= Pack(count).local(size, 0)
    assert Pack(count).is_even(size) == (count % size == 0)


def test_packs_that_ranks_cant_share_evenly() -> None:
    odd = packed(0, [Pack(5), Pack(5)])
    assert odd.local_shape((10,), 2, 0) == (6,)
    assert odd.intervals(10, 2, 1) == [(3, 2), (8, 2)]


def test_interleaved_shards_are_moved_to_and_from_replicated_only() -> None:
    flat = sharded(0, interleave=3)
    assert reshard_between(flat, REPLICATED_PARTIAL) == reshard_between(sharded(0), REPLICATED_PARTIAL)
    assert reshard_between(flat, sharded(0)) is None
    assert reshard_between(sharded(1), flat) is None
    assert flat.local_shape((36, 8), 2, 1) == (18, 8)
