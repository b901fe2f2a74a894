"""Draws: random numbers that a model draws even in evaluation, the same for the unsharded model and for every rank.

    torch.multinomial(weights, count)   ->   from a stream of this run's own, which begins as that of every other run

Real ranks have a generator each, seeded alike. Simulated ones are threads, which share torch's: without a stream of its
own each would draw what another one left.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tpplan.compat import OpOverload, TorchDispatchMode, random_state, set_random_state
from tpplan.compiler.trace.draws import is_draw

_LOCK = threading.Lock()


class OwnDraws(TorchDispatchMode):
    """Draws from a stream of its own, not from torch's default generator.

    Attributes:
        drew: whether anything was drawn.
    """

    def __init__(self, seed: int) -> None:
        """Begin the stream with `seed`."""
        super().__init__()
        self.drew = False
        self._state = torch.Generator().manual_seed(seed).get_state()

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operation; one that draws, with the generator as this stream left it."""
        keywords = kwargs or {}
        if not is_draw(func, tuple(args), keywords) or keywords.get("generator") is not None:
            return func(*args, **keywords)
        self.drew = True
        with _LOCK:
            before = random_state()
            set_random_state(self._state)
            try:
                return func(*args, **keywords)
            finally:
                self._state = random_state()
                set_random_state(before)


__all__ = ["OwnDraws"]
