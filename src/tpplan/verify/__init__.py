"""Parity of a sharded program with the unsharded model.

The package is also the function: `tpplan.verify(model, plan, tp=4)` and `tpplan.verify.verify(…)` are the same.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from tpplan.verify.errors import (
    RankError,
    RanksDisagreeError,
    RankTimeoutError,
    TooLargeError,
    UnshardedError,
    VerifyError,
)
from tpplan.verify.parity import Divergence, ParityReport, TensorParity
from tpplan.verify.run import verify, verify_program
from tpplan.verify.tolerance import Tolerance

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


class _CallablePackage(ModuleType):
    """Importing a part of this package binds it as `tpplan.verify`, where the public function is expected."""

    def __call__(self, *args: Any, **kwargs: Any) -> ParityReport:
        return verify(*args, **kwargs)


_package = _CallablePackage(__name__, __doc__)
_package.__dict__.update({name: held for name, held in globals().items() if name != "_package"})
sys.modules[__name__] = _package
