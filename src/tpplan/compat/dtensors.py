# pyright: reportPrivateUsage=false
"""DTensors: local tensors, how they are put together, and classes of tensors and placements of one's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement
from torch.torch_version import TorchVersion as Version
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tpplan.compat.schemas import _ADD_, _DETACH
from tpplan.compat.tensors import _DATA, _GRADIENT


def local_of(tensor: Tensor) -> Tensor:
    """The local shard inside a DTensor, without autograd and without a copy. For every torch."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor  # pyright: ignore


def local_of_one_axis(tensor: Tensor) -> Tensor | None:
    """The local shard inside a plain DTensor on a mesh of one axis; None for anything else.

    Without a property or a call on the way, since each decoded token asks for every parameter. For every torch.
    """
    if type(tensor) is DTensor and len(tensor._spec.placements) == 1:  # pyright: ignore
        return tensor._local_tensor  # pyright: ignore
    return None


def new_distributed_tensor(local: Tensor, like: DTensor) -> DTensor:
    """A DTensor around `local` with `like`'s mesh, placements and global geometry; no autograd, no communication.

    For every torch.
    """
    # DTensor's own __init__ does nothing, at two thirds of the cost.
    return DTensor.__new__(DTensor, local, like._spec, requires_grad=False)  # pyright: ignore


def lie_alike(one: DTensor, other: DTensor) -> bool:
    """Whether a rank holds the same part of both. For every torch."""
    ours, theirs = one._spec, other._spec  # pyright: ignore
    if ours is theirs:
        return True
    return ours.placements == theirs.placements and ours.shape == theirs.shape and ours.mesh == theirs.mesh


def like_distributed(local: Tensor, like: DTensor) -> DTensor:
    """A DTensor of `like`'s class and geometry around `local`, whose dtype it has; no autograd, no communication.

    For every torch.
    """
    if isinstance(like, OwnTensor):
        return like.like(local)
    if local.dtype == like.dtype:
        return new_distributed_tensor(local, like)
    return made_dtensor(DTensor, local, like.device_mesh, like.placements, like.shape)


def _accumulates(kind: type[DTensor], gradient: Any, arrived: Any) -> bool:
    """Add what arrived to a gradient of class `kind`, part by part, if the two lie alike."""
    if type(gradient) is not kind or not isinstance(arrived, DTensor):
        return False
    if gradient._spec is not arrived._spec and gradient._spec != arrived._spec:  # pyright: ignore
        return False
    gradient._local_tensor.add_(arrived._local_tensor)  # pyright: ignore
    return True


class OwnPlacement(Partial):
    """A placement whose numbers tpplan puts together by itself.

    To DTensor's code it is a sum over the ranks, each of which has a part of its own: `distribute_tensor` asks it for
    that part, and whatever DTensor doesn't compute on parts, it computes on the whole. For every torch.
    """

    def __init__(self) -> None:
        """Say that it is a sum."""
        super().__init__("sum")

    def gathered(self, part: Tensor, mesh: DeviceMesh, axis: int) -> Tensor:
        """The whole of what the ranks of mesh axis `axis` have parts of; a collective."""
        raise NotImplementedError

    def part_of(self, whole: Tensor, mesh: DeviceMesh, axis: int) -> Tensor:
        """This rank's part."""
        raise NotImplementedError

    def adopt(self, tensor: DTensor, axis: int) -> None:
        """Give a DTensor that has this placement on `axis` the class that its operations need."""
        raise NotImplementedError

    def _reduce_value(self, tensor: Tensor, mesh: DeviceMesh, mesh_dim: int) -> Tensor:
        return self.gathered(tensor, mesh, mesh_dim)

    def _reduce_shard_value(self, tensor: Tensor, mesh: DeviceMesh, mesh_dim: int, shard_spec: Placement) -> Tensor:
        target = cast("Any", shard_spec)
        return target._replicate_to_shard(
            self.gathered(tensor, mesh, mesh_dim), mesh, mesh_dim, mesh.get_local_rank(mesh_dim)
        )

    def _partition_value(self, tensor: Tensor, mesh: DeviceMesh, mesh_dim: int) -> Tensor:
        return self.part_of(tensor, mesh, mesh_dim)


def as_in_mode_of(tensor: Tensor) -> AbstractContextManager[Any]:
    """A block whose tensors are inference tensors if `tensor` is one; views of others are none in inference mode.

    For every torch.
    """
    is_other = torch.is_inference_mode_enabled() and not tensor.is_inference()
    return torch.inference_mode(False) if is_other else nullcontext()


class _OfSubclasses(TorchDispatchMode):
    """Hands operations on subclasses of DTensor to these, which torch 2.11 takes for DTensors."""

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        own = next((held for held in pytree.tree_leaves((args, keywords)) if isinstance(held, OwnTensor)), None)
        return func(*args, **keywords) if own is None else type(own).__torch_dispatch__(func, types, args, keywords)


class OwnTensor(DTensor):
    """A DTensor whose operations tpplan runs by itself, in `dispatched`. For every torch."""

    __slots__ = ()

    @classmethod
    def __torch_dispatch__(
        cls, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DETACH and isinstance(args[0], OwnTensor):
            return args[0].like(local_of(args[0]).detach())
        if func is _ADD_ and not kwargs and _accumulates(cls, *args):
            return args[0]
        return cls.dispatched(func, args, kwargs or {})

    if Version(torch.__version__) < Version("2.12.0a0"):

        @classmethod
        def __torch_function__(
            cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            with torch._C.DisableTorchFunctionSubclass(), _OfSubclasses():
                return func(*args, **(kwargs or {}))

    @classmethod
    def dispatched(cls, operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation that has such a tensor among its arguments."""
        raise NotImplementedError

    @classmethod
    def adopted(cls, tensor: Any) -> Any:
        """The same object, of this class if it is a DTensor that lost it on its way through torch's code."""
        raise NotImplementedError

    def taken(self, value: Any) -> Any:
        """What lies as this tensor does, of the whole's numbers or of a part's; `value` if it is neither."""
        raise NotImplementedError

    def set_to(self, value: Any) -> Any:
        """As `taken`, to be its gradient or its data."""
        raise NotImplementedError

    def misfit(self, value: Any) -> Exception:
        """The error for numbers that can't be this tensor's."""
        raise NotImplementedError

    def like(self, local: Tensor) -> Any:
        """A tensor of this class and geometry around `local`, whose dtype it has; no autograd, no communication."""
        spec = self._spec  # pyright: ignore
        meta: Any = spec.tensor_meta
        if meta.dtype != local.dtype:
            known = spec.__dict__.get("tpplan_name")
            spec = DTensorSpec(spec.mesh, spec.placements, tensor_meta=TensorMeta(meta.shape, meta.stride, local.dtype))
            spec.__dict__["tpplan_name"] = known
        if torch.is_inference_mode_enabled():
            with as_in_mode_of(self):
                return DTensor.__new__(type(self), local, spec, requires_grad=False)  # pyright: ignore
        return DTensor.__new__(type(self), local, spec, requires_grad=False)  # pyright: ignore

    def _stable_hash_for_caching(self) -> str:
        """As DTensor's, with this rank's sizes: ranks that share a compiler's cache may hold more or less."""
        return f"{super()._stable_hash_for_caching()} {tuple(local_of(self).shape)}"  # pyright: ignore

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = cast("Any", super()).__deepcopy__(memo)
        if isinstance(self, torch.nn.Parameter):
            made.grad = None
        return made

    # What arrives at a parameter from FSDP, or from operations on whole tensors, is laid out as the parameter is.
    @property
    def grad(self) -> Tensor | None:  # pyright: ignore
        """The gradient."""
        held = _GRADIENT.__get__(self)
        if held is None or type(held) is type(self):
            return held
        taken = self.taken(held)
        if taken is not held:
            _GRADIENT.__set__(self, taken)
        return taken

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        _GRADIENT.__set__(self, self.set_to(gradient))

    @grad.deleter
    def grad(self) -> None:  # pyright: ignore
        _GRADIENT.__delete__(self)

    @property
    def data(self) -> Any:  # pyright: ignore
        """The same numbers, outside of autograd; what it is set to is cut, where it is a whole."""
        return _DATA.__get__(self)

    @data.setter
    def data(self, value: Any) -> None:
        value = self.set_to(value)
        if not isinstance(value, DTensor) or value.shape != self.shape:
            raise self.misfit(value)
        _DATA.__set__(self, value)
        self._local_tensor, self._spec = value._local_tensor.detach(), value._spec  # pyright: ignore


def placed_anew(tensor: DTensor, kind: type[DTensor], placements: Sequence[Placement]) -> None:
    """Make `tensor` one of class `kind` with these placements, in place; its local tensor stays. For every torch."""
    spec = tensor._spec  # pyright: ignore
    if tuple(placements) != spec.placements:
        tensor._spec = DTensorSpec(spec.mesh, tuple(placements), tensor_meta=spec.tensor_meta)  # pyright: ignore
    tensor.__class__ = kind


def made_dtensor(
    kind: type[DTensor], local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> Any:
    """A DTensor of class `kind` around `local`, contiguous as a whole; no autograd, no communication.

    For every torch.
    """
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    meta = TensorMeta(torch.Size(shape), tuple(strides), local.dtype)
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
    return DTensor.__new__(kind, local, spec, requires_grad=False)  # pyright: ignore


def make_gradient(local: Tensor, like: Tensor) -> Tensor:
    """What `like.grad` may be set to, around `local`; no autograd, no communication. For every torch."""
    return like_distributed(local, like) if isinstance(like, DTensor) else local
