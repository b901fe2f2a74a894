"""A model's own tensors, and how each takes its part of the stock model's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tpplan.compat.dtensors import local_of
from tpplan.compat.modules import named_modules, own_buffers, own_parameters
from tpplan.initialize.construction import Construction
from tpplan.initialize.findings import OTHER, UNKNOWN, finding
from tpplan.plan import Diagnostic, Severity
from tpplan.runtime.parameters.distribute import device_of_mesh
from tpplan.runtime.parameters.whole_states import part_of


@dataclass(slots=True)
class Target:
    """A tensor of the model.

    Attributes:
        tensor: the tensor.
        device: where its numbers are to lie, if it is on `meta`.
        names: all that it goes by.
        holders: the modules that have it, and what they call it.
        made: what takes its place, once it has numbers; None for a tensor that is written to.
    """

    tensor: Tensor
    device: torch.device
    names: list[str] = field(default_factory=list[str])
    holders: list[tuple[nn.Module, str]] = field(default_factory=list[tuple[nn.Module, str]])
    made: Tensor | None = None

    def take(self, whole: Tensor) -> None:
        """Take this rank's part of the stock model's tensor."""
        held = self.tensor.detach()
        part = part_of(held).of(whole) if isinstance(held, DTensor) else whole
        if local_of(held).is_meta:
            device = device_of_mesh(held.device_mesh) if isinstance(held, DTensor) else self.device
            held = self.made = torch.empty_like(held, device=device)
        local_of(held).copy_(part)

    def put(self) -> None:
        """Give a tensor that was on `meta` to all that hold it."""
        if self.made is None:
            return
        filled = self.made
        if isinstance(self.tensor, nn.Parameter):
            filled = nn.Parameter(filled, requires_grad=self.tensor.requires_grad)
        for module, name in self.holders:
            setattr(module, name, filled)


def targets_of(model: nn.Module, device: torch.device) -> list[Target]:
    """Every distinct parameter and buffer, and plain attributes on `meta`.

    Args:
        model: the model.
        device: for what is on `meta` and on no mesh.
    """
    found: dict[int, Target] = {}
    for prefix, module in named_modules(model, remove_duplicate=False):
        registered = {**own_parameters(module), **own_buffers(module)}
        plain = {leaf: held for leaf, held in vars(module).items() if isinstance(held, Tensor) and held.is_meta}
        for leaf, tensor in (registered | plain).items():
            if tensor is None:
                continue
            target = found.setdefault(id(tensor), Target(tensor, device))
            target.names.append(f"{prefix}.{leaf}" if prefix else leaf)
            target.holders.append((module, leaf))
    return list(found.values())


def misfits(targets: Sequence[Target], stock: Construction) -> list[Diagnostic]:
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


def _undefined(targets: Sequence[Target], stock: Construction) -> list[Diagnostic]:
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


__all__ = ["Target", "misfits", "targets_of"]
