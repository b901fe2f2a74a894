"""Agreement: before any rank changes its model, all know that all have compiled the same program."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist

from tpplan.compat import without_dispatch_modes
from tpplan.plan import CompileError, Diagnostic
from tpplan.runtime.faults import naming_ranks


def agree(group: dist.ProcessGroup, digest: str | None, error: Exception | None, draws: bool = False) -> None:
    """Compare digests over `group`; every rank raises if any of them failed or differs.

    Args:
        group: the ranks of the axis.
        digest: of this rank's program; None if it has none.
        error: what this rank failed with.
        draws: whether the program draws random numbers that must be the same on all ranks.

    Warns:
        UserWarning: the program draws random numbers, and the ranks' generators were seeded differently.

    Raises:
        Exception: this rank's own error.
        CompileError: TP116 for another rank's error or another program.
    """
    if group.size() == 1 or dist.get_backend(group) == "fake":
        if error is not None:
            raise error
        return
    held: list[tuple[str | None, str, int]] = [(None, "", 0)] * group.size()
    text = "" if error is None else str(error) or type(error).__name__
    with (
        naming_ranks("the ranks' comparison of their programs"),
        without_dispatch_modes(),
    ):  # a call may be watched or counted, of which this is no part
        dist.all_gather_object(held, (digest, text, torch.initial_seed()), group=group)
    if error is not None:
        raise error
    failed = next(((rank, text) for rank, (_, text, _) in enumerate(held) if text), None)
    if failed is not None:
        raise _mismatch(f"rank {failed[0]} of the axis could not compile the plan", failed[1])
    digests = [text for text, _, _ in held]
    other = next((rank for rank, text in enumerate(digests) if text != digest), None)
    if other is not None:
        raise _mismatch(
            f"rank {group.rank()} and rank {other} of the axis compiled different programs",
            "the plan, the model's config, or the example inputs differ between them",
        )
    if draws and len({seed for _, _, seed in held}) > 1:
        warnings.warn(
            "the ranks' random generators were seeded differently, so that dropout on replicated values would differ "
            "between them; call torch.manual_seed with one seed on all ranks of the axis before training",
            stacklevel=3,
        )


def any_rank(group: dist.ProcessGroup | None, flag: bool) -> bool:
    """Whether `flag` holds on any rank of `group`; on this one alone where there is no group."""
    if group is None or group.size() == 1 or dist.get_backend(group) == "fake":
        return flag
    flags = [False] * group.size()
    with naming_ranks("the ranks' comparison of a call"), without_dispatch_modes():
        dist.all_gather_object(flags, flag, group=group)
    return any(flags)


def gathered(group: dist.ProcessGroup | None, held: Any) -> list[Any]:
    """What the ranks of `group` hold, by rank; of this one alone where no messages are sent."""
    if group is None or group.size() == 1 or dist.get_backend(group) == "fake":
        return [held]
    found: list[Any] = [None] * group.size()
    with without_dispatch_modes():
        dist.all_gather_object(found, held, group=group)
    return found


def _mismatch(message: str, note: str) -> CompileError:
    return CompileError(
        [
            Diagnostic(
                code="TP116",
                message=message,
                help="give every rank the same plan file, the same model and the same versions of tpplan and torch",
                notes=tuple(note.splitlines()),
            )
        ]
    )
