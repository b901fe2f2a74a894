"""Request: the program that is wanted.

in:  a model, a plan, an example call
out: `Request`, which a compilation takes
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tpplan.compiler.bind.wrappers import Members
from tpplan.compiler.ir.freedoms import Freedoms
from tpplan.compiler.ir.layout import Layout
from tpplan.compiler.ir.locations import Location
from tpplan.compiler.ir.observations import CaptureSettings, FoundCount
from tpplan.compiler.ir.program import LocalAttribute
from tpplan.compiler.ir.trace import Path
from tpplan.compiler.trace.branches import Captures
from tpplan.compiler.trace.device import device_of
from tpplan.plan import Plan


@dataclass(frozen=True, slots=True)
class Request:
    """The program that is wanted: `plan` for `model` on an axis of `size` ranks.

    Attributes:
        model: the stock model, materialised or on `meta`; not changed.
        plan: the plan.
        size: number of ranks.
        arguments, keywords: an example call; only the tensors' geometry counts.
        training: the mode to capture in; None captures in training mode, whose random numbers need care, or in
            evaluation mode if training can't be captured.
        partly: whether the call may leave out modules that the plan shards, as another call was proved with them.
        parts: layouts of the call's tensors of which a rank gets its part only; the example has them whole.
        taken: the branches on data to take on their true side; None for those without which modules stay uncalled.
        members: what the first call has made of rules on wrappers; None if this is the first.
        device: where the model will run; None for where its parameters are.
        freedoms: what is allowed from the start.
        exchanges: whether operands may be resharded inside of bodies where nothing else works.
        values: whether bodies may read the numbers in the call; else only if they can't be captured without.
        looking: modules whose bodies look up in tables that are split by rows; see `ir/look_ups`.
        replays, records, emptied, found: see `CaptureSettings`.
        attributes: integer attributes that are local in another call, by module: they are tried first.
        captures: what was captured of this model and call for other plans.
    """

    model: nn.Module
    plan: Plan
    size: int
    arguments: Sequence[Any]
    keywords: Mapping[str, Any]
    training: bool | None = None
    partly: bool = False
    parts: Mapping[Path, Layout] = field(default_factory=dict[Path, Layout])
    taken: frozenset[Location] | None = None
    members: Members | None = None
    device: torch.device | None = None
    freedoms: Freedoms = field(default_factory=Freedoms)
    exchanges: bool = True
    values: bool = False
    looking: frozenset[str] = frozenset()
    replays: bool = False
    records: bool = True
    emptied: tuple[int, int] | None = None
    attributes: Mapping[str, tuple[LocalAttribute, ...]] = field(default_factory=dict[str, tuple[LocalAttribute, ...]])
    found: FoundCount | None = None
    captures: Captures = field(default_factory=Captures, compare=False)

    def capture_settings(self, training: bool) -> CaptureSettings:
        """How to record the call in a mode."""
        device = self.device or device_of(self.model)
        reducing = self.freedoms.reducing
        return CaptureSettings(
            training, self.taken, device, reducing, self.values, self.looking, self.replays, self.records,
            emptied=self.emptied, found=self.found,
        )  # fmt: skip


__all__ = ["Request"]
