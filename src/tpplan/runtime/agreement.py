"""Agreement: before any rank changes its model, all know that all have compiled the same program."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist

from tpplan.plan import CompileError, Diagnostic
from tpplan.runtime.board import exchange


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
    text = "" if error is None else str(error) or type(error).__name__
    held: list[tuple[str | None, str, int]] = exchange(
        group, "the ranks' comparison of their programs", (digest, text, torch.initial_seed())
    )
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
    return any(exchange(group, "the ranks' comparison of a call", flag))


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
