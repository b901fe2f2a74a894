"""What of a collective runs beside matrix products: seconds, on two streams and a link.

    beside       exposed = max(T - P, 0)                 a sum of gradients, while the weights' gradients are computed
    pairwise     n - 1 steps of T / (n - 1); products of some parts at a time, each when its parts are there, or before
                 they are sent
    summed       products of some rows at a time, each summed by itself while the next is made

T is what the collective takes by itself, P the products. Parts are smaller products, with a start and a derate of their
own, so that an exchange may cost more than it hides.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tpplan.cost.cluster import Cluster
from tpplan.cost.kernel_times import task_seconds
from tpplan.cost.link_times import Group, collective_seconds
from tpplan.cost.work import COLLECTIVE, PRODUCTS, Task

if TYPE_CHECKING:
    from tpplan.compiler.ir.overlaps import Overlap
    from tpplan.compiler.ir.program import Program


LinearPart = tuple[int, int, str, int]
"""A rank's part of a weight: outputs, inputs, the dtype, and the bytes of an entry."""


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast products are.

    Attributes:
        cluster: the GPUs.
        precision: what products compute in, if not in their own dtype.
        kept: the share of the cluster's rates that is kept.
    """

    cluster: Cluster
    precision: str | None = None
    kept: float = 1.0

    def products(self, layers: Iterable[LinearPart], rows: int) -> float:
        """Seconds of one product of so many rows with each weight, or of its gradient, which takes as long."""
        total = 0.0
        for made, given, dtype, itemsize in layers:
            moved = (rows * (made + given) + made * given) * itemsize
            task = Task(
                "", False, PRODUCTS, "product", dtype, 1, 1, (2 * rows * made * given,), (moved,), (moved,),
                (rows * made * itemsize,), ((1,), (rows,), (made,), (given,)),
            )  # fmt: skip
            total += task_seconds(self.cluster, task, self.precision) / self.kept
        return total

    def pairwise(
        self, layers: Sequence[LinearPart], rows: int, groups: Sequence[int], grouped: int, alone: float
    ) -> float:
        """What a pairwise all-gather hides of the `alone` seconds of a collective; less than 0 if it costs more.

        That of a reduce-scatter is its mirror, and hides as much.
        """
        size = sum(groups)
        step, at, parts = alone / (size - 1), 0.0, 0
        for group in groups:
            parts += group
            at = max(at, (parts - 1) * step) + self.products(layers[:grouped], math.ceil(rows * group / size))
        whole = self.products(layers[:grouped], rows)
        return alone + whole - at

    def summed(self, layers: Sequence[LinearPart], rows: int, parts: Sequence[int], group: Group) -> float:
        """What is hidden of the all-reduce of a layer's result that is made, and summed, in parts."""
        made, _, _, itemsize = layers[0]

        def seconds(rows: int) -> float:
            return collective_seconds(self.cluster, "all-reduce", rows * made * itemsize, group)

        computed = sent = 0.0
        for part in parts:
            own = math.ceil(rows * part / sum(parts))
            computed += self.products(layers, own)
            sent = max(sent, computed) + seconds(own)
        return self.products(layers, rows) + seconds(rows) - sent


def schedules(size: int, layers: int, chunks: int | None = None) -> Iterator[tuple[tuple[int, ...], int]]:
    """The ways to group parts that are compared: one at a time, or as many as were multiplied before; for some layers.

    If the products take at least about twice as long as the exchange, no part of the second way is waited for.

    Args:
        size: how many parts there are.
        layers: how many layers multiply them.
        chunks: of how many products each layer is to be, as far as there are parts; None for any.
    """
    doubling = [1]
    while sum(doubling) < size:
        doubling.append(min(sum(doubling), size - sum(doubling)))
    ways = ((1,) * size, tuple(doubling))
    if chunks is not None:
        few = min(chunks, size)
        ways = (tuple((size + place) // few for place in range(few)),)
    for grouped in range(layers, 0, -1):
        yield from dict.fromkeys((way, grouped) for way in ways)


def sums_in_parts(chunks: int | None = None) -> Iterator[tuple[tuple[int, ...], int]]:
    """The numbers of equal parts that are compared for an all-reduce, as `schedules` has them."""
    for parts in (2, 3, 4, 6, 8) if chunks is None else (chunks,):
        yield (1,) * parts, 1


@dataclass(frozen=True, slots=True)
class Hiding:
    """The overlaps of a program, on some GPUs.

    Attributes:
        rates: of products.
        overlaps: by the module at whose boundary they stand.
        layers: the linear layers, by name.
        size: how many ranks there are.
    """

    rates: Rates
    overlaps: Mapping[str, tuple[Overlap, ...]]
    layers: Mapping[str, LinearPart]
    size: int

    @classmethod
    def of(cls, program: Program, rates: Rates) -> Hiding:
        """What runs beside products in a program."""
        found: dict[str, tuple[Overlap, ...]] = {}
        for overlap in program.overlaps:
            if overlap.units:
                found[overlap.module] = (*found.get(overlap.module, ()), overlap)
        names = {layer for held in found.values() for overlap in held for layer in overlap.linears}
        transposed = {spec.name: spec.transposed for spec in program.modules}
        layers: dict[str, LinearPart] = {}
        for held in program.parameters:
            for layer in names.intersection(name.removesuffix(".weight") for name in held.names):
                made, given = held.local_shape[::-1] if transposed[layer] else held.local_shape
                layers[layer] = (made, given, held.dtype, held.itemsize)
        return cls(rates, found, layers, program.size)

    def seconds(self, task: Task, alone: float) -> float:
        """Of a collective that takes `alone` by itself, what is hidden; less than 0 where an exchange costs more."""
        overlap = self._overlap(task)
        if overlap is None:
            return 0.0
        layers = [self.layers[name] for name in overlap.linears]
        made, given, _, itemsize = layers[0]
        rows = math.ceil(task.made[0] / ((given if overlap.inward else made) * itemsize))
        if rows < overlap.least:
            return 0.0
        if overlap.inward and task.backward:
            return min(alone, self.rates.products(layers, rows))
        if task.name == "all-reduce":
            return self.rates.summed(layers, rows, overlap.groups, Group.of(self.rates.cluster, self.size))
        groups = overlap.groups if overlap.inward else overlap.groups[::-1]
        return self.rates.pairwise(layers, rows, groups, overlap.grouped, alone)

    def _overlap(self, task: Task) -> Overlap | None:
        """The overlap that a collective is one of; that of equal layers is the first's."""
        if task.kind != COLLECTIVE:
            return None
        gathers, scatters = task.name == "all-gather", task.name == "reduce-scatter"
        expected = {
            "gather_linear": scatters if task.backward else gathers,
            "linear_reduce": gathers if task.backward else scatters or task.name == "all-reduce",
            "weight_gradient": task.backward and task.name == "all-reduce",
        }
        for overlap in self.overlaps.get(task.module, ()):
            if all(expected[unit] for unit in overlap.units):
                return overlap
        return None


__all__ = ["Hiding", "LinearPart", "Rates", "schedules"]
