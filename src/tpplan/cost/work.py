"""What a program's step has a rank do: kernels, collectives and what is kept, as numbers that another size scales.

in:  a measurement at a few sizes of the batch and the sequence
out: `Work`, which a program carries as data; `Work.at` gives it for one size

Each amount is known at the sizes in `points`, and is a polynomial of them: of degree one in the batch and two in the
sequence. `at` interpolates it, exactly where amounts are such polynomials, as those of layers and of attention are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from typing import Any

Point = tuple[int, int]
Amount = tuple[int, ...]
"""A count at each point; at one size, of one entry."""
PRODUCTS = "product"
ATTENTION = "attention"
COLLECTIVE = "collective"


@dataclass(frozen=True, slots=True)
class Task:
    """Equal kernels, or a collective, of one call of a module.

    Attributes:
        module: the module in whose forward it runs, or whose backward it is.
        backward: whether it runs in the backward.
        kind: "product", "attention", "collective", or "other" for what memory bounds.
        name: of the operator, such as `aten.mm.default`, or of the collective.
        dtype: of what it computes in, such as `bfloat16`.
        times: how often a step runs it: as often as there are equal layers.
        launches: how many kernels it stands for.
        flops: of multiplications and additions, two for each pair.
        moved: bytes read and written, if each kernel reads its operands and writes its result.
        fused: the same, if kernels between products are one kernel each.
        made: bytes of the results; of a collective, of the whole tensor.
        sizes: of a product, (batch, rows, columns, summed), each an amount; otherwise empty.
    """

    module: str
    backward: bool
    kind: str
    name: str
    dtype: str
    times: int
    launches: int
    flops: Amount
    moved: Amount
    fused: Amount
    made: Amount
    sizes: tuple[Amount, ...] = ()


@dataclass(frozen=True, slots=True)
class SavedBytes:
    """What autograd keeps from the forward for the backward, beside parameters and buffers.

    Attributes:
        module: whose backward it is for.
        kind: of the task that made it; "input" for what was passed into the call.
        times: how often there is as much: once for each equal layer.
        bytes: of the storages, each counted once.
    """

    module: str
    kind: str
    times: int
    bytes: Amount


@dataclass(frozen=True, slots=True)
class Work:
    """One forward, and its backward, of a rank.

    Attributes:
        points: (batch, sequence) where amounts are known.
        example: (batch, sequence) of the example call.
        tokens: of the call on all ranks: entries of its batch and sequence.
        tasks: in order of execution.
        saved: what autograd keeps.
        lists: the outermost lists of modules: activation checkpoints wrap each module in them, a block.
        block_inputs: bytes of what is passed to all blocks, and wants a gradient: what a checkpoint keeps.
        results: bytes of what the call returns and autograd doesn't keep.
        temporary: the most bytes beside what is kept, at any time; of gradients, only those that are freed again.
        forward_temporary: the most bytes at any time of a forward without gradients, its result among them.
        cache: bytes of keys and values, as attention reads them: what a token more is computed from.
        model_flops: of the products of a forward and a backward on all ranks, attention counted in full: what MFU means
            (Chowdhery et al., "PaLM", 2022, appendix B).
        unsized: why amounts are known at one point alone; empty otherwise.
        training: whether there is a backward.
        own: that of an example with a batch of 1, which lies in memory as no other does; not interpolated.
    """

    points: tuple[Point, ...]
    example: Point
    tokens: Amount
    tasks: tuple[Task, ...]
    saved: tuple[SavedBytes, ...]
    lists: tuple[str, ...]
    block_inputs: Amount
    results: Amount
    temporary: Amount
    forward_temporary: Amount
    cache: Amount
    model_flops: Amount
    unsized: str = ""
    training: bool = True
    own: Work | None = None

    def in_block(self, module: str) -> bool:
        """Whether a module is a block, or inside of one."""
        return module.startswith(tuple(f"{name}." if name else "" for name in self.lists))

    def at(self, batch: int, sequence: int) -> Work:
        """The same at one size.

        Raises:
            ValueError: amounts are known at one size alone.
        """
        if self.own is not None and (batch, sequence) == self.example:
            return self.own
        if (batch, sequence) in self.points:
            place = self.points.index((batch, sequence))
            return self._with([Fraction(int(i == place)) for i in range(len(self.points))], (batch, sequence))
        if len(self.points) == 1:
            raise ValueError(self.unsized)
        return self._with(_weights(self.points, batch, sequence), (batch, sequence))

    def _with(self, weights: Sequence[Fraction], point: Point) -> Work:
        def of(amount: Amount) -> Amount:
            return (max(0, round(sum(w * n for w, n in zip(weights, amount, strict=True)))),)

        shared = replace(self, own=None)
        return replace(_changed(shared, of, len(weights)), points=(point,), example=self.example)


def joined(works: Sequence[Work], example: Point) -> Work:
    """The same work at several sizes, each known at one.

    Raises:
        ValueError: at some it does something else, or keeps something else.
    """
    if any(_form(work) != _form(works[0]) for work in works):
        raise ValueError("at another size it does something else")
    merged = _merged(works)
    return replace(merged, points=tuple(work.points[0] for work in works), example=example)


def _form(work: Work) -> list[tuple[object, ...]]:
    tasks = [(t.module, t.backward, t.kind, t.name, t.dtype, t.times, t.launches, len(t.sizes)) for t in work.tasks]
    return [*tasks, *((held.module, held.kind, held.times) for held in work.saved)]


def _is_amount(held: object, entries: int) -> bool:
    return isinstance(held, tuple) and len(held) == entries and all(type(n) is int for n in held)  # pyright: ignore


def _changed(held: Any, of: Callable[[Amount], Amount], entries: int) -> Any:
    """The same with other amounts."""
    if isinstance(held, (Work, Task, SavedBytes)):
        return replace(held, **{f.name: _changed(getattr(held, f.name), of, entries) for f in fields(held)})
    if _is_amount(held, entries):
        return of(held)
    return tuple(_changed(item, of, entries) for item in held) if isinstance(held, tuple) else held  # pyright: ignore


def _merged(held: Sequence[Any]) -> Any:
    """One after the other, each of one entry, as one."""
    first = held[0]
    if isinstance(first, (Work, Task, SavedBytes)):
        return replace(first, **{f.name: _merged([getattr(one, f.name) for one in held]) for f in fields(first)})
    if _is_amount(first, 1):
        return tuple(one[0] for one in held)
    return tuple(_merged(items) for items in zip(*held, strict=True)) if isinstance(first, tuple) else first


def _weights(points: Sequence[Point], batch: int, sequence: int) -> list[Fraction]:
    """Lagrange's weights on a grid of batches and sequences."""
    batches, sequences = sorted({b for b, _ in points}), sorted({s for _, s in points})
    return [_lagrange(batches, b, batch) * _lagrange(sequences, s, sequence) for b, s in points]


def _lagrange(nodes: Sequence[int], node: int, at: int) -> Fraction:
    weight = Fraction(1)
    for other in nodes:
        if other != node:
            weight *= Fraction(at - other, node - other)
    return weight


__all__ = ["ATTENTION", "COLLECTIVE", "PRODUCTS", "Amount", "Point", "SavedBytes", "Task", "Work", "joined"]
