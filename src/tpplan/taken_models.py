"""What public functions take of torch: models, meshes, example calls, devices and dtypes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tpplan.plan import Plan
from tpplan.plan.taken import PLAN_SOURCE, ArgumentKind


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
INPUTS: Final = ArgumentKind(
    lambda held: held is None or isinstance(held, (Mapping, tuple, list, torch.Tensor)),
    "an example call: a dict of keywords, a tuple of positional arguments, or one tensor",
)
DEVICE: Final = ArgumentKind(
    lambda held: held is None or isinstance(held, (str, int, torch.device)), "a device of torch, or None"
)
DTYPE: Final = ArgumentKind(
    lambda held: held is None or isinstance(held, torch.dtype),
    "a dtype of torch, or None",
    lambda came: f"write `torch.{came}`" if isinstance(came, str) and hasattr(torch, came) else "",
)

__all__ = ["DEVICE", "DTYPE", "INPUTS", "MESH", "MODEL", "PLAN"]
