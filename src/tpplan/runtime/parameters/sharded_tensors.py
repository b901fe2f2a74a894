"""Sharded tensors: a model's parameters, their gradients and their optimizer's states, as their owner sees them.

To everyone outside of a forward they are the whole tensors. What counts for each element by itself is computed on a
rank's part, and so are norms and sums; all else on the whole, which is gathered, and cut again where it was written to.
Operations are in `sharded_operations.py`, views in `sharded_views.py`.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from tpplan.compat.dtensors import OwnPlacement, OwnTensor, local_of, made_dtensor, new_distributed_tensor
from tpplan.compat.dynamo import skip_frame
from tpplan.compat.placements import interleaving
from tpplan.compat.tensors import as_bytes, base_of, is_gathered, name_alike, name_of
from tpplan.compiler.ir.layout import REPLICATED, sharded
from tpplan.plan import Diagnostic, PlanError, Severity
from tpplan.runtime.parameters import pieces
from tpplan.runtime.parameters.pieces import Part
from tpplan.runtime.ranks.faults import naming_ranks


class _Forwards(threading.local):
    """The forwards of sharded models in a thread.

    Attributes:
        count: how many are under way.
        opened: how many there were.
        summed: for each of those under way, the parameters whose gradients are summed, by id.
    """

    count = 0
    opened = 0
    summed: tuple[frozenset[int], ...] = ()


forwards = _Forwards()


class StateError(PlanError):
    """What was asked of a sharded parameter, its gradient or its optimizer state can't be computed."""


def refusal(message: str, way_out: str, *notes: str) -> StateError:
    """A StateError with one TP140 finding."""
    return StateError.of("TP140", message, help=way_out, notes=notes)


class WholeMethods:
    """What torch's methods in C would do to memory that a tensor over several ranks hasn't."""

    def plain(self) -> Tensor:
        """Its numbers as a plain tensor, outside of autograd; a collective."""
        raise NotImplementedError

    def tolist(self) -> Any:
        """See torch's."""
        return cast("Any", self.plain()).tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """See torch's; a copy, which can't be written to."""
        plain = self.plain().requires_grad_(cast("Any", self).requires_grad)
        made = plain.numpy(force=force)
        made.flags.writeable = False
        return made

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        made = self.numpy()
        return made if dtype is None else made.astype(dtype)

    def __format__(self, specification: str) -> str:
        tensor = cast("Any", self)
        return format(tensor.detach().item() if not tensor.dim() and specification else str(tensor), specification)

    def apply_(self, callable: Any) -> Any:
        """See torch's."""
        with torch.no_grad():
            return cast("Any", self).copy_(self.plain().apply_(callable))

    def map_(self, other: Tensor, callable: Any) -> Any:
        """See torch's."""
        with torch.no_grad():
            held = other.plain() if isinstance(other, WholeMethods) else other
            return cast("Any", self).copy_(self.plain().map_(held, callable))

    def _refuse_memory(self, *_: Any, **__: Any) -> Any:
        raise refusal(
            "the memory of a sharded tensor was asked for, of which each rank has a part",
            "take `tensor.to_local()` for this rank's part, `tensor.full_tensor()` for the whole",
        )

    storage = _refuse_memory
    share_memory_ = _refuse_memory
    __dlpack__ = _refuse_memory


class ShardedTensor(WholeMethods, OwnTensor):
    """A DTensor that is a whole tensor to operations outside of a forward."""

    __slots__ = ()

    @classmethod
    def dispatched(cls, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation on parts where it has no need of more, else on the whole."""
        from tpplan.runtime.parameters.sharded_operations import run

        return run(operator, args, kwargs)

    @classmethod
    def adopted(cls, tensor: Any) -> Any:
        """The same object, of this class if it is a DTensor that torch has made of one."""
        if type(tensor) is DTensor:
            own = [(axis, p) for axis, p in enumerate(tensor.placements) if isinstance(p, OwnPlacement)]
            for axis, placement in own:
                placement.adopt(tensor, axis)
            if not any(p.is_partial() for p in tensor.placements):
                tensor.__class__ = ShardedTensor
        return tensor

    def taken(self, value: Any) -> Any:
        """What lies as this tensor does: a DTensor laid out otherwise, or a plain whole, is gathered and cut."""
        value = self.adopted(value)
        if isinstance(value, Tensor) and value.layout is not torch.strided:
            raise refusal(f"{shown(self)} was given sparse numbers", "use dense ones: `sparse=False`, `to_dense()`")
        if not isinstance(value, Tensor) or value.shape != self.shape:
            return value
        if isinstance(value, DTensor):
            if value.placements == self.placements and value.device_mesh == self.device_mesh:
                name_alike(value, self)
                return value
            if value.device_mesh.ndim != self.device_mesh.ndim:
                return value
            value = whole_of(value)
        cut = self.part.of(value.detach())
        return self.like(cut.clone(memory_format=torch.contiguous_format))

    def register_hook(self, hook: Any) -> Any:
        """See torch's."""
        if isinstance(self, torch.nn.Parameter) and self.device_mesh.ndim > 1:
            raise refusal(
                f"FSDP sets the gradient of {shown(self)} without calling hooks on it",
                "use `register_post_accumulate_grad_hook`, which it calls",
            )
        return super().register_hook(hook)  # pyright: ignore

    def set_to(self, value: Any) -> Any:
        """What lies as this tensor does, to be its gradient or its data.

        Raises:
            StateError: TP140 for a part of other memory, which would go on by itself.
        """
        if isinstance(value, Tensor) and not isinstance(value, DTensor):
            base = getattr(value, "base", None) if isinstance(value, WholeMethods) else base_of(value)
            if base is not None and (isinstance(value, WholeMethods) or base.numel() > value.numel()):
                raise refusal(
                    f"the data or the gradient of {shown(self)} was set to a part of another tensor, whose memory it "
                    "can't share",
                    "set it to a copy, `part.clone()`, and write to that",
                )
        return self.taken(value)

    def misfit(self, value: Any) -> Exception:
        """A TP140 for numbers of another shape."""
        return refusal(
            f"`.data` of {shown(self)} was set to a tensor of shape {list(value.shape)}, where the model was compiled "
            f"for {list(self.shape)}",
            "change the stock model's parameter before `parallelize`",
        )

    def plain(self) -> Tensor:
        """See `WholeMethods`."""
        return whole_of(self)

    @property
    def part(self) -> Part:
        """What this rank holds."""
        return self.part_at(None)

    def part_at(self, place: tuple[int, ...] | None) -> Part:
        """What the rank at `place` of the mesh, or this one, holds."""
        return _part_of(self, place)

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """The whole; a collective."""
        if self.is_meta:
            return local_of(self).new_empty(self.shape)
        with naming_ranks(f"the gathering of {shown(self)}"):
            bits = as_bytes(local_of(self))
            if bits.dtype == self.dtype:
                return self._as_dtensor().full_tensor(grad_placements=grad_placements)
            sent = made_dtensor(DTensor, bits, self.device_mesh, self.placements, self.shape)
            return sent.full_tensor().view(self.dtype)

    def redistribute(
        self, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None, **options: Any
    ) -> DTensor:
        """With other placements, as a DTensor of torch's own."""
        return self._as_dtensor().redistribute(device_mesh, placements, **options)

    def _as_dtensor(self) -> DTensor:
        if torch.is_grad_enabled() and self.requires_grad:
            return _AsDTensor.apply(self)  # pyright: ignore
        return new_distributed_tensor(local_of(self), self)

    @staticmethod
    def __tensor_unflatten__(inner_tensors: Any, flatten_spec: Any, outer_size: Any, outer_stride: Any) -> Any:
        return ShardedTensor.adopted(
            DTensor.__tensor_unflatten__(inner_tensors, flatten_spec, outer_size, outer_stride)  # pyright: ignore
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        if type(self) is not ShardedTensor:
            return cast("Any", super()).__reduce_ex__(protocol)
        plain: Any = new_distributed_tensor(local_of(self), self)
        return plain.__reduce_ex__(protocol)


skip_frame(ShardedTensor.__torch_dispatch__, called=True)


class _AsDTensor(torch.autograd.Function):
    """The same part in a DTensor of torch's own."""

    @staticmethod
    def forward(ctx: Any, tensor: ShardedTensor) -> DTensor:
        ctx.tensor = tensor.detach()
        return new_distributed_tensor(local_of(tensor), tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.tensor.taken(gradients[0])


def shown(tensor: DTensor) -> str:
    """What a message calls a sharded tensor."""
    name = name_of(tensor)
    if name is None:
        return f"a sharded tensor of shape {list(tensor.shape)}"
    return f"`{name}`" if isinstance(tensor, torch.nn.Parameter) else f"the gradient, the state or the data of `{name}`"


def whole_of(tensor: DTensor) -> Tensor:
    """The whole, outside of autograd; a collective."""
    return cast("DTensor", tensor.detach()).full_tensor()


REPLACED = "_tpplan_replaced"
"""The attribute of a parameter that FSDP has replaced."""


def refuse_gathered(held: Sequence[DTensor], written: Sequence[Any]) -> None:
    """Refuse what FSDP has gathered for a forward and has freed, or would free with what is written to it.

    Raises:
        StateError: TP140 with the parameter's name.
    """
    for tensor in held:
        if not is_gathered(tensor):
            continue
        if any(other is tensor for other in written):
            raise refusal(
                f"{shown(tensor)} was written to while FSDP has it gathered, after a forward without a backward, and "
                "would lose that",
                "call `model.reshard()` first",
            )
        local = local_of(tensor)
        if local.numel() and not local.untyped_storage().size():
            raise refusal(
                f"{shown(tensor)} was taken from the model while FSDP had it gathered, and its memory is freed",
                "take the parameter from the model where it is used",
            )


def gathered_for(operator: str, tensor: DTensor) -> Tensor:
    """The whole, for an operation that needs it; warns where each step asks for it anew."""
    steps, last = _gatherings.get(operator, (0, -1))
    if last != forwards.opened:
        steps = steps + 1 if last == forwards.opened - 1 else 1
        _gatherings[operator] = steps, forwards.opened
        if steps == _REPEATED:
            gathers = Diagnostic(
                "TP140",
                f"`{operator}` gathers the whole of {shown(tensor)} in each step",
                help="the result is the unsharded model's; where it takes too long, compute it by elements, norms and "
                "sums, which run on each rank's part, or in every n-th step",
                severity=Severity.WARNING,
            )
            warnings.warn(gathers.warned, stacklevel=2)
    return whole_of(tensor)


_REPEATED = 3
_gatherings: dict[str, tuple[int, int]] = {}
"""By operation, in how many steps in a row it gathered something, and after how many forwards the last time."""


def part_of(tensor: DTensor, place: tuple[int, ...] | None = None) -> Part:
    """What the rank at `place` of its mesh, or this one, holds of a parameter.

    The axis of tensor parallelism is the last of the mesh. FSDP, on the axes before it, cuts what that axis gives to a
    rank.
    """
    return tensor.part_at(place) if isinstance(tensor, ShardedTensor) else _part_of(tensor, place)


def _part_of(tensor: DTensor, place: tuple[int, ...] | None) -> Part:
    splits = [interleaving(placement) for placement in tensor.placements]
    axis, mesh = len(splits) - 1, tensor.device_mesh
    layout = REPLICATED if splits[axis] is None else sharded((splits[axis] or (0, 1))[0])
    chunks = tuple(None if split is None or i == axis else split[0] for i, split in enumerate(splits))
    if place is None:
        place = tuple(mesh.get_coordinate() or (0,) * mesh.ndim)
    return pieces.part(layout, axis, chunks, tuple(tensor.shape), tuple(mesh.shape), place)


__all__ = [
    "REPLACED",
    "ShardedTensor",
    "StateError",
    "WholeMethods",
    "forwards",
    "gathered_for",
    "part_of",
    "refusal",
    "refuse_gathered",
    "shown",
    "whole_of",
]
