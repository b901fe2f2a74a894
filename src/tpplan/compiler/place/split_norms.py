"""Split norms: norms over features that are split; each rank normalizes its part by statistics of the whole.

in:  a region, and the layouts of its inputs
out: a `Solution` that sums the statistics over the ranks; None if the region is no norm, or its features aren't split

    q_norm(x: S(2))         ->   S(2), at the cost of an all-reduce of (batch, sequence, 1) each way
    norm(x: S(2), z: S(2))  ->   likewise, if z does no more than gate
"""

from __future__ import annotations

import math

from tpplan.compiler.ir.layout import REPLICATED, Layout
from tpplan.compiler.ir.region import Region
from tpplan.compiler.place.boundaries import Boundaries
from tpplan.compiler.place.solution import Entered, Left, Normed, Solution, State, Steps
from tpplan.compiler.rewrite.recognise import Norm, recognise, recognise_gated
from tpplan.cost.communication import Topology, bytes_sent


class SplitNorms:
    """Solves norms; remembers what it recognised."""

    def __init__(self, size: int, topology: Topology) -> None:
        """Solve for an axis of `size` ranks."""
        self.size = size
        self.topology = topology
        self._norms: dict[int, object] = {}

    def solve(self, region: Region, inputs: State, boundaries: Boundaries) -> Solution | None:
        """The way to run `region` on a part of its features, under the constraints of its boundaries."""
        count = len(region.entries)
        if region.has_own_backward:
            return None
        if len(region.inputs) != count or count not in (1, 2) or len(region.exits) != 1 or region.style is not None:
            return None
        held, value = inputs[0], region.values[region.entries[0].target]
        if any(other != held for other in inputs):
            return None
        if held.dim is None or held.dim != len(value.shape) - 1 or held.interleave != 1 or held.within:
            return None
        if not held.is_even(value.shape[-1], self.size) or not self._counts_alike(held, value.shape[-1]):
            return None
        if id(region) not in self._norms:
            self._norms[id(region)] = recognise(region) if count == 1 else recognise_gated(region)
        norm = self._norms[id(region)]
        if not isinstance(norm, Norm) or norm.dims != 1:
            return None
        parameters = [i for i in (norm.weight, norm.bias) if i is not None]
        partial = frozenset(i for i in parameters if region.values[i].differentiable)
        split = any(region.values[i].parameter != REPLICATED for i in parameters)
        if split or any((region.example, i) in boundaries.constraints.whole_gradients for i in partial):
            return None
        # No latency is counted: to gather the features would save a step of a ring, and repeat on every rank the work
        # that is done with them, of which this model of cost knows nothing.
        sent = 2 * bytes_sent("all-reduce", _statistic_bytes(norm, value.shape), self.size)
        cost = self.topology.time(0, sent) + sum(boundaries.gradient_sum(region.values[i]) for i in partial)
        steps = Steps(Normed(norm, held), Steps(Entered((held,) * count), None))
        return Solution((held,), (cost, 0), Steps(Left((held,), partial), steps))

    def _counts_alike(self, held: Layout, count: int) -> bool:
        """Whether as many ranks hold each feature as any other: the sums over the ranks count all of them as often."""
        parts = [part for rank in range(self.size) for part in held.intervals(count, self.size, rank)]
        bounds = sorted({bound for start, length in parts for bound in (start, start + length)})
        holders = {sum(start <= at < start + length for start, length in parts) for at in bounds[:-1]}
        return len(holders) == 1


def _statistic_bytes(norm: Norm, shape: tuple[int, ...]) -> int:
    """Of what a norm over the last dim sums over the ranks, in float32."""
    return (2 if norm.centred else 1) * math.prod(shape[:-1]) * 4


__all__ = ["SplitNorms"]
