"""What public functions take of torch: models, meshes, example calls, devices and dtypes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final, ParamSpec, TypeVar, cast

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from tpplan.plan import Plan
from tpplan.plan.taken import PLAN_SOURCE, ArgumentKind, takes

P = ParamSpec("P")
R = TypeVar("R")


def _of_model(came: Any) -> str:
    if isinstance(came, type) and issubclass(came, nn.Module):
        return f"make one of it, `{came.__name__}(…)`"
    if isinstance(came, str):
        return "load it first; `tpplan.from_pretrained` does both with a folder of transformers"
    return ""


def _of_mesh(came: Any) -> str:
    if isinstance(came, int):
        return f"`tp={came}` makes a mesh of so many ranks of torchrun's processes"
    return 'make one: `init_device_mesh("cuda", (2,), mesh_dim_names=("tp",))`'


MODEL: Final = ArgumentKind(lambda held: isinstance(held, nn.Module), "a torch.nn.Module", _of_model)
MESH: Final = ArgumentKind(lambda held: held is None or isinstance(held, DeviceMesh), "a DeviceMesh, or None", _of_mesh)
PLAN: Final = ArgumentKind(
    lambda held: isinstance(held, Plan) or PLAN_SOURCE.fits(held),
    'a Plan, a path, a shipped plan\'s name, YAML text, a mapping, or "auto"',
    lambda came: 'write "auto" to have one found' if came is None else "",
)


def _are_stages(held: Any) -> bool:
    if isinstance(held, nn.Module) and not isinstance(held, nn.ModuleList):
        return not isinstance(held, nn.ModuleDict)
    several = isinstance(held, (Collection, nn.ModuleList)) and not isinstance(held, (str, bytes, Mapping))
    return several and all(isinstance(stage, nn.Module) for stage in cast("Collection[object]", held))


STAGES: Final = ArgumentKind(
    _are_stages,
    "a torch.nn.Module, or a list of them",
    _of_model,
)
AXIS: Final = ArgumentKind(
    lambda held: held is None or (isinstance(held, DeviceMesh) and held.ndim == 1),
    "a DeviceMesh of one axis, or None",
    lambda came: 'name the axis, as in `mesh["pp"]`' if isinstance(came, DeviceMesh) else "",
)
INPUTS: Final = ArgumentKind(
    lambda held: held is None or isinstance(held, (Mapping, tuple, list, torch.Tensor)),
    "an example call: a dict of keywords, a tuple of positional arguments, or one tensor",
)
DEVICE: Final = ArgumentKind(
    lambda held: held is None or (isinstance(held, (str, int, torch.device)) and not isinstance(held, bool)),
    "a device of torch, or None",
)
DTYPE: Final = ArgumentKind(
    lambda held: held is None or isinstance(held, torch.dtype),
    "a dtype of torch, or None",
    lambda came: f"write `torch.{came}`" if isinstance(came, str) and hasattr(torch, came) else "",
)

DTYPE_OR_NAME: Final = ArgumentKind(
    lambda held: DTYPE.fits(held) or isinstance(held, str), "a dtype of torch, its name, or None"
)
BUILD: Final = ArgumentKind(
    lambda held: held is None or (callable(held) and not isinstance(held, nn.Module)),
    "a function that makes the model, or None",
)
TENSOR: Final = ArgumentKind(lambda held: isinstance(held, torch.Tensor), "a tensor")
TENSORS: Final = ArgumentKind(
    lambda held: isinstance(held, Iterable) and not isinstance(held, (str, bytes, Mapping)),
    "a tensor, or several of them",
    lambda came: "pass `model.parameters()`" if isinstance(came, nn.Module) else "",
)
RANKS_OF: Final = ArgumentKind(
    lambda held: held is None or isinstance(held, (DeviceMesh, ProcessGroup)),
    "a DeviceMesh, a ProcessGroup, or None",
    _of_mesh,
)


def takes_in_graphs(**kinds: ArgumentKind) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """As `takes`, of functions that torch.compile may meet: what it traces isn't checked."""

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        checked = takes(**kinds)(function)

        @functools.wraps(checked)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            return (function if torch.compiler.is_compiling() else checked)(*args, **kwargs)

        return call

    return decorated


__all__ = [
    "AXIS",
    "BUILD",
    "DEVICE",
    "DTYPE",
    "DTYPE_OR_NAME",
    "INPUTS",
    "MESH",
    "MODEL",
    "PLAN",
    "RANKS_OF",
    "STAGES",
    "TENSOR",
    "TENSORS",
    "takes_in_graphs",
]
