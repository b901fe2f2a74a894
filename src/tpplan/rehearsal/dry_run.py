"""Dry run: a program runs once on fake tensors of the device that it is for, which needs no such device.

in:  a stock model, its program, the example call and a device such as `cuda`
out: a TP136 for what the sharded model can't do there; a note where that can't be told here

A capture tells bodies the device, and runs on `meta`. Here torch itself, kernels of libraries and checks in either meet
tensors of that device, with a rank's shapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tpplan.ambience import ambience
from tpplan.compat.dtensors import OwnTensor
from tpplan.compat.dynamo import nothing_compiled
from tpplan.compat.fakes import NEEDS_NUMBERS, fake_tensors
from tpplan.compat.modes import TorchDispatchMode
from tpplan.compat.trees import flattened_tree, rebuilt_tree
from tpplan.compiler.ir.arrivals import call_on_rank
from tpplan.compiler.ir.pytree import with_tensors
from tpplan.compiler.pipeline import Compiled
from tpplan.compiler.trace.signatures import argument_names
from tpplan.compiler.trace.skeleton import make_skeleton
from tpplan.compiler.trace.surroundings import Surroundings
from tpplan.plan import CompileError, Diagnostic, Severity
from tpplan.rehearsal.rehearse import (
    cannot_run,
    differentiate,
    kinds_of_ranks,
    like_on,
    lowered_on_shapes,
    naming_failures,
)
from tpplan.runtime.parameters.sharded_operations import is_final


@ambience()
def dry_run(
    model: nn.Module,
    compiled: Compiled,
    arguments: Sequence[Any],
    keywords: Mapping[str, Any],
    device: torch.device,
) -> list[Diagnostic]:
    """Run a program on fake tensors, once for each kind of rank: forward, and backward where there is such a device.

    Without one, autograd has no stream to run on.

    Args:
        model: the stock model; not changed.
        compiled: the program.
        arguments, keywords: the call that it was compiled for.
        device: which the tensors say that they lie on.

    Returns:
        A note, if the run couldn't go to its end here.

    Raises:
        CompileError: TP136, if the model can't run there.
    """
    if not is_built_for(device):  # autograd ends the process there
        return [
            _note(f"this build of torch has no `{device.type}`", "run it where a build has, which takes no GPU", device)
        ]
    example = (arguments, keywords, argument_names(type(model).forward))
    for rank in kinds_of_ranks(compiled):
        with fake_tensors(), nothing_compiled():
            skeleton, _ = lowered_on_shapes(model, compiled.program, rank, device)
            try:
                own = call_on_rank(compiled.program, rank, *example)
                _run(skeleton, (*own, example[2]), device)
            except NEEDS_NUMBERS:
                return [_note("it reads the numbers of a tensor", "nothing is wrong; run it on such a device", device)]
            except Exception as error:
                if is_final(error):
                    raise
                finding = _of_stock(model, compiled, example, device) or cannot_run(error, rank)
                raise CompileError([finding]) from error
    return []


def is_built_for(device: torch.device) -> bool:
    """Whether this build of torch knows such devices, whether or not there is one."""
    accelerator = torch.accelerator.current_accelerator(check_available=False)
    return device.type == "cpu" or (accelerator is not None and accelerator.type == device.type)


def has_device(device: torch.device) -> bool:
    """Whether there is such a device."""
    return is_built_for(device) and (device.type == "cpu" or torch.accelerator.is_available())


_Example = tuple[Sequence[Any], Mapping[str, Any], Sequence[str]]


def _run(model: nn.Module, example: _Example, device: torch.device) -> None:
    around = Surroundings(model)
    try:
        with naming_failures(model), _FromMeta(device):
            call = with_tensors(*example, like_on(device))
            result = model(*call[0], **call[1])
            if has_device(device):
                differentiate(result)
    finally:
        around.restore()


def _of_stock(model: nn.Module, compiled: Compiled, example: _Example, device: torch.device) -> Diagnostic | None:
    """The finding for a model that can't run there unsharded either."""
    skeleton = make_skeleton(model).model.train(compiled.program.training)
    try:
        _run(skeleton, example, device)
    except Exception as error:
        text = str(error).strip().splitlines()
        return Diagnostic(
            code="TP136",
            message=f"the unsharded model can't run on `{device.type}` either: {type(error).__name__}"
            f"{': ' + text[0] if text else ''}",
            help="let the line make what it needs on the device of the tensors beside it: `device=x.device`",
            notes=cannot_run(error, 0).notes,
        )
    return None


class _FromMeta(TorchDispatchMode):
    """Tensors that modules hold beside parameters and buffers are on `meta` in a skeleton: they lie with the others."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._made: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        leaves, form = flattened_tree((args, kwargs or {}))
        args, keywords = rebuilt_tree([self._there(leaf) for leaf in leaves], form)
        return func(*args, **keywords)

    def _there(self, held: Any) -> Any:
        if not isinstance(held, Tensor) or isinstance(held, OwnTensor) or held.device.type != "meta":
            return held
        if id(held) not in self._made:
            made = torch.empty_strided(held.shape, held.stride(), dtype=held.dtype, device=self._device)
            self._made[id(held)] = (held, made)
        return self._made[id(held)][1]


def _note(why: str, way_out: str, device: torch.device) -> Diagnostic:
    """What the run can't tell here."""
    return Diagnostic(
        code="TP136",
        message=f"the sharded model wasn't run to its end on fake `{device.type}` tensors: {why}",
        help=way_out,
        severity=Severity.NOTE,
    )


__all__ = ["dry_run"]
