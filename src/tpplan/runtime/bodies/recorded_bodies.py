"""Inside: what a body that runs from its record does between its operations.

in:  layouts before and after; of a mean over a split dim, how many entries the whole has
out: reshards; the part of the mean that this rank makes
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tpplan.compiler.ir.layout import Layout, reshard_between
from tpplan.runtime.ranks.communicator import Communicator, placed
from tpplan.runtime.ranks.reshard import CallContext, Move, make_reshard


@dataclass(frozen=True, slots=True)
class Inside:
    """Exchanges between the operations of a module's body.

    Attributes:
        axis: the ranks.
        context: tells the batch size of a call.
        twice: whether backwards may be differentiated.
        module: the module's name, for errors.
        strict: see `Exchanges`.
    """

    axis: Communicator
    context: CallContext
    twice: bool
    module: str
    strict: bool = False

    def reshard(self, source: Layout, target: Layout, shape: tuple[int, ...], before: str) -> Move:
        """A change of layout of a value whose whole has this shape, before an operation."""
        axis, ways = placed(self.axis, f"`{before}` in the body of `{self.module}`"), reshard_between(source, target)
        assert ways is not None
        return make_reshard(source, target, ways.forward, ways.backward, axis, False, self.context, shape, self.twice)

    def mean(self, count: int, stock: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The sum of what this rank has of `count` entries, divided by all of them."""

        def part(
            tensor: Tensor, dims: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
        ) -> Tensor:
            return torch.sum(tensor, dims, keepdim, dtype=dtype) / count

        return part


__all__ = ["Inside"]
