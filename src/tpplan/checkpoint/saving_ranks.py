"""The ranks that save together: a step fails on all of them, with the same words, or on none.

Torch's checkpoints do so for whole phases; here a rank that fails must go on to serve those that it has blocks for.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from tpplan.checkpoint.files import CheckpointError, problem

T = TypeVar("T")

Failure = tuple[str, str, tuple[str, ...]]


class Ranks:
    """All ranks of the world, seen from one of them; this process alone where there is no process group.

    Attributes:
        size: how many.
        rank: this one.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Those that save to `folder`, which errors name."""
        self.folder = folder
        together = dist.is_initialized()
        if together and dist.get_backend() == "fake":
            raise problem(
                "the process group is a fake one, through which no numbers pass", "save with real processes, or none"
            )
        self.size = dist.get_world_size() if together else 1
        self.rank = dist.get_rank() if together else 0
        self._parted = False  # whether another rank doesn't answer any more, so that there is no use in asking it

    def together(self, step: Callable[[], T]) -> list[T]:
        """Take a step on every rank, and exchange what it returns.

        Raises:
            CheckpointError: TP121, on every rank, if any of them failed.
        """
        failure: Failure | None = None
        outcome: T | None = None
        try:
            outcome = step()
        except Exception as error:
            if self._parted:
                raise
            failure = self._described(error)
        outcomes = self._exchanged((failure, outcome))
        for rank, (failed, _) in enumerate(outcomes):
            if failed is not None:
                message, way_out, notes = failed
                where = (f"on rank {rank} of {self.size}",) if self.size > 1 else ()
                raise problem(message, way_out, *notes, *where)
        return [held for _, held in outcomes]  # pyright: ignore[reportReturnType]

    def first(self, step: Callable[[], T]) -> T:
        """Take a step on the first rank; all get what it returns."""
        return self.together(lambda: step() if self.rank == 0 else None)[0]  # pyright: ignore[reportReturnType]

    def _exchanged(self, own: tuple[Failure | None, T | None]) -> list[tuple[Failure | None, T | None]]:
        if self.size == 1:
            return [own]
        outcomes = [own] * self.size
        try:
            dist.all_gather_object(outcomes, own)
        except Exception as error:
            raise self.parted(error) from None
        return outcomes

    def parted(self, error: Exception) -> CheckpointError:
        """What to raise where another rank doesn't answer any more."""
        self._parted = True
        return problem(
            f"the model can't be saved to `{self.folder}`: another rank has ended, or can't be reached",
            "look for the first error among the ranks; what was in the folder before is unchanged",
            str(error).splitlines()[0] if str(error) else type(error).__name__,
        )

    def _described(self, error: Exception) -> Failure:
        if isinstance(error, CheckpointError):
            first = error.diagnostics[0]
            return first.message, first.help or "", tuple(first.notes)
        if isinstance(error, OSError):
            text = error.strerror or str(error)
            notes = (f"file: {error.filename}",) if error.filename else ()
            return f"the model can't be saved to `{self.folder}`: {text}", _way_out(error), notes
        text = f"{type(error).__name__}: {error}"
        return f"the model can't be saved to `{self.folder}`: {text}", "what was there before is unchanged", ()


def _way_out(error: OSError) -> str:
    unchanged = "; what was there before is unchanged"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "make room, or save elsewhere" + unchanged
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "name a folder that this user may write to" + unchanged
    if error.errno in (errno.EEXIST, errno.ENOTDIR, errno.EISDIR):
        return "name a folder, new or there already" + unchanged
    return "mend that, or save elsewhere" + unchanged


__all__ = ["Ranks"]
