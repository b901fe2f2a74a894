"""Parity of a sharded program with the unsharded model."""

from __future__ import annotations

from tpplan.parity.parity_errors import (
    RankError,
    RanksDisagreeError,
    RankTimeoutError,
    TooLargeError,
    UnshardedError,
    VerifyError,
)
from tpplan.parity.parity_report import Divergence, ParityReport, TensorParity
from tpplan.parity.tolerance import Tolerance
from tpplan.parity.verification import verify, verify_program

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
