"""Accelerate's `Accelerator`, adapted to sharded models.

    accelerator = Accelerator(parallelism_config=ParallelismConfig(tp_size=2))
    model, optimizer, data = accelerator.prepare(model, optimizer, data)

What its methods do for other models stays as it is. For a sharded one: it isn't wrapped in DistributedDataParallel
over the ranks that share it; those get the same batches, also from workers that draw random numbers, and count once
where results are gathered; norms and states are those of the whole model. What can't be done is refused by `prepare`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from tpplan.compiler.ir.pytree import leaves, with_items
from tpplan.runtime.modules.writes import WRITES, Writes
from tpplan.runtime.parameters.saved_models import whole_state_of
from tpplan.runtime.parameters.whole_states import without_replicas
from tpplan.training.follow import wrap
from tpplan.training.sharding import Sharding, check, keep_reading, sharding_of
from tpplan.training.states import has_parts, parts_of_state, refuse_plain, whole_state

_Stock = Callable[..., Any]


def adapt(module: ModuleType) -> None:
    """Adapt the module `accelerate.accelerator`."""
    for name, around in _METHODS.items():
        wrap(module.Accelerator, name, around)
    wrap(module.AcceleratedOptimizer, "state_dict", _optimizer_state)
    wrap(module.AcceleratedOptimizer, "load_state_dict", _load_optimizer_state)
    wrap(module.AcceleratedScheduler, "step", _step_scheduler)
    wrap(module.ParallelismConfig, "_validate_accelerator", _validate)


# -- preparing ---------------------------------------------------------------------------------------------------------
def _prepare(stock: _Stock, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse what can't be done before anything is prepared."""
    for held in args:
        sharding = sharding_of(held)
        if sharding is not None:
            check(self, sharding)
    return stock(self, *args, **kwargs)


def _prepare_model(
    stock: _Stock, self: Any, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
) -> nn.Module:
    sharding = sharding_of(model)
    if sharding is None:
        return stock(self, model, device_placement, evaluation_mode)
    check(self, sharding)
    if getattr(model, "_is_accelerate_prepared", False):
        return stock(self, model, device_placement, evaluation_mode)
    writes: Writes | None = vars(model).get(WRITES)
    if writes is None:
        prepared = stock(self, model, device_placement, True)
    else:
        with writes.paused():  # it gives the model a forward that casts around its own
            prepared = stock(self, model, device_placement, True)
    if evaluation_mode or sharding.replicas == 1 or sharding.is_fsdp or isinstance(model, DistributedDataParallel):
        return prepared
    return _replicated(self, prepared)


def _replicated(accelerator: Any, model: nn.Module) -> nn.Module:
    """The model with gradients averaged over the ranks that hold the same parts."""
    options: dict[str, Any] = {} if accelerator.ddp_handler is None else accelerator.ddp_handler.to_kwargs()
    names = accelerator.parallelism_config.dp_dim_names
    mesh = accelerator.torch_device_mesh[names[0] if len(names) == 1 else "dp"]
    wrap_up: Any = DistributedDataParallel
    wrapped = wrap_up(model, process_group=mesh.get_group(), **options)
    accelerator._models[-1] = wrapped
    wrapped._is_accelerate_prepared = True
    vars(model).pop("_is_accelerate_prepared")  # another Accelerator must wrap it again
    return wrapped


def _prepare_tp(stock: _Stock, self: Any, *args: Any) -> Any:
    """Leave the parameters as they are, which it would look for by the addresses of their memory."""
    return args if any(sharding_of(held) is not None for held in args) else stock(self, *args)


def _prepare_optimizer(stock: _Stock, self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    if not getattr(optimizer, "_is_accelerate_prepared", False):
        refuse_plain(optimizer)
    return stock(self, optimizer, *args, **kwargs)


def _prepare_data_loader(stock: _Stock, self: Any, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
    size = _sharing(self)
    if size > 1 and isinstance(data_loader, DataLoader):
        _seed_alike(cast("DataLoader[Any]", data_loader), size)
        keep_reading(self.dataloader_config)
    return stock(self, data_loader, *args, **kwargs)


def _seed_alike(data_loader: DataLoader[Any], size: int) -> None:
    """Let the workers of ranks that share a model draw the same numbers, where they are seeded by rank."""
    seed = data_loader.worker_init_fn
    if isinstance(seed, functools.partial) and isinstance(seed.keywords.get("rank"), int):
        keywords: dict[str, Any] = seed.keywords | {"rank": seed.keywords["rank"] // size}
        data_loader.worker_init_fn = functools.partial(seed.func, *seed.args, **keywords)


def _validate(stock: _Stock, self: Any, accelerator: Any) -> None:
    """Let a config be used on processes without a GPU as well."""
    if accelerator.distributed_type.value != "MULTI_CPU":
        return stock(self, accelerator)
    names = ("num_processes", "distributed_type", "is_fsdp2", "is_main_process")
    told = {name: getattr(accelerator, name) for name in names}
    return stock(self, SimpleNamespace(multi_device=True, **told))


def _step_scheduler(stock: _Stock, self: Any, *args: Any, **kwargs: Any) -> None:
    """As often as there are replicas, by which accelerate divides the batches; it takes each rank to be one."""
    state: Any = self.optimizers[0].accelerator_state if self.optimizers else None
    config: Any = None if state is None else state.parallelism_config
    if state is None or config is None or config.tp_size == 1 or not any(map(has_parts, self.optimizers)):
        stock(self, *args, **kwargs)
        return
    from accelerate.state import PartialState

    shared: Any = PartialState()  # from which an AcceleratorState takes the number each time
    before = shared.num_processes
    shared.num_processes = before // config.tp_size
    try:
        stock(self, *args, **kwargs)
    finally:
        shared.num_processes = state.num_processes = before


# -- training and evaluation -------------------------------------------------------------------------------------------
def _clip_grad_norm(stock: _Stock, self: Any, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
    norm = stock(self, parameters, max_norm, norm_type)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _gather_for_metrics(stock: _Stock, self: Any, input_data: Any, use_gather_object: bool = False) -> Any:
    """The replicas' results, each once."""
    size = _sharing(self)
    if size == 1 or not any(sharding_of(model) is not None for model in self._models):
        return stock(self, input_data, use_gather_object)
    data = _gathered(input_data, self.parallelism_config.data_parallel_size, size, use_gather_object)
    state = self.gradient_state
    if state.end_of_dataloader and state.remainder > 0:
        if use_gather_object or not _tensors_only(input_data):
            return data[: state.remainder]
        return with_items(data, lambda tensor: tensor[: state.remainder])
    return data


def _gathered(held: Any, replicas: int, size: int, as_objects: bool) -> Any:
    if not as_objects and _tensors_only(held):
        return with_items(held, lambda tensor: _concatenated(tensor, replicas, size))
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, held)
    return [item for of in found[::size] for item in of]


def _concatenated(tensor: Tensor, replicas: int, size: int) -> Tensor:
    tensor = tensor.detach().contiguous() if tensor.dim() else tensor.detach()[None]
    if replicas == 1:
        return tensor
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor)
    return torch.cat(found[::size])


def _tensors_only(held: Any) -> bool:
    return all(isinstance(item, Tensor) for _, item in leaves(held))


def _sharing(accelerator: Any) -> int:
    """How many ranks share a model, as accelerate was told."""
    config = accelerator.parallelism_config
    return 1 if config is None else int(config.tp_size)


# -- states ------------------------------------------------------------------------------------------------------------
def _get_state_dict(stock: _Stock, self: Any, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
    """The whole state on every rank; for `save_state` (which doesn't unwrap) on the first, which writes it."""
    sharding: Sharding | None = sharding_of(model)
    if sharding is None:
        return stock(self, model, unwrap)
    return whole_state_of(self.unwrap_model(model), keep=unwrap or self.is_main_process)


def _load_state(stock: _Stock, self: Any, *args: Any, **kwargs: Any) -> Any:
    handle = self.register_load_state_pre_hook(_load_models)
    try:
        return stock(self, *args, **kwargs)
    finally:
        handle.remove()


def _load_models(models: list[nn.Module], folder: str) -> None:
    """Load what `save_state` wrote of sharded models, which accelerate would ask for the addresses of their memory."""
    if not any(sharding_of(model) is not None for model in models):
        return
    for number, model in enumerate(models):
        path = Path(folder) / f"model{f'_{number}' if number else ''}.safetensors"
        if path.exists():
            state = load_file(path)
        else:
            state = torch.load(path.with_name(path.stem.replace("model", "pytorch_model") + ".bin"), weights_only=True)
        inner = without_replicas(model)
        inner.load_state_dict(_with_tied(inner, {name.removeprefix("module."): held for name, held in state.items()}))
    models.clear()  # by which a hook says that it has loaded them


def _with_tied(model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """A state with all names of tensors that it has under one of them."""
    held = {name: id(tensor) for name, tensor in model.named_parameters(remove_duplicate=False)}
    by_identity = {held[name]: tensor for name, tensor in state.items() if name in held}
    return {name: by_identity[number] for name, number in held.items() if number in by_identity} | state


def _optimizer_state(stock: _Stock, self: Any) -> dict[str, Any]:
    state = stock(self)
    if not has_parts(self.optimizer) or self.accelerator_state.distributed_type.value == "FSDP":
        return state
    return whole_state(state, keep=not dist.get_rank())


def _load_optimizer_state(stock: _Stock, self: Any, state_dict: dict[str, Any]) -> None:
    if has_parts(self.optimizer) and self.accelerator_state.distributed_type.value != "FSDP":
        state_dict = parts_of_state(self.optimizer, state_dict)
    stock(self, state_dict)


_METHODS = {
    "prepare": _prepare,
    "prepare_model": _prepare_model,
    "_prepare_tp": _prepare_tp,
    "prepare_optimizer": _prepare_optimizer,
    "prepare_data_loader": _prepare_data_loader,
    "clip_grad_norm_": _clip_grad_norm,
    "gather_for_metrics": _gather_for_metrics,
    "get_state_dict": _get_state_dict,
    "load_state": _load_state,
}

__all__ = ["adapt"]
