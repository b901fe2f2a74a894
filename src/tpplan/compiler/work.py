"""Work: what the passes share while they look for a program that passes the check.

in:  a model, a plan, a trace
out: `Work`: these, with what each round learns
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from tpplan.compiler.bind.bind import Binding
from tpplan.compiler.bind.regions import RegionTable
from tpplan.compiler.ir.dataflow import DataFlow
from tpplan.compiler.ir.layout import Layout
from tpplan.compiler.ir.program import LocalAttribute
from tpplan.compiler.ir.region import Instance
from tpplan.compiler.ir.steps import Stream
from tpplan.compiler.ir.trace import Path, Trace
from tpplan.compiler.place.place import Placer
from tpplan.compiler.place.solution import Constraints
from tpplan.compiler.rules.propagate import Propagator
from tpplan.plan import Diagnostic, Plan


@dataclass(slots=True)
class Work:
    """What the passes share while they look for a program that passes the check."""

    model: nn.Module
    plan: Plan
    size: int
    arguments: Sequence[Any]
    keywords: Mapping[str, Any]
    binding: Binding
    trace: Trace
    flow: DataFlow
    results: dict[tuple[str, int], Any]
    constraints: Constraints
    propagator: Propagator
    placer: Placer
    table: RegionTable = field(default_factory=RegionTable)
    attributes: dict[str, tuple[LocalAttribute, ...]] = field(default_factory=dict[str, tuple[LocalAttribute, ...]])
    heads: frozenset[int] = frozenset()
    features: frozenset[int] = frozenset()
    recorded: frozenset[str] = frozenset()
    read: dict[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])
    fixed: frozenset[str] = frozenset()
    excused: frozenset[str] = frozenset()
    findings: list[Diagnostic] = field(default_factory=list[Diagnostic])
    learned_from: Diagnostic | None = None
    learned: list[Diagnostic] = field(default_factory=list[Diagnostic])
    regions: tuple[frozenset[str], Instance] | None = None
    streams: dict[int, Stream] = field(default_factory=dict[int, Stream])
    parts: Mapping[Path, Layout] = field(default_factory=dict[Path, Layout])

    @property
    def given(self) -> dict[int, Layout]:
        """How the inputs lie that don't come whole."""
        return {self.trace.arguments[path]: layout for path, layout in self.parts.items()}


__all__ = ["Work"]
