"""What sharding a materialised model takes: each parameter is freed before the next is made."""

from __future__ import annotations

import ctypes
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tpplan
from tests.checkpoint.memory import MIB, peak
from tests.checkpoint.subjects import subject
from tests.marking import slow_but
from tests.runtime.world import Member, world
from tpplan.compat.dtensors import local_of
from tpplan.runtime.parameters import distribute
from tpplan.runtime.parameters.distribute import MeshDistributor

pytestmark = pytest.mark.processes

WIDTH = 16


class Stack(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.ups = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(layers))
        self.downs = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(layers))
        self.table = nn.Parameter(torch.rand(()))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.ups, self.downs, strict=True):
            x = x + down(up(x).relu()) * self.table
        return x


PLAN: dict[str, Any] = {"version": 1, "modules": {"ups.*": "colwise", "downs.*": "rowwise"}}


def _sharded(member: Member, model: nn.Module, width: int, **options: Any) -> nn.Module:
    return tpplan.parallelize(model, PLAN, member.mesh(), inputs=(torch.zeros(2, width),), **options)


def _frees(member: Member, broadcast: bool) -> list[int]:
    """How many of the stock parameters there are, each time that one is sharded."""
    model = Stack(WIDTH, 2)
    there = [weakref.ref(parameter) for parameter in model.parameters()]
    counts: list[int] = []
    stock = MeshDistributor.distribute

    def counted(self: MeshDistributor, parameter: Tensor, placement: Any) -> Tensor:
        if not parameter.is_meta:
            counts.append(sum(held() is not None for held in there))
        return stock(self, parameter, placement)

    gc.disable()
    MeshDistributor.distribute = counted
    try:
        _sharded(member, model, WIDTH, broadcast=broadcast)
    finally:
        MeshDistributor.distribute = stock
        gc.enable()
    return [*counts, sum(held() is not None for held in there)]


@pytest.mark.parametrize("broadcast", [True, False])
def test_each_parameter_is_freed_before_the_next_is_sharded(broadcast: bool) -> None:
    for counts in world(2).run(_frees, broadcast):
        assert counts == list(range(9, -1, -1))


def _fails(member: Member, after: int) -> tuple[bool, list[str], list[str]]:
    model = Stack(WIDTH, 2)
    before = {name: (type(p), p.detach().clone()) for name, p in model.named_parameters()}
    kinds = [type(module) for module in model.modules()]
    hooks = [len(module._load_state_dict_pre_hooks) for module in model.modules()]  # pyright: ignore
    stock, calls = MeshDistributor.distribute, [0]

    def counted(self: MeshDistributor, parameter: Tensor, placement: Any) -> Tensor:
        calls[0] += not parameter.is_meta
        if calls[0] > after:
            raise MemoryError("no more")
        return stock(self, parameter, placement)

    MeshDistributor.distribute = counted
    notes: list[str] = []
    try:
        _sharded(member, model, WIDTH, broadcast=False)
    except MemoryError as error:
        notes = error.__notes__ if hasattr(error, "__notes__") else []
    finally:
        MeshDistributor.distribute = stock
    same = [n for n, p in model.named_parameters() if type(p) is before[n][0] and torch.equal(p, before[n][1])]
    ours = [len(module._load_state_dict_pre_hooks) for module in model.modules()]  # pyright: ignore
    return kinds == [type(module) for module in model.modules()] and hooks == ours, same, notes


def test_what_fails_on_the_way_leaves_the_classes_and_the_rest_of_the_parameters() -> None:
    for undone, same, notes in world(2).run(_fails, 0):
        assert undone and len(same) == 9 and not notes
    for undone, same, notes in world(2).run(_fails, 3):
        assert undone and len(same) == 6 and "3 of the model's 9 parameters are sharded already" in notes[0]


def give_back_at_once() -> None:
    """Let the C library give freed tensors back: it keeps those as large as any that this process has freed before."""
    library, threshold = ctypes.CDLL(None), -3  # M_MMAP_THRESHOLD of glibc
    if hasattr(library, "mallopt"):
        library.mallopt(threshold, 1 << 17)
        library.malloc_trim(0)


def _takes(member: Member, broadcast: bool) -> tuple[int, int]:
    """The bytes of a tensor, and the most memory that sharding takes beside the model."""
    give_back_at_once()
    _sharded(member, Stack(WIDTH, 1), WIDTH, broadcast=broadcast)  # what a first compile imports isn't the model's
    model = Stack(1024, 16)
    largest = max(p.nbytes for p in model.parameters())
    with peak(0.005) as seen:
        _sharded(member, model, 1024, broadcast=broadcast)
    assert sum(local_of(p).nbytes for p in model.parameters()) > 200 * MIB
    return largest, seen[0]


@pytest.mark.slow
@pytest.mark.parametrize("broadcast", [True, False])
def test_a_model_and_its_shards_are_not_there_at_once(broadcast: bool) -> None:
    for largest, most in world(2).run(_takes, broadcast):
        print(f"{most // MIB} MiB over the whole model, of which a tensor has {largest // MIB}")
        assert most <= largest + 64 * MIB


def _agrees(member: Member, name: str, block: int) -> None:
    held = subject(name, seed=member.rank)
    first = subject(name, seed=0).model.state_dict()
    stock, distribute.BLOCK = distribute.BLOCK, block
    try:
        tpplan.parallelize(held.model, held.plan, member.mesh(), inputs=held.inputs)
    finally:
        distribute.BLOCK = stock
    for key, tensor in held.model.state_dict().items():
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        assert torch.equal(whole, first[key]), key


NAMES = ("packs", "uneven", "shared in packs", "groups", "tied", "gpt2")


@pytest.mark.parametrize("name", slow_but(["packs", "uneven", "shared in packs", "groups", "tied"], NAMES))
@pytest.mark.parametrize("block", [1, 700])
@pytest.mark.one_in(5)
def test_all_ranks_take_the_first_ones_numbers_block_by_block(name: str, block: int) -> None:
    world(2).run(_agrees, name, block)
