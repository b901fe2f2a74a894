"""Problem: what a program is searched for, and what the search has learned so far.

in:  a request, its bound plan and its trace
out: `Problem`, which doesn't change; `Learned`, of which each round may make another
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tpplan.compiler.bind.bind import Binding
from tpplan.compiler.check.same_steps import CheckInput
from tpplan.compiler.ir.dataflow import DataFlow
from tpplan.compiler.ir.layout import Features, Layout
from tpplan.compiler.ir.program import LocalAttribute
from tpplan.compiler.ir.region import Instance
from tpplan.compiler.ir.trace import Trace
from tpplan.compiler.place.assign import Assignment
from tpplan.compiler.place.solution import Constraints
from tpplan.compiler.request import Request
from tpplan.plan import Diagnostic

Attributes = Mapping[str, tuple[LocalAttribute, ...]]


@dataclass(frozen=True, slots=True)
class Problem:
    """A model that is bound and traced.

    Attributes:
        request: the program that is wanted.
        binding: what the plan says of modules and parameters.
        flow: the trace, as a data flow.
        results: what each call of a module returned, by module and call.
        heads, features: the numbers of heads, and the features, by which values may be split where nothing else works.
        read: the counts of a module that its body reads.
    """

    request: Request
    binding: Binding
    flow: DataFlow
    results: Mapping[tuple[str, int], Any]
    heads: Features
    features: Features
    read: Callable[[str], frozenset[str]]

    @property
    def trace(self) -> Trace:
        """The trace."""
        return self.flow.trace

    @property
    def parts(self) -> dict[int, Layout]:
        """The layouts of the inputs that aren't whole."""
        return {self.trace.arguments[path]: layout for path, layout in self.request.parts.items()}


@dataclass(frozen=True, slots=True)
class Learned:
    """What the rounds so far have taught.

    Attributes:
        constraints: what the placement must obey.
        attributes: integer attributes that are local, by module.
        fixed: modules whose boundaries carry no reshard unless the plan pins one.
        recorded: modules whose bodies run from their records.
        excused: modules that no check runs, as they were reported already.
        unplaced: modules whose bodies no layouts suit.
        reasons: the findings that led to constraints, the latest last.
        findings: what to report.
    """

    constraints: Constraints
    attributes: Attributes
    fixed: frozenset[str] = frozenset()
    recorded: frozenset[str] = frozenset()
    excused: frozenset[str] = frozenset()
    unplaced: frozenset[str] = frozenset()
    reasons: tuple[Diagnostic, ...] = ()
    findings: tuple[Diagnostic, ...] = ()

    def constrained(self, reason: Diagnostic | None = None, **changes: Any) -> Learned:
        """With other fields of `constraints`, for this reason."""
        reasons = self.reasons if reason is None else (*self.reasons, reason)
        return replace(self, constraints=replace(self.constraints, **changes), reasons=reasons)

    def recording(self, modules: Iterable[str]) -> Learned:
        """With more modules whose bodies run from their records; no attribute of theirs is local."""
        recorded = self.recorded | {*modules}
        attributes = {name: counts for name, counts in self.attributes.items() if name not in recorded}
        return replace(self, recorded=recorded, attributes=attributes)

    def reporting(self, *findings: Diagnostic) -> Learned:
        """With more findings."""
        return replace(self, findings=(*self.findings, *findings))


@dataclass(frozen=True, slots=True)
class Placed:
    """A placement, and what it obeys.

    Attributes:
        instance: the regions that were placed.
        assignment: what was decided.
        learned: what it obeys.
        cut: how many ways weren't followed in a region, by its identity.
    """

    instance: Instance
    assignment: Assignment
    learned: Learned
    cut: Mapping[int, int] = field(default_factory=dict[int, int])

    def to_check(self, problem: Problem) -> CheckInput:
        """What the check needs to know."""
        request = problem.request
        return CheckInput(
            request.model, problem.trace, self.assignment, self.instance, request.size, request.arguments,
            request.keywords, problem.results, request.parts,
        )  # fmt: skip


__all__ = ["Attributes", "Learned", "Placed", "Problem"]
