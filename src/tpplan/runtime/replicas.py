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
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from tpplan.compat import local_of, pending_fully_shard
from tpplan.compiler.ir.pytree import children
from tpplan.runtime.averaging import MEBIBYTE, Averager, DataParallelError, equalise

_AXIS = 'device_mesh=mesh["dp"]', 'fully_shard(model, mesh=mesh["dp"])'
_handle: RemovableHandle | None = None


class _Averaging(DistributedDataParallel):
    """A DistributedDataParallel around a model with DTensors."""

    reducer: Any
    logger: Any

    def _build_params_for_reducer(self) -> tuple[list[Tensor], list[bool]]:
        """The parameters to average, as what torch compares the ranks' shapes of; and that no gradient is sparse."""
        self._refuse_options()
        held = self._averaged()
        ranks = dist.get_process_group_ranks(self.process_group)  # pyright: ignore
        refuse_other_parts(held, ranks, type(self).__name__, _AXIS[0])
        self._assign_modules_buffers()
        return [local_of(parameter).detach() for parameter in held], [False] * len(held)

    def _averaged(self) -> list[nn.Parameter]:
        return [parameter for parameter in self._equal() if parameter.requires_grad]

    def _equal(self) -> list[nn.Parameter]:
        ignored: set[str] = self.parameters_to_ignore - self._sharded  # pyright: ignore
        return [p for name, p in self.module.named_parameters() if name not in ignored]

    def _build_debug_param_to_name_mapping(self, parameters: Any) -> dict[int, str]:
        return {}

    def _ddp_init_helper(self, *_: Any) -> None:
        """Make what takes the place of torch's reducer and its log; all ranks then have the first rank's numbers."""
        limit = int(self.bucket_bytes_cap)
        group: Any = self.process_group
        self.reducer = Averager(self._averaged(), group, (min(limit, MEBIBYTE), limit))
        equalise(self._equal(), group)
        self.logger = _Log()

    def _refuse_options(self) -> None:
        options = {
            "mixed_precision": self.mixed_precision is not None,
            "delay_all_reduce_named_params": bool(self._delay_all_reduce_params),
            "python_reducer": self._use_python_reducer,
        }
        for name, is_used in options.items():
            if is_used:
                raise _refused(f"`{name}`", "leave it out")

    def _post_forward(self, output: Any) -> Any:
        if self._check_sync_bufs_post_fwd():
            self._sync_buffers()
        wanted = torch.is_grad_enabled() and self.require_backward_grad_sync
        self.require_forward_param_sync = wanted
        self.reducer.announce(wanted)
        if wanted:
            for tensor in _tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(self.reducer.begin)
        return output

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Refuse the hook, which would be given buckets of torch's own."""
        raise _refused("a communication hook", "cast in the model, or use `fully_shard` with a MixedPrecisionPolicy")

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        self.register_comm_hook(None, comm_hook_type)

    def join_hook(self, **kwargs: Any) -> Any:
        """Refuse uneven inputs."""
        raise _refused("`join`, for ranks with fewer batches than others,", "give all ranks equally many batches")

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return {}


class _Log:
    """In place of torch's log of what its reducer does."""

    def set_runtime_stats_and_log(self) -> None:
        """Nothing is measured."""

    def set_error_and_log(self, error: str) -> None:
        """The error is raised, too."""

    def _set_static_graph(self) -> None:
        """The same is done for any graph."""


def _refused(what: str, way_out: str) -> DataParallelError:
    return DataParallelError(
        f"TP172 data-parallel-option: {what} isn't there for a sharded model's DistributedDataParallel\n"
        f"  help: {way_out}"
    )


@functools.cache
def _averaging_class(kind: type[DistributedDataParallel]) -> type[DistributedDataParallel]:
    return type(kind.__name__, (_Averaging, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})


def follow_wrappers() -> None:
    """From now on, let each DistributedDataParallel that is put around DTensors average them."""
    global _handle
    if _handle is None:
        _handle = register_module_module_registration_hook(_wrapped)


def _wrapped(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    if name != "module" or not isinstance(parent, DistributedDataParallel) or isinstance(parent, _Averaging):
        return
    sharded = set[str]() if child is None else {n for n, p in child.named_parameters() if isinstance(p, DTensor)}
    if sharded:
        parent.__class__ = _averaging_class(type(parent))
        # Torch has no look at these; what it does to plain parameters and to buffers it still does.
        parent._sharded = sharded - parent.parameters_to_ignore  # pyright: ignore
        parent.parameters_to_ignore = parent.parameters_to_ignore | sharded  # pyright: ignore


def _tensors(held: Any) -> Iterator[Tensor]:
    if isinstance(held, Tensor):
        yield held
    for _, item in children(held) or ():
        yield from _tensors(item)


# -- ranks ------------------------------------------------------------------------------------------------------------
def refuse_other_parts(parameters: Iterable[Tensor], ranks: Iterable[int], who: str, way_out: str) -> None:
    """Refuse ranks over which something is to be averaged or cut, if some of them hold other parts of the model."""
    seen: set[int] = set()
    over = set(ranks)
    for parameter in parameters:
        if isinstance(parameter, DTensor) and id(parameter.device_mesh) not in seen:
            mesh = parameter.device_mesh
            seen.add(id(mesh))
            parts = dist.get_process_group_ranks(mesh.get_group(mesh.ndim - 1))
            shared = sorted(over.intersection(parts))
            if len(shared) > 1:
                raise DataParallelError(
                    f"TP170 data-parallel-ranks: {who} is to work over ranks {_listed(over)}, of which "
                    f"{_listed(shared)} hold different parts of the model\n  help: give it the data-parallel axis "
                    f"alone, {way_out} of a mesh with both axes: init_device_mesh(device, (replicas, parts), "
                    'mesh_dim_names=("dp", "tp"))'
                )


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))


def look_at_composition(module: nn.Module) -> None:
    """Called when torch's `fully_shard` or `replicate` registers its hooks on a module, before it changes anything.

    Raises:
        DataParallelError: what it was asked for would be wrong, or would fail later.
    """
    pending = pending_fully_shard()
    if pending is None:
        return
    mesh = pending.mesh
    refuse_other_parts(module.parameters(), mesh.mesh.flatten().tolist(), f"`{pending.name}`", _AXIS[1])
    if mesh.mesh_dim_names is None and any(isinstance(p, DTensor) for p in module.parameters()):
        raise DataParallelError(
            f"TP172 data-parallel-option: the axes of `{pending.name}`'s mesh have no names, which torch needs to join "
            f"it with the mesh of the parts\n  help: take the mesh from that of the parts: {_AXIS[1]}"
        )
    if pending.reshards_to is not None:
        raise DataParallelError(
            f"TP172 data-parallel-option: torch has no `reshard_after_forward={pending.reshards_to}` for DTensors\n"
            "  help: pass True or False"
        )


__all__ = ["follow_wrappers", "look_at_composition", "refuse_other_parts"]
