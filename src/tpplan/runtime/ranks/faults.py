"""Faults: what a rank is told when another one doesn't take part in a collective, and what that one leaves behind.

rank 1   raises ValueError: a bad batch            writes that to the board (`runtime/ranks/board.py`)
rank 0   RuntimeError: Connection closed by peer   ->   TP176, with the place and the other rank's error
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import TracebackType

import torch
import torch.distributed as dist

from tpplan.compat.autograd import runs_backward
from tpplan.compat.process_groups import group_timeout
from tpplan.runtime.ranks import board
from tpplan.runtime.ranks.board import LostRankError


def lost_rank(what: str, error: BaseException, group: dist.ProcessGroup | None = None) -> LostRankError:
    """The error for a collective that failed with `error`.

    Args:
        what: the collective, and where it belongs.
        error: what the process group raised.
        group: the ranks, where they are known to leave a reason.
    """
    return board.lost(f"{what}{', in a backward' if runs_backward() else ''}", error, group)


def name_forward(error: LostRankError, module: str) -> None:
    """Name the module whose forward a collective failed in; of several, the first that is told, the innermost."""
    what, failed, rest = str(error).partition(" failed, as ")
    if ", in " not in what:
        error.args = (f"{what}, in {f'`{module}`' if module else 'the model'}{failed}{rest}",)


@contextmanager
def naming_ranks(what: str, group: dist.ProcessGroup | None = None) -> Generator[None]:
    """A block that exchanges something between the ranks; a failure names the likely cause."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise lost_rank(what, error, group) from error


# -- a rank that leaves -----------------------------------------------------------------------------------------------
def leave(group: dist.ProcessGroup, error: BaseException) -> None:
    """A call of the model raised on this rank: tell the others, and the reader of the error what they will see."""
    if board.is_alone(group) or isinstance(error, LostRankError):
        return
    board.tell(f"raised {_shown(error)}")
    others = ", ".join(str(rank) for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank())
    error.add_note(
        f"  note: if this isn't raised on all ranks of the axis, the others ({others}) wait in a collective, and end "
        f"with a TP176 that has this error, at the latest after the process group's timeout ({group_timeout(group)})"
    )


def tell_of_exits() -> Callable[[], None]:
    """From now on, tell other ranks of an error by which this process ends, as one from a backward.

    Returns:
        What ends that; a hook that somebody has put around this one stays.
    """
    before, ended = sys.excepthook, False

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        if not ended and not isinstance(error, LostRankError) and not board.has_left() and dist.is_initialized():
            board.tell(f"ended by {_shown(error)}")

    def undo() -> None:
        nonlocal ended
        ended = True
        if sys.excepthook is hook:
            sys.excepthook = before

    sys.excepthook = hook
    return undo


def _shown(error: BaseException) -> str:
    """The kind of an error and its first line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


__all__ = ["LostRankError", "leave", "lost_rank", "name_forward", "naming_ranks", "tell_of_exits"]
