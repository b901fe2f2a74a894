"""Agreement: what one rank finds wrong with its task, all ranks raise, before any of them changes its model.

Torch's checkpoints tell all ranks of an error as well, once the model has been written to in part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tpplan.checkpoint.files import CheckpointError, finding
from tpplan.compat.modes import without_dispatch_modes
from tpplan.plan import Diagnostic, PlanError, Severity

Digest = str | Mapping[str, str] | None


@dataclass(frozen=True, slots=True)
class Report:
    """What one rank tells the others.

    Attributes:
        rank: its number in the world.
        source: what it was told to work from.
        digest: of what it would do, or of each thing that must be the same; None if it can't.
        findings: errors and warnings.
    """

    rank: int
    source: str
    digest: Digest
    findings: tuple[Diagnostic, ...]


@dataclass(frozen=True, slots=True)
class Words:
    """How a task is spoken of.

    Attributes:
        doing: what the ranks do together, after "while" or before "failed".
        finding: makes a finding of a message, a way out and notes.
        error: what is raised with findings.
        apart: says that two ranks would do different things.
    """

    doing: str
    finding: Callable[..., Diagnostic]
    error: type[PlanError]
    apart: Callable[[Report, Report], Diagnostic]


class AgreeingRanks:
    """The ranks that hold parts of one model."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh | None = None, words: Words | None = None) -> None:
        """Those of `mesh`, and of the meshes that the model's parameters are on; none but this one without any."""
        self._words = words or _LOADING
        self.meshes: list[DeviceMesh] = [] if mesh is None else [mesh]
        for tensor in model.parameters():
            if isinstance(tensor, DTensor) and tensor.device_mesh not in self.meshes:
                self.meshes.append(tensor.device_mesh)
        self._groups = [group for mesh in self.meshes for group in _groups_of(mesh)]
        self.rank = dist.get_rank() if self._groups else 0

    @property
    def speaks(self) -> bool:
        """Whether it is for this rank to tell the user, once for all."""
        return all(set(mesh.get_coordinate() or (0,)) == {0} for mesh in self.meshes)

    def settle(
        self, source: str, digest: Digest, findings: Sequence[Diagnostic], error: Exception | None
    ) -> tuple[Diagnostic, ...]:
        """Compare notes; every rank raises if any of them has an error.

        Args:
            source: what this rank was told to work from.
            digest: of what it would do; or several, by the words for what they are of.
            findings: errors and warnings of this rank.
            error: what it failed with.

        Returns:
            The warnings of all ranks.

        Raises:
            Exception: this rank's own error, if it is a bug.
            PlanError: the findings, the same on all ranks.
        """
        if isinstance(error, PlanError):
            findings = [*findings, *error.diagnostics]
        elif error is not None:
            text = f"{self._words.doing} failed with {type(error).__name__}: {error}"
            findings = [*findings, self._words.finding(text, "see the traceback of the rank where it failed")]
        reports = self._gathered(Report(self.rank, source, digest, tuple(findings)))
        if error is not None and not isinstance(error, PlanError):
            raise error
        merged = _merged(reports)
        if not any(held.severity is Severity.ERROR for held in merged):
            other = next((report for report in reports if report.digest != reports[0].digest), None)
            merged += [] if other is None else [self._words.apart(reports[0], other)]
        if any(held.severity is Severity.ERROR for held in merged):
            raise self._words.error([held for held in merged if held.severity is Severity.ERROR])
        return tuple(merged)

    def _gathered(self, report: Report) -> list[Report]:
        reports = {report.rank: report}
        for group in self._groups:
            held: list[Any] = [None] * group.size()
            try:
                with without_dispatch_modes():
                    dist.all_gather_object(held, list(reports.values()), group=group)
            except RuntimeError as lost:
                text = str(lost).splitlines()[0]
                message = f"a rank was lost during {self._words.doing}: {text}"
                raise self._words.error([self._words.finding(message, "see why it ended, and restart")]) from None
            reports |= {one.rank: one for several in held for one in several}
        return [reports[rank] for rank in sorted(reports)]


def _groups_of(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    if not dist.is_initialized() or mesh.get_coordinate() is None:
        return []
    groups = [mesh.get_group(axis) for axis in range(mesh.ndim)]
    return [group for group in groups if group.size() > 1 and dist.get_backend(group) != "fake"]


def _merged(reports: Sequence[Report]) -> list[Diagnostic]:
    """Every finding once; one that not all ranks have says which do."""
    merged: list[Diagnostic] = []
    for held in dict.fromkeys(held for report in reports for held in report.findings):
        ranks = [report.rank for report in reports if held in report.findings]
        if len(ranks) < len(reports):
            where = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
            held = replace(held, notes=(f"on {where} of {len(reports)}", *held.notes))
        merged.append(held)
    return merged


def _other_checkpoints(one: Report, other: Report) -> Diagnostic:
    what, way_out = "checkpoints, or other tensors of one", "give every rank the same files and the same `rename`"
    if isinstance(one.digest, Mapping) and isinstance(other.digest, Mapping):
        theirs = other.digest
        what = " and ".join(name for name, digest in one.digest.items() if theirs.get(name) != digest)
        way_out = "give every rank the same folder, and the same arguments"
    return finding(
        f"rank {one.rank} and rank {other.rank} would load different {what}",
        way_out,
        *(f"rank {report.rank} reads `{report.source}`" for report in (one, other)),
    )


_LOADING = Words("loading", finding, CheckpointError, _other_checkpoints)

__all__ = ["AgreeingRanks", "Report", "Words"]
