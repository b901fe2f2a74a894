"""Agreement: what one rank finds wrong with a checkpoint, all ranks raise, before any of them changes its model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tpplan.checkpoint.files import CheckpointError, finding
from tpplan.compat import without_dispatch_modes
from tpplan.plan import Diagnostic, PlanError, Severity

Digest = str | Mapping[str, str] | None


@dataclass(frozen=True, slots=True)
class Report:
    """What one rank tells the others.

    Attributes:
        rank: its number in the world.
        source: what it was told to load.
        digest: of what it would load, or of each thing that must be the same; None if it can't.
        findings: errors and warnings.
    """

    rank: int
    source: str
    digest: Digest
    findings: tuple[Diagnostic, ...]


class Ranks:
    """The ranks that hold parts of one model."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh | None = None) -> None:
        """Those of `mesh`, and of the meshes that the model's parameters are on; none but this one without any."""
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
            source: what this rank was told to load.
            digest: of what it would load; or several, by the words for what they are of.
            findings: errors and warnings of this rank.
            error: what it failed with.

        Returns:
            The warnings of all ranks.

        Raises:
            Exception: this rank's own error, if it is a bug.
            CheckpointError: TP121, the same on all ranks.
        """
        if isinstance(error, PlanError):
            findings = [*findings, *error.diagnostics]
        elif error is not None:
            text = f"loading failed with {type(error).__name__}: {error}"
            findings = [*findings, finding(text, "see the traceback of the rank where it failed")]
        reports = self._gathered(Report(self.rank, source, digest, tuple(findings)))
        if error is not None and not isinstance(error, PlanError):
            raise error
        merged = _merged(reports)
        if not any(held.severity is Severity.ERROR for held in merged):
            merged += _differences(reports)
        if any(held.severity is Severity.ERROR for held in merged):
            raise CheckpointError([held for held in merged if held.severity is Severity.ERROR])
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
                raise CheckpointError(
                    [
                        finding(
                            f"a rank was lost while the checkpoint was loaded: {text}", "see why it ended, and restart"
                        )
                    ]
                ) from None
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


def _differences(reports: Sequence[Report]) -> list[Diagnostic]:
    first = reports[0]
    other = next((report for report in reports if report.digest != first.digest), None)
    if other is None:
        return []
    what, way_out = "checkpoints, or other tensors of one", "give every rank the same files and the same `rename`"
    if isinstance(first.digest, Mapping) and isinstance(other.digest, Mapping):
        theirs = other.digest
        what = " and ".join(name for name, digest in first.digest.items() if theirs.get(name) != digest)
        way_out = "give every rank the same folder, and the same arguments"
    return [
        finding(
            f"rank {first.rank} and rank {other.rank} would load different {what}",
            way_out,
            *(f"rank {report.rank} reads `{report.source}`" for report in (first, other)),
        )
    ]


__all__ = ["Ranks"]
