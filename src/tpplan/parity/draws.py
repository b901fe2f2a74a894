"""Draws: random numbers that a model draws even in evaluation, the same for the unsharded model and for every rank.

    torch.multinomial(weights, count)   ->   from a stream of this run's own, which begins as that of every other run
    torch.randn_like(h) with h: S(2)    ->   drawn whole, as by the unsharded model, of which a rank keeps its part

Real ranks have a generator each, seeded alike, and draw numbers of their own for what they hold a part of. Simulated
ones are threads, which share torch's: without a stream of its own each would draw what another one left.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tpplan.compat import OpOverload, TorchDispatchMode, random_state, set_random_state
from tpplan.compiler.trace.draws import is_draw

_LOCK = threading.Lock()
# These take one number of the stream for each entry, whatever their operands' numbers are.
_OF_SHAPES = ("aten::rand", "aten::normal_", "aten::uniform_", "aten::exponential_", "aten::bernoulli")
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
        with _LOCK:
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

    def __init__(self, draws: Draws, rank: int, size: int) -> None:
        """Draw as the unsharded model did, as `rank` of `size`."""
        super().__init__(draws.seed)
        self._whole, self._rank, self._size = draws.made, rank, size

    def _drawn(self, func: OpOverload, args: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        number, name = len(self.made), func.name()
        whole = self._whole[number] if number < len(self._whole) else None
        first: Any = args[0] if args else None
        local = _shape_of(first)
        if whole is None or local is None or whole[0] != name or not name.startswith(_OF_SHAPES):
            return func(*args, **keywords)
        part = self._part(whole[1], local)
        if part is None:
            return func(*args, **keywords)
        if isinstance(first, Tensor):
            given = torch.empty_strided(*whole[1:], dtype=first.dtype, device=first.device).fill_(0.5)
            given.narrow(*part).copy_(first)  # of probabilities a rank has its own; each takes one number of the stream
            mine = func(given, *args[1:], **keywords).narrow(*part)
            return first.copy_(mine) if name.partition(".")[0].endswith("_") else torch.empty_like(first).copy_(mine)
        return func([*whole[1]], *args[1:], **keywords).narrow(*part).contiguous()

    def _part(self, whole: tuple[int, ...], local: tuple[int, ...]) -> tuple[int, int, int] | None:
        """The dim of which this rank holds a part, where that begins, and its length; None if it holds all."""
        split = [dim for dim, (one, other) in enumerate(zip(whole, local, strict=False)) if one != other]
        if len(whole) != len(local) or len(split) != 1:
            return None
        (dim,) = split
        start = min(whole[dim], self._rank * -(-whole[dim] // self._size))
        return dim, start, local[dim]


def _shape_of(first: Tensor | list[int] | None) -> tuple[int, ...] | None:
    """The shape of what is drawn, by the first operand: a tensor or sizes."""
    return tuple(first.shape if isinstance(first, Tensor) else first) if isinstance(first, (Tensor, list)) else None


__all__ = ["Draws", "DrawsOfRank", "OwnDraws"]
