"""What keeps a verification from being carried out; a divergence is no error, but a report."""

from __future__ import annotations

from tpplan.plan import Diagnostic, TpplanError


class VerifyError(TpplanError):
    """A verification couldn't be carried out; the message says why."""


class TooLargeError(VerifyError):
    """The model's numbers would take more memory than there is."""


class UnshardedError(VerifyError):
    """The unsharded model itself raised on the inputs."""


class RankError(VerifyError):
    """A rank raised; `__cause__` is what it raised, where it can be had.

    Attributes:
        rank: which one.
    """

    def __init__(self, rank: int, message: str) -> None:
        """Name the rank and say what it raised."""
        self.rank = rank
        super().__init__([Diagnostic("TP194", f"rank {rank} raised {message}")])


class RanksDisagreeError(VerifyError):
    """The ranks called different collectives, or one of them was done while others waited for it."""


class RankTimeoutError(VerifyError):
    """A rank kept the others waiting for too long."""


def describe(error: BaseException) -> str:
    """An exception's type and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
