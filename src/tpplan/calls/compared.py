"""Compared: what of a call must be the same on all ranks of an axis, in words; see `runtime/lockstep.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tpplan.calls.decision import Call
from tpplan.calls.describe import described
from tpplan.compat import random_state
from tpplan.compiler.ir.program import Program, dtype_name
from tpplan.compiler.ir.pytree import tensors_of
from tpplan.runtime.placements import checksum


def facts_of(call: Call, names: Sequence[str], program: Program) -> list[tuple[str, str]]:
    """The arguments of a call and the state around it, each with its name."""
    found = [(f"`{name}`", text) for name, text in _flags(call.arguments, call.keywords, names)]
    for path, tensor in tensors_of(call.arguments, call.keywords, names):
        shown = f"{dtype_name(tensor.dtype)} on {tensor.device.type}"
        if path not in call.parts:
            shown += f" of shape {tuple(tensor.shape)} with checksum {checksum(tensor):08x}"
        grad = ", which requires grad" if tensor.requires_grad else ""
        found.append((f"`{'.'.join(map(str, path))}`", shown + grad))
    found.append(("the recording of gradients", _gradients()))
    found.append(("autocast", _autocast()))
    found.append(("the default dtype", dtype_name(torch.get_default_dtype())))
    if call.training and any(module.random for module in program.modules):
        found.append(("the state of the random generator", f"{checksum(_generator(program.device)):08x}"))
    return found


def _flags(arguments: Sequence[Any], keywords: Mapping[str, Any], names: Sequence[str]) -> list[tuple[str, str]]:
    named = {names[i] if i < len(names) else f"*{i}": held for i, held in enumerate(arguments)} | dict(keywords)
    texts = described(arguments, keywords, names)
    return sorted((name, text) for name, text in texts.items() if not isinstance(named[name], Tensor))


def _gradients() -> str:
    if torch.is_inference_mode_enabled():
        return "off, in inference mode"
    return "on" if torch.is_grad_enabled() else "off"


def _autocast() -> str:
    kinds = ("cpu", "cuda")
    return (
        ", ".join(f"{dtype_name(torch.get_autocast_dtype(k))} on {k}" for k in kinds if torch.is_autocast_enabled(k))
        or "off"
    )


def _generator(device: str) -> Tensor:
    return torch.cuda.get_rng_state() if device.startswith("cuda") else random_state()


__all__ = ["facts_of"]
