# pyright: reportPrivateUsage=false
"""torch's private names, all of them, behind one seam.

Everything that tpplan needs from torch beyond its public interface is imported here and given a small,
typed function. Checked on the torch versions that pyproject.toml admits.
"""

from __future__ import annotations

import copy
import functools
import math
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import sympy
import torch
import torch.distributed as dist
from torch import Tensor, nn, overrides
from torch._C._distributed_c10d import AllgatherOptions
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import SLoc
from torch._higher_order_ops.flex_attention import _permute_strides, flex_attention
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.autograd import forward_ad
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, RuntimeSchemaInfo
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.experimental import register_sharding as _register_sharding
from torch.distributed.tensor.parallel.ddp import _localize_dtensor, _reconstruct_dtensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.nn.modules import module as _modules
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.prune import BasePruningMethod
from torch.torch_version import TorchVersion as Version
from torch.utils import _pytree as pytree
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._sympy.printers import PythonPrinter
from torch.utils.checkpoint import CheckpointFunction

# torch renamed them after 2.12, and warns of the old names.
_renamed = hasattr(dist, "all_gather_single")
all_gather_single: Callable[..., object] = getattr(dist, "all_gather_single" if _renamed else "all_gather_into_tensor")

__all__ = [
    "BATCH_NORM_FORWARD",
    "COMPILED_CALL",
    "COMPOSED",
    "FLEX_ATTENTION",
    "FORWARD_HOOKS",
    "FUSED_WEIGHT_NORM",
    "HOOK_TABLES",
    "NEEDS_NUMBERS",
    "OFF",
    "PARAMETRIZATIONS",
    "READ_VERSION",
    "SYMBOLIC",
    "TORCH_NAMESPACES",
    "DeviceContext",
    "FunctionNode",
    "ModuleHooks",
    "OpOverload",
    "OpOverloadPacket",
    "OperatorMeta",
    "OwnPlacement",
    "OwnReducer",
    "OwnTensor",
    "PendingShards",
    "PythonNode",
    "RecordingMode",
    "SizeSymbols",
    "TorchDispatchMode",
    "Unwatched",
    "acceptable_shardings",
    "active_compiler",
    "after_backward",
    "all_gather_single",
    "as_in_mode_of",
    "as_python",
    "backward_hooks",
    "balanced",
    "base_of",
    "buffer_versions",
    "compiled_inside",
    "compiles",
    "computed_weights",
    "copy_all",
    "copy_hook",
    "count_as_compiled",
    "derive_class",
    "enable_python_dispatcher",
    "expression_of",
    "fake_call",
    "fake_mesh",
    "fake_process_group",
    "fake_tensors",
    "flattened_tree",
    "flex_function",
    "flex_strides",
    "foreach_norm",
    "function_node",
    "gathered_over_ranks",
    "geometry_of",
    "given_expression",
    "given_sharding",
    "global_hook_tables",
    "global_hooks",
    "gradient_of",
    "graph_break",
    "group_all_gather",
    "group_reduce_scatter",
    "has_device",
    "has_function_mode",
    "has_gradient_hooks",
    "hint_of",
    "hook_tables",
    "hooks_of",
    "innermost_mode",
    "inside_transform",
    "interleaved_shard",
    "interleaving",
    "is_autocast_on_cuda",
    "is_built_for",
    "is_called_as_usual",
    "is_checkpointed",
    "is_gathered",
    "is_jit_traced",
    "is_localized",
    "is_localizer",
    "is_of_fsdp",
    "is_pruning",
    "is_random",
    "is_reentrant_checkpoint",
    "is_registered_container",
    "is_traced",
    "lie_alike",
    "like_distributed",
    "local_of",
    "local_of_one_axis",
    "made_dtensor",
    "made_wrapper",
    "make_gradient",
    "mark_gathered",
    "name_alike",
    "name_of",
    "name_tensor",
    "named_modules",
    "native_apply",
    "new_distributed_tensor",
    "nothing_compiled",
    "one_shot_sum",
    "ordinary_call",
    "over_ranks",
    "own_buffers",
    "own_modules",
    "own_parameters",
    "packs_saved_tensors",
    "parametrized_tensors",
    "pending_fully_shard",
    "placed_anew",
    "propagate",
    "qualified_name",
    "random_state",
    "read_anew",
    "rebuild_container",
    "rebuilt_tree",
    "recomputes",
    "refused_option",
    "register_sharding",
    "rendezvous",
    "replicas_without_mesh",
    "run_as_written",
    "run_flex_attention",
    "runs_as_written",
    "runs_backward",
    "saving_hook",
    "schema_argument_names",
    "schema_defaults",
    "schema_keywords",
    "schema_lists",
    "schema_mutates",
    "schema_returns_view",
    "set_compiler",
    "set_random_state",
    "skip_frame",
    "storage_key",
    "symmetric_empty",
    "take_as_constant",
    "takes_apart",
    "takes_device",
    "tensor_arguments",
    "traced_all_gather",
    "traced_all_reduce",
    "traced_all_to_all",
    "traced_reduce_scatter",
    "transient_buffers",
    "uncompiled",
    "use_count",
    "wait_for",
    "wants_shapes_alone",
    "without_cached_weights",
    "without_dispatch_modes",
    "without_function_modes",
    "without_packing",
    "wrapper_like",
    "written_tensors",
    "written_values",
]

COMPOSED = frozenset((STATE_KEY, REGISTRY_KEY, "_is_fsdp_managed_module", "_fsdp_use_orig_params"))
"""The attributes by which `fully_shard` and `replicate` mark a module as theirs."""


def interleaved_shard(dim: int, factor: int) -> Placement:
    """The placement of a dim that was flattened from (factor, sharded): DTensor's strided shard."""
    return _StridedShard(dim, split_factor=factor)


def interleaving(placement: Placement) -> tuple[int, int] | None:
    """The dim and the factor of an interleaved shard, (dim, 1) of a plain one; None for another placement."""
    if isinstance(placement, _StridedShard):
        return int(placement.dim), int(placement.split_factor)  # pyright: ignore[reportUnknownArgumentType]
    return (int(placement.dim), 1) if isinstance(placement, Shard) else None  # pyright: ignore[reportUnknownArgumentType]


def collectives_without_dispatch(
    group: dist.ProcessGroup, device: torch.device
) -> tuple[Callable[[list[Tensor], Any], dist.Work | None], Callable[[Tensor, Tensor], dist.Work | None]]:
    """The all-reduce and the all-gather of a group's backend for `device`: what the group's own end in."""
    options = AllgatherOptions()
    options.asyncOp = False
    try:
        backend = cast("Any", group)._get_backend(device)
        gather = backend._allgather_base
        return backend.allreduce, lambda gathered, tensor: gather(gathered, tensor, options)
    except (AttributeError, RuntimeError):  # a group that is written in Python
        return group.allreduce, group_all_gather(group)


def group_all_gather(group: dist.ProcessGroup) -> Callable[[Tensor, Tensor], dist.Work | None]:
    """The group's own all-gather, which is waited for: of an output and an input."""
    gather = getattr(group, "all_gather_single" if _renamed else "_allgather_base")
    options = AllgatherOptions()
    options.asyncOp = False
    return lambda gathered, tensor: gather(gathered, tensor, options)


def group_reduce_scatter(group: dist.ProcessGroup) -> Callable[[Tensor, Tensor], dist.Work | None]:
    """The group's own reduce-scatter of a sum, which is waited for: of an output and an input."""
    scatter = getattr(group, "reduce_scatter_single" if _renamed else "_reduce_scatter_base")
    options = dist.ReduceScatterOptions()
    options.asyncOp = False
    return lambda scattered, tensor: scatter(scattered, tensor, options)


class RecordingMode(TorchDispatchMode):
    """A dispatch mode without the guard that keeps torch.compile out of it.

    That guard takes longer than a dispatch, and nothing is compiled while a model is recorded.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


_MODE_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.Python).add(torch._C.DispatchKey.PythonTLSSnapshot)


class Unwatched:
    """A block whose torch calls on plain tensors no dispatch mode and no function mode sees.

    A mode that lets a call pass costs twice what the call does, and a function mode sees even `.shape`.
    """

    __slots__ = ("_dispatch", "_function")

    def __init__(self) -> None:
        """Make the two guards."""
        self._dispatch = torch._C._ExcludeDispatchKeyGuard(_MODE_KEYS)
        self._function = torch._C.DisableTorchFunction()

    def __enter__(self) -> None:
        """Leave the modes."""
        self._dispatch.__enter__()
        self._function.__enter__()

    def __exit__(self, *_: object) -> None:
        """Go back to them."""
        self._function.__exit__(None, None, None)
        self._dispatch.__exit__(None, None, None)


def named_modules(model: nn.Module, remove_duplicate: bool = True) -> list[tuple[str, nn.Module]]:
    """As `model.named_modules`, whose types torch leaves open, in time that doesn't grow with the depth."""
    found: list[tuple[str, nn.Module]] = []
    seen: set[int] = set()

    def visit(name: str, module: nn.Module) -> None:
        if remove_duplicate and id(module) in seen:
            return
        seen.add(id(module))
        found.append((name, module))
        for leaf, child in module._modules.items():
            if child is not None:
                visit(f"{name}.{leaf}" if name else leaf, child)

    visit("", model)
    return found


def computed_weights(module: nn.Module) -> dict[str, object]:
    """The tensors that hooks before a forward compute, as torch's pruning and old weight norm do, with their hook."""
    hooks = cast("dict[int, object]", module._forward_pre_hooks).values()
    names = {getattr(hook, "_tensor_name" if is_pruning(hook) else "name", None): hook for hook in hooks}
    return {
        name: hook
        for name, hook in names.items()
        if isinstance(name, str) and name not in module._parameters and hasattr(module, name)
    }


def is_pruning(hook: object) -> bool:
    """Whether a hook is that of `torch.nn.utils.prune`, which multiplies a parameter by its mask before a forward."""
    return isinstance(hook, BasePruningMethod)


FUSED_WEIGHT_NORM: Callable[..., Tensor] = torch._weight_norm  # pyright: ignore[reportPrivateImportUsage]
"""What torch's weight norms call: directions, lengths, the dim that counts the vectors; -1 for a single one."""

PARAMETRIZATIONS = "parametrizations"


def parametrized_tensors(module: nn.Module) -> dict[str, Sequence[nn.Module]]:
    """The tensors of a module that torch's parametrizations compute whenever they're read, with the steps of each."""
    return dict(cast("Any", module).parametrizations) if is_parametrized(module) else {}


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The table that holds a module's own parameters, by name."""
    return module._parameters


WEIGHTS_LISTED = "_flat_weights"
"""The attribute in which a recurrent layer of torch has a list of its weights."""


def weights_to_list(module: nn.RNNBase) -> list[Tensor | None]:
    """What is in that list."""
    return [own_parameters(module).get(name) for name in cast("list[str]", module._flat_weights_names)]


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """The table that holds a module's own buffers, by name."""
    return module._buffers


def has_hooks(module: nn.Module) -> bool:
    """Whether something is called with a module's arguments, results or gradients besides its forward."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(bool(getattr(module, name)) for name in names)


def own_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """The table that holds a module's children, by name."""
    return module._modules


GENERATOR = threading.RLock()
"""Held by whoever draws from torch's generator on the CPU, or changes its state, where other threads do so as well."""


READ_VERSION: Any = cast("Any", Tensor)._version.__get__
"""What a function mode sees of a body that reads how often a tensor was written to."""


def random_state() -> Tensor:
    """The state of torch's generator on the CPU.

    torch takes it under a lock of its own, in which garbage may be collected and another thread run: one that asked as
    well would wait for ever. So threads ask one after the other.
    """
    with GENERATOR:
        return torch.get_rng_state()


def set_random_state(state: Tensor) -> None:
    """Put torch's generator on the CPU back to a state."""
    with GENERATOR:
        torch.set_rng_state(state)


def storage_key(tensor: Tensor) -> int:
    """What tells a tensor's memory from all other memory, while it is alive."""
    functorch: Any = cast("Any", torch._C)._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor.untyped_storage()._cdata


def buffer_versions(module: nn.Module) -> list[int]:
    """How often each buffer of a module and of those inside was written to."""
    return [buffer._version for buffer in module.buffers()]


def kept_buffers(module: nn.Module) -> Callable[[], None]:
    """How to put the buffers of a module and of those inside back to what they hold."""
    kept = [(buffer, buffer._version, buffer.detach().clone()) for buffer in module.buffers()]

    def restore() -> None:
        with torch.no_grad():
            for buffer, version, numbers in kept:
                if buffer._version != version:
                    buffer.copy_(numbers)

    return restore


HOOK_TABLES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def hook_tables(module: nn.Module) -> dict[str, dict[int, Any]]:
    """The tables of what is called with a module's arguments, results or gradients besides its forward."""
    return {name: getattr(module, name) for name in HOOK_TABLES}


def hooks_of(module: nn.Module) -> list[object]:
    """What is in a module's tables of hooks."""
    return [hook for table in hook_tables(module).values() for hook in table.values()]


def copy_hook(source: nn.Module, target: nn.Module, table: str, key: int, hook: object) -> None:
    """Register `hook` on `target` as that of `source` by the name `key`, with its options."""
    getattr(target, table)[key] = hook
    for options in ("with_kwargs", "always_called"):
        chosen = getattr(source, f"{table}_{options}", None)
        if chosen is not None and key in chosen:
            getattr(target, f"{table}_{options}")[key] = True
    if table == "_backward_hooks":
        target._is_full_backward_hook = source._is_full_backward_hook


BATCH_NORM_FORWARD = _BatchNorm.forward.__code__
"""The code of the forward that torch's batch norms share."""


FORWARD_HOOKS = HOOK_TABLES[:2]
"""The attributes of a module with the tables of what is called before and after its forward."""


_CALLED = ("forward_pre", "forward", "backward_pre", "backward")
_REGISTERED = ("module_registration", "parameter_registration", "buffer_registration")


def tables_of_all() -> dict[str, dict[int, Any]]:
    """The tables of hooks that all modules call, by what they are called for."""
    return {kind: getattr(_modules, f"_global_{kind}_hooks") for kind in _CALLED}


def global_hook_tables() -> tuple[dict[int, object], dict[int, object]]:
    """The tables of what is called before and after the forward of any module."""
    tables = tables_of_all()
    return tables["forward_pre"], tables["forward"]


def has_hooks_of_all() -> bool:
    """Whether there are hooks that all modules call."""
    tables = cast("Any", _modules)
    return bool(
        tables._global_forward_hooks
        or tables._global_forward_pre_hooks
        or tables._global_backward_hooks
        or tables._global_backward_pre_hooks
    )


def global_hooks() -> list[object]:
    """The forward hooks and pre-hooks of all modules."""
    return [hook for table in global_hook_tables() for hook in table.values()]


def is_called_as_usual(module: nn.Module) -> bool:
    """Whether the module's class leaves it to torch what a call does around the forward."""
    return type(module)._call_impl is nn.Module._call_impl


def ordinary_call(module: nn.Module) -> Callable[..., Any]:
    """What a call of the module does, hooks and all, where nothing was compiled for it."""
    return cast("Any", module)._call_impl
    tables = tables_of_all()
    return [*tables["forward_pre"].values(), *tables["forward"].values()]


@contextmanager
def without_global_hooks(left_out: Callable[[str, object], bool]) -> Generator[None]:
    """A block in which those hooks of all modules don't run that are `left_out`, by kind."""
    every = tables_of_all() | {kind: getattr(_modules, f"_global_{kind}_hooks") for kind in _REGISTERED}
    before = {kind: dict(table) for kind, table in every.items()}
    for kind, table in every.items():
        for key in [key for key, hook in table.items() if left_out(kind, hook)]:
            del table[key]
    try:
        yield
    finally:
        for kind, table in every.items():
            added = {key: hook for key, hook in table.items() if key not in before[kind]}
            table.clear()
            table.update(before[kind] | added)


def transient_buffers(module: nn.Module) -> set[str]:
    """The names of a module's own buffers that aren't in its state_dict."""
    return module._non_persistent_buffers_set


def derive_class(held: object, members: dict[str, object]) -> None:
    """Give an object of our own, such as a module of a skeleton, a class with these members, derived from its own."""
    kind: type[object] = held.__class__
    held.__class__ = type(kind.__name__, (kind,), members | {"__module__": kind.__module__})


@dataclass(frozen=True, slots=True)
class OperatorMeta:
    """A tensor operand of a propagation query: its global geometry and its placement on the one axis."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    placement: Placement


def fake_tensors() -> AbstractContextManager[object]:
    """A block in which tensors are made without numbers, on whatever device they say that they lie on."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def is_built_for(device: torch.device) -> bool:
    """Whether this build of torch knows such devices, whether or not there is one."""
    accelerator = torch.accelerator.current_accelerator(check_available=False)
    return device.type == "cpu" or (accelerator is not None and accelerator.type == device.type)


def has_device(device: torch.device) -> bool:
    """Whether there is such a device."""
    return is_built_for(device) and (device.type == "cpu" or torch.accelerator.is_available())


NEEDS_NUMBERS = (DataDependentOutputException, DynamicOutputShapeException)
"""What a fake tensor raises that is asked for a number."""


def fake_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device: str) -> Any:
    """What the forward of a module on `meta` would return for such arguments on `device`, under autocast as well."""

    class Forward(nn.Module):
        """Runs the forward, without the hooks around it."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.inner.forward(*args, **kwargs)

    def like(held: Any) -> Any:
        if not isinstance(held, Tensor):
            return held
        return torch.empty_strided(held.shape, held.stride(), dtype=held.dtype, device=device)

    if device == "meta":
        return module.forward(*map(like, args), **{name: like(held) for name, held in kwargs.items()})
    with FakeTensorMode():
        args, kwargs = tuple(map(like, args)), {name: like(held) for name, held in kwargs.items()}
        stored = (*module.named_parameters(), *module.named_buffers())
        return torch.func.functional_call(Forward(), {f"inner.{n}": like(t) for n, t in stored}, args, kwargs)


@functools.cache
def fake_mesh(size: int, rank: int = 0, axis: str = "tp") -> DeviceMesh:
    """A one-axis mesh of `size` ranks, seen from `rank`, that needs no process group; it can't communicate.

    DTensor remembers what it works out for a mesh by the mesh's content, to which the axis's name belongs.
    """
    with without_dispatch_modes(), without_function_modes():  # such as a caller's default device
        return DeviceMesh("cpu", torch.arange(size), mesh_dim_names=(axis,), _init_backend=False, _rank=rank)


def _to_spec(mesh: DeviceMesh, operand: Any) -> Any:
    if isinstance(operand, OperatorMeta):
        meta = TensorMeta(torch.Size(operand.shape), operand.stride, operand.dtype)
        return DTensorSpec(mesh, (operand.placement,), tensor_meta=meta)
    if isinstance(operand, (list, tuple)):
        return [_to_spec(mesh, item) for item in operand]  # pyright: ignore
    return operand


_Question = tuple[OpOverload, tuple[Any, ...], tuple[tuple[str, Any], ...], int]


class _Same:
    """An object, equal to itself alone; as it is kept, no other one gets its address."""

    __slots__ = ("_kept",)

    def __init__(self, kept: object) -> None:
        self._kept = kept

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._kept is self._kept

    def __hash__(self) -> int:
        return id(self._kept)


class NoRule(Exception):
    """DTensor has no sharding rule for the operator, or its rule refused these placements; the text says which."""


def propagate(
    operator: OpOverload, arguments: Sequence[Any], keywords: Mapping[str, Any], size: int
) -> list[Placement | None] | None:
    """Ask DTensor's sharding propagator what `operator` yields for operands placed as given, without communication.

    Tensor operands are `OperatorMeta`; anything else is passed through. Returns one placement for each tensor result,
    or None where the propagator would first have to move an operand. Raises `NoRule` where it has no answer.
    """
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    rules = tuple(
        _Same(getattr(propagator, table, {}).get(operator))
        for table in ("op_to_rules", "op_strategy_funcs", "op_single_dim_strategy_funcs")
    )
    question = (operator, tuple(arguments), tuple(keywords.items()), size)
    try:
        answer = _remembered(question, rules)
    except TypeError:  # an argument that can't be hashed
        answer = _asked(question)
    if isinstance(answer, NoRule):
        raise answer
    return None if answer is None else [*answer]


@functools.lru_cache(maxsize=1 << 14)
def _remembered(question: _Question, rules: tuple[_Same, ...]) -> tuple[Placement | None, ...] | NoRule | None:
    """As `_asked`, which takes ten milliseconds; `rules` are those that the operator has now."""
    return _asked(question)


def _asked(question: _Question) -> tuple[Placement | None, ...] | NoRule | None:
    operator, arguments, keywords, size = question
    mesh = fake_mesh(size)
    propagator = DTensor._op_dispatcher.sharding_propagator
    single_dim: Mapping[OpOverload, Any] = getattr(propagator, "op_to_schema_info_for_single_dim_strategy", {})
    schema = OpSchema(
        operator,
        tuple(_to_spec(mesh, a) for a in arguments),
        {name: _to_spec(mesh, a) for name, a in keywords},
        schema_info=propagator.op_to_schema_info.get(operator) or single_dim.get(operator),
    )
    try:
        sharding = _MetaPropagator(propagator).propagate_op_sharding_non_cached(schema)
    except Exception as error:  # the propagator raises bare RuntimeErrors, NotImplementedErrors and assertions alike
        viewed = _view_placement(operator, arguments, size)
        if viewed is not None:
            return (viewed,)
        return NoRule(str(error).splitlines()[0] if str(error) else type(error).__name__)
    if sharding.needs_redistribute and sharding.redistribute_schema is not None:
        # The flag is also set where only *size arguments* must become local; a changed operand is communication.
        suggested = _specs(sharding.redistribute_schema)
        for given, wanted in zip(_specs(schema), suggested, strict=True):
            if given.placements != wanted.placements:
                return None
    output: Any = sharding.output_spec
    if output is None:
        return ()
    outputs: list[DTensorSpec | None] = [*output] if isinstance(output, (list, tuple)) else [output]  # pyright: ignore
    return tuple([None if spec is None else spec.placements[0] for spec in outputs])


class _MetaPropagator(ShardingPropagator):
    """A propagator that asks meta tensors for the geometry of results: torch's asks fake ones, which takes longest."""

    def __init__(self, propagator: ShardingPropagator) -> None:
        self.__dict__ = propagator.__dict__  # its tables, as they are

    def _propagate_tensor_meta_non_cached(self, op_schema: OpSchema) -> Any:
        arguments = (op_schema.args_schema, op_schema.kwargs_schema)
        tensors: list[Tensor] = []
        try:
            with without_dispatch_modes(), without_function_modes():  # which would take it for the model's
                on_meta: Any = _on_meta(arguments, tensors)
                if not tensors:
                    raise _NotOnMetaError
                made: Any = op_schema.op(*on_meta[0], **on_meta[1])
                return _geometry(made)
        except Exception:  # whatever an operator can't do there
            return super()._propagate_tensor_meta_non_cached(op_schema)


class _NotOnMetaError(Exception):
    """An operation would make a real tensor."""


def _on_meta(held: Any, tensors: list[Tensor]) -> Any:
    """Arguments of an operation with tensors on `meta` in place of specs, which are noted."""
    if isinstance(held, DTensorSpec):
        meta = held.tensor_meta
        assert meta is not None
        tensors.append(torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta"))
        return tensors[-1]
    if isinstance(held, (list, tuple)):
        return type(held)(_on_meta(item, tensors) for item in held)  # pyright: ignore
    if isinstance(held, dict):
        return {name: _on_meta(item, tensors) for name, item in held.items()}  # pyright: ignore
    if isinstance(held, torch.device):
        raise _NotOnMetaError
    return held


def _geometry(made: Any) -> Any:
    """What the propagator is told of results."""
    if isinstance(made, Tensor):
        return TensorMeta(made.shape, made.stride(), made.dtype)
    if isinstance(made, (list, tuple)):
        found = [_geometry(item) if isinstance(item, Tensor) else None for item in made]  # pyright: ignore
        return tuple(found) if isinstance(made, tuple) else found
    return None


def register_sharding(operator: OpOverload, rule: Callable[..., Any]) -> None:
    """As torch's `register_sharding`, with every argument but the first counted when results are looked up again.

    By itself torch remembers a rule's answer by the tensors and by what follows the first integer: which of several
    optional tensors was None is forgotten.
    """
    _register_sharding(operator)(rule)
    DTensor._op_dispatcher.sharding_propagator.op_to_schema_info[operator] = RuntimeSchemaInfo(static_argnum=1)


def given_sharding(operator: OpOverload) -> Callable[..., Any] | None:
    """The function that somebody gave to torch's `register_sharding` for an operator; None if nobody did."""
    strategy: Any = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs.get(operator)
    of_torch = isinstance(strategy, functools.partial) and strategy.func.__qualname__.startswith("register_sharding.")
    return strategy.args[0] if of_torch else None


def acceptable_shardings(
    sharding: Callable[..., Any], arguments: Sequence[Any], keywords: Mapping[str, Any], size: int
) -> list[tuple[list[Placement | None], list[Placement | None]]]:
    """Ask a function for `register_sharding` as torch does: the placements of results and of operands, way by way.

    Tensor operands are `OperatorMeta`; anything else is passed through.
    """

    def spec(operand: Any) -> Any:
        return (*map(spec, operand),) if type(operand) is tuple else _to_spec(fake_mesh(size), operand)  # pyright: ignore

    made = sharding(*map(spec, arguments), **{name: spec(held) for name, held in keywords.items()})
    return [([*results], [*operands]) for results, operands in made]


_VIEWS = ("aten::view", "aten::_unsafe_view", "aten::reshape")
TORCH_NAMESPACES = ("aten", "prims")
"""Those of torch's own operators."""


def _view_placement(operator: OpOverload, arguments: Sequence[Any], size: int) -> Placement | None:
    """The placement after a view, for torch before 2.12, whose rules know no interleaved shards.

    A group of dims of the one shape covers the same elements as a group of the other. With the elements of the group
    that precede the sharded dim counted as `outer`, the new dim that begins at `outer` is sharded; one that contains it
    is interleaved.
    """
    if operator.name() not in _VIEWS or not isinstance(arguments[0], OperatorMeta):
        return None
    source, split = arguments[0].shape, interleaving(arguments[0].placement)
    target = _without_minus_one(tuple(arguments[1]), math.prod(source))
    if split is None or 0 in source:
        return None
    dim, factor = split
    start, first = _group_of(source, target, dim)
    outer = math.prod(source[start:dim]) * factor
    covered = 1
    for position in range(first, len(target)):
        if covered == outer and (target[position] != 1 or size == 1):
            return Shard(position) if target[position] % size == 0 else None
        if covered * target[position] > outer:
            inner = outer // covered
            fits = outer % covered == 0 and target[position] % (inner * size) == 0
            return interleaved_shard(position, inner) if fits else None
        covered *= target[position]
    return None


def _without_minus_one(shape: tuple[int, ...], count: int) -> tuple[int, ...]:
    known = math.prod(n for n in shape if n != -1)
    return tuple(count // max(known, 1) if n == -1 else n for n in shape)


def _group_of(source: tuple[int, ...], target: tuple[int, ...], dim: int) -> tuple[int, int]:
    """The first dims, in both shapes, of the smallest groups of equal size of which the one contains `dim`."""
    i = j = 0
    while True:
        start, first = i, j
        ours, theirs = source[i], target[j]
        i, j = i + 1, j + 1
        while ours != theirs:
            if ours < theirs:
                ours, i = ours * source[i], i + 1
            else:
                theirs, j = theirs * target[j], j + 1
        if start <= dim < i:
            return start, first


def _specs(schema: OpSchema) -> list[DTensorSpec]:
    leaves = pytree.tree_leaves(
        (schema.args_schema, schema.kwargs_schema), is_leaf=lambda x: isinstance(x, DTensorSpec)
    )
    return [leaf for leaf in leaves if isinstance(leaf, DTensorSpec)]


@functools.cache
def schema_mutates(operator: OpOverload) -> tuple[int, ...]:
    """Positions of the arguments that `operator` writes to."""
    return tuple(
        position
        for position, argument in enumerate(operator._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


@functools.cache
def written_tensors(operator: OpOverload) -> tuple[int, ...]:
    """Of an operator's tensor arguments, those that it writes to and doesn't return.

    Of torch's own they are looked at where nothing is returned, as of `_foreach_add_`: what others write beside their
    result is known where they are.
    """
    returns = operator._schema.returns
    if operator.namespace in (*TORCH_NAMESPACES, "c10d_functional", "_c10d_functional") and returns:
        return ()
    names, _ = tensor_arguments(operator)
    returned = {name for held in returns if (alias := held.alias_info) is not None for name in alias.before_set}
    arguments = operator._schema.arguments
    held = [(arguments[place].name, arguments[place].alias_info) for place in schema_mutates(operator)]
    written = [name for name, alias in held if alias is None or returned.isdisjoint(alias.before_set)]
    return tuple(names.index(name) for name in written if name in names)


def written_values(operator: OpOverload, args: Sequence[Any], keywords: Mapping[str, Any]) -> list[Any]:
    """What a call writes to and doesn't return, in the order of `written_tensors`; None for what it isn't given.

    What is in a list is there by itself.
    """
    places = written_tensors(operator)
    if not places:
        return []
    names = tensor_arguments(operator)[0]
    given = {**dict(zip(schema_argument_names(operator), args, strict=False)), **keywords}
    found = [given.get(names[place]) for place in places]
    return [item for held in found for item in (held if isinstance(held, (list, tuple)) else (held,))]  # pyright: ignore


def qualified_name(packet: OpOverloadPacket) -> str:
    """`my::attn`, of all overloads together."""
    return str(packet._qualified_op_name)


@functools.cache
def tensor_arguments(operator: OpOverload) -> tuple[tuple[str, ...], int | None]:
    """The names of an operator's tensor arguments, lists of tensors too, and how many tensors it returns.

    The number is None where a result is a list.
    """
    schema = operator._schema
    names = tuple(held.name for held in schema.arguments if "Tensor" in str(held.type))
    lists = any("List" in str(held.type) for held in schema.returns)
    return names, None if lists else sum("Tensor" in str(held.type) for held in schema.returns)


@functools.cache
def schema_returns_view(operator: OpOverload) -> bool:
    """Whether a result of `operator` shares storage with an operand."""
    return any(result.alias_info is not None for result in operator._schema.returns)


@functools.cache
def schema_argument_names(operator: OpOverload) -> tuple[str, ...]:
    """The names of the operator's arguments, in order."""
    return tuple(argument.name for argument in operator._schema.arguments)


def is_registered_container(value: object) -> bool:
    """Whether torch's pytree registry knows how to take `value` apart (transformers registers its ModelOutput)."""
    return type(value) in pytree.SUPPORTED_NODES and type(value) not in (tuple, list, dict)


def rebuild_container(value: Any, transform: Callable[[Any], Any]) -> Any:
    """Rebuild a registered container with `transform` applied to each child."""
    node = pytree.SUPPORTED_NODES[type(value)]
    children, context = node.flatten_fn(value)
    return node.unflatten_fn([transform(child) for child in children], context)


def local_of(tensor: Tensor) -> Tensor:
    """The local shard inside a DTensor, without autograd and without a copy."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor  # pyright: ignore


def local_of_one_axis(tensor: Tensor) -> Tensor | None:
    """The local shard inside a plain DTensor on a mesh of one axis; None for anything else.

    Without a property or a call on the way, since each decoded token asks for every parameter.
    """
    if type(tensor) is DTensor and len(tensor._spec.placements) == 1:  # pyright: ignore
        return tensor._local_tensor  # pyright: ignore
    return None


def new_distributed_tensor(local: Tensor, like: DTensor) -> DTensor:
    """A DTensor around `local` with `like`'s mesh, placements and global geometry; no autograd, no communication."""
    # DTensor's own __init__ does nothing, at two thirds of the cost.
    return DTensor.__new__(DTensor, local, like._spec, requires_grad=False)  # pyright: ignore


_DETACH, _ADD_ = torch.ops.aten.detach.default, torch.ops.aten.add_.Tensor


def lie_alike(one: DTensor, other: DTensor) -> bool:
    """Whether a rank holds the same part of both."""
    ours, theirs = one._spec, other._spec  # pyright: ignore
    if ours is theirs:
        return True
    return ours.placements == theirs.placements and ours.shape == theirs.shape and ours.mesh == theirs.mesh


def like_distributed(local: Tensor, like: DTensor) -> DTensor:
    """A DTensor of `like`'s class and geometry around `local`, whose dtype it has; no autograd, no communication."""
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


_SHAPES_ALONE = frozenset(("_forward_metadata_inference", "_shape_inference"))


def wants_shapes_alone() -> bool:
    """Whether torch's pipelining calls a stage on memory that holds anything, to learn the shapes of its results."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name in _SHAPES_ALONE and frame.f_globals.get("__name__") == "torch.distributed.pipelining.stage":
            return True
        frame = frame.f_back
    return False


def inside_transform() -> bool:
    """Whether a transform of torch.func is under way, such as `vmap`, or forward-mode differentiation."""
    return cast("Any", torch._C)._are_functorch_transforms_active() or forward_ad._current_level >= 0  # pyright: ignore


def foreach_norm(tensors: Sequence[Tensor], order: float, dtype: torch.dtype) -> Sequence[Tensor]:
    """The norm of each of several tensors, computed in `dtype`."""
    return cast("Any", torch)._foreach_norm(list(tensors), order, dtype=dtype) if tensors else ()


def native_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` without torch's Python around it, which takes as long again as the call itself.

    What that Python adds is support for `setup_context` under torch.func; without it, torch refuses such calls itself.
    """
    return super(torch.autograd.Function, function).apply  # pyright: ignore


PythonNode = torch.autograd.function.BackwardCFunction
"""What autograd calls in the backward of a function that is written in Python: its `apply` runs that backward."""


@dataclass(frozen=True, slots=True)
class FunctionNode:
    """A `PythonNode` taken apart.

    Attributes:
        name: the class's name.
        outputs: shape and dtype of each result, as autograd fills in zeros for those without a gradient.
        inputs: for each argument that requires grad, its position, and the node and the output that it came from.
    """

    name: str
    outputs: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    inputs: tuple[tuple[int, Any, int], ...]


def function_node(node: Any) -> FunctionNode:
    """What autograd knows of a function's call."""
    wanted = [position for position, wants in enumerate(node.needs_input_grad) if wants]
    edges = [edge for edge in node.next_functions if edge[0] is not None]
    return FunctionNode(
        node._forward_cls.__qualname__.replace("<locals>.", ""),
        tuple((tuple(held.shape), held.dtype) for held in node._input_metadata),
        tuple((place, source, number) for place, (source, number) in zip(wanted, edges, strict=True)),
    )


def is_reentrant_checkpoint(node: Any) -> bool:
    """Whether a `PythonNode` is that of torch's activation checkpointing, with `use_reentrant=True`."""
    return node._forward_cls is CheckpointFunction


def packs_saved_tensors(also_of_torch: bool = False) -> object:
    """The innermost hook on what autograd saves for the backward; of torch's own if wanted, not a checkpoint's."""
    hooks: Any = cast("Any", torch._C)._autograd._top_saved_tensors_default_hooks(True)
    pack = None if hooks is None else hooks[0]
    foreign = "torch.utils.checkpoint." if also_of_torch else "torch."
    return None if f"{getattr(pack, '__module__', None)}.".startswith(foreign) else pack


def saving_hook() -> object:
    """The innermost hook on what autograd saves for the backward, a checkpoint's or any other; None without one."""
    hooks: Any = cast("Any", torch._C)._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else hooks[0]


def is_checkpointed() -> bool:
    """Whether an activation checkpoint counts what autograd saves for the backward."""
    hooks: Any = cast("Any", torch._C)._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", None) == "torch.utils.checkpoint"


@contextmanager
def without_packing() -> Generator[None]:
    """A block in which autograd keeps what it saves as it is, whatever hooks there are: nothing is recomputed."""
    hooks: Any = cast("Any", torch._C)._autograd
    before: bool = hooks._saved_tensors_hooks_set_tracing(True)
    try:
        yield
    finally:
        hooks._saved_tensors_hooks_set_tracing(before)


@contextmanager
def without_saved_tensor_hooks() -> Generator[None]:
    """A block outside of all hooks on what autograd saves for the backward, and of a ban on them."""
    hooks: Any = cast("Any", torch._C)._autograd
    banned: str | None = hooks._saved_tensors_hooks_get_disabled_error_message()
    hooks._saved_tensors_hooks_enable()
    held: list[tuple[Any, Any]] = []
    while (pair := hooks._top_saved_tensors_default_hooks(True)) is not None:
        held.append(pair)
        hooks._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pair in reversed(held):
            hooks._push_saved_tensors_default_hooks(*pair)
        if banned is not None:
            hooks._saved_tensors_hooks_disable(banned)


@contextmanager
def without_cached_weights() -> Generator[None]:
    """A block outside of `parametrize.cached()`, which keeps what is computed of parameters."""
    module: Any = parametrize
    before = module._cache_enabled, module._cache
    module._cache_enabled, module._cache = 0, {}
    try:
        yield
    finally:
        module._cache_enabled, module._cache = before


def is_profiled() -> bool:
    """Whether a profiler runs in this thread."""
    return torch.autograd._profiler_enabled()  # pyright: ignore


@contextmanager
def without_profiler() -> Generator[None]:
    """A block of which a profiler that runs in this thread notes nothing."""
    if not is_profiled():
        yield
        return
    switch: Any = cast("Any", torch._C)._autograd._enable_record_function
    switch(False)
    try:
        yield
    finally:
        switch(True)


_blocks = [0]
_blocks_lock = threading.Lock()


@contextmanager
def without_inference_kernels() -> Generator[None]:
    """A block in which torch's encoder layers and attention compute in evaluation by what they compute in training.

    Their kernels for inference take whole weights, and `nn.TransformerEncoder` packs padded sequences for them. The
    setting is the process's: several threads may be in such blocks.
    """
    with _blocks_lock:
        _blocks[0] += 1
        if _blocks[0] == 1:
            _blocks.append(torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        with _blocks_lock:
            _blocks[0] -= 1
            if not _blocks[0]:
                torch.backends.mha.set_fastpath_enabled(bool(_blocks.pop()))


def has_inference_kernels(module: nn.Module) -> bool:
    """Whether it is a module to which `without_inference_kernels` applies."""
    return isinstance(module, (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention))


@dataclass(frozen=True, slots=True)
class ModuleHooks:
    """A module's hooks before and after its backward; `legacy` for those that see the last operation alone."""

    before: tuple[Callable[..., Any], ...]
    after: tuple[Callable[..., Any], ...]
    legacy: bool


def backward_hooks(module: nn.Module) -> ModuleHooks | None:
    """The hooks of a module's backward, those of all modules among them; None if there are none."""
    tables, held = cast("Any", _modules), cast("Any", module)
    own, everywhere = _listed(held._backward_hooks), _listed(tables._global_backward_hooks)
    before, sooner = _listed(held._backward_pre_hooks), _listed(tables._global_backward_pre_hooks)
    if not (own or before or everywhere or sooner):
        return None
    legacy = (bool(own) and module._is_full_backward_hook is False) or (
        bool(everywhere) and tables._global_is_full_backward_hook is False
    )
    return ModuleHooks((*sooner, *before), (*everywhere, *own), legacy)


def _listed(table: Mapping[int, Callable[..., Any]]) -> tuple[Callable[..., Any], ...]:
    return tuple(table.values())


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Whether there are hooks on a tensor's gradient."""
    accumulated: object = getattr(tensor, "_post_accumulate_grad_hooks", None)
    return bool(tensor._backward_hooks) or bool(accumulated)


def without_dispatch_modes() -> AbstractContextManager[Any]:
    """A block outside of all dispatch modes that are active."""
    from torch.utils import _python_dispatch

    return cast("AbstractContextManager[Any]", _python_dispatch._disable_current_modes())


def function_modes() -> list[Any]:
    """The function modes that see a call, the innermost last."""
    return overrides._get_current_function_mode_stack()


def dispatch_modes() -> list[Any]:
    """The dispatch modes that see an operation, the innermost last; without those that torch itself is built on."""
    from torch.utils import _python_dispatch

    return [mode for mode in _python_dispatch._get_current_dispatch_mode_stack() if not _is_of_torch(mode)]


def _is_of_torch(mode: Any) -> bool:
    return getattr(mode, "_mode_key", None) is not None


@contextmanager
def under_function_modes(modes: Iterable[Any] = ()) -> Generator[None]:
    """A block under these function modes in place of those that are active."""
    before = function_modes()
    _set_function_modes(modes)
    try:
        yield
    finally:
        _set_function_modes(before)


def _set_function_modes(modes: Iterable[Any]) -> None:
    while overrides._get_current_function_mode() is not None:
        overrides._pop_mode()
    for mode in modes:
        overrides._push_mode(mode)


@contextmanager
def under_dispatch_modes(modes: Iterable[Any] = ()) -> Generator[None]:
    """A block under these dispatch modes in place of those of `dispatch_modes`."""
    before = dispatch_modes()
    _set_dispatch_modes(modes)
    try:
        yield
    finally:
        _set_dispatch_modes(before)


def _set_dispatch_modes(modes: Iterable[Any]) -> None:
    from torch.utils import _python_dispatch

    while (mode := innermost_mode()) is not None and not _is_of_torch(mode):
        _python_dispatch._pop_mode()
    for mode in modes:
        _python_dispatch._push_mode(mode)


def flattened_tree(held: Any) -> tuple[list[Any], Any]:
    """The leaves of nested containers, and their form."""
    return pytree.tree_flatten(held)


def rebuilt_tree(leaves: list[Any], form: Any) -> Any:
    """Containers of a form with these leaves."""
    return pytree.tree_unflatten(leaves, form)


def has_function_mode() -> bool:
    """Whether a mode looks at the functions of torch that are called."""
    return overrides._get_current_function_mode() is not None  # pyright: ignore


def without_function_modes() -> AbstractContextManager[Any]:
    """A block whose calls no function mode sees."""
    return cast("AbstractContextManager[Any]", torch._C.DisableTorchFunction())


def innermost_function_mode() -> Any:
    """The function mode that sees a call first; None if there is none."""
    return overrides._get_current_function_mode()


def without_tensor_classes() -> AbstractContextManager[Any]:
    """A block whose calls no class of tensors sees."""
    return cast("AbstractContextManager[Any]", torch._C.DisableTorchFunctionSubclass())


def innermost_mode() -> TorchDispatchMode | None:
    """The dispatch mode that sees an operation first."""
    from torch.utils import _python_dispatch

    return _python_dispatch._get_current_dispatch_mode()


has_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack  # pyright: ignore
"""How many dispatch modes see operations."""


def has_modes() -> bool:
    """Whether function or dispatch modes see what runs."""
    return torch._C._is_torch_function_mode_enabled() or has_dispatch_modes() > 0  # pyright: ignore


def without_keeping_modes() -> AbstractContextManager[Any]:
    """A block that no mode sees which keeps what operations return, as a selective activation checkpoint's do."""
    from torch.utils import _python_dispatch
    from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

    kinds = (_CachedTorchDispatchMode, _CachingTorchDispatchMode)
    if not any(isinstance(mode, kinds) for mode in _python_dispatch._get_current_dispatch_mode_stack()):
        return nullcontext()
    if isinstance(_python_dispatch._get_current_dispatch_mode(), kinds):
        return cast("AbstractContextManager[Any]", _python_dispatch._pop_mode_temporarily())
    return without_dispatch_modes()


def is_random(operator: OpOverload) -> bool:
    """Whether it makes a tensor, and may draw random numbers to do so."""
    returned = [argument.type.kind() for argument in operator._schema.returns]
    return torch.Tag.nondeterministic_seeded in operator.tags and "TensorType" in returned


def sizes_by_numbers(operator: OpOverload) -> bool:
    """Whether the sizes of its results depend on the numbers in its operands."""
    return torch.Tag.dynamic_output_shape in operator.tags


def schema_defaults(operator: OpOverload) -> tuple[tuple[str, Any], ...]:
    """The names of its arguments, with their defaults; None for those without one."""
    return tuple((argument.name, argument.default_value) for argument in operator._schema.arguments)


def schema_lists(operator: OpOverload) -> tuple[str, ...]:
    """The names of the arguments that are lists, such as sizes."""
    return tuple(a.name for a in operator._schema.arguments if str(a.type).startswith("List["))


def schema_keywords(operator: OpOverload) -> frozenset[str]:
    """The names of the arguments that can't be passed by position."""
    return frozenset(argument.name for argument in operator._schema.arguments if argument.kwarg_only)


def runs_backward() -> bool:
    """Whether this thread is in a backward: what runs there is an activation checkpoint's forward, once more."""
    return torch._C._current_graph_task_id() != -1  # pyright: ignore[reportUnknownMemberType]


def recomputes() -> bool:
    """Whether what runs in a backward is a forward once more: of an activation checkpoint, or in a user's function."""
    if not runs_backward():
        return False
    forward_class = getattr(torch._C._current_autograd_node(), "_forward_cls", None)  # pyright: ignore
    return is_checkpointed() or not (getattr(forward_class, "__module__", None) or "tpplan").startswith("tpplan")


def is_jit_traced() -> bool:
    """Whether `torch.jit.trace` records what runs."""
    return cast("Any", torch._C)._get_tracing_state() is not None


def running_backward() -> int:
    """The number of the backward that this thread runs; -1 outside of one."""
    return torch._C._current_graph_task_id()  # pyright: ignore


def group_timeout(group: dist.ProcessGroup) -> timedelta:
    """How long a collective of a group may take."""
    from torch.distributed import distributed_c10d

    device = torch.device("cuda" if "nccl" in dist.get_backend(group) else "cpu")
    options: Any = getattr(group._get_backend(device), "options", None)
    return getattr(options, "_timeout", None) or distributed_c10d.default_pg_timeout


def default_store() -> Any:
    """Where the processes met; None for a backend that needs none."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def next_node_number() -> int:
    """The number of the next node of a graph that this thread makes."""
    return torch._C._autograd._get_sequence_nr()  # pyright: ignore


def running_node_number() -> int | None:
    """The number of the node whose backward this thread runs; None outside of one."""
    node = torch._C._current_autograd_node()  # pyright: ignore
    return None if node is None else node._sequence_nr()  # pyright: ignore


def takes_device(operator: OpOverload) -> bool:
    """Whether it makes a tensor on a device that it is told."""
    return any(argument.name == "device" for argument in operator._schema.arguments)


@contextmanager
def fake_process_group(size: int, rank: int = 0) -> Generator[None]:
    """A default process group of `size` ranks, seen from `rank`, whose collectives move nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


class OwnPlacement(Partial):
    """A placement whose numbers tpplan puts together by itself.

    To DTensor's code it is a sum over the ranks, each of which has a part of its own: `distribute_tensor` asks it for
    that part, and whatever DTensor doesn't compute on parts, it computes on the whole.
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
    """A block whose tensors are inference tensors if `tensor` is one; views of others are none in inference mode."""
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
    """A DTensor whose operations tpplan runs by itself, in `dispatched`."""

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


_DATA: Any = torch._C.TensorBase.data
_GRADIENT: Any = Tensor.grad


def wait_for(result: Any) -> None:
    """Wait until what an operation of torch.distributed has begun, which it returns last, is done."""
    work: Any = cast("Sequence[Any]", result)[-1] if isinstance(result, (list, tuple)) else result
    dist.Work.unbox(work).wait()  # pyright: ignore


def gradient_of(parameter: Tensor) -> Tensor | None:
    """`parameter.grad`; of one that lies as its parameter without a call of Python's."""
    held = _GRADIENT.__get__(parameter)
    return held if held is None or type(held) is type(parameter) else parameter.grad


def use_count(tensor: Tensor) -> int:
    """How many hold a tensor: Python, its views, and the graph of autograd that ends in it."""
    return tensor._use_count()  # pyright: ignore


def base_of(held: object) -> Tensor | None:
    """The tensor of which an object is a view; None if it is no view."""
    return held._base if issubclass(type(held), Tensor) else None  # pyright: ignore


def name_tensor(tensor: DTensor, name: str) -> None:
    """Let a DTensor, and what has its geometry and dtype, be known by a name."""
    tensor._spec = copy.copy(tensor._spec)  # FSDP's have one for all that lie alike  # pyright: ignore
    tensor._spec.__dict__["tpplan_name"] = name  # pyright: ignore


def geometry_of(tensors: Iterable[DTensor]) -> list[Any]:
    """How DTensors lie, to be compared: quickly where nothing was changed."""
    return [tensor._spec for tensor in tensors]  # pyright: ignore


def name_alike(tensor: DTensor, named: DTensor) -> None:
    """Let a DTensor that lies as another one does be known by its name."""
    name = name_of(named)
    if name is not None and name_of(tensor) is None:
        name_tensor(tensor, name)


def mark_gathered(tensor: DTensor) -> None:
    """Let a DTensor, which has a name, and what has its geometry and dtype, be known as FSDP's for a forward."""
    tensor._spec.__dict__["tpplan_gathered"] = True  # pyright: ignore


def is_gathered(tensor: DTensor) -> bool:
    """Whether a DTensor is what FSDP has gathered for a forward."""
    return "tpplan_gathered" in tensor._spec.__dict__  # pyright: ignore


def name_of(tensor: DTensor) -> str | None:
    """The name by which a DTensor, or that of which it has the geometry, is known."""
    return tensor._spec.__dict__.get("tpplan_name")  # pyright: ignore


def wrapper_like(kind: type[Any], shown: Tensor, device: torch.device) -> Any:
    """A tensor of class `kind` without memory, of the geometry of `shown`, on `device`."""
    geometry = {"strides": shown.stride(), "storage_offset": shown.storage_offset(), "dtype": shown.dtype}
    return Tensor._make_wrapper_subclass(kind, shown.shape, device=device, **geometry)  # pyright: ignore


def placed_anew(tensor: DTensor, kind: type[DTensor], placements: Sequence[Placement]) -> None:
    """Make `tensor` one of class `kind` with these placements, in place; its local tensor stays."""
    spec = tensor._spec  # pyright: ignore
    if tuple(placements) != spec.placements:
        tensor._spec = DTensorSpec(spec.mesh, tuple(placements), tensor_meta=spec.tensor_meta)  # pyright: ignore
    tensor.__class__ = kind


def made_dtensor(
    kind: type[DTensor], local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> Any:
    """A DTensor of class `kind` around `local`, contiguous as a whole; no autograd, no communication."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    meta = TensorMeta(torch.Size(shape), tuple(strides), local.dtype)
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
    return DTensor.__new__(kind, local, spec, requires_grad=False)  # pyright: ignore


OFF: Any = cast("Any", torch._C)._disabled_torch_function_impl
"""As `__torch_function__` of a class of tensors whose operations give plain ones."""


def after_backward(callback: Callable[[], None]) -> None:
    """Call `callback` when the backward under way, in which a hook asks for it, has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # pyright: ignore


def make_gradient(local: Tensor, like: Tensor) -> Tensor:
    """What `like.grad` may be set to, around `local`; no autograd, no communication."""
    return like_distributed(local, like) if isinstance(like, DTensor) else local


@dataclass(frozen=True, slots=True)
class PendingShards:
    """What `fully_shard` or `replicate` was called for.

    Attributes:
        name: which of them.
        mesh: the data-parallel ranks.
        reshards_to: over how many ranks parameters are cut after the forward, where that is a number of its own.
    """

    name: str
    mesh: DeviceMesh
    reshards_to: int | None


def pending_fully_shard() -> PendingShards | None:
    """The call of `fully_shard` or FSDP's `replicate` that is under way in this thread, before it changes parameters.

    Nothing that torch passes to a module at that time has the mesh, so it is taken from the caller.
    """
    frame = sys._getframe(1)
    while frame is not None:
        info = frame.f_locals.get("mesh_info") if frame.f_code.co_name in ("fully_shard", "replicate") else None
        if info is not None and isinstance(getattr(info, "mesh", None), DeviceMesh):
            after: Any = frame.f_locals.get("post_forward_mesh_info")
            number = None if after is None or after.mesh is info.mesh else int(after.shard_mesh_size)
            return PendingShards(frame.f_code.co_name, info.mesh, number)
        frame = frame.f_back
    return None


def fsdp_unit() -> object:
    """The parameters that FSDP gathers and reduces together, while it sets one of them on a module; None if it doesn't.

    A parameter doesn't lead there, so it is taken from the caller.
    """
    frame = sys._getframe(1)
    while frame is not None:
        held = frame.f_locals.get("self")
        if isinstance(held, FSDPParamGroup):
            return held
        frame = frame.f_back
    return None


def is_of_fsdp(hook: object) -> bool:
    """Whether `hook` is one that `fully_shard` or FSDP's `replicate` registers on a module."""
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp._fully_shard")


def is_localizer(hook: object) -> bool:
    """Whether `hook` is one by which torch's data parallelism takes DTensors apart before, and after, a forward."""
    return hook is _localize_dtensor or hook is _reconstruct_dtensor


def is_localized(parameter: Tensor) -> bool:
    """Whether torch's data parallelism has made it of a DTensor, to put it in that one's place."""
    return hasattr(parameter, "_st_info")


def replicas_without_mesh(module: nn.Module) -> None:
    """Let torch's `replicate`, which was called for `module`, know its ranks as a group.

    With a mesh, it would take DTensors apart.
    """
    states: Any = module.__dict__.get(STATE_KEY) or {}
    for state in states.values():
        options: Any = getattr(state, "_init_kwargs", None)
        if isinstance(options, dict) and options.get("device_mesh") is not None:
            options["process_group"] = options.pop("device_mesh").get_group()


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source to its target, in one call."""
    torch._foreach_copy_(targets, sources)  # pyright: ignore


class OwnReducer(DistributedDataParallel):
    """A DistributedDataParallel whose gradients are averaged by `make_reducer`'s result."""

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
    """The option of a DistributedDataParallel that torch's reducer alone can serve, if one was chosen."""
    options = {
        "mixed_precision": wrapper.mixed_precision is not None,
        "delay_all_reduce_named_params": bool(cast("Any", wrapper)._delay_all_reduce_params),
        "python_reducer": wrapper._use_python_reducer,
    }
    return next((name for name, chosen in options.items() if chosen), None)


# -- flex attention ---------------------------------------------------------------------------------------------------
FLEX_ATTENTION: Any = flex_attention
"""What a function mode sees of `torch.nn.attention.flex_attention`, of whatever version, compiled or not."""


def flex_function(function: Callable[..., Tensor], arguments: Sequence[Tensor]) -> Tensor:
    """What `flex_attention` makes of one score by a function of the user's, which may index tensors by tensors."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex  # it takes seconds

    with TransformGetItemToIndex():
        return function(*arguments)


def run_flex_attention(args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Call the operator where nothing else is compiled.

    As it is written it holds all scores in memory, and what its functions read gets no gradient.
    """
    from torch._dynamo.exc import BackendCompilerFailed  # it takes a second

    with _STANCE.taken(False):
        if args[0].is_cuda:
            try:
                return _compiled_flex_attention(True)(*args[:_FLEX_ARGUMENTS], **keywords)
            except BackendCompilerFailed:  # inductor has no kernel for some sizes
                pass
        return _compiled_flex_attention(False)(*args[:_FLEX_ARGUMENTS], **keywords)


_FLEX_ARGUMENTS = 7  # behind these come tensors that Dynamo has taken out of functions, which are none outside of it


@functools.cache
def _compiled_flex_attention(fused: bool) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return FLEX_ATTENTION(*args, **kwargs)

    return torch.compile(call, backend="inductor" if fused else "eager", fullgraph=True)


def flex_strides(made: Tensor, query: Tensor) -> Tensor:
    """A result of `flex_attention`, which lies in memory as its queries do."""
    return _permute_strides(made, query.stride())


# -- torch.compile ----------------------------------------------------------------------------------------------------
_eval_frame: Any = cast("Any", torch._C)._dynamo.eval_frame

COMPILED_CALL = "_compiled_call_impl"
"""The attribute in which `Module.compile` notes what runs in place of a call."""

is_traced: Callable[[], bool] = torch.compiler.is_dynamo_compiling
"""Whether Dynamo reads this code at the moment; where Python runs it, it is false."""

active_compiler: Callable[[], object] = _eval_frame.get_eval_frame_callback
"""What compiles the frames that this thread runs; None outside of `torch.compile`."""

set_compiler: Callable[[object], object] = _eval_frame.set_eval_frame
"""Let another compiler have the frames that this thread runs, or None; returns the one before."""


def skip_frame(function: Callable[..., Any], called: bool = False) -> None:
    """Have Dynamo run the frames of `function` as they are; it still compiles those that they call, unless `called`."""
    action = _eval_frame._FrameAction
    strategy = _eval_frame._FrameExecStrategy(action.SKIP, action.SKIP if called else action.DEFAULT)
    _eval_frame.set_code_exec_strategy(cast("Any", function).__code__, strategy)


def count_as_compiled() -> None:
    """Let a call with `fullgraph=True` pass that has run no compiled frame for a reason of ours."""
    count: Callable[[int], int] | None = getattr(_eval_frame, "set_fullgraph_compiled_frame_count", None)
    if count is not None and count(-1) >= 0:  # somebody counts, and only a counter that is off can be set
        count(1)


class _Stance:
    """Whether what `torch.compile` has returned runs as it was before; threads share one stance, and are counted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._as_written = self._compiled = 0
        self._before: Any = None

    @contextmanager
    def taken(self, as_written: bool) -> Generator[None]:
        """A block with nothing compiled, or inside of one with what is called there compiled."""
        before = set_compiler(None)  # a stance can't be taken where a caller is compiled
        self._count(as_written, 1)
        try:
            yield
        finally:
            self._count(as_written, -1)
            set_compiler(before)

    def _count(self, as_written: bool, step: int) -> None:
        from torch._dynamo import eval_frame  # it takes seconds

        with self._lock:
            was = self._as_written > 0 and not self._compiled
            self._as_written += step if as_written else 0
            self._compiled += 0 if as_written else step
            now = self._as_written > 0 and not self._compiled
            if now and not was:
                self._before = eval_frame._set_stance(eval_frame.DynamoStance("force_eager"))
            elif was and not now:
                eval_frame._set_stance(self._before)


_STANCE = _Stance()


@contextmanager
def nothing_compiled() -> Generator[None]:
    """A block in which what `torch.compile` has returned runs as it was before.

    That is asked for where somebody can have compiled something: it takes seconds to import what compiles.
    """
    if {"torch._dynamo", "torch.nn.attention.flex_attention"}.isdisjoint(sys.modules) or is_traced():
        yield
        return
    with _STANCE.taken(True):
        yield


def graph_break(reason: str) -> None:
    """In code that Dynamo reads: run the call that leads here as it is."""
    torch._dynamo.graph_break(msg=reason)  # pyright: ignore


def take_as_constant(function: Callable[..., Any]) -> None:
    """Have Dynamo call `function` as it is, and put its result into the graph; torch's decorator imports Dynamo."""
    cast("Any", function)._dynamo_marked_constant = True


def symmetric_empty(size: int, device: torch.device) -> Tensor:
    """So many bytes that other ranks' GPUs can read, once all have met (`rendezvous`)."""
    import torch.distributed._symmetric_memory as symmetric

    return symmetric.empty(size, dtype=torch.uint8, device=device)


def rendezvous(memory: Tensor, group: dist.ProcessGroup) -> None:
    """Let the ranks of a group read each other's memory; each calls this with its own, all of one size."""
    import torch.distributed._symmetric_memory as symmetric

    symmetric.rendezvous(memory, group.group_name)


def one_shot_sum(place: Tensor, own: Tensor, group: str) -> None:
    """The sum over the ranks of a group, in place of `own`; `place` is as large, in memory that they all read."""
    cast("Any", torch.ops.symm_mem).one_shot_all_reduce_copy_out(place, own, "sum", group, own)


def traced_all_reduce(tensor: Tensor, group: str) -> Tensor:
    """The sum over the ranks of a group, in code that Dynamo reads."""
    ops: Any = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(tensor, "sum", group))


def over_ranks(tensor: Tensor, group: dist.ProcessGroup, operation: str = "sum") -> Tensor:
    """The sum or the maximum ("max") over the ranks of a group; a node of the graph where a compiler looks.

    The tensor is written to where none does.
    """
    if _is_plain(tensor):
        dist.all_reduce(tensor, dist.ReduceOp.MAX if operation == "max" else dist.ReduceOp.SUM, group)
        return tensor
    ops: Any = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(tensor, operation, group.group_name))


def gathered_over_ranks(tensor: Tensor, size: int, group: dist.ProcessGroup) -> Tensor:
    """The ranks' tensors along the first dim; a node of the graph where a compiler looks."""
    if not _is_plain(tensor):
        return traced_all_gather(tensor, size, group.group_name)
    received = tensor.new_empty((size * tensor.shape[0], *tensor.shape[1:]))
    all_gather_single(received, tensor, group=group)
    return received


def _is_plain(tensor: Tensor) -> bool:
    return not type(tensor).__module__.startswith("torch._subclasses")


def traced_all_gather(tensor: Tensor, size: int, group: str) -> Tensor:
    """The ranks' tensors along the first dim, in code that Dynamo reads."""
    ops: Any = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_gather_into_tensor(tensor, size, group))


def traced_reduce_scatter(tensor: Tensor, size: int, group: str) -> Tensor:
    """This rank's part of the sum along the first dim, in code that Dynamo reads."""
    ops: Any = torch.ops._c10d_functional
    return ops.wait_tensor(ops.reduce_scatter_tensor(tensor, "sum", size, group))


def traced_all_to_all(tensor: Tensor, size: int, group: str) -> Tensor:
    """The ranks' parts for this one along the first dim, which counts the ranks, in code that Dynamo reads."""
    ops: Any = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_to_all_single(tensor, [1] * size, [1] * size, group))


def uncompiled(model: Any) -> Any:
    """The module inside of what `torch.compile(model)` returns, if it is that; else `model` itself."""
    frames = sys.modules.get("torch._dynamo.eval_frame")  # which takes a second to import
    return model._orig_mod if frames is not None and isinstance(model, frames.OptimizedModule) else model


def compiled_inside(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """The modules inside of a model that `torch.compile` has returned, with their owner and their name there."""
    return [
        (owner, name, child)
        for _, owner in named_modules(model)
        for name, child in owner._modules.items()
        if child is not None and uncompiled(child) is not child
    ]


def compiles(model: nn.Module) -> bool:
    """Whether the caller, or modules of a model, are compiled, rather than functions that its bodies call."""
    held = (module.__dict__.get(COMPILED_CALL) for _, module in named_modules(model))
    own = any(hasattr(call, "_torchdynamo_orig_callable") for call in held)
    return own or active_compiler() is not None or bool(compiled_inside(model))


def read_anew(compiled: Any) -> None:
    """Let a module that `torch.compile` has returned see that its module has become another one."""
    compiled._initialize()


def made_wrapper(
    kind: type[Tensor],
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    stride: Sequence[int] | None = None,
) -> Tensor:
    """A tensor of a class of its own without numbers of its own, made without the class's constructor."""
    strides = None if stride is None else tuple(stride)
    return Tensor._make_wrapper_subclass(kind, tuple(shape), strides=strides, dtype=dtype, device=device)  # pyright: ignore


def takes_apart(tensor: Tensor) -> bool:
    """Whether torch can take a tensor apart into others, as it can one of quantised numbers; DTensors don't count."""
    return not isinstance(tensor, DTensor) and is_traceable_wrapper_subclass(tensor)


# What a class of tensors may have of its own and compute as any other: how tensors are made, shown, copied and moved.
_AS_ANY_CLASS = frozenset(
    f"__{name}__"
    for name in (
        "new", "init", "init_subclass", "repr", "str", "format", "hash", "dir", "copy", "deepcopy", "reduce",
        "reduce_ex", "getstate", "setstate", "module", "doc", "dict", "weakref", "annotations", "slots",
        "class_getitem",
    )
) | {"to", "cpu", "cuda"}  # fmt: skip


@functools.cache
def computes_otherwise(kind: type[Tensor]) -> bool:
    """Whether a class of tensors says itself what operations on its tensors compute, or what their methods do.

    A fake tensor computes what a plain one does, without its numbers.
    """
    known = (Tensor, nn.Parameter, nn.Buffer, DTensor)
    if kind in known or f"{kind.__module__}.{kind.__name__}" == "torch._subclasses.fake_tensor.FakeTensor":
        return False
    own = [held for held in kind.__mro__ if not any(issubclass(plain, held) for plain in known)]
    said = {name for held in own for name in vars(held) if hasattr(Tensor, name) and name not in _AS_ANY_CLASS}
    plain = {"__torch_function__": nn.Parameter, "__torch_dispatch__": Tensor}  # classes in which these are off
    return any(getattr(kind, name) is not getattr(plain.get(name), name, None) for name in said)


@functools.cache
def is_autocast_on_cuda(operator: str) -> bool:
    """Whether an operator of aten has a dtype of its own under CUDA's autocast; `rms_norm` from torch 2.13 on."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{operator}", "AutocastCUDA")


def runs_as_written(func: OpOverload, inside: bool = False) -> bool:
    """Whether an operator of another library has a kernel for any device, and no derivative: it is what that calls.

    `inside` of such a kernel torch doesn't take its own operators apart, so that these count as well.
    """
    name = func.name()
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    if inside and has(name, "CompositeImplicitAutograd"):
        return True
    others = ("Meta", "Autograd", "AutogradCPU", "AutogradCUDA")
    return (
        func.namespace not in TORCH_NAMESPACES
        and has(name, "CompositeExplicitAutograd")
        and not any(has(name, key) for key in others)
    )


def run_as_written(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the kernel of an operator of which `runs_as_written` holds, so that modes see what it calls."""
    implicit = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    keys = torch._C.DispatchKey
    return func._op_dk(keys.CompositeImplicitAutograd if implicit else keys.CompositeExplicitAutograd, *args, **kwargs)


SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


class SizeSymbols(ShapeEnv):
    """Sizes that stand for any number from 2 on, and the conditions that Python's and torch's code puts on them.

    Two sizes of an example that are equal by chance are two symbols, as else that would be a condition which nobody
    sees. 0 and 1 steer broadcasting, and stay numbers.

    Attributes:
        where: the line to name for conditions, in place of the one that is running.
    """

    def __init__(self, line: Callable[[], str]) -> None:
        """Have none; `line` tells the line of the user's code that is running."""
        super().__init__(duck_shape=False, specialize_zero_one=True)
        self._line = line
        self.where = ""

    def symbol(self, name: str, example: int) -> Any:
        """A size, of this value in the example."""
        from torch._dynamo.source import ConstantSource  # half a second, for those who have sizes as symbols

        source = ConstantSource(name)
        made = self.create_symbol(example, source, DimDynamic.DYNAMIC)
        return self.create_symintnode(made, hint=example, source=source)

    def conditions(self) -> list[tuple[Any, str]]:
        """What was compared, as expressions, and the line that did it."""
        return [(guard.expr, guard.sloc.maybe_user_loc or "") for guard in self.guards]

    def create_unbacked_symint(self, *args: Any, **options: Any) -> Any:
        """Refuse: nothing is known of a size that is found in a tensor."""
        raise NotImplementedError("a size is found in a tensor")

    create_unbacked_symfloat = create_unbacked_symbool = create_unbacked_symint

    def _get_stack_summary(self, is_debug: bool = False, framework_loc: Any = None) -> tuple[SLoc, str]:
        return SLoc(None, self.where or self._line()), ""


def expression_of(number: Any) -> Any:
    """What a size, or a number made of sizes, is in terms of symbols; a plain number of what is one."""
    return cast("Any", number).node.expr if isinstance(number, SYMBOLIC) else number


def given_expression(number: Any) -> Any:
    """As `expression_of`, before conditions have made numbers of symbols."""
    return cast("Any", number).node._expr if isinstance(number, SYMBOLIC) else number


def hint_of(number: Any) -> Any:
    """The value of a size in the example; no condition is made of it."""
    return cast("Any", number).node.hint if isinstance(number, SYMBOLIC) else number


def balanced(condition: Any) -> Any:
    """A comparison of sizes without terms that count negatively: they go to the other side."""
    if not isinstance(condition, sympy.core.relational.Relational):
        return condition
    left, right = cast("tuple[Any, Any]", condition.args)
    terms: Any = sympy.Add.make_args(left - right)
    lacking = [term for term in terms if term.could_extract_minus_sign()]
    sides = (sympy.Add(*(term for term in terms if term not in lacking)), sympy.Add(*(-term for term in lacking)))
    return cast("Any", condition).func(*sides, evaluate=False)


def as_python(expression: Any) -> str:
    """An expression over symbols as Python, of their names."""
    return PythonPrinter().doprint(expression) if isinstance(expression, sympy.Basic) else repr(expression)
