"""How far rounding alone moves the results of the unsharded model.

in:  the stock model, a call, and what an unsharded run of it has shown
out: by how much each output and each gradient changes where sums are rounded otherwise

A sharded model takes the same sums in another order. The bound in `tolerance.py` takes it that errors pass from step to
step as they are; but where large numbers cancel, as the gradients of a softmax that is nearly even, what is left of
them is as uncertain as the large ones were. How much so is measured: the stock model runs again, forward and backward,
and each product and each sum comes out with a random error of one unit in the last place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tpplan.compat.modes import TorchDispatchMode
from tpplan.compat.schemas import OpOverload
from tpplan.ops.registry import FUSED_ATTENTION, base_name, has_role
from tpplan.parity.call import Call
from tpplan.parity.drawn import OwnDraws
from tpplan.parity.materialise import copy_structure
from tpplan.parity.measure import magnitude
from tpplan.parity.observed import observe
from tpplan.parity.reference import UnshardedRun

_RUNS = 3


class OtherRounding(TorchDispatchMode):
    """Gives the results of products and sums a relative error of up to one unit in the last place."""

    def __init__(self, generator: torch.Generator) -> None:
        """Draw the errors from `generator`."""
        super().__init__()
        self._generator = generator

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operation, and change its result."""
        result: Any = func(*args, **(kwargs or {}))
        name = str(func)
        if has_role(name, "accumulation") or base_name(name).startswith(FUSED_ATTENTION):
            results: Sequence[Any] = result if type(result) in (tuple, list) else (result,)
            for tensor in results:
                self._disturb(tensor)
        return result

    def _disturb(self, tensor: object) -> None:
        """Change a sum, unless it is of whole numbers, which are exact and may be compared."""
        if isinstance(tensor, Tensor) and tensor.is_floating_point() and not torch.equal(tensor, tensor.round()):
            drawn = torch.rand(tensor.shape, generator=self._generator, dtype=torch.float64).to(tensor.dtype)
            tensor.mul_(1 + (2 * drawn - 1) * torch.finfo(tensor.dtype).eps)


@dataclass(frozen=True, slots=True)
class Moved:
    """The largest change of each tensor, by name: of outputs, and of the gradients of parameters and of inputs."""

    outputs: dict[str, float]
    gradients: dict[str, float]
    input_gradients: dict[str, float]


def moved_by_rounding(model: nn.Module, call: Call, reference: UnshardedRun, seed: int) -> Moved:
    """Run the stock model again, with other roundings."""
    generator = torch.Generator().manual_seed(seed)
    moved = Moved({}, {}, {})
    for _ in range(_RUNS):
        draws = contextlib.nullcontext() if reference.draws is None else OwnDraws(reference.draws.seed)
        with draws, OtherRounding(generator):
            again = observe(copy_structure(model), call, lambda name, _: reference.cotangents.get(name))
        _note(moved.outputs, reference.seen.outputs, again.outputs)
        _note(moved.gradients, reference.seen.gradients, again.gradients)
        _note(moved.input_gradients, reference.seen.input_gradients, again.input_gradients)
    return moved


def _note(moved: dict[str, float], before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
    for name, whole in before.items():
        found = after.get(name)
        if found is not None and found.shape == whole.shape and whole.is_floating_point():
            moved[name] = max(moved.get(name, 0.0), magnitude(found - whole))
