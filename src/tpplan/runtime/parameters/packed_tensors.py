"""Packed tensors: DTensors of which a rank holds several stretches, or what other ranks hold as well.

No placement of DTensor's says so. `PackedShard` does, and `PackedTensor` knows what follows: how the whole is put
together, in the model's order; which chunks a checkpoint has of it; what may be computed on parts, and that an element
that several ranks hold is counted once. Operations are in `sharded_operations.py`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from tpplan.compat.dtensors import OwnPlacement, local_of, made_dtensor, placed_anew
from tpplan.compat.placements import interleaving
from tpplan.compat.process_groups import gathered_over_ranks
from tpplan.compat.subclasses import OFF
from tpplan.compat.tensors import as_bytes
from tpplan.compiler.ir.layout import Layout, Pack
from tpplan.runtime.parameters import pieces
from tpplan.runtime.parameters.pieces import Box, Part
from tpplan.runtime.parameters.sharded_tensors import ShardedTensor, StateError, refusal, shown
from tpplan.runtime.ranks.faults import naming_ranks


class Chunk(OwnPlacement):
    """On another axis of the mesh: it cuts what a `PackedShard` gives to a rank, along `dim`, as FSDP does."""

    def __init__(self, dim: int) -> None:
        """Cut along `dim`."""
        super().__init__()
        self.dim = dim

    def gathered(self, part: Tensor, mesh: DeviceMesh, axis: int) -> Tensor:
        """What it is given: the `PackedShard` gathers over all axes."""
        return part

    def part_of(self, whole: Tensor, mesh: DeviceMesh, axis: int) -> Tensor:
        """What it is given: the `PackedShard` cuts for all axes."""
        return whole

    def adopt(self, tensor: DTensor, axis: int) -> None:
        """Leave that to the `PackedShard`."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Chunk) and other.dim == self.dim

    def __hash__(self) -> int:
        return hash(("chunk", self.dim))

    def __repr__(self) -> str:
        return f"Chunk({self.dim})"

    __str__ = __repr__

    def __reduce__(self) -> tuple[Any, ...]:
        return Chunk, (self.dim,)


class PackedShard(OwnPlacement):
    """A layout with packs, on one axis of a mesh.

    Attributes:
        layout: the layout.
        shape: of the whole tensor.
        axis: the axis.
        chunks: for each axis of the mesh the dim along which it cuts a rank's part further, or None.
    """

    def __init__(
        self, layout: Layout, shape: Sequence[int], axis: int = 0, chunks: tuple[int | None, ...] = (None,)
    ) -> None:
        """See the class."""
        super().__init__()
        self.layout, self.shape, self.axis, self.chunks = layout, tuple(shape), axis, chunks
        self._key = (layout, self.shape, axis, chunks)

    def part(self, mesh: DeviceMesh, place: tuple[int, ...] | None = None) -> Part:
        """What the rank at `place` of the mesh, or this one, holds."""
        if place is None:
            here = mesh.get_coordinate()
            place = (0,) * mesh.ndim if here is None else tuple(here)
        if mesh.ndim != len(self.chunks):
            raise refusal(f"{self} is a placement on a mesh of {len(self.chunks)} axes, not of {mesh.ndim}", _ANEW)
        return pieces.part(self.layout, self.axis, self.chunks, self.shape, tuple(mesh.shape), place)

    def gathered(self, part: Tensor, mesh: DeviceMesh, axis: int) -> Tensor:
        """The whole, of a part on this rank; a collective."""
        if self.part(mesh).shape != tuple(part.shape):
            raise refusal(f"a tensor of shape {list(part.shape)} is no part of {self}", _ANEW)
        return gathered(part, self, mesh)

    def part_of(self, whole: Tensor, mesh: DeviceMesh, axis: int) -> Tensor:
        """This rank's part, with memory of its own."""
        if tuple(whole.shape) != self.shape:
            raise refusal(f"a tensor of shape {list(whole.shape)} can't be laid out as {self}", _ANEW)
        _Returned.expect()
        return self.part(mesh).of(whole).clone(memory_format=torch.contiguous_format)

    def adopt(self, tensor: DTensor, axis: int) -> None:
        """Make it a `PackedTensor`."""
        placed_anew(tensor, PackedTensor, _on_all_axes(tensor.placements, axis))

    def __eq__(self, other: object) -> bool:
        return other is self or (isinstance(other, PackedShard) and other._key == self._key)

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"PackedShard({self.layout} of {list(self.shape)})"

    __str__ = __repr__

    def __reduce__(self) -> tuple[Any, ...]:
        held = self.layout
        packs = tuple(tuple(pack) for pack in held.packs), tuple(tuple(pack) for pack in held.within)
        plain = held.forward, held.gradient, held.dim, held.interleave, *packs, held.inner_dim
        return _packed_shard, (plain, self.shape, self.axis, self.chunks)


def _packed_shard(
    plain: tuple[Any, ...], shape: tuple[int, ...], axis: int, chunks: tuple[int | None, ...]
) -> PackedShard:
    """What `PackedShard.__reduce__` wrote."""
    forward, gradient, dim, interleave, *held, inner_dim = plain if len(plain) > 6 else (*plain, None)
    packs, within = (tuple(Pack(*pack) for pack in row) for row in held)
    layout = Layout(forward, gradient, dim, interleave, packs, within, inner_dim=inner_dim)
    return PackedShard(layout, shape, axis, chunks)


_ANEW = "take the whole with `full_tensor()` of the parameter, its gradient or its state, or a tensor like these"


class PackedTensor(ShardedTensor):
    """A sharded tensor with a `PackedShard`, on one axis of its mesh."""

    __slots__ = ()

    @property
    def packing(self) -> PackedShard:
        """The placement that it is of this class for."""
        return next(p for p in self.placements if isinstance(p, PackedShard))

    def part_at(self, place: tuple[int, ...] | None) -> Part:
        """What the rank at `place` of the mesh, or this one, holds."""
        return self.packing.part(self.device_mesh, place)

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """The whole, in the model's order; a collective."""
        if torch.is_grad_enabled() and self.requires_grad:
            return _Whole.apply(self)  # pyright: ignore
        with naming_ranks(f"the gathering of {shown(self)}"):
            return gathered(local_of(self), self.packing, self.device_mesh)

    def redistribute(
        self, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None, **options: Any
    ) -> DTensor:
        """With other placements, by way of the whole."""
        if placements is None or tuple(placements) == self.placements:
            return self
        whole = self.full_tensor()
        mesh = device_mesh or self.device_mesh
        replicated = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return replicated.redistribute(mesh, placements, **options)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """This rank's part, whose gradient lies as the part does."""
        if torch.is_grad_enabled():
            return super().to_local(grad_placements=grad_placements or self.placements)
        local = local_of(self).as_subclass(LocalPart)
        _parts[local] = self.part, tuple(self.shape)
        return local

    @staticmethod
    def __tensor_unflatten__(inner_tensors: Any, flatten_spec: Any, outer_size: Any, outer_stride: Any) -> Any:
        return PackedTensor.adopted(
            DTensor.__tensor_unflatten__(inner_tensors, flatten_spec, outer_size, outer_stride)  # pyright: ignore
        )

    # What torch.distributed.checkpoint asks.
    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(local_of(self))
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(box.start)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=_chunk(box), properties=properties, size=self.size()),
            )
            for box in self.part.owned
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(box) for box in self.part.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        offset = tuple(index.offset or ())
        box = next((box for box in self.part.boxes if box.start == offset), None)
        if box is None:
            raise refusal(f"this rank holds no chunk of `{index.fqn}` that begins at {list(offset)}", _ANEW)
        return box.of_part(local_of(self))


class LocalPart(Tensor):
    """A rank's part as `to_local` gives it, which may be filled from the whole.

    `broadcast_from_rank0` of torch's state dicts copies to each rank's part what it takes for it: the whole.
    """

    __torch_function__ = OFF  # pyright: ignore

    def copy_(self, other: Tensor, non_blocking: bool = False) -> Tensor:
        """Copy what is given as the part or as the whole."""
        part, shape = _parts.get(self, (None, ()))
        if part is not None and other.shape != self.shape and tuple(other.shape) == shape:
            other = part.of(other)
        return super().copy_(other, non_blocking)

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain: Any = self.as_subclass(Tensor)
        return plain.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Tensor:
        plain: Any = self.as_subclass(Tensor)
        return plain.__deepcopy__(memo)


_parts: Any = WeakTensorKeyDictionary()


class _Whole(torch.autograd.Function):
    """The whole of a packed tensor; the gradient of the whole is the same on all ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: PackedTensor) -> Tensor:
        ctx.tensor = tensor.detach()
        return gathered(local_of(tensor), tensor.packing, tensor.device_mesh)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> PackedTensor:
        return ctx.tensor.like(ctx.tensor.part.of(gradients[0]).contiguous())


class _Returned:
    """Optimizer states that `set_optimizer_state_dict` has cut, which are plain DTensors.

    An optimizer is known by its first step, which torch makes itself, of no length, before it sets a state.
    """

    _hooked: ClassVar[WeakKeyDictionary[torch.optim.Optimizer, RemovableHandle]] = WeakKeyDictionary()
    _seen: ClassVar[WeakSet[torch.optim.Optimizer]] = WeakSet()

    @classmethod
    def watch(cls) -> Callable[[], None]:
        """Look at optimizers from now on; returns what ends that."""
        before_steps = register_optimizer_step_pre_hook(cls._adopt)

        def undo() -> None:
            for handle in (before_steps, *cls._hooked.values()):
                handle.remove()
            cls._hooked.clear()
            cls.expect()

        return undo

    @classmethod
    def expect(cls) -> None:
        """Look at each optimizer before its next step."""
        cls._seen = WeakSet()

    @classmethod
    def _adopt(cls, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if optimizer in cls._seen:
            return
        cls._seen.add(optimizer)
        if optimizer not in cls._hooked:
            cls._hooked[optimizer] = optimizer.register_load_state_dict_post_hook(cls._adopt_states)
        cls._adopt_states(optimizer)

    @classmethod
    def _adopt_states(cls, optimizer: torch.optim.Optimizer) -> None:
        states: list[Any] = list(optimizer.state.values())
        for state in states:
            for held in dict[str, Any](state).values():
                PackedTensor.adopted(held)


def packed_tensor(local: Tensor, mesh: DeviceMesh, layout: Layout, shape: Sequence[int]) -> PackedTensor:
    """A packed tensor of `shape` around this rank's part, on a mesh of one axis."""
    return made_dtensor(PackedTensor, local, mesh, [PackedShard(layout, shape)], shape)


def gathered(part: Tensor, packing: PackedShard, mesh: DeviceMesh) -> Tensor:
    """The whole of which every rank of the mesh holds a part; one all-gather for each axis that splits it."""
    axes = [i for i, cut in enumerate(packing.chunks) if cut is not None or i == packing.axis]
    places = [_place(mesh, axes, held) for held in itertools.product(*(range(mesh.size(i)) for i in axes))]
    parts = [packing.part(mesh, place) for place in places]
    longest = [max(sizes) for sizes in zip(*(held.shape for held in parts), strict=True)]
    kind, part = part.dtype, as_bytes(part)
    sent = part.detach().contiguous()
    if tuple(longest) != tuple(part.shape):
        sent = part.new_zeros(longest)
        pieces.beginning(sent, part.shape).copy_(part)
    for axis in reversed(axes):
        if mesh.size(axis) > 1:
            sent = gathered_over_ranks(sent.view(-1), mesh.size(axis), mesh.get_group(axis))
    whole = part.new_empty(packing.shape)
    for held, numbers in zip(parts, sent.view(-1, math.prod(longest)).unbind(), strict=True):
        own = pieces.beginning(numbers.view(longest), held.shape)
        for box in held.owned:
            box.of_whole(whole).copy_(box.of_part(own))
    return whole.view(kind)


def _place(mesh: DeviceMesh, axes: list[int], held: tuple[int, ...]) -> tuple[int, ...]:
    here = [*(mesh.get_coordinate() or (0,) * mesh.ndim)]
    for axis, place in zip(axes, held, strict=True):
        here[axis] = place
    return tuple(here)


def _on_all_axes(placements: Sequence[Placement], axis: int) -> list[Placement]:
    """The placements that FSDP makes of a `PackedShard`, such that this one knows of the others."""
    packing = placements[axis]
    assert isinstance(packing, PackedShard)
    chunks: list[int | None] = []
    for placement in placements:
        split = interleaving(placement)
        cut = placement.dim if isinstance(placement, Chunk) else None if split is None else split[0]
        chunks.append(cut)
    found = [placement if cut is None else Chunk(cut) for placement, cut in zip(placements, chunks, strict=True)]
    found[axis] = PackedShard(packing.layout, packing.shape, axis, tuple(chunks))
    return found


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.start), sizes=torch.Size(box.sizes))


def watch_optimizers() -> Callable[[], None]:
    """From now on let optimizers have packed states where their parameters are packed; returns what ends that."""
    return _Returned.watch()


def allow_in_files() -> Callable[[], None]:
    """Let `torch.load` read packed tensors with `weights_only=True`; returns what ends that."""
    own: list[Any] = [Chunk, PackedTensor, _packed_shard]
    torch.serialization.add_safe_globals(own)

    def undo() -> None:
        others: list[Any] = [*torch.serialization.get_safe_globals()]
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals([held for held in others if held not in own])

    return undo


__all__ = [
    "Chunk",
    "PackedShard",
    "PackedTensor",
    "StateError",
    "allow_in_files",
    "gathered",
    "packed_tensor",
    "refusal",
    "watch_optimizers",
]
