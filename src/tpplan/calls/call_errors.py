"""What a call of a sharded model may raise."""

from __future__ import annotations

from tpplan.plan import TpplanError


class UnprovedCallError(TpplanError):
    """A call that no proof covers; the message says how it differs."""
