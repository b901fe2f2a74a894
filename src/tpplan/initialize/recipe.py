"""How a model's stock twin is built once more: by its class and config, by the caller's function, or by resets."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from tpplan.initialize.construction import Construction, recorded
from tpplan.initialize.findings import BUILD, UNKNOWN, problem
from tpplan.initialize.resets import reset_twin, unknown_modules
from tpplan.runtime.modules.writes import Watched


def construction_of(model: nn.Module, build: Callable[[], nn.Module] | None, device: torch.device) -> Construction:
    """Record how the stock model of a model is made.

    Args:
        model: the model, parallelized or not; only read.
        build: makes the stock model; None to find out how.
        device: where the stock model would lie.

    Raises:
        InitializationError: TP143, if it can't be found out.
    """
    if build is not None:
        return recorded(build, device, None)
    kind = stock_class(model)
    config: Any = getattr(model, "config", None)
    if callable(getattr(kind, "_from_config", None)) and hasattr(config, "to_dict"):
        return recorded(lambda: _built(kind, config, model), device, _main_dtype(model))
    unknown_modules(model, stock_class)
    stock = recorded(lambda: reset_twin(model, stock_class), device, _main_dtype(model))
    left = [name for name in sorted(stock.registered) if stock.tensors[name].storage not in stock.written]
    if left:
        raise problem(
            UNKNOWN,
            f"`reset_parameters` of the modules that have them leaves {len(left)} of the model's tensors as they are",
            BUILD,
            *(f"`{name}`" for name in left),
        )
    return stock


def _built(kind: type[nn.Module], config: Any, model: nn.Module) -> nn.Module:
    """The stock model of a config, with those parameters wider that the library keeps so, as in `model`."""
    stock = kind(copy.deepcopy(config))
    dtypes = {name: held.dtype for name, held in model.named_parameters() if held.is_floating_point()}
    for name, held in stock.named_parameters():
        if name in dtypes and dtypes[name].itemsize > held.dtype.itemsize:
            held.data = held.data.to(dtypes[name])
    return stock


def stock_class(module: nn.Module) -> type[nn.Module]:
    """A module's class before `parallelize` and FSDP have derived theirs from it."""
    ours = (Watched, FSDPModule)
    return next(kind for kind in type(module).__mro__ if issubclass(kind, nn.Module) and not issubclass(kind, ours))


def _main_dtype(model: nn.Module) -> torch.dtype | None:
    """The dtype of most of a model's parameters: that which was torch's default when it was made."""
    counted = Counter(held.dtype for held in model.parameters() if held.is_floating_point())
    return counted.most_common(1)[0][0] if counted else None


__all__ = ["construction_of", "stock_class"]
