"""Draws: random numbers that a model draws even in evaluation, the same for the unsharded model and for every rank.

    torch.multinomial(weights, count)   ->   from a stream of this run's own, which begins as that of every other run
    torch.randn_like(h) with h: S(2)    ->   drawn whole, as by the unsharded model, of which a rank keeps its part: by
                                             the program's layout of it, such as parts of several packs

Real ranks have a generator each, seeded alike, and draw numbers of their own for what they hold a part of. Simulated
ones are threads, which share torch's: without a stream of its own each would draw what another one left.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tpplan.compat.generators import GENERATOR, random_state, set_random_state
from tpplan.compat.modes import TorchDispatchMode
from tpplan.compat.schemas import OpOverload
from tpplan.compiler.ir.layout import Layout, Pack, packed, sharded
from tpplan.compiler.ir.program import Program
from tpplan.compiler.trace.random_draws import is_draw
from tpplan.ops.registry import DRAWN_BY_SHAPE
from tpplan.runtime.parameters.pieces import part
from tpplan.runtime.ranks.segments import taken

Drawn = tuple[str, tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Draws:
    """What a run of the unsharded model drew: with what its stream began, and each result's geometry."""

    seed: int
    made: tuple[Drawn, ...]


class OwnDraws(TorchDispatchMode):
    """Draws from a stream of its own, not from torch's default generator.

    Attributes:
        made: the operator, the shape and the strides of each draw so far.
    """

    def __init__(self, seed: int) -> None:
        """Begin the stream with `seed`."""
        super().__init__()
        self.made: list[Drawn] = []
        self._state = torch.Generator().manual_seed(seed).get_state()

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operation; one that draws, with the generator as this stream left it."""
        keywords = kwargs or {}
        if not is_draw(func, tuple(args), keywords) or keywords.get("generator") is not None:
            return func(*args, **keywords)
        with GENERATOR:
            before = random_state()
            set_random_state(self._state)
            try:
                result = self._drawn(func, args, keywords)
            finally:
                self._state = random_state()
                set_random_state(before)
        shape, stride = (tuple(result.shape), result.stride()) if isinstance(result, Tensor) else ((), ())
        self.made.append((func.name(), shape, stride))
        return result

    def _drawn(self, func: OpOverload, args: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        return func(*args, **keywords)


class DrawsOfRank(OwnDraws):
    """A rank's draws: of what it holds a part of, its part of the whole."""

    def __init__(self, draws: Draws, program: Program, rank: int) -> None:
        """Draw as the unsharded model did, as `rank` of those that run `program`."""
        super().__init__(draws.seed)
        self._whole, self._rank, self._size = draws.made, rank, program.size
        self._layouts: dict[tuple[str, tuple[int, ...]], list[Layout]] = defaultdict(list)
        for drawn in program.drawn:
            self._layouts[drawn.operation, drawn.shape].append(drawn.layout)
        self._met: Counter[tuple[str, tuple[int, ...]]] = Counter()

    def _drawn(self, func: OpOverload, args: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        number, name = len(self.made), func.name()
        whole = self._whole[number] if number < len(self._whole) else None
        first: Any = args[0] if args else None
        local = _shape_of(first)
        if whole is None or local is None or whole[0] != name or not name.startswith(DRAWN_BY_SHAPE):
            return func(*args, **keywords)
        layout = self._layout(name, whole[1], local)
        if layout is None:
            return func(*args, **keywords)
        places = part_of(torch.arange(math.prod(whole[1])).reshape(whole[1]), layout, self._size, self._rank)
        if isinstance(first, Tensor):
            given = torch.empty_strided(*whole[1:], dtype=first.dtype, device=first.device).fill_(0.5)
            given.put_(places, first)  # of probabilities a rank has its own; each takes one number of the stream
            mine = func(given, *args[1:], **keywords).take(places)
            return first.copy_(mine) if name.partition(".")[0].endswith("_") else torch.empty_like(first).copy_(mine)
        return func([*whole[1]], *args[1:], **keywords).take(places)

    def _layout(self, name: str, whole: tuple[int, ...], local: tuple[int, ...]) -> Layout | None:
        """How the rank's part lies, by the program or else by its shape; None if it holds all."""
        stated = self._layouts.get((name, whole), [])
        number = self._met[name, whole]
        self._met[name, whole] += 1
        split = [dim for dim, (one, other) in enumerate(zip(whole, local, strict=False)) if one != other]
        if not split or len(whole) != len(local):
            return None
        # A call of the other mode may leave some draws out; those that fit are tried then.
        tried = [*stated[number : number + 1], *stated, sharded(split[0])]
        return next((held for held in tried if held.local_shape(whole, self._size, self._rank) == local), None)


def part_of(whole: Tensor, layout: Layout, size: int, rank: int) -> Tensor:
    """What `rank` of `size` holds of a whole tensor that lies as `layout` says."""
    dim, shape = layout.dim, tuple(whole.shape)
    if dim is None:
        return whole
    if layout.interleave != 1:
        rows = whole.reshape(*shape[:dim], layout.interleave, -1, *shape[dim + 1 :])
        return taken(rows, dim + 1, [Pack(rows.shape[dim + 1]).part(size, rank)]).flatten(dim, dim + 1)
    if layout.joint:
        flat = taken(whole.flatten(dim, dim + 1), dim, packed(dim, layout.joint).intervals(0, size, rank))
        return flat.reshape(layout.local_shape(shape, size, rank))
    return part(layout, 0, (None,), shape, (size,), (rank,)).of(whole)


def _shape_of(first: Tensor | list[int] | None) -> tuple[int, ...] | None:
    """The shape of what is drawn, by the first operand: a tensor or sizes."""
    return tuple(first.shape if isinstance(first, Tensor) else first) if isinstance(first, (Tensor, list)) else None


__all__ = ["Draws", "DrawsOfRank", "OwnDraws", "part_of"]
