# pyright: reportPrivateUsage=false
"""torch's pipelining."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any

_STAGES, _SCHEDULES = "torch.distributed.pipelining.stage", "torch.distributed.pipelining.schedules"
_SHAPES_ALONE = frozenset(("_forward_metadata_inference", "_shape_inference"))  # since torch 2.13, and before
_APART = frozenset(("BACKWARD_INPUT", "BACKWARD_WEIGHT"))
_known: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()  # by schedule


def wants_shapes_alone() -> bool:
    """Whether torch's pipelining calls a stage on memory that holds anything, to learn the shapes of its results.

    For every torch.
    """
    return any(frame.f_code.co_name in _SHAPES_ALONE for frame in _callers(_STAGES))


def splits_backward() -> bool:
    """Whether a schedule calls a stage that computes the gradients of inputs and those of parameters apart.

    It then takes each parameter's gradient from the point where its path through the graph meets that of the inputs, as
    zero-bubble schedules do. Nothing tells a stage that it is called by one.

    For every torch.
    """
    schedules = (frame.f_locals.get("self") for frame in _callers(_SCHEDULES))
    schedule = next((held for held in schedules if hasattr(held, "pipeline_order")), None)
    if schedule is None:
        return False
    if schedule not in _known:
        names = ("pipeline_order", "pipeline_order_with_comms")
        orders: list[dict[Any, list[Any]]] = [getattr(schedule, name, None) or {} for name in names]
        steps = [step for order in orders for actions in order.values() for step in actions if step is not None]
        steps += [inner for step in steps for inner in getattr(step, "sub_actions", None) or ()]
        _known[schedule] = any(step.computation_type.name in _APART for step in steps)
    return _known[schedule]


def _callers(module: str) -> Iterator[FrameType]:
    """The frames of a module's code that lead here."""
    frame = sys._getframe(2) if module in sys.modules else None
    while frame is not None:
        if frame.f_globals.get("__name__") == module:
            yield frame
        frame = frame.f_back
