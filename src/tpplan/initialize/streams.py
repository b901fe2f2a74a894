"""Which state each generator has at each draw, though nothing is drawn while a construction is recorded.

A constructor may seed a generator, or keep its state and put it back. So after each recorded draw the generator gets a
state of our own that stands for that moment. Whichever state it has at the next draw says what Python has done:
nothing, a return to an earlier moment, or a seed.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from tpplan.initialize.record import Draw

_BASE = 0x7470_706C_0000_0000  # no seed that a user would choose


class Clock:
    """One generator, while a construction is recorded.

    Attributes:
        number: the stream's.
        generator: the generator.
        start: its state before.
        fresh: whether the construction has brought it, so that its first draw says where it was.
        draws: how many draws were recorded.
    """

    def __init__(self, number: int, generator: Generator, fresh: bool) -> None:
        """Begin to count."""
        self.number = number
        self.generator = generator
        self.fresh = fresh
        self.start = generator.get_state()
        self.draws = 0
        self._now = self.start
        if not fresh:
            self._stand_in()

    def draw(self) -> Draw:
        """Record a draw."""
        jump = self.start if self.fresh and self.draws == 0 else self.jumped()
        found = Draw(self.number, self.draws, jump)
        self.draws += 1
        self._stand_in()
        return found

    def jumped(self) -> Tensor | int | None:
        """Where Python has put the generator since the last draw."""
        state = self.generator.get_state()
        if torch.equal(state, self._now):
            return None
        seed = self.generator.initial_seed() - _BASE
        if 0 <= seed <= self.draws and torch.equal(state, self._standing_for(seed)):
            return seed
        return state

    def restore(self) -> None:
        """Put the generator back to where it was before."""
        self.generator.set_state(self.start)

    def _stand_in(self) -> None:
        self.generator.manual_seed(_BASE + self.draws)
        self._now = self.generator.get_state()

    def _standing_for(self, position: int) -> Tensor:
        return Generator(self.generator.device).manual_seed(_BASE + position).get_state()


def default_generator(device: torch.device) -> Generator:
    """The generator that torch draws from on a device, unless told otherwise."""
    if device.type == "cpu":
        return torch.default_generator
    backend = getattr(torch, device.type)
    unnamed = device == torch.device(device.type)
    return backend.default_generators[backend.current_device() if unnamed else device.index]


__all__ = ["Clock", "default_generator"]
