"""Buffers that no checkpoint has, such as rotary frequencies: on `meta` they are made as the stock model makes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tpplan.checkpoint.files import finding
from tpplan.compat.modules import named_modules, own_buffers, own_parameters, transient_buffers
from tpplan.plan import Diagnostic, Severity
from tpplan.runtime.modules.writes import WRITES


@dataclass(frozen=True, slots=True)
class Made:
    """A buffer's numbers, with the module that has it and what that calls it."""

    module: nn.Module
    leaf: str
    numbers: Tensor


def make_buffers(model: nn.Module, device: torch.device, strict: bool) -> tuple[list[Made], list[Diagnostic]]:
    """The numbers of all buffers on `meta` that aren't in the model's state_dict; the model isn't changed.

    The stock model is asked by `_init_weights`, as transformers does for what isn't in a checkpoint. It counts where it
    writes every number, whatever was there before.

    Args:
        model: the model.
        device: for the numbers.
        strict: whether a buffer that can't be made is an error.
    """
    made: list[Made] = []
    without: list[str] = []
    for prefix, module, initialise in _with_initialisers(model):
        buffers = own_buffers(module)
        wanted = [n for n in transient_buffers(module) if (held := buffers.get(n)) is not None and held.is_meta]
        if not wanted:
            continue
        numbers = _numbers(module, initialise, device) if initialise is not None else {}
        made += [Made(module, leaf, numbers[leaf]) for leaf in sorted(wanted) if leaf in numbers]
        without += [f"{prefix}.{leaf}" if prefix else leaf for leaf in sorted(wanted) if leaf not in numbers]
    return made, _without_numbers(without, strict)


def _with_initialisers(model: nn.Module) -> Iterator[tuple[str, nn.Module, Callable[[nn.Module], Any] | None]]:
    """Every module, with the `_init_weights` of the nearest one around it."""
    found: dict[str, Callable[[nn.Module], Any] | None] = {}
    for prefix, module in named_modules(model):
        own = getattr(type(module), "_init_weights", None)
        around = found.get(prefix.rpartition(".")[0]) if prefix else None
        found[prefix] = own.__get__(module) if own is not None else around
        yield prefix, module, found[prefix]


def _numbers(module: nn.Module, initialise: Callable[[nn.Module], Any], device: torch.device) -> dict[str, Tensor]:
    """The buffers that `initialise` writes, whether it finds zeros or ones in them."""
    tries: list[dict[str, Tensor]] = []
    for fill in (0, 1):
        buffers = {
            name: torch.full_like(held, fill, device=device)
            for name, held in own_buffers(module).items()
            if held is not None
        }
        try:
            with torch.no_grad(), torch.random.fork_rng():
                initialise(_alone(module, buffers))
        except Exception:  # a user's code, whatever it may raise: the buffers can't be made by it
            return {}
        tries.append(buffers)
    zeros, ones = tries
    return {name: held for name, held in zeros.items() if torch.equal(held, ones[name])}


def _alone(module: nn.Module, buffers: dict[str, Tensor]) -> nn.Module:
    """A module of the same class and attributes with these buffers, without children, its parameters on `meta`."""
    parameters = {
        name: None if held is None else nn.Parameter(torch.empty(held.shape, dtype=held.dtype, device="meta"), False)
        for name, held in own_parameters(module).items()
    }
    alone: nn.Module = type(module).__new__(type(module))
    own = {name: held for name, held in vars(module).items() if name != WRITES}
    vars(alone).update(own | {"_parameters": parameters, "_buffers": buffers, "_modules": {}})
    return alone


def _without_numbers(names: Sequence[str], strict: bool) -> list[Diagnostic]:
    if not names:
        return []
    return [
        finding(
            f"{len(names)} buffers are on `meta`, are in no checkpoint (`persistent=False`), and the model has no "
            "`_init_weights` that makes them",
            "build the module that has them outside of `torch.device('meta')`, or set them before the load"
            + ("; `strict=False` leaves them as they are" if strict else ""),
            *(f"`{name}`" for name in names[:20]),
            severity=Severity.ERROR if strict else Severity.WARNING,
        )
    ]


__all__ = ["Made", "make_buffers"]
