"""Captures: runs of one model on one call, remembered for the compilations of several plans.

in:  a model, a call, and how to capture
out: the trace and the capture, or the error that came of it; a capture doesn't depend on the plan
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from torch import nn

from tpplan.compiler.ir.trace import Trace
from tpplan.compiler.trace.branches import CaptureSettings, record_model
from tpplan.compiler.trace.capture import Capture


class Captures:
    """What was captured. The model, the call, and what is around them must be the same for all that ask."""

    def __init__(self) -> None:
        """Start without any."""
        self._found: dict[CaptureSettings, tuple[Trace, Capture] | Exception] = {}
        self._others: dict[Hashable, Captures] = {}

    def record(
        self, model: nn.Module, arguments: Sequence[Any], keywords: Mapping[str, Any], settings: CaptureSettings
    ) -> tuple[Trace, Capture]:
        """What `record_model` returns, or raises."""
        if settings not in self._found:
            try:
                self._found[settings] = record_model(model, arguments, keywords, settings)
            except Exception as error:
                self._found[settings] = error
        found = self._found[settings]
        if isinstance(found, Exception):
            raise found
        return found

    def where(self, state: Hashable) -> Captures:
        """Those of the model in another state, such as a call leaves it in."""
        return self._others.setdefault(state, Captures())


__all__ = ["Captures"]
