"""Packed tensors: what a rank holds, what is computed on parts, and what is refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor, Replicate

from tpplan.compat.dtensors import local_of, made_dtensor
from tpplan.compat.propagator import fake_mesh
from tpplan.compiler.ir.layout import Layout, Pack, packed, sharded
from tpplan.runtime.parameters.packed_tensors import PackedShard, PackedTensor, packed_tensor
from tpplan.runtime.parameters.pieces import part

LAYOUTS = {
    "equal": packed(0, [Pack(8), Pack(8)]),
    "of several sizes": packed(0, [Pack(8), Pack(4)]),
    "uneven": packed(0, [Pack(9), Pack(5)]),
    "few": packed(0, [Pack(3), Pack(2)]),
    "shared": packed(0, [Pack(4, replicas=2)]),
    "shared in part": packed(0, [Pack(8), Pack(4, replicas=2), Pack(4, replicas=4)]),
    "among some": packed(0, [Pack(8, 1, 0, 2), Pack(4, 2, 0, 2), Pack(8, 1, 2, 2), Pack(4, 2, 2, 2)]),
    "second dim": packed(1, [Pack(4), Pack(2)]),
    "by parts": packed(0, [Pack(14, parts=((0, 5), (5, 4), (9, 5), (14, 0)))]),
    "by parts that overlap": packed(0, [Pack(6, parts=((0, 3), (2, 2), (3, 2), (3, 3))), Pack(4)]),
    "plain": sharded(0),
    "nested": packed(0, [Pack(2, replicas=2)], [Pack(6), Pack(2, replicas=2)]),
}


def _shape(layout: Layout) -> tuple[int, ...]:
    sizes = [5, 8, 3]
    if layout.packs:
        assert layout.dim is not None
        sizes[layout.dim] = sum(pack.size for pack in layout.packs)
    if layout.within:
        sizes[1] = sum(pack.size for pack in layout.within)
    return tuple(sizes)


@pytest.mark.parametrize("chunk", [None, 0, 1, 2])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_element_is_held_and_owned_once(name: str, chunk: int | None) -> None:
    layout = LAYOUTS[name]
    shape = _shape(layout)
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    owned = torch.zeros(shape, dtype=torch.int64)
    for row in range(3 if chunk is not None else 1):
        for rank in range(4):
            held = part(layout, 1, (chunk, None), shape, (3, 4), (row, rank))
            local = held.of(whole)
            assert tuple(local.shape) == held.shape
            if chunk is None:
                assert held.shape == layout.local_shape(shape, 4, rank)
                dim = layout.dim or 0
                start, length = layout.intervals(shape[dim], 4, rank)[0]
                assert layout.within or torch.equal(local.narrow(dim, 0, length), whole.narrow(dim, start, length))
            for box in held.boxes:
                assert torch.equal(box.of_part(local), box.of_whole(whole))
                box.of_whole(owned).add_(int(box.owned))
            assert sum(box.of_part(local).numel() for box in held.boxes) == local.numel()
    assert bool((owned == 1).all())


def _made(layout: Layout = LAYOUTS["of several sizes"], rank: int = 1, size: int = 2) -> tuple[PackedTensor, Tensor]:
    whole = torch.randn(_shape(layout))
    held = part(layout, 0, (None,), tuple(whole.shape), (size,), (rank,))
    return packed_tensor(held.of(whole).contiguous(), fake_mesh(size, rank), layout, tuple(whole.shape)), whole


LISTS: Any = torch  # whose functions on lists aren't public

ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "arithmetic": lambda t: (t * 2 + t.exp() - 1).tanh(),
    "in place": lambda t: t.clone().mul_(3).add_(t, alpha=2).clamp_(-1, 1),
    "likes": lambda t: torch.zeros_like(t) + torch.ones_like(t) + torch.full_like(t, 3.0),
    "casts": lambda t: t.double().half().to(torch.float32),
    "conditions": lambda t: torch.where(t > 0, t, -t),
    "lists": lambda t: LISTS._foreach_add(LISTS._foreach_mul([t, t], [2.0, 3.0]), [t, t])[1],
    "draws": lambda t: torch.manual_seed(3) and torch.zeros_like(t).normal_() + torch.rand_like(t),
}


@pytest.mark.parametrize("how", ELEMENTWISE)
@pytest.mark.parametrize("name", ["of several sizes", "shared", "uneven"])
def test_what_counts_for_each_element_alone_is_computed_on_parts(name: str, how: str) -> None:
    tensor, whole = _made(LAYOUTS[name])
    ours, theirs = (ELEMENTWISE[how](held) for held in (tensor, whole))
    assert type(ours) is PackedTensor and ours.placements == tensor.placements and ours.dtype == theirs.dtype
    assert torch.equal(local_of(ours), tensor.part.of(theirs))


def test_operands_that_lie_otherwise_are_cut_to_parts() -> None:
    tensor, whole = _made()
    row = torch.randn(8, 3)
    mesh = tensor.device_mesh
    ours = tensor * made_dtensor(DTensor, row, mesh, [Replicate()], row.shape)
    assert torch.equal(local_of(ours), tensor.part.of(whole * row))
    lost = made_dtensor(DTensor, local_of(tensor), mesh, tensor.placements, tensor.shape)
    assert torch.equal(local_of(tensor + lost), tensor.part.of(whole + whole))
    assert type(lost) is PackedTensor
    tensor.copy_(torch.ones_like(whole))
    assert bool((local_of(tensor) == 1).all())


@pytest.mark.parametrize("how", [copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))])
def test_a_copy_knows_how_it_lies(how: Callable[[Any], Any]) -> None:
    placement = PackedShard(LAYOUTS["among some"], (24, 8), 1, (0, None))
    assert how(placement) == placement
    assert placement != PackedShard(LAYOUTS["among some"], (24, 8), 1, (None, None))


def test_a_part_may_be_filled_from_the_whole_and_is_copied_as_a_plain_tensor() -> None:
    tensor, whole = _made()
    with torch.no_grad():
        local = tensor.to_local()
        local.copy_(whole + 1)
    assert torch.equal(local_of(tensor), tensor.part.of(whole + 1))
    assert type(copy.deepcopy(local)) is Tensor and type(pickle.loads(pickle.dumps(local))) is Tensor
    assert type(local + 1) is Tensor


def _boxes(tensors: Sequence[PackedTensor]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return sorted(
        (tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes))
        for tensor in tensors
        for item in tensor.__create_write_items__("name", tensor)
        if item.tensor_data is not None
    )


def test_chunks_of_a_checkpoint_cover_the_whole_once() -> None:
    layout = LAYOUTS["shared in part"]
    ranks = [_made(layout, rank, 4)[0] for rank in range(4)]
    covered = torch.zeros(_shape(layout))
    for offsets, sizes in _boxes(ranks):
        covered[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] += 1
    assert bool((covered == 1).all())
    for tensor in ranks:
        for chunk in tensor.__create_chunk_list__():
            index = MetadataIndex("name", chunk.offsets)
            assert tensor.__get_tensor_shard__(index).shape == chunk.sizes
