"""How long kernels take on a GPU: the slower of its arithmetic and its memory, and a start.

A product runs in tiles, one on a processor at a time. With few tiles some processors idle, which is the derate of small
products: the time is that of ⌈tiles / processors⌉ rounds, by the best of four tile sizes. Products of few rows, as of
one token for each prompt, share the sum out over processors, and take the time to read the weight (a guess). Two
numbers, the share of the peak that large products reach and the start, are fitted to half of the published products of
an H100 (tests/cost/published/gemm_h100.csv), the other half is held out.
"""

from __future__ import annotations

import math

from tpplan.cost.cluster import Cluster
from tpplan.cost.cost_errors import CostError
from tpplan.cost.work import ATTENTION, PRODUCTS, Task

# Tiles (rows, columns), and the rate of a processor on them as a share of that on the largest.
_TILES = ((128, 256, 1.0), (128, 128, 1.0), (64, 128, 0.7), (64, 64, 0.49))
_FEW_ROWS = 64  # of which kernels share the sum out, so that no processor idles: the weight's reading is what counts
_MANY_ROUNDS = 4  # from here on tiles of one round run beside those of the next


def task_seconds(cluster: Cluster, task: Task, precision: str | None = None, compiled: bool = False) -> float:
    """Seconds of a kernel, or of all that a task stands for, once.

    Args:
        cluster: whose GPU it runs on.
        task: at one size.
        precision: what products compute in, if not in their own dtype: `tf32`, `fp8`, `bfloat16`.
        compiled: whether kernels between products are one.
    """
    moved = (task.fused if compiled else task.moved)[0]
    memory = moved / (cluster.memory_bandwidth * cluster.memory_efficiency)
    if task.kind == PRODUCTS:
        peak = peak_of(cluster, precision or known_dtype(cluster, task.dtype)) * cluster.product_efficiency
        groups = [tuple(n[0] for n in task.sizes[i : i + 4]) for i in range(0, len(task.sizes), 4)]
        return max(sum(_rounds(cluster, *group) for group in groups) / peak, memory) + cluster.product_start
    if task.kind == ATTENTION:
        peak = peak_of(cluster, known_dtype(cluster, task.dtype)) * cluster.attention_efficiency
        return max(task.flops[0] / peak, memory) + cluster.kernel
    return memory + cluster.kernel * (1 if compiled else task.launches)


def peak_of(cluster: Cluster, dtype: str) -> float:
    """FLOPs a second of products in a dtype.

    Raises:
        CostError: TP220, the GPU has none for it.
    """
    if dtype not in cluster.flops:
        known = ", ".join(cluster.flops)
        raise CostError.of("TP220", f"`{cluster.name}` has no rate of products in `{dtype}`", help=f"it has {known}")
    return cluster.flops[dtype]


def known_dtype(cluster: Cluster, dtype: str) -> str:
    """A dtype of which the GPU has a rate: that of float32 for others, such as complex numbers."""
    dtype = "fp8" if dtype.startswith("float8") else dtype
    return dtype if dtype in cluster.flops else "float32"


def _rounds(cluster: Cluster, batch: int, rows: int, columns: int, summed: int) -> float:
    """FLOPs that the rounds of a product take, idle processors included."""
    if min(rows, columns) <= _FEW_ROWS:
        return 2 * batch * rows * columns * summed
    best = math.inf
    for high, wide, rate in _TILES:
        tiles = batch * math.ceil(rows / high) * math.ceil(columns / wide)
        rounds = tiles / cluster.processors
        rounds = rounds if rounds >= _MANY_ROUNDS else math.ceil(rounds)
        best = min(best, rounds * cluster.processors * 2 * high * wide * summed / rate)
    return best


__all__ = ["known_dtype", "peak_of", "task_seconds"]
