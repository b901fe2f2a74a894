"""Replicas: torch's data parallelism around a sharded model.

DistributedDataParallel and `replicate` average plain tensors, in C++, and can't take DTensors. One that is put around a
sharded model becomes a subclass of its class when it registers the model as its child, which torch tells in a public
hook. What it does in Python stays as it is: `no_sync`, buffers, names in its state_dict. An `Averager` does the rest.

    DistributedDataParallel(model, device_mesh=mesh["dp"])      the mean over `dp` of each rank's parts

FSDP takes DTensors. Both are refused where their ranks hold different parts of the model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn, cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from tpplan.compat.data_parallel import OwnReducer, PendingUnit, follow_units, refused_option
from tpplan.compat.modules import class_over
from tpplan.compiler.ir.pytree import children
from tpplan.runtime.data_parallel.averaging import MEBIBYTE, Averager, DataParallelError, equalise

_AXIS = 'device_mesh=mesh["dp"]', 'fully_shard(model, mesh=mesh["dp"])'


class _Averaging(OwnReducer):
    """A DistributedDataParallel around a model with DTensors."""

    _sharded: frozenset[str]

    def averaged(self) -> list[nn.Parameter]:
        """The parameters whose gradients are averaged."""
        refused = refused_option(self)
        if refused is not None:
            raise _refused(f"`{refused}`", "leave it out")
        held = [parameter for parameter in self._equal() if parameter.requires_grad]
        refuse_other_parts(held, dist.get_process_group_ranks(self.group()), type(self).__name__, _AXIS[0])
        return held

    def make_reducer(self, limit: int) -> Averager:
        """What averages them; all ranks then have the first rank's numbers."""
        made = Averager(self.averaged(), self.group(), (min(limit, MEBIBYTE), limit))
        parts = (held for name, held in cast("Any", self).module.named_buffers() if name in self._sharded)
        equalise([*self._equal(), *parts], self.group())
        return made

    def after_forward(self, output: Any, wanted: bool) -> None:
        """Average in the backward of this output, if that is wanted."""
        self.reducer.announce(wanted)
        for tensor in _tensors(output) if wanted else ():
            if tensor.requires_grad:
                tensor.register_hook(self.reducer.begin)

    def _equal(self) -> list[nn.Parameter]:
        wrapper = cast("Any", self)
        ignored: set[str] = {*wrapper.parameters_to_ignore} - self._sharded
        return [parameter for name, parameter in wrapper.module.named_parameters() if name not in ignored]

    def refuse_hook(self) -> NoReturn:
        """Refuse a communication hook, which would be given buckets of torch's own."""
        raise _refused("a communication hook", "cast in the model, or use `fully_shard` with a MixedPrecisionPolicy")

    def join_hook(self, **kwargs: Any) -> NoReturn:
        """Refuse uneven inputs."""
        raise _refused("`join`, for ranks with fewer batches than others,", "give all ranks equally many batches")


def _refused(what: str, way_out: str) -> DataParallelError:
    message = f"{what} isn't there for a sharded model's DistributedDataParallel"
    return DataParallelError.of("TP172", message, help=way_out)


@functools.cache
def _averaging_class(kind: type[DistributedDataParallel]) -> type[DistributedDataParallel]:
    return class_over(kind.__name__, _Averaging, kind, {"__module__": kind.__module__, "__doc__": kind.__doc__})


def follow_wrappers() -> Callable[[], None]:
    """From now on, let DistributedDataParallel around DTensors average them; returns what ends that."""
    return register_module_module_registration_hook(_wrapped).remove


def _wrapped(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    if name != "module" or not isinstance(parent, DistributedDataParallel) or isinstance(parent, _Averaging):
        return
    held = () if child is None else (*child.named_parameters(), *child.named_buffers())
    sharded = {name for name, tensor in held if isinstance(tensor, DTensor)}
    if sharded:
        wrapper: Any = parent
        wrapper.__class__ = _averaging_class(type(parent))
        # Torch has no look at these; what it does to plain parameters and to buffers it still does.
        wrapper._sharded = frozenset(sharded - wrapper.parameters_to_ignore)
        wrapper.parameters_to_ignore = wrapper.parameters_to_ignore | sharded


def _tensors(held: Any) -> Iterator[Tensor]:
    if isinstance(held, Tensor):
        yield held
    for _, item in children(held) or ():
        yield from _tensors(item)


# -- ranks ------------------------------------------------------------------------------------------------------------
def refuse_other_parts(parameters: Iterable[Tensor], ranks: Iterable[int], who: str, way_out: str) -> None:
    """Refuse ranks over which something is to be averaged or cut, if some of them hold other parts of the model."""
    over = set(ranks)
    groups = {group for parameter in parameters for group in _parts(parameter)}
    for parts in groups:
        shared = sorted(over.intersection(parts))
        if len(shared) > 1:
            raise DataParallelError.of(
                "TP170",
                f"{who} is to work over ranks {_listed(over)}, of which {_listed(shared)} hold different parts of the "
                "model",
                help=f"give it the data-parallel axis alone, {way_out} of a mesh with both axes: "
                'init_device_mesh(device, (replicas, parts), mesh_dim_names=("dp", "tp"))',
            )


def _parts(parameter: Tensor) -> Iterator[tuple[int, ...]]:
    """The ranks that hold other parts of a parameter than this one, along each axis of its mesh."""
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        for axis, placement in enumerate(parameter.placements):
            if axis == mesh.ndim - 1 or not placement.is_replicate():
                yield tuple(dist.get_process_group_ranks(mesh.get_group(axis)))


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))


def refuse_units() -> Callable[[], None]:
    """From now on, refuse what torch's `fully_shard` and `replicate` would get wrong, or fail at, with DTensors.

    They raise a DataParallelError before a parameter has changed. Returns what ends that.
    """
    return follow_units(_refuse_unit)


def _refuse_unit(pending: PendingUnit) -> None:
    mesh = pending.mesh
    ranks = cast("list[int]", cast("Any", mesh.mesh).flatten().tolist())
    uncut = [p for p in pending.parameters if isinstance(p, DTensor) and p.device_mesh.ndim == 1]
    refuse_other_parts(uncut, ranks, f"`{pending.name}`", _AXIS[1])
    if mesh.mesh_dim_names is None and uncut:
        raise DataParallelError.of(
            "TP172",
            f"the axes of `{pending.name}`'s mesh have no names, which torch needs to join it with the mesh of the "
            "parts",
            help=f"take the mesh from that of the parts: {_AXIS[1]}",
        )
    if pending.reshards_to is not None and uncut:
        message = f"torch has no `reshard_after_forward={pending.reshards_to}` for DTensors"
        raise DataParallelError.of("TP172", message, help="pass True or False")


__all__ = ["follow_wrappers", "refuse_other_parts", "refuse_units"]
