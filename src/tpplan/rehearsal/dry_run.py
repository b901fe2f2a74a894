"""Dry run: a program runs once on fake tensors of the device that it is for, which needs no such device.

in:  a stock model, its program, the example call and a device such as `cuda`
out: a TP136 for what the sharded model can't do there; a note where that can't be told here

A capture tells bodies the device, and runs on `meta`. Here torch itself, kernels of libraries and checks in either meet
tensors of that device, with a rank's shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tpplan.ambience import ambience
from tpplan.compat import NEEDS_NUMBERS, fake_tensors, has_device, is_built_for, nothing_compiled
from tpplan.compiler.ir.pytree import tensors_of, with_tensors
from tpplan.compiler.ir.trace import Path
from tpplan.compiler.pipeline import Compiled
from tpplan.compiler.trace.capture import argument_names
from tpplan.compiler.trace.surroundings import Surroundings
from tpplan.plan import CompileError, Diagnostic, Severity, TpplanError
from tpplan.rehearsal.rehearse import cannot_run, lowered_on_shapes


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
        CompileError: TP136, if the sharded model can't run there.
    """
    if not is_built_for(device):  # autograd ends the process there
        return [_note(f"this build of torch has no `{device.type}`", "run it where a build has, which takes no device",
                      device)]  # fmt: skip
    names = argument_names(type(model).forward)
    ranks = {id(compiled.streams[rank]): rank for rank in sorted(compiled.streams, reverse=True)}

    def on_device(_: Path, tensor: Tensor) -> Tensor:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        return made.requires_grad_().clone() if tensor.requires_grad else made

    for rank in sorted(ranks.values()):
        with fake_tensors(), nothing_compiled():
            skeleton, _ = lowered_on_shapes(model, compiled.program, rank, device)
            around = Surroundings(skeleton)
            try:
                call = with_tensors(arguments, keywords, names, on_device)
                result = skeleton(*call[0], **call[1])
                if has_device(device):
                    outputs = [t for _, t in tensors_of((result,), {}, ("result",)) if t.requires_grad]
                    torch.autograd.backward(outputs, [torch.empty_like(t) for t in outputs])
            except TpplanError:
                raise
            except NEEDS_NUMBERS:
                return [_note("it reads the numbers of a tensor", "nothing is wrong; run it on such a device", device)]
            except Exception as error:
                raise CompileError([cannot_run(error, rank, skeleton)]) from error
            finally:
                around.restore()
    return []


def _note(why: str, way_out: str, device: torch.device) -> Diagnostic:
    """What the run can't tell here."""
    return Diagnostic(
        code="TP136",
        message=f"the sharded model wasn't run to its end on fake `{device.type}` tensors: {why}",
        help=way_out,
        severity=Severity.NOTE,
    )


__all__ = ["dry_run"]
