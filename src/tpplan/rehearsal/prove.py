"""Prove: compile an example call, and rehearse the program that came out."""

from __future__ import annotations

from tpplan.ambience import ambience
from tpplan.compiler.pipeline import Compiled, compile_call
from tpplan.compiler.request import Request
from tpplan.compiler.trace.capture import without_collection
from tpplan.compiler.trace.surroundings import same_files
from tpplan.rehearsal.rehearse import rehearse


@ambience()
@same_files()
def prove(request: Request) -> Compiled:
    """A program that passed the check and a rehearsal.

    Raises:
        CompileError: plan and model don't fit together.
        InternalError: the backward of what was compiled can't run.
    """
    with without_collection():
        compiled = compile_call(request)
        rehearse(request.model, compiled, request.arguments, request.keywords, request.parts)
    return compiled


__all__ = ["prove"]
