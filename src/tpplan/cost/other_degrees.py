"""Degrees of pipeline, context and expert parallelism with which a rank would fit, where other degrees aren't enough.

Pipeline stages split what is kept from step to step, and caches; the first stage has as many activations as one stage
alone (Narayanan et al., "Efficient large-scale language model training", 2021). Ranks of a context split activations
and temporaries, and caches. Ranks of experts split what is kept for experts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from tpplan.cost.estimates import MemoryEstimate

_MOST = 4096


def other_degrees(
    memory: MemoryEstimate, available: int, experts: float = 0.0, most: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Each by itself; pipeline and context together if neither is enough; nothing if it fits, or none is enough.

    Args:
        memory: of a rank.
        available: bytes that it may take.
        experts: the share of parameters that are experts', from 0 to 1.
        most: the largest degree of each: as many as there are layers, tokens of a sequence, experts.
    """
    if memory.total <= available:
        return {}
    most = {"pipeline": _MOST, "context": _MOST, "experts": _MOST} | dict(most or {})
    kept = memory.parameters + memory.gradients + memory.optimizer
    split = {
        "pipeline": kept + memory.cache,
        "context": memory.activations + memory.temporaries + memory.cache,
        "experts": int(kept * experts),
    }
    found = {name: _ways(held, available - (memory.total - held), most[name]) for name, held in split.items()}
    alone = {name: ways for name, ways in found.items() if ways}
    if "pipeline" in alone or "context" in alone:
        return alone
    stages = range(2, most["pipeline"] + 1)
    pairs = [(n, _ways(split["context"], available - math.ceil(kept / n), most["context"])) for n in stages]
    both = min((pair for pair in pairs if pair[1]), key=math.prod, default=None)
    return alone | dict(zip(("pipeline", "context"), both or (), strict=False))


def degrees_text(degrees: Mapping[str, int], memory: MemoryEstimate, available: int) -> str:
    """`pipeline 3 or experts 4`; of pipeline and context, whether it takes both."""
    each = {name: f"{name} {ways}" for name, ways in degrees.items()}
    kept = memory.parameters + memory.gradients + memory.optimizer + memory.cache
    if {"pipeline", "context"} <= degrees.keys() and memory.total - kept + kept / degrees["pipeline"] > available:
        each["pipeline"] += f" with {each.pop('context')}"
    return " or ".join(each.values())


def _ways(held: int, room: int, most: int) -> int:
    """How many ranks that share it have room; 0 if more than `most`."""
    ways = math.ceil(held / room) if room > 0 else 0
    return ways if ways <= most else 0


__all__ = ["degrees_text", "other_degrees"]
