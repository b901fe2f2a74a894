"""Assumed: rules of operators that couldn't be tried where a program was compiled are tried at the first call.

in:  the trials that are open, and the device of a call
out: nothing; on every rank a TP151 if a rule isn't true, before a number of the call is used

A kernel for a GPU that a compilation didn't have runs here. What can't run on this device either stays assumed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from tpplan.ambience import ambience
from tpplan.compiler.check.tried_rules import Trial
from tpplan.ops.declared import OperatorRuleError
from tpplan.ops.trial import DRAWS


class Assumed:
    """The trials of one model that are open, each with the kinds of devices on which it couldn't run."""

    def __init__(self, trials: Iterable[Trial]) -> None:
        """Start with those of the example."""
        self._open: dict[Trial, set[str]] = {trial: set() for trial in trials}

    def add(self, trials: Iterable[Trial]) -> None:
        """Let a further proof lean on rules."""
        self._open |= {trial: set[str]() for trial in trials}

    def is_open(self, device: torch.device) -> bool:
        """Whether something is to be tried on a device; all ranks say the same."""
        return device.type != "meta" and any(device.type not in known for known in self._open.values())

    def settle(self, device: torch.device, exchange: Callable[[str, Any], list[Any]]) -> None:
        """Try what is open.

        Args:
            device: where.
            exchange: tells what each rank found; all come here.

        Raises:
            OperatorRuleError: TP151, on every rank, for a rule that isn't true on one of them.
        """
        error: OperatorRuleError | None = None
        failed: list[str] = []
        for trial in self._open:
            try:
                with ambience():
                    failed.append(trial(device).removeprefix(DRAWS))
            except OperatorRuleError as raised:
                error = raised
                break
        found = exchange("the ranks' trial of operators' rules", ("" if error is None else str(error), failed))
        if error is not None:
            raise error
        other = next(((rank, told) for rank, (told, _) in enumerate(found) if told), None)
        if other is not None:
            message = f"rank {other[0]} of the axis found that a rule isn't true\n{other[1]}"
            raise OperatorRuleError.of("TP151", message)
        for trial, *kept in zip([*self._open], *(own for _, own in found), strict=True):
            self._open[trial].add(device.type)
            if not any(kept):
                del self._open[trial]


__all__ = ["Assumed"]
