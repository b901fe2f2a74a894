# pyright: reportPrivateUsage=false
"""FSDP, replicate and DistributedDataParallel: what they mark, hold and call."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor.parallel.ddp import _localize_dtensor, _reconstruct_dtensor
from torch.nn.parallel import DistributedDataParallel

from tpplan.compat.dtensors import local_of

COMPOSED = frozenset((STATE_KEY, REGISTRY_KEY, "_is_fsdp_managed_module", "_fsdp_use_orig_params"))
"""The attributes by which `fully_shard` and `replicate` mark a module as theirs."""


@dataclass(frozen=True, slots=True)
class PendingUnit:
    """Parameters that FSDP is about to cut, to gather and reduce them together.

    Attributes:
        name: what was called for them, `fully_shard` or `replicate`.
        parameters: as they are before.
        mesh: the data-parallel ranks.
        reshards_to: over how many ranks parameters are cut after the forward, where that is a number of its own.

    For every torch.
    """

    name: str
    parameters: tuple[nn.Parameter, ...]
    mesh: DeviceMesh
    reshards_to: int | None


_forming = threading.local()


def follow_units(look: Callable[[PendingUnit], None]) -> Callable[[], None]:
    """From now on, have `look` called before FSDP cuts parameters; if it raises, their modules are left without hooks.

    Returns:
        What ends that.

    For every torch.
    """
    group: Any = FSDPParamGroup
    make: Callable[..., None] = group.__init__

    @functools.wraps(make)
    def watched(
        unit: FSDPParamGroup, params: Any, modules: Any, mesh_info: Any, after: Any, *rest: Any, **options: Any
    ) -> None:
        name = "replicate" if "replicate" in vars(modules[0])[REGISTRY_KEY] else "fully_shard"
        number = None if after is None or after.mesh is mesh_info.mesh else int(after.shard_mesh_size)
        try:
            look(PendingUnit(name, tuple(params), mesh_info.mesh, number))
        except Exception:
            _remove_hooks(modules[0])
            raise
        outer, _forming.unit = fsdp_unit(), unit
        try:
            make(unit, params, modules, mesh_info, after, *rest, **options)
        finally:
            _forming.unit = outer

    def end() -> None:
        group.__init__ = make

    group.__init__ = watched
    return end


def fsdp_unit() -> object:
    """The parameters that FSDP gathers and reduces together, while it cuts them; None if it doesn't.

    For every torch.
    """
    return getattr(_forming, "unit", None)


def _remove_hooks(module: nn.Module) -> None:
    for state in vars(module)[STATE_KEY].values():
        for name in ("_pre_forward_hook_handle", "_post_forward_hook_handle"):
            if hasattr(state, name):
                getattr(state, name).remove()


def is_localizer(hook: object) -> bool:
    """Whether `hook` is one by which torch's data parallelism takes DTensors apart before, and after, a forward.

    For every torch.
    """
    return hook is _localize_dtensor or hook is _reconstruct_dtensor


def is_localized(parameter: Tensor) -> bool:
    """Whether torch's data parallelism has made it of a DTensor, to put it in that one's place. For every torch."""
    return hasattr(parameter, "_st_info")


def replicas_without_mesh(module: nn.Module) -> None:
    """Let torch's `replicate`, which was called for `module`, know its ranks as a group.

    With a mesh, it would take DTensors apart. For every torch.
    """
    states: Any = module.__dict__.get(STATE_KEY) or {}
    for state in states.values():
        options: Any = getattr(state, "_init_kwargs", None)
        if isinstance(options, dict) and options.get("device_mesh") is not None:
            options["process_group"] = options.pop("device_mesh").get_group()


class OwnReducer(DistributedDataParallel):
    """A DistributedDataParallel whose gradients are averaged by `make_reducer`'s result. For every torch."""

    reducer: Any
    logger: Any

    def averaged(self) -> list[nn.Parameter]:
        """The parameters whose gradients are averaged."""
        raise NotImplementedError

    def make_reducer(self, limit: int) -> Any:
        """What averages them, with buckets of `limit` bytes."""
        raise NotImplementedError

    def after_forward(self, output: Any, wanted: bool) -> None:
        """Told after each forward: its result, and whether its backward is to be averaged."""
        raise NotImplementedError

    def refuse_hook(self) -> None:
        """Raise, as there is no bucket of torch's for a communication hook."""
        raise NotImplementedError

    def group(self) -> dist.ProcessGroup:
        """The ranks."""
        return cast("Any", self).process_group

    def _build_params_for_reducer(self) -> Any:
        # What torch compares the ranks' shapes of, and whether gradients are sparse.
        held = [local_of(parameter).detach() for parameter in self.averaged()]
        self._assign_modules_buffers()
        return held, [False] * len(held)

    def _build_debug_param_to_name_mapping(self, parameters: Any) -> dict[int, str]:
        return {}

    def _ddp_init_helper(self, *args: Any, **kwargs: Any) -> None:
        self.reducer, self.logger = self.make_reducer(int(self.bucket_bytes_cap)), _Idle()

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        reducer, self.reducer = self.reducer, self.logger
        try:
            return cast("Any", super())._pre_forward(*inputs, **kwargs)
        finally:
            self.reducer = reducer

    def _set_static_graph(self) -> None:
        self.static_graph = True

    def _post_forward(self, output: Any) -> Any:
        if self._check_sync_bufs_post_fwd():
            self._sync_buffers()
        wanted = torch.is_grad_enabled() and self.require_backward_grad_sync
        self.require_forward_param_sync = wanted
        self.after_forward(output, wanted)
        return output

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Refuse the hook."""
        self.refuse_hook()

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        self.refuse_hook()

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return {}


class _Idle:
    """In place of torch's log, and of its reducer before a forward, in which there is nothing to do."""

    def set_runtime_stats_and_log(self) -> None:
        pass

    def set_error_and_log(self, error: str) -> None:
        pass

    def prepare_for_forward(self) -> None:
        pass

    def _rebuild_buckets(self) -> bool:
        return False


def refused_option(wrapper: OwnReducer) -> str | None:
    """The option of a DistributedDataParallel that torch's reducer alone can serve, if one was chosen.

    For every torch.
    """
    options = {
        "mixed_precision": wrapper.mixed_precision is not None,
        "delay_all_reduce_named_params": bool(cast("Any", wrapper)._delay_all_reduce_params),
        "python_reducer": wrapper._use_python_reducer,
    }
    return next((name for name, chosen in options.items() if chosen), None)
