"""Prove: compile an example call, and rehearse the program that came out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tpplan.calls.rehearse import rehearse
from tpplan.compiler.pipeline import Compiled, compile_call
from tpplan.plan import Plan


def prove(
    model: nn.Module,
    plan: Plan,
    size: int,
    arguments: Sequence[Any],
    keywords: Mapping[str, Any],
    device: torch.device | None = None,
) -> Compiled:
    """A program that passed the check and a rehearsal; see `compile_call` for the arguments.

    Raises:
        CompileError: plan and model don't fit together.
        InternalError: the backward of what was compiled can't run.
    """
    compiled = compile_call(model, plan, size, arguments, keywords, device=device)
    rehearse(model, compiled, arguments, keywords)
    return compiled


__all__ = ["prove"]
