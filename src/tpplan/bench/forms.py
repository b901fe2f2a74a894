"""The forms of a toy Llama that are held against each other: unsharded, by tpplan, by torch and by transformers."""

from __future__ import annotations

from torch import Tensor, nn
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


def forms_of(kind: str, sizes: ToySizes, mesh: DeviceMesh, call: dict[str, Tensor]) -> dict[str, nn.Module]:
    """One model in all its forms, with the same numbers.

    Args:
        kind: a key of `MODELS`; transformers shards only its own.
        sizes: of the model.
        mesh: of one axis, that of the default group.
        call: the keywords of an example call.
    """
    forms: dict[str, nn.Module] = {
        UNSHARDED: toy_llama(kind, sizes),
        TPPLAN: parallelize(toy_llama(kind, sizes), "llama", mesh, call),
        SEQUENCE: parallelize(toy_llama(kind, sizes), "llama-sequence", mesh, call),
        TORCH: parallelize_module(toy_llama(kind, sizes), mesh, torch_plan(sizes.layers)),
    }
    if kind == "transformers" and can_load():
        forms[HUB] = loaded_by_transformers(toy_llama(kind, sizes))
    return forms


__all__ = ["HUB", "MODELS", "SEQUENCE", "TORCH", "TPPLAN", "UNSHARDED", "forms_of"]
