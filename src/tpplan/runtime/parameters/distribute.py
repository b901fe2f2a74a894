"""A rank's parts of the model's tensors: cut from the whole, or made on `meta`, and wrapped as DTensors."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tpplan.compat.dtensors import made_dtensor
from tpplan.compat.tensors import as_bytes, name_tensor
from tpplan.compiler.ir.program import ParameterPlacement
from tpplan.runtime.parameters.packed_tensors import packed_tensor
from tpplan.runtime.parameters.pieces import Part, narrowed, part
from tpplan.runtime.parameters.sharded_tensors import ShardedTensor
from tpplan.runtime.ranks.board import exchange
from tpplan.runtime.ranks.communicator import Communicator
from tpplan.runtime.ranks.faults import naming_ranks

BLOCK = 32 * 1024**2
"""How many bytes of a parameter are sent to all ranks at once."""


class MeshDistributor:
    """Distributes over the one axis of a device mesh."""

    owns = True

    def __init__(self, mesh: DeviceMesh, axis: Communicator, source: dist.ProcessGroup | None) -> None:
        """Cut for `axis`, whose DTensors live on `mesh` (one-dim).

        Args:
            mesh: the one-axis mesh.
            axis: this rank's view of it.
            source: a group whose first rank's numbers everybody takes; None if all hold the same already.
        """
        self.mesh = mesh
        self.axis = axis
        self.device = device_of_mesh(mesh)
        self._source = source

    def distribute(self, parameter: Tensor, placement: ParameterPlacement) -> Tensor:
        """This rank's part of a parameter or a buffer, as a DTensor on the mesh's device that is one, too."""
        local = self._local(parameter.detach(), placement)
        layout, count = placement.layout, placement.shape[placement.layout.dim or 0] if placement.shape else 0
        if layout.packs or (layout.is_sharded and not layout.is_even(count, self.axis.size)):
            # Of uneven parts, too, torch doesn't know how FSDP cuts them, or that a norm may be one of nothing.
            packs = replace(layout, packs=layout.stretches(count))
            distributed: DTensor = packed_tensor(local, self.mesh, packs, placement.shape)
        else:
            stored = [placement.layout.stored_placement]
            distributed = made_dtensor(ShardedTensor, local, self.mesh, stored, placement.shape)
        name_tensor(distributed, placement.name)
        if not isinstance(parameter, nn.Parameter):
            return distributed
        return nn.Parameter(distributed, requires_grad=parameter.requires_grad)

    def _local(self, whole: Tensor, placement: ParameterPlacement) -> Tensor:
        if whole.is_meta:
            shape = placement.stored_shape(self.axis.size, self.axis.rank)
            return torch.empty(shape, dtype=whole.dtype, device="meta")
        held = part(placement.layout, 0, (None,), placement.shape, (self.axis.size,), (self.axis.rank,))
        if self._source is None:
            return held.of(whole).to(self.device, copy=True, memory_format=torch.contiguous_format)
        if not whole.dim():
            return self._agreed(whole)
        return self._received(whole, held)

    def _received(self, whole: Tensor, held: Part) -> Tensor:
        """This rank's part of the first rank's numbers, of which it has a block at a time."""
        local = torch.empty(held.shape, dtype=whole.dtype, device=self.device)
        rows = max(BLOCK // max(whole[:1].numel() * whole.itemsize, 1), 1)
        for first in range(0, whole.shape[0], rows):
            block = self._agreed(whole[first : first + rows])
            for box in held.boxes:
                met = box.met((first, *(0 for _ in block.shape[1:])), tuple(block.shape))
                if met is not None:
                    source = narrowed(block, (met.start[0] - first, *met.start[1:]), met.sizes)
                    met.of_part(local).copy_(source)
        return local

    def _agreed(self, whole: Tensor) -> Tensor:
        if self._source is None:
            return whole.to(self.device)
        sent = whole.to(self.device, copy=True, memory_format=torch.contiguous_format)
        with naming_ranks("the broadcast of the first rank's parameters"):
            dist.broadcast(as_bytes(sent), group=self._source, group_src=0)
        return sent

    def place_buffer(self, buffer: Tensor) -> Tensor:
        """The buffer on the mesh's device, with the first rank's numbers."""
        if buffer.is_meta:
            return buffer
        if buffer.layout is torch.strided:
            return self._agreed(buffer)
        sent = buffer if self._source is None or self._source.rank() == 0 else None
        held = exchange(self._source, "the exchange of the first rank's sparse buffers", sent)  # as many as it has
        return held[0].to(self.device)


def device_of_mesh(mesh: DeviceMesh) -> torch.device:
    """This rank's device of a mesh."""
    if mesh.device_type in ("cpu", "meta"):
        return torch.device(mesh.device_type)
    module = getattr(torch, mesh.device_type)
    return torch.device(mesh.device_type, module.current_device())
