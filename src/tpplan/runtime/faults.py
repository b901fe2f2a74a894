"""Faults: what a rank is told when another one doesn't take part in a collective.

RuntimeError: Connection closed by peer [127.0.0.1]:60177      ->      TP176, with the place and the likely cause
"""

from __future__ import annotations

import inspect
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tpplan.compat import runs_backward
from tpplan.plan import TpplanError


class LostRankError(TpplanError):
    """Another rank died, raised, or runs other collectives than this one."""


def lost_rank(what: str, error: BaseException) -> LostRankError:
    """The error for a collective that failed with `error`.

    Args:
        what: the collective, and where it belongs.
        error: what the process group raised.
    """
    text = str(error).strip().splitlines() or [type(error).__name__]
    came = "didn't come in time" if "imed out" in text[0] or "imeout" in text[0] else "stopped or left the step"
    way = ", in a backward" if runs_backward() else _where()
    return LostRankError(
        f"TP176 lost-rank: {what}{way} failed, as another rank of the axis {came}\n  help: look for the first error "
        "in the other ranks' logs; if there is none, a rank makes calls that the others don't: a forward, or "
        "`full_tensor`, `save_weights`, `save_pretrained` or `get_model_state_dict` under `if rank == 0`. "
        f"TPPLAN_DEBUG=1 tells where the ranks part\n  note: {text[0]}"
    )


def _where() -> str:
    """The module whose forward is under way, in words."""
    frame = inspect.currentframe()
    while frame is not None:
        module = frame.f_locals.get("self")
        writes: Any = vars(module).get("_tpplan_writes") if isinstance(module, nn.Module) else None
        if writes is not None and writes.outside is not None:
            return f", in `{writes.outside(module).name or 'the model'}`"
        frame = frame.f_back
    return ""


@contextmanager
def naming_ranks(what: str) -> Generator[None]:
    """A block that exchanges something between the ranks; a failure names the likely cause."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise lost_rank(what, error) from error


__all__ = ["LostRankError", "lost_rank", "naming_ranks"]
