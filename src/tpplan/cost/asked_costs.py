"""What an estimate is asked for, by name; looked at before anything is compiled.

in:  the names of GPUs, of an optimizer and of a kind of activation checkpointing; a size such as `70GiB`
out: the cluster; the size in bytes
"""

from __future__ import annotations

import os
import re

from tpplan.cost.cluster import Cluster, cluster_of
from tpplan.cost.cost_errors import unknown
from tpplan.cost.state_memory import OPTIMIZERS
from tpplan.plan import ArgumentError
from tpplan.plan.taken import SIZE, ArgumentKind

CHECKPOINTING = ("none", "selective", "full")
TOPOLOGY = ArgumentKind(
    lambda held: held is None or isinstance(held, (str, os.PathLike, Cluster)), "a YAML file, a Cluster, or None"
)
MEMORY = ArgumentKind(
    lambda held: held is None or isinstance(held, str) or SIZE.fits(held), "bytes, a text such as `70GiB`, or None"
)
_UNITS = {"": 1, "B": 1} | {f"{p}{u}": b**n for u, b in (("iB", 2**10), ("B", 10**3)) for n, p in enumerate("KMGT", 1)}


def asked_cluster(
    gpu: str,
    topology: str | os.PathLike[str] | Cluster | None = None,
    optimizer: str = "adamw",
    checkpointing: str = "none",
) -> Cluster:
    """The cluster of a GPU's name or of a topology, once the other names are known to be right.

    Raises:
        CostError: TP220, something is asked for by a name that isn't known.
        PlanError: TP221, the topology file has mistakes.
    """
    cluster = cluster_of(gpu if topology is None else topology)
    if optimizer not in OPTIMIZERS:
        raise unknown("optimizer", optimizer, OPTIMIZERS)
    if checkpointing not in CHECKPOINTING:
        raise unknown("kind of checkpointing", checkpointing, CHECKPOINTING)
    return cluster


def bytes_of(size: int | str) -> int:
    """`70GiB` in bytes.

    Raises:
        ArgumentError: it is no size.
    """
    if isinstance(size, int):
        number, unit = float(size), ""
    else:
        text = size.strip().replace(" ", "")
        found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([A-Za-z]*)", text)
        number, unit = (float(found[1]), found[2]) if found else (0.0, "")
    count = int(number * _UNITS.get(unit, 0))
    if count <= 0:
        raise ArgumentError(f"{size!r} isn't a size: write bytes, or a number with a unit, such as 70GiB")
    return count


__all__ = ["CHECKPOINTING", "MEMORY", "TOPOLOGY", "asked_cluster", "bytes_of"]
