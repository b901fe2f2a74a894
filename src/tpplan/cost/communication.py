"""What a collective costs: the α-β model of ring algorithms.

T(all-reduce) = 2(N-1)α + 2(N-1)/N · D/β; all-gather, reduce-scatter and all-to-all take half of that, with D the bytes
of the whole tensor (Thakur, Rabenseifner & Gropp, "Optimization of collective communication operations in MPICH",
2005). A one-shot all-reduce has one step, in which each rank reads the whole of every other.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Topology:
    """The link between the ranks of an axis.

    Attributes:
        latency: α, picoseconds for one step of a ring.
        bandwidth: β, bytes per second that each rank can send while it receives.
    """

    latency: int = 3_000_000
    bandwidth: int = 450_000_000_000

    def time(self, steps: int, sent: int) -> int:
        """Picoseconds for a collective of `steps` ring steps in which each rank sends `sent` bytes."""
        return steps * self.latency + sent * 1_000_000_000_000 // self.bandwidth


NVLINK = Topology()


def ring_steps(collective: str, size: int) -> int:
    """Steps of the ring algorithm of `collective` on `size` ranks."""
    return {
        "all-reduce": 2 * (size - 1),
        "one-shot all-reduce": 1,
        "all-gather": size - 1,
        "reduce-scatter": size - 1,
        "all-to-all": size - 1,
    }.get(collective, 0)


def bytes_sent(collective: str, whole: int, size: int) -> int:
    """Bytes that each of `size` ranks sends, for a tensor of `whole` bytes before splitting or after gathering."""
    share = whole * (size - 1) // size
    if collective == "all-reduce":
        return 2 * share
    if collective == "one-shot all-reduce":
        return whole * (size - 1)
    if collective == "all-to-all":
        return share // size
    return share if collective in ("all-gather", "reduce-scatter") else 0
