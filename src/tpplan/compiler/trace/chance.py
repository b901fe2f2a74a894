"""Chance: the random numbers of a run; of Python's `random` and of numpy, by which a forward may skip layers.

in:  a run of the model
out: numbers as the generators draw them; of each comparison with one, the side that the run is to take; values of torch
     that are random numbers alone, or that the forward has seeded

    if random.random() < self.layerdrop: continue   ->   a branch, as is `if torch.rand([]) < self.layerdrop`

What draws in another way (`random.choice`, a name that was imported on its own) is seen by the generator's state alone.
"""

from __future__ import annotations

import functools
import pickle
import random
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from tpplan.compat.generators import random_state, set_random_state
from tpplan.compat.modes import Unwatched
from tpplan.compiler.ir.observations import RandomNumbers
from tpplan.compiler.ir.trace import Operation
from tpplan.compiler.trace.random_draws import is_draw
from tpplan.compiler.trace.tape import Observer

PYTHON, NUMPY, TORCH = "Python's `random`", "`numpy.random`", "torch's random generator"
_DRAWS = {PYTHON: ("random", "uniform"), NUMPY: ("rand", "random", "random_sample", "uniform")}
_Decide = Callable[[bool], bool]
_OWN_DRAWS = torch.Generator().manual_seed(0x7EA51DE5).get_state()


class Chance(float):
    """A random number, of which a comparison is decided by whom the run asks."""

    decide: _Decide

    @classmethod
    def of(cls, number: float, decide: _Decide) -> Chance:
        """A number as it was drawn; `decide` is told how it compares, and says what the run is told."""
        made = cls(number)
        made.decide = decide
        return made


def _compared(name: str) -> Any:
    plain: Any = getattr(float, name)

    def compare(self: Chance, other: object) -> Any:
        found = plain(self, other)
        return found if found is NotImplemented else self.decide(found)

    return compare


def _computed(name: str) -> Any:
    plain: Any = getattr(float, name)

    def compute(self: Chance, *others: object) -> Any:
        found = plain(self, *others)
        return Chance.of(found, self.decide) if type(found) is float else found

    return compute


for _name in ("__lt__", "__le__", "__gt__", "__ge__"):
    setattr(Chance, _name, _compared(_name))
for _name in ("add", "mul", "neg", "radd", "rmul", "rsub", "rtruediv", "sub", "truediv"):
    setattr(Chance, f"__{_name}__", _computed(f"__{_name}__"))


class DrawObserver(Observer):
    """What a run draws: from torch's generator, and from those of Python and of numpy.

    Attributes:
        told: the generators that Python is told numbers of.
    """

    def __init__(self) -> None:
        """Nothing was drawn yet."""
        self.told: set[str] = set()
        self._unseen = False  # whether it draws otherwise than by a number whose comparisons are decided
        self._states: dict[str, object] = {}
        self._decide: _Decide = bool
        self._drawn: set[int] = set()  # random numbers, and what is made of them alone
        self._seeded: set[int] = set()
        self._state = random_state()

    # -- torch's generator ----------------------------------------------------------------------------------------
    def begin(self) -> None:
        """Put the generator of torch where no body's seed puts it: one that sets it is noticed by that."""
        with Unwatched():
            set_random_state(_OWN_DRAWS)
        self._state = _OWN_DRAWS

    def added(self, operation: Operation, called: bool) -> None:
        """Note random numbers, and what is made of them alone."""
        if not called:
            return
        draws = is_draw(operation.target, operation.arguments, operation.keywords)
        if self._drawn.issuperset(operation.inputs) if operation.inputs else draws:
            self._drawn.update(output for output in operation.outputs if output is not None)
        if draws and self._is_seeded():
            self._seeded.update(output for output in operation.outputs if output is not None)

    def _is_seeded(self) -> bool:
        """Whether the body has set the generator of random numbers: a capture doesn't draw from it."""
        with Unwatched():
            return not torch.equal(self._state, random_state())

    def is_drawn(self, value: int) -> bool:
        """Whether a value that Python is told is random numbers, or made of them alone."""
        if value in self._drawn:
            self.told.add(TORCH)
        return value in self._drawn

    def result(self) -> RandomNumbers:
        """What was drawn."""
        return RandomNumbers(frozenset(self.told), self._unseen, frozenset(self._seeded))

    # -- those of Python and of numpy -----------------------------------------------------------------------------
    @contextmanager
    def followed(self, decide: _Decide) -> Generator[None]:
        """Have comparisons of random numbers that this thread draws in the block decided."""
        before: DrawObserver | None = getattr(_thread, "draws", None)
        self._decide = decide
        self._states = {name: _state(generator) for name, generator in _generators()}
        _watches.enter()
        _thread.draws = self
        try:
            yield
        finally:
            _thread.draws = before
            _watches.leave()
            for name, generator in _generators():
                self._look(name, generator)

    def draw(self, name: str, generator: Any, draw: Callable[[], Any]) -> Any:
        """What `draw` draws from a generator."""
        self._look(name, generator)
        found = draw()
        if type(found) is not float:
            return found
        self.told.add(name)
        self._states[name] = _state(generator)
        return Chance.of(found, self._decide)

    def _look(self, name: str, generator: Any) -> None:
        """Note what was drawn unseen."""
        if name in self._states and self._states[name] != _state(generator):
            self.told.add(name)
            self._unseen = True


_thread = threading.local()


class _Watches:
    """Functions that draw, replaced while any run follows them; each thread follows its own run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs = 0
        self._replaced: list[tuple[Any, str, Any]] = []

    def enter(self) -> None:
        with self._lock:
            self._runs += 1
            if self._runs == 1:
                self._replaced = [(held, leaf, getattr(held, leaf)) for n, held in _generators() for leaf in _DRAWS[n]]
                for name, generator in _generators():
                    for leaf in _DRAWS[name]:
                        setattr(generator, leaf, _following(name, generator, getattr(generator, leaf)))

    def leave(self) -> None:
        with self._lock:
            self._runs -= 1
            if not self._runs:
                for holder, leaf, draw in self._replaced:
                    setattr(holder, leaf, draw)


_watches = _Watches()


def _following(name: str, generator: Any, draw: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(draw)
    def drawn(*args: Any, **kwargs: Any) -> Any:
        draws: DrawObserver | None = getattr(_thread, "draws", None)
        if draws is None:
            return draw(*args, **kwargs)
        return draws.draw(name, generator, lambda: draw(*args, **kwargs))

    return drawn


def states(names: frozenset[str]) -> Iterator[tuple[str, bytes]]:
    """Of these generators, what they draw next."""
    if TORCH in names:
        yield TORCH, random_state().numpy().tobytes()
    yield from ((name, repr(_state(generator)).encode()) for name, generator in _generators() if name in names)


def _generators() -> Iterator[tuple[str, Any]]:
    yield PYTHON, random
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        yield NUMPY, numpy.random


def _state(generator: Any) -> object:
    if hasattr(generator, "getstate"):
        return generator.getstate()
    legacy = hasattr(generator, "get_state")
    return pickle.dumps(generator.get_state(legacy=False) if legacy else generator.bit_generator.state)


def own_generators(holders: Iterable[tuple[str, Mapping[str, Any]]]) -> list[tuple[str, Callable[[], object]]]:
    """Generators of random numbers of Python's or numpy's that names stand for, each with how to read its state."""
    kinds: tuple[Any, ...] = (random.Random,)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        kinds += (numpy.random.Generator, numpy.random.RandomState)
    return [
        (f"{prefix}.{name}".lstrip("."), functools.partial(_state, held))
        for prefix, names in holders
        for name, held in names.items()
        if isinstance(held, kinds) and not isinstance(held, random.SystemRandom)
    ]


__all__ = ["NUMPY", "PYTHON", "TORCH", "DrawObserver", "own_generators", "states"]
