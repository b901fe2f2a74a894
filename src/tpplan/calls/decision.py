"""Decisions: a call of the root, and the proof that it runs by."""

from __future__ import annotations

from typing import Any, NamedTuple

from tpplan.calls.call_arguments import Parts
from tpplan.calls.key import CallKey
from tpplan.calls.proofs import Proof


class Decision(NamedTuple):
    """What a call runs by.

    Attributes:
        proof: the proof that covers it.
        key: its key.
        plain: its key without the numbers that its Python reads.
    """

    proof: Proof
    key: CallKey
    plain: CallKey


class DecidedCall(NamedTuple):
    """A call of the root, with how those of its tensors lie that an earlier call has left."""

    training: bool
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    parts: Parts


__all__ = ["DecidedCall", "Decision"]
