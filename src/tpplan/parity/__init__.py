"""Parity of a sharded program with the unsharded model."""

from __future__ import annotations

from tpplan.parity.errors import (
    RankError,
    RanksDisagreeError,
    RankTimeoutError,
    TooLargeError,
    UnshardedError,
    VerifyError,
)
from tpplan.parity.parity import Divergence, ParityReport, TensorParity
from tpplan.parity.run import verify, verify_program
from tpplan.parity.tolerance import Tolerance

__all__ = [
    "Divergence",
    "ParityReport",
    "RankError",
    "RankTimeoutError",
    "RanksDisagreeError",
    "TensorParity",
    "Tolerance",
    "TooLargeError",
    "UnshardedError",
    "VerifyError",
    "verify",
    "verify_program",
]
