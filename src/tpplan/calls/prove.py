"""Prove: compile a call, and rehearse the program that came out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tpplan.calls.rehearse import rehearse
from tpplan.compiler.ir.layout import Layout
from tpplan.compiler.ir.trace import Location, Path
from tpplan.compiler.pipeline import Compiled, compile_call
from tpplan.plan import Plan


def prove(
    model: nn.Module,
    plan: Plan,
    size: int,
    arguments: Sequence[Any],
    keywords: Mapping[str, Any],
    training: bool | None = None,
    *,
    partly: bool = False,
    parts: Mapping[Path, Layout] | None = None,
    taken: frozenset[Location] | None = None,
    device: torch.device | None = None,
) -> Compiled:
    """A program that passed the check and a rehearsal; see `compile_call` for the arguments.

    Raises:
        CompileError: plan and model don't fit together.
        InternalError: what was compiled can't run, or communicates otherwise than predicted.
    """
    compiled = compile_call(model, plan, size, arguments, keywords, training, partly, parts, taken, device)
    rehearse(model, compiled, arguments, keywords, parts or {})
    return compiled


__all__ = ["prove"]
