"""Agreement: before any rank changes its model, all know that all have compiled the same program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from tpplan.compiler.emit.digest import Digest
from tpplan.plan import CompileError
from tpplan.plan.warned import warn_user
from tpplan.runtime.ranks.board import exchange

Exchanges = tuple[tuple[str, str], ...]
_ALIKE = "give every rank the same plan file, the same model and the same versions of tpplan and torch"


def agree(group: dist.ProcessGroup, digest: Digest | None, error: Exception | None, draws: bool = False) -> None:
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
    mine = None if digest is None else replace(digest, exchanges=())
    held: list[tuple[Digest | None, str, int]] = exchange(
        group, "the ranks' comparison of their programs", (mine, text, torch.initial_seed())
    )
    if error is not None:
        raise error
    failed = next(((rank, text) for rank, (_, text, _) in enumerate(held) if text), None)
    if failed is not None:
        raise _mismatch(f"rank {failed[0]} of the axis could not compile the plan", failed[1])
    digests = [told for told, _, _ in held]
    if digest is not None and len({told.work for told in digests if told is not None}) > 1:
        raise _different(digests, exchange(group, "the ranks' comparison of their exchanges", digest.exchanges))
    if draws and len({seed for _, _, seed in held}) > 1:
        warn_user(
            "the ranks' random generators were seeded differently, so that dropout on replicated values would differ "
            "between them; call torch.manual_seed with one seed on all ranks of the axis before training"
        )


def any_rank(group: dist.ProcessGroup | None, flag: bool) -> bool:
    """Whether `flag` holds on any rank of `group`; on this one alone where there is no group."""
    return any(exchange(group, "the ranks' comparison of a call", flag))


def _different(digests: Sequence[Digest | None], exchanges: Sequence[Exchanges]) -> CompileError:
    """The error for ranks with different programs, or with one whose steps they take in another order."""
    held = {rank: digest for rank, digest in enumerate(digests) if digest is not None}
    first = held[0]
    rank, other = next((rank, digest) for rank, digest in held.items() if digest.work != first.work)
    if not first.differs_in_order(other):
        return _mismatch(
            f"rank 0 and rank {rank} of the axis compiled different programs",
            "the plan, the model's config, or the example inputs differ between them",
        )
    met = zip(exchanges[0], exchanges[rank], strict=False)
    parted = next(((ours, theirs) for (made, ours), (same, theirs) in met if made != same), None)
    if parted is None:
        note = "what they exchange is the same, and what they make of it isn't: sums in another order round otherwise"
    elif parted[0] == parted[1]:
        note = f"they come to {parted[0]} with other values"
    else:
        note = f"rank 0 comes to {parted[0]}, and rank {rank} to {parted[1]}"
    return _mismatch(
        f"rank 0 and rank {rank} of the axis run the same operations in another order",
        note,
        "let the model iterate over a list, a dict or `sorted(...)` where it iterates over a set, whose order differs "
        "between processes; or start all ranks with the same PYTHONHASHSEED, for a set of strings",
    )


def _mismatch(message: str, note: str, way_out: str = _ALIKE) -> CompileError:
    return CompileError.of("TP116", message, help=way_out, notes=note.splitlines())
