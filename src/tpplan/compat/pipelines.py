# pyright: reportPrivateUsage=false
"""torch's pipelining."""

from __future__ import annotations

import sys

_SHAPES_ALONE = frozenset(("_forward_metadata_inference", "_shape_inference"))  # since torch 2.13, and before


def wants_shapes_alone() -> bool:
    """Whether torch's pipelining calls a stage on memory that holds anything, to learn the shapes of its results.

    For every torch.
    """
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name in _SHAPES_ALONE and frame.f_globals.get("__name__") == "torch.distributed.pipelining.stage":
            return True
        frame = frame.f_back
    return False
