"""A model's own tensors against the stock model's, and how each takes its part of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tpplan.checkpoint.wanted import Wanted
from tpplan.compat.dtensors import local_of
from tpplan.initialize.construction import Construction
from tpplan.initialize.findings import OTHER, UNKNOWN, finding
from tpplan.plan import Diagnostic, Severity
from tpplan.runtime.parameters.whole_states import part_of


def taken(target: Wanted, whole: Tensor, device: torch.device) -> Tensor:
    """This rank's part of the stock model's tensor, in the memory of the model's own.

    Args:
        target: a tensor of the model.
        whole: the stock model's.
        device: for a tensor that is on `meta` and on no mesh.
    """
    filled = target.with_memory(device)
    local_of(filled).copy_(part_of(filled).of(whole) if isinstance(filled, DTensor) else whole)
    return filled


def misfits(targets: Sequence[Wanted], stock: Construction) -> list[Diagnostic]:
    """Why the stock model that was recorded isn't the one that the model was made of; and what it leaves undefined."""
    names = {name for target in targets for name in target.names}
    wrong = [f"`{name}` is in the model alone" for name in sorted(names - stock.tensors.keys())]
    ours = {name for name in stock.tensors if name not in names and name in stock.registered}
    wrong += [f"`{name}` is in the stock model alone" for name in sorted(ours)]
    for target in targets:
        known = [name for name in target.names if name in stock.tensors]
        wrong += [text for name in known if (text := _difference(name, target.tensor, stock))]
        if len({stock.ties[name] for name in known}) > 1:
            wrong.append(f"{', '.join(f'`{name}`' for name in known)} are one tensor in the model, and several there")
    if wrong:
        return [
            finding(
                OTHER,
                f"the stock model, built anew, is another one than the model, in {len(wrong)} places",
                "build the same: with the arguments, dtype and changes that the model had before `parallelize`, "
                "tpplan.init_weights(model, build=lambda: Model(…))",
                *wrong,
            )
        ]
    return _undefined(targets, stock)


def _difference(name: str, tensor: Tensor, stock: Construction) -> str:
    view = stock.tensors[name]
    if tuple(tensor.shape) != view.shape:
        return f"`{name}` has shape {list(tensor.shape)}, and {list(view.shape)} in the stock model"
    if tensor.dtype != view.dtype:
        return f"`{name}` is {_plain(tensor.dtype)}, and {_plain(view.dtype)} in the stock model"
    return ""


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _undefined(targets: Sequence[Wanted], stock: Construction) -> list[Diagnostic]:
    """What the stock model never writes to."""
    names = [
        target.names[0]
        for target in targets
        if (view := stock.tensors[target.names[0]]).storage not in stock.written
        and stock.storages[view.storage].constant is None
        and target.tensor.numel()
    ]
    if not names:
        return []
    return [
        finding(
            UNKNOWN,
            f"the stock model leaves {len(names)} tensors without numbers; they are zeros here",
            "initialise them, or load them from a checkpoint",
            *(f"`{name}`" for name in names),
            severity=Severity.WARNING,
        )
    ]


__all__ = ["misfits", "taken"]
