"""What a rank keeps from step to step: parameters, gradients, and the optimizer's state.

adamw       two moments of 4 bytes, and a master of 4 for parameters that are narrower: 16 bytes in all with bfloat16
(Rajbhandari et al., "ZeRO", 2020)
adamw-8bit  two moments of 1 byte with a scale of 4 bytes for each block of 256 (Dettmers et al., 2022), and a master
adamw-plain torch.optim.AdamW on the parameters as they are: two moments in their dtype
sgd         nothing; sgd-momentum: one momentum in the parameter's dtype
muon        one momentum of 4 bytes, and a master, for matrices inside of repeated layers; adamw for all others
(Jordan et al., 2024)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from tpplan.cost.cost_errors import unknown

if TYPE_CHECKING:
    from tpplan.compiler.ir.program import ParameterPlacement
    from tpplan.cost.cluster import Cluster
    from tpplan.cost.estimates import MemoryEstimate

_PASSES = 2

_MASTER = 4


def _with_master(bytes_each: float) -> Callable[[int], float]:
    return lambda itemsize: bytes_each + (_MASTER if itemsize < _MASTER else 0)


_ADAMW = _with_master(8)
OPTIMIZERS: dict[str, Callable[[int], float]] = {
    "adamw": _ADAMW,
    "adamw-8bit": _with_master(2 + 2 * 4 / 256),
    "adamw-plain": lambda itemsize: 2 * itemsize,
    "muon": _with_master(4),
    "sgd": lambda itemsize: 0,
    "sgd-momentum": lambda itemsize: itemsize,
}
"""Bytes of state for each entry of a parameter, by its itemsize."""


def optimizer_bytes(optimizer: str, parameters: Iterable[ParameterPlacement], repeated: Callable[[str], bool]) -> int:
    """Bytes of an optimizer's state for a rank's parts of parameters.

    Args:
        optimizer: a name of `OPTIMIZERS`.
        parameters: those that train count.
        repeated: whether a parameter is inside of a repeated layer.

    Raises:
        CostError: TP220, there is no such optimizer.
    """
    if optimizer not in OPTIMIZERS:
        raise unknown("optimizer", optimizer, OPTIMIZERS)
    total = 0.0
    for parameter in parameters:
        if parameter.trainable:
            matrix = len(parameter.shape) == 2 and repeated(parameter.name)
            each = OPTIMIZERS[optimizer] if optimizer != "muon" or matrix else _ADAMW
            total += math.prod(parameter.local_shape) * each(parameter.itemsize)
    return math.ceil(total)


def optimizer_seconds(memory: MemoryEstimate, cluster: Cluster) -> float:
    """Of an optimizer's step: each byte of parameters, gradients and state is read, and most are written."""
    held = memory.parameters + memory.gradients + memory.optimizer
    return _PASSES * held / (cluster.memory_bandwidth * cluster.memory_efficiency)


__all__ = ["OPTIMIZERS", "optimizer_bytes", "optimizer_seconds"]
