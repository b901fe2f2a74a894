"""Degrees of pipeline, context and expert parallelism with which a rank would fit, where other degrees aren't enough.

Pipeline stages split what is kept from step to step, and caches; the first stage has as many activations as one stage
alone (Narayanan et al., "Efficient large-scale language model training", 2021). Ranks of a context split activations
and temporaries, and caches. Ranks of experts split what is kept for experts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from tpplan.cost.estimates import MemoryEstimate


def other_degrees(memory: MemoryEstimate, available: int, experts: float = 0.0) -> dict[str, int]:
    """Each by itself; pipeline and context together if neither is enough; nothing if it fits.

    Args:
        memory: of a rank.
        available: bytes that it may take.
        experts: the share of parameters that are experts', from 0 to 1.
    """
    if memory.total <= available:
        return {}
    kept = memory.parameters + memory.gradients + memory.optimizer
    split = {
        "pipeline": kept + memory.cache,
        "context": memory.activations + memory.temporaries + memory.cache,
        "experts": int(kept * experts),
    }
    found = {name: _ways(held, available - (memory.total - held)) for name, held in split.items()}
    alone = {name: ways for name, ways in found.items() if ways}
    if "pipeline" in alone or "context" in alone:
        return alone
    halves = {"pipeline": _ways(kept, available // 2), "context": _ways(split["context"], available // 2)}
    return alone | {name: ways for name, ways in halves.items() if ways}


def degrees_text(degrees: Mapping[str, int], memory: MemoryEstimate, available: int) -> str:
    """`pipeline 3 or experts 4`; of pipeline and context, whether it takes both."""
    each = {name: f"{name} {ways}" for name, ways in degrees.items()}
    kept = memory.parameters + memory.gradients + memory.optimizer + memory.cache
    if {"pipeline", "context"} <= degrees.keys() and memory.total - kept >= available:
        each["pipeline"] += f" with {each.pop('context')}"
    return " or ".join(each.values())


def _ways(held: int, room: int) -> int:
    return math.ceil(held / room) if room > 0 else 0


__all__ = ["degrees_text", "other_degrees"]
