"""How long a collective takes on GPUs in nodes.

    T = α + x/β + √(α·x/β),   x the bytes that each rank sends on its links

The last term is that of a pipeline which its first segments fill: with segments of the best size it takes
(√α + √(x/β))², twice that term (Bruck et al., "Efficient algorithms for all-to-all communications", 1997; Rabenseifner
2004). Once fits the published figures of NCCL, which doesn't choose segments by size.
Between nodes, each GPU exchanges its share over its own network card while the links of the node do the rest, so the
slower of the two counts: what NCCL's trees and rings over several cards come to.

A one-shot all-reduce reads the whole of every other rank, in one step. That is an estimate from the links alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tpplan.cost.cluster import Cluster
from tpplan.cost.communication import bytes_sent

_LONE_SHOT = 0.35  # of an all-reduce's latency: one step instead of a ring's


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks of a collective.

    Attributes:
        size: how many.
        nodes: over how many nodes they are spread, as many on each.
    """

    size: int
    nodes: int = 1

    @classmethod
    def of(cls, cluster: Cluster, size: int, stride: int = 1, gpus: int = 0) -> Group:
        """`size` ranks of which neighbours are `stride` apart; of as many groups as `gpus` have, the widest."""
        inside = max(1, cluster.in_node // stride)
        broken = stride == 1 and gpus > inside and size <= inside and inside % size > 0
        return cls(size, 2 if broken else math.ceil(size / min(inside, size)))


def collective_seconds(cluster: Cluster, collective: str, whole: int, group: Group) -> float:
    """Seconds for a collective.

    Args:
        cluster: where it runs.
        collective: its name, such as `all-reduce`; others take no time.
        whole: bytes of the tensor before splitting, or after gathering.
        group: the ranks.
    """
    if group.size < 2 or not whole:
        return 0.0
    one_shot = collective == "one-shot all-reduce"
    kind = "all-reduce" if one_shot else collective
    if kind not in cluster.latency:
        return 0.0
    inside = max(1, group.size // group.nodes)
    latency = seconds = 0.0
    if inside > 1:
        latency = cluster.by_ranks(cluster.latency[kind], inside) * (_LONE_SHOT if one_shot else 1)
        rate = cluster.link * cluster.by_ranks(cluster.efficiency[kind], inside)
        sent = bytes_sent(collective, whole // group.nodes**2 if kind == "all-to-all" else whole, inside)
        seconds = sent / rate
    if group.nodes > 1:
        passes = 2 if kind == "all-reduce" else 1
        latency += cluster.network_latency * math.log2(group.nodes) * passes
        own = group.size if kind == "all-to-all" else inside  # what a GPU exchanges of the whole
        share = whole / own * (group.nodes - 1) / group.nodes * passes
        seconds = max(seconds, share / (cluster.network * cluster.network_efficiency))
    return latency + seconds + math.sqrt(latency * seconds)


__all__ = ["Group", "collective_seconds"]
