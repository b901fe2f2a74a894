"""The forms of a toy Llama that are held against each other: unsharded, by tpplan, by torch and by transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from tpplan.api import parallelize
from tpplan.bench.own_plan import can_load, loaded_by_transformers
from tpplan.bench.subjects import ToySizes, torch_plan, toy_llama

UNSHARDED = "unsharded"
TPPLAN = "tpplan"
SEQUENCE = "tpplan, TP+SP"
TORCH = "parallelize_module"
HUB = "transformers' own"
MODELS = {"transformers": "LlamaForCausalLM of transformers", "plain": "Llama on plain torch.nn"}


def ways_to_shard(
    kind: str, sizes: ToySizes, mesh: DeviceMesh, call: dict[str, Any]
) -> dict[str, Callable[[nn.Module], nn.Module]]:
    """By form, what makes it of the stock model.

    Args:
        kind: a key of `MODELS`; transformers shards only its own.
        sizes: of the model.
        mesh: of one axis, that of the default group.
        call: the keywords of an example call.
    """
    ways: dict[str, Callable[[nn.Module], nn.Module]] = {
        UNSHARDED: lambda model: model,
        TPPLAN: lambda model: parallelize(model, "llama", mesh, call),
        SEQUENCE: lambda model: parallelize(model, "llama-sequence", mesh, call),
        TORCH: lambda model: parallelize_module(model, mesh, torch_plan(sizes.layers)),
    }
    return ways | ({HUB: loaded_by_transformers} if kind == "transformers" and can_load() else {})


def stock_of(kind: str, sizes: ToySizes, mesh: DeviceMesh, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The stock model where the mesh is; each has the same numbers."""
    return toy_llama(kind, sizes).to(mesh.device_type, dtype)


def forms_of(kind: str, sizes: ToySizes, mesh: DeviceMesh, call: dict[str, Any]) -> dict[str, nn.Module]:
    """One model in all its forms, with the same numbers; see `ways_to_shard`."""
    return {name: shard(stock_of(kind, sizes, mesh)) for name, shard in ways_to_shard(kind, sizes, mesh, call).items()}


__all__ = [
    "HUB", "MODELS", "SEQUENCE", "TORCH", "TPPLAN", "UNSHARDED", "forms_of", "stock_of", "ways_to_shard",
]  # fmt: skip
