"""The unsharded run, with what it takes to say how large rounding errors may be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from tpplan.compat.modes import TorchDispatchMode
from tpplan.compat.schemas import OpOverload
from tpplan.compiler.trace.stock_again import stock_again
from tpplan.ops.registry import first_factor, has_role
from tpplan.parity.call import Call
from tpplan.parity.drawn import Draws, OwnDraws
from tpplan.parity.materialise import copy_structure
from tpplan.parity.observed import Observation, observe
from tpplan.parity.parity_errors import UnshardedError, VerifyError, describe


class ArithmeticMeter(TorchDispatchMode):
    """Notes the coarsest floating dtype that any operation rounds to, and the longest sum that one takes.

    Attributes:
        epsilon: of the coarsest dtype.
        terms: of the longest sum.
    """

    def __init__(self) -> None:
        """Start with nothing seen."""
        super().__init__()
        self.epsilon = 0.0
        self.terms = 1

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operation and look at its result."""
        result = func(*args, **(kwargs or {}))
        several = isinstance(result, (tuple, list))
        results = cast("Sequence[object]", result if several else (result,))
        for tensor in results:
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.itemsize > 1:
                self.epsilon = max(self.epsilon, torch.finfo(tensor.dtype).eps)
        operator = str(func)
        if has_role(operator, "product", "vector product"):
            first = first_factor(operator)
            one = [held for held in args if isinstance(held, Tensor)][-2] if first is None else args[first]
            self.terms = max(self.terms, one.shape[-1])
        elif has_role(operator, "sum", "mean", "sum of exponentials"):
            first = results[0]
            if isinstance(args[0], Tensor) and isinstance(first, Tensor) and first.numel():
                self.terms = max(self.terms, args[0].numel() // first.numel())
        return result


@dataclass(frozen=True, slots=True)
class UnshardedRun:
    """The unsharded run.

    Attributes:
        seen: outputs and gradients.
        cotangents: the gradients that were sent into the outputs.
        draws: what it drew of random numbers; None if that is nothing.
        epsilon: of the coarsest dtype that the model's arithmetic rounds to.
        terms: of the longest sum that an operation takes.
        depth: how many leaf modules were called.
    """

    seen: Observation
    cotangents: dict[str, Tensor] = field(repr=False)
    draws: Draws | None
    epsilon: float
    terms: int
    depth: int


def run_reference(model: nn.Module, call: Call, seed: int) -> UnshardedRun:
    """Run the stock model forward and backward, with a seeded normal cotangent for every differentiable output.

    What runs is a copy, since a forward may write to its buffers, and the ranks begin where this run does.

    Raises:
        UnshardedError: the model raised.
        VerifyError: it returned nothing to compare.
    """
    generator = torch.Generator().manual_seed(seed + 2)
    cotangents: dict[str, Tensor] = {}

    def cotangent(name: str, output: Tensor) -> Tensor:
        drawn = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output.dtype)
        cotangents[name] = drawn
        return drawn

    meter, own = ArithmeticMeter(), OwnDraws(seed + 3)
    try:
        with own, meter:
            copied = copy_structure(model)
            with stock_again(copied.modules()):
                seen = observe(copied, call, cotangent)
    except Exception as error:  # the model's own, whatever it is
        raise UnshardedError.of(
            "TP194", f"the unsharded `{type(model).__name__}` raised {describe(error)}", help="call it on its own first"
        ) from error
    if not seen.outputs:
        raise VerifyError.of(
            "TP194",
            f"`{type(model).__name__}` returned no tensor that can be compared",
            help="return tensors, or tuples, dicts or dataclasses of them",
        )
    epsilon = meter.epsilon or torch.finfo(torch.float64).eps
    draws = Draws(seed + 3, tuple(own.made)) if own.made else None
    return UnshardedRun(seen, cotangents, draws, epsilon, meter.terms, max(1, sum(held.leaf for held in seen.calls)))
