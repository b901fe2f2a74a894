"""Explain a failed capture: what a model raised on the example inputs, where, and what to do about it.

in:  an exception that came out of the model
out: TP110; of a later call, the model's own error, which the unsharded model raises as well
"""

from __future__ import annotations

import math
import re
import traceback
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tpplan.compat.modes import without_dispatch_modes, without_function_modes
from tpplan.compiler.ir.locations import INTERNAL, PACKAGE, Location
from tpplan.compiler.ir.pytree import tensors_in, with_items
from tpplan.compiler.ir.trace import quoted
from tpplan.compiler.trace.capture import CALLING, BodyError, ReplacedModuleError
from tpplan.compiler.trace.counts import RowCount
from tpplan.compiler.trace.left_state import LeftStateError
from tpplan.compiler.trace.recorder import REFUSED, Recorder
from tpplan.compiler.trace.unfollowed import DataDependentError, PackedSequencesError, UnfollowedError
from tpplan.plan import CompileError, Diagnostic, Severity, TpplanError

# What torch says of an operator that can't run on shapes alone.
_NO_META = ("attempted to run this operator with Meta tensors", "There was no fake impl registered")
_COUNTS = (RowCount.__name__, "numpy.object_")
_PACKS = "'lengths' argument should be a 1D CPU int64 tensor"
# What torch says where a meta tensor's numbers are wanted.
_NO_NUMBERS = (
    "Cannot copy out of meta tensor", "convert meta device type tensor to numpy", "cannot be called on meta tensors",
)  # fmt: skip
# What torch says where a device itself is asked that this machine hasn't: a dry run has tensors of it alone.
_NO_DEVICE = re.compile(
    r"not compiled with \w+ enabled|Cannot get \w+ generator without|Found no NVIDIA driver|No \w+ GPUs are available"
)
_SHOWN = "note: the model raised this as it was shown the call on shapes alone, before any rank ran it"
_FEW = 1 << 22
_SHOWN_NAMES = 3


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
    if isinstance(cause, LeftStateError):
        return Diagnostic(
            code="TP129",
            message=f"what the model computes depends on how often it has been called: {cause}",
            help="keep such state in a buffer that the forward reads as a tensor, or count outside of the forward",
            subject=cause.name.rpartition(".")[0] or None,
        )
    at, (message, way_out) = _raised_at(cause), _told(cause, quoted(name)) or _raised(cause, quoted(name))
    written = error.written if isinstance(error, BodyError) else ()
    names = ", ".join(f"`{held}`" for held in written[:_SHOWN_NAMES])
    notes = (f"in {quoted(name)}, at {at}",) if at else ()
    return Diagnostic(
        code="TP110",
        message=message,
        help=way_out,
        notes=(*notes, f"before that it had changed {names}, which a proof puts back") if written else notes,
        subject=name or None,
    )


def of_training(error: BaseException) -> Diagnostic:
    """For a model that is in training, and could only be captured in evaluation: TP153."""
    found = of_capture(error)
    message = f"this program is for evaluation: in training, {found.message}"
    return replace(found, code="TP153", severity=Severity.WARNING, message=message)


def _told(cause: BaseException, name: str) -> tuple[str, str] | None:
    """What a module did that a capture can't follow, and what to do about it; None if the error is the module's own."""
    text = str(cause)
    if isinstance(cause, UnfollowedError):
        message = text if text.startswith(("`", "the model")) else f"{name} can't be captured: {text}"
        return message, cause.way_out or "leave that out of the forward, or keep this model whole"
    if isinstance(cause, DataDependentError) and cause.absent:
        return (
            f"{name} reads numbers of `{cause.absent}`, and the example call has none",
            "pass `inputs=` with the whole numbers of a real call, as a processor makes them, and not on `meta`",
        )
    if isinstance(cause, DataDependentError) and cause.drawn:
        return (
            f"{name} turns a random number of torch's into one of Python's, by which it may take any way",
            "compare the tensor itself, as by `if torch.rand(1) < self.p:` without `.item()`, or draw by Python's "
            "`random`",
        )
    if getattr(cause, "counts", False) or any(held in text for held in _COUNTS):
        return (
            f"{name} reads numbers that each call finds anew",
            "use numbers by which rows are split for nothing else: split or slice by all of them in their order, ask "
            "of one alone whether it is 0, and compute with them as a tensor",
        )
    if isinstance(cause, DataDependentError) or any(told in text for told in _NO_NUMBERS):
        return (
            f"{name} reads a tensor's values, and a capture has none",
            "compute it with tensor operations instead, such as `torch.where`, or read the values outside of the "
            "forward and pass them as arguments; of a function that does so inside, say how it works on parts: "
            "`tpplan.operator(rule)(function)`",
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
            "by `torch.library.register_fake`; of a function that calls it, say how that works on parts: "
            "`tpplan.operator(rule)(function)`",
        )
    if "HigherOrderOperator" in text:
        return (
            f"{name} calls a higher-order operator such as `torch.cond`, which can't be captured",
            "write the branch or the loop in plain Python, or with `torch.where`",
        )
    return None


def _raised(cause: BaseException, name: str) -> tuple[str, str]:
    """What a module itself raised."""
    first = str(cause).strip().splitlines()
    way_out = "check that the model runs on these inputs without sharding, or pass `inputs=` that it accepts"
    if first and _NO_DEVICE.search(first[0]):
        way_out = (
            "it asks a device that this machine, or this build of torch, hasn't, and a dry run has only tensors that "
        )
        way_out += "say so: compile it where there is one, or ask in `__init__`, and keep the answer"
    elif first and re.search(r"\bCPU\b", first[0]):
        way_out += "; if it is for a GPU, check it as there: `tpplan validate … --device cuda`, or "
        way_out += '`compile_plan(…, device="cuda")`'
    return f"{name} raised {type(cause).__name__}{': ' + first[0] if first else ''}", way_out


def models_own(error: BaseException | None) -> Exception | None:
    """What the model itself raised, as it does unsharded, where a compilation failed for that."""
    while error is not None and not isinstance(error, CompileError):
        error = error.__cause__
    cause = None if error is None else error.__cause__
    if isinstance(cause, BodyError) and cause.written:
        return None  # whoever catches it would go on with another state than unsharded
    cause = cause.__cause__ if isinstance(cause, BodyError) else cause
    if not isinstance(cause, Exception) or isinstance(cause, (ReplacedModuleError, LeftStateError, TpplanError)):
        return None
    frames = [frame for frame, _ in traceback.walk_tb(cause.__traceback__)]
    asked = next((frame for frame in reversed(frames) if frame.f_code is Recorder.__torch_dispatch__.__code__), None)
    last = frames[-1].f_code
    ours = asked is None and last.co_filename.startswith(PACKAGE) and last is not CALLING
    if ours or _told(cause, "") is not None:
        return None
    told = _by_numbers(cause)
    told.add_note(_SHOWN)
    return told.with_traceback(cause.__traceback__)


def _by_numbers(error: Exception) -> Exception:
    """What an operation raises for numbers: of shapes alone, torch complains in other words here and there."""
    func, args, keywords = vars(error).get(REFUSED, (None, (), {}))
    held = args, keywords
    if func is None or sum(math.prod(tensor.shape) for _, tensor in tensors_in(held)) > _FEW:
        return error
    try:
        with without_dispatch_modes(), without_function_modes(), torch.no_grad():
            args, keywords = with_items(held, _with_numbers)
            func(*args, **keywords)
    except Exception as told:
        return told if type(told) is type(error) else error
    return error


def _with_numbers(held: Any) -> Any:
    if isinstance(held, Tensor):
        return torch.zeros(held.shape, dtype=held.dtype)
    return torch.device("cpu") if isinstance(held, torch.device) else held


def _operator(told: str) -> str:
    """The operator that torch's message is of."""
    found = re.search(r"\w+::[\w.]+", told)
    return f"`{found.group()}`" if found else "an operator"


def _raised_at(error: BaseException) -> Location | None:
    """The innermost line of the model's own code that the error came through."""
    own = [
        Location(frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.startswith((*INTERNAL, "<frozen"))
    ]
    return own[-1] if own else None


__all__ = ["models_own", "of_capture", "of_training"]
