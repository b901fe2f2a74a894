"""The exception for arguments that no kernel can take."""

from __future__ import annotations

from tpplan.plan.exceptions import TpplanError


class KernelArgumentError(TpplanError, ValueError):
    """A wrong argument to a function of `tpplan.kernels`; the message says what came and what to pass instead."""
