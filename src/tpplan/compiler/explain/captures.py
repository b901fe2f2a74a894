"""Explain a failed capture: what a model raised on the example inputs, where, and what to do about it.

in:  an exception that came out of the model
out: TP110
"""

from __future__ import annotations

import re
import traceback

from tpplan.compiler.ir.trace import Location, quoted
from tpplan.compiler.trace.capture import BodyError, ReplacedModuleError
from tpplan.compiler.trace.counts import Count
from tpplan.compiler.trace.noted import PackedSequencesError, UnfollowedError
from tpplan.compiler.trace.recorder import INTERNAL, DataDependentError
from tpplan.compiler.trace.state import StateError
from tpplan.plan import Diagnostic

# What torch says of an operator that can't run on shapes alone.
_NO_META = ("attempted to run this operator with Meta tensors", "There was no fake impl registered")
_PACKS = "'lengths' argument should be a 1D CPU int64 tensor"
# What torch says where a meta tensor's numbers are wanted.
_NO_NUMBERS = (
    "Cannot copy out of meta tensor", "convert meta device type tensor to numpy", "cannot be called on meta tensors",
)  # fmt: skip


def of_capture(error: BaseException) -> Diagnostic:
    """For a model that raised on the example inputs."""
    cause = error.__cause__ if isinstance(error, BodyError) and error.__cause__ is not None else error
    name = error.frame.module if isinstance(error, BodyError) else ""
    if isinstance(cause, ReplacedModuleError):
        return Diagnostic(
            code="TP110",
            message=f"the model replaces the module `{cause}` while it runs on these inputs",
            help="if it does so in its first call alone, call it once on such inputs before; if in every call, make "
            "the module in `__init__`, or use the new one without setting it on a module",
            notes=(f"in {quoted(cause.module)}, at {cause.location}",) if cause.location is not None else (),
            subject=str(cause),
        )
    if isinstance(cause, PackedSequencesError):
        return Diagnostic(
            code="TP110",
            message=f"in evaluation, {quoted(str(cause))} packs padded sequences into nested tensors, which "
            "can't be sharded",
            help="make it with `nn.TransformerEncoder(..., enable_nested_tensor=False)`, or set `use_nested_tensor` "
            "to False before `parallelize`; what it computes of padding is then as in training, and not 0",
            subject=str(cause) or None,
        )
    if isinstance(cause, StateError):
        return Diagnostic(
            code="TP129",
            message=f"what the model computes depends on how often it has been called: {cause}",
            help="keep such state in a buffer that the forward reads as a tensor, or count outside of the forward",
            subject=cause.name.rpartition(".")[0] or None,
        )
    at, (message, way_out) = _raised_at(cause), _told(cause, quoted(name))
    return Diagnostic(
        code="TP110",
        message=message,
        help=way_out,
        notes=(f"in {quoted(name)}, at {at}",) if at else (),
        subject=name or None,
    )


def _told(cause: BaseException, name: str) -> tuple[str, str]:
    """What a module did that a capture can't follow, or what it raised; and what to do about it."""
    text = str(cause)
    if isinstance(cause, UnfollowedError):
        message = text if text.startswith(("`", "the model")) else f"{name} can't be captured: {text}"
        return message, cause.way_out or "leave that out of the forward, or keep this model whole"
    if isinstance(cause, DataDependentError) and cause.absent:
        return (
            f"{name} reads numbers of `{cause.absent}`, and the example call has none",
            "pass `inputs=` with the whole numbers of a real call, as a processor makes them, and not on `meta`",
        )
    if getattr(cause, "counts", False) or f"type {Count.__name__}" in text:
        return (
            f"{name} reads numbers that each call finds anew",
            "use numbers by which rows are split for nothing else: split by all of them, leave no empty part out, and "
            "compute with them as a tensor",
        )
    if isinstance(cause, DataDependentError) or any(told in text for told in _NO_NUMBERS):
        return (
            f"{name} reads a tensor's values, and a capture has none",
            "compute it with tensor operations instead, such as `torch.where`, or read the values outside of the "
            "forward and pass them as arguments",
        )
    if _PACKS in text:
        return (
            f"{name} packs sequences, as by `pack_padded_sequence`, which a capture can't follow",
            "give the recurrent layer the padded batch, and mask what it makes of padding",
        )
    if any(told in text for told in _NO_META):
        return (
            f"{name} calls {_operator(text)}, which can't run on shapes alone",
            "call it outside of the model, as with a loss; for an operator of your own, register what shapes it makes, "
            "by `torch.library.register_fake`",
        )
    if "HigherOrderOperator" in text:
        return (
            f"{name} calls a higher-order operator such as `torch.cond`, which can't be captured",
            "write the branch or the loop in plain Python, or with `torch.where`",
        )
    first = text.strip().splitlines()
    return (
        f"{name} raised {type(cause).__name__}{': ' + first[0] if first else ''}",
        "check that the model runs on these inputs without sharding, or pass `inputs=` that it accepts",
    )


def _operator(told: str) -> str:
    """The operator that torch's message is of."""
    found = re.search(r"\w+::[\w.]+", told)
    return f"`{found.group()}`" if found else "an operator"


def _raised_at(error: BaseException) -> Location | None:
    """The innermost line of the model's own code that the error came through."""
    own = [
        Location(frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.startswith(INTERNAL)
    ]
    return own[-1] if own else None


__all__ = ["of_capture"]
