"""Raising: branches on data of which one side is an error of the model's own.

in:  what a capture raised, and the branch on data that it met last
out: the branch, if the error may come of the side that was taken; whether every call that takes it raises so

    if n_tokens != n_features: raise ValueError("they do not match")   ->   the condition's other side may go on

A capture has no numbers, and takes for granted that a call's are what the model wants: it goes by the side that doesn't
raise. A call whose numbers are others raises what the unsharded model raises.
"""

from __future__ import annotations

import dis
import functools
import traceback
from pathlib import Path as FilePath
from types import CodeType

from tpplan.compiler.ir.trace import Location
from tpplan.compiler.trace.recorder import Recorder

_OWN = str(FilePath(__file__).parents[2])
_FEW = 4
_DISPATCHES = frozenset(("__torch_dispatch__", "__torch_function__"))


def tested_before(error: BaseException, recorder: Recorder, jumps: int = _FEW) -> Location | None:
    """The branch on data that the model raised an error of its own for; None if it met none, or torch raised.

    Args:
        error: what a body raised.
        recorder: of that run.
        jumps: how often Python may branch between the test and the error, the test's own jump included.
    """
    test, frames = recorder.last_test, list(traceback.walk_tb(error.__traceback__))
    if test is None or not frames:
        return None
    code, line = frames[-1][0].f_code, frames[-1][1]
    names = {frame.f_code.co_name for frame, _ in frames}
    if code.co_filename.startswith(_OWN) or not names.isdisjoint(_DISPATCHES) or line not in _raising_lines(code):
        return None
    around = ((frame.f_code, at) for frame, at in frames if frame.f_code.co_filename == test.file)
    return test if any(_is_decided(held, test.line, at, jumps) for held, at in around) else None


def surely_raises(error: BaseException, recorder: Recorder) -> Location | None:
    """As `tested_before`, where each call that takes this side raises: nothing else is decided before the error."""
    made_up = bool(recorder.chosen)  # how many entries were found, which the model may look at
    return None if made_up else tested_before(error, recorder, 1)


@functools.cache
def _raising_lines(code: CodeType) -> frozenset[int | None]:
    return frozenset(_line(step) for step in dis.get_instructions(code) if step.opname == "RAISE_VARARGS")


def _is_decided(code: CodeType, test: int, line: int, jumps: int) -> bool:
    """Whether code has both lines, and so many jumps between them at most."""
    between = [step for step in dis.get_instructions(code) if test <= (_line(step) or 0) <= line]
    held = [step for step in between if "_IF_" in step.opname or step.opname == "FOR_ITER"]
    return any(_line(step) == test for step in between) and len(held) <= jumps


def _line(step: dis.Instruction) -> int | None:
    return None if step.positions is None else step.positions.lineno


__all__ = ["surely_raises", "tested_before"]
