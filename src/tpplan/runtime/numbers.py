"""Numbers that Python takes of DTensors: those of the whole, on all ranks.

torch takes a rank's own number of a norm that isn't summed yet, `gradient.norm().item()`, and asks for infinities only
the ranks that split the first gradient of a list. Optimizers and loops that do so would go on by other numbers on each
rank.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tpplan.compat import OpOverload, handle_operator, handler_of, local_of
from tpplan.runtime.packed_operations import split_first

_NUMBER = torch.ops.aten._local_scalar_dense.default
_RESCALE = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default


@functools.cache
def take_whole_numbers() -> None:
    """From now on let DTensors give the whole's numbers."""
    rescaled = handler_of(_RESCALE)

    def rescale(operator: OpOverload, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        return rescaled(operator, (split_first(args[0]), *args[1:]), keywords)

    handle_operator(_NUMBER, _number)
    handle_operator(_RESCALE, rescale)


def _number(operator: OpOverload, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    tensor: DTensor = args[0]
    whole = all(placement.is_replicate() for placement in tensor.placements)
    return operator(local_of(tensor) if whole else tensor.full_tensor())


__all__ = ["take_whole_numbers"]
