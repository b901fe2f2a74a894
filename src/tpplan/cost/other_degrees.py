"""Degrees of pipeline, context and expert parallelism with which a rank would fit, where other degrees aren't enough.

Pipeline stages split what is kept from step to step, and caches; the first stage has as many activations as one stage
alone (Narayanan et al., "Efficient large-scale language model training", 2021). Ranks of a context split activations
and temporaries, and caches. Ranks of experts split what is kept for experts.

A step of p stages and m microbatches, c ranks of a context, with t seconds of one microbatch in a rank's whole layers:

    T = (m + p - 1) · (t / (p·c) + ring + 2 · send) + sums + optimizer / p

(p - 1) / m is the bubble of 1F1B. A microbatch is sent on forward and back. The ring of a context (Liu et al., "Ring
attention", 2023) passes keys and values in the forward, and again with their gradients in the backward.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tpplan.cost.cluster import Cluster
from tpplan.cost.estimates import MemoryEstimate
from tpplan.cost.link_times import Group, collective_seconds

_MOST = 4096
_EACH = 4  # microbatches of a stage
_RINGS = 3  # keys and values in the forward; these, and their gradients, in the backward
ASSUMED = {
    "pipeline": f"pipelines have {_EACH} microbatches of the row's batch for each stage, even stages, 1F1B's bubble, "
    "and sends that nothing hides",
    "context": "ranks of a context share attention evenly, and nothing hides their rings",
}


@dataclass(frozen=True, slots=True)
class Microbatch:
    """A row's step, of which pipelines and contexts make several, or parts.

    Attributes:
        seconds: of its forward and backward.
        optimizer_seconds: of the optimizer's step after it.
        tokens: of all replicas.
        ranks: of the row: the degree of tensor parallelism, and replicas.
        blocks: repeated layers.
        handed: bytes of what a rank hands from one to the next.
        keys: bytes of the keys and values of all of them.
        gradients: bytes.
    """

    seconds: float
    optimizer_seconds: float
    tokens: int
    ranks: tuple[int, int]
    blocks: int
    handed: int
    keys: int
    gradients: int


@dataclass(frozen=True, slots=True)
class OtherStep:
    """A step in training with other parallelism beside a row's.

    Attributes:
        pipeline, context: degrees.
        gpus: in all.
        microbatches: of a step.
        seconds: of it.
        bubble_seconds: in which a stage waits for its first microbatch, and after its last.
        sending_seconds: of a rank's sends to other stages and along the context.
        tokens_per_second: of all GPUs.
    """

    pipeline: int
    context: int
    gpus: int
    microbatches: int
    seconds: float
    bubble_seconds: float
    sending_seconds: float
    tokens_per_second: float


def other_step(cluster: Cluster, one: Microbatch, pipeline: int = 1, context: int = 1) -> OtherStep:
    """What a step takes with so many stages, and ranks of a context; the plan's ranks are nearest, then these."""
    tp, dp = one.ranks
    group = Group.of(cluster, context, tp)
    apart = 1 if pipeline * context * tp <= cluster.in_node else 2
    microbatches = _EACH * pipeline if pipeline > 1 else 1
    layers = max(one.blocks, 1)
    ring = _RINGS * layers / pipeline * collective_seconds(cluster, "all-gather", one.keys // layers, group)
    both = 2 * one.handed // context if pipeline > 1 else 0  # of two ranks that gather, each sends the other its half
    send = collective_seconds(cluster, "all-gather", both, Group(2, apart))
    sums = collective_seconds(cluster, "all-reduce", one.gradients // pipeline, group)
    slot = one.seconds / (pipeline * context) + ring + 2 * send
    total = (microbatches + pipeline - 1) * slot + sums + one.optimizer_seconds / pipeline
    return OtherStep(
        pipeline, context, tp * dp * pipeline * context, microbatches, total, (pipeline - 1) * slot,
        microbatches * (ring + 2 * send) + sums, microbatches * one.tokens / total,
    )  # fmt: skip


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


def ways_of(degrees: Mapping[str, int], memory: MemoryEstimate, available: int) -> list[dict[str, int]]:
    """Degrees, each by itself; pipeline and context together if it takes both."""
    kept = memory.parameters + memory.gradients + memory.optimizer + memory.cache
    both = {"pipeline", "context"} <= degrees.keys()
    if both and memory.total - kept + kept / degrees["pipeline"] > available:
        together = {name: degrees[name] for name in ("pipeline", "context")}
        return [together, *({name: n} for name, n in degrees.items() if name not in together)]
    return [{name: n} for name, n in degrees.items()]


def degrees_text(ways: Iterable[Mapping[str, int]], steps: Iterable[OtherStep] = ()) -> str:
    """`pipeline 3 (3 GPUs, 1.20 s of 12 microbatches, 23% of it bubble, 3,000 tokens/s) or experts 4`."""
    told = {(step.pipeline, step.context): step for step in steps}
    texts: list[str] = []
    for way in ways:
        text = " with ".join(f"{name} {n}" for name, n in way.items())
        step = told.get((way.get("pipeline", 1), way.get("context", 1)))
        if step is not None:
            bubble = f", {step.bubble_seconds / step.seconds:.0%} of it bubble" if step.pipeline > 1 else ""
            many = f" of {step.microbatches} microbatches" if step.microbatches > 1 else ""
            text += f" ({step.gpus} GPUs, {step.seconds:.3g} s{many}{bubble}, {step.tokens_per_second:,.0f} tokens/s)"
        texts.append(text)
    return " or ".join(texts)


def _ways(held: int, room: int, most: int) -> int:
    """How many ranks that share it have room; 0 if more than `most`."""
    ways = math.ceil(held / room) if room > 0 else 0
    return ways if ways <= most else 0


__all__ = ["ASSUMED", "Microbatch", "OtherStep", "degrees_text", "other_degrees", "other_step", "ways_of"]
