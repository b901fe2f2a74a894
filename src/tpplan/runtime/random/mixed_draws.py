"""Draws told apart: bodies that draw random numbers for sharded and for replicated values alike.

in:  the kind of each draw of a body, in order of execution, from the program
out: contexts to run bodies in

Such a body runs under a dispatch mode that counts the operations which draw, and switches the stream for each. Modules
called inside that draw as well have contexts of their own, in which the mode is off: it costs as much as the operations
that it sees. What a body draws in a call that isn't what the program says is an error, never another stream.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from types import FrameType, TracebackType
from typing import Any, Protocol

from tpplan.compat.modes import RecordingMode, innermost_mode
from tpplan.compat.schemas import OpOverload
from tpplan.compiler.ir.trace import quoted
from tpplan.compiler.trace.random_draws import is_draw
from tpplan.runtime.bodies.open_bodies import OpenBodies
from tpplan.runtime.random.randomness import RandomnessError, ReplicatedRandomness, SplitRandomness, is_checkpointed


class Randomness(Protocol):
    """A context for a body that draws random numbers."""

    def __enter__(self) -> None:
        """Prepare the generator."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Put it back."""
        ...


class OneStream:
    """A context for bodies whose draws are all of one kind."""

    def __init__(self, stream: SplitRandomness | ReplicatedRandomness, bodies: OpenBodies[DrawCounter]) -> None:
        """Draw from `stream`."""
        self._stream = stream
        self._bodies = bodies

    def __enter__(self) -> None:
        """Draw from the stream from now on."""
        self._bodies.enter(None)
        self._stream.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Go on with the stream of before."""
        self._stream.__exit__(kind, error, trace)
        self._bodies.leave()


class CallersStream:
    """A context for modules whose draws are counted with those of the body that calls them."""

    def __init__(self, name: str, bodies: OpenBodies[DrawCounter]) -> None:
        """Be called by one of `bodies`."""
        self._name = name
        self._bodies = bodies

    def __enter__(self) -> None:
        """See that there is such a body.

        Raises:
            RandomnessError: the module is called by itself, or recomputed by an activation checkpoint of its own.
        """
        if not self._bodies:
            raise RandomnessError.of(
                "TP119",
                f"{quoted(self._name)} draws random numbers for sharded values in some calls and for replicated ones "
                "in others, and only the body that calls it knows which this call is",
                help="put the activation checkpoint around that body, or use two modules",
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave everything as it is."""


class MixedStreams:
    """A context for a body that draws for sharded and for replicated values alike."""

    def __init__(
        self,
        name: str,
        draws: tuple[str, ...],
        streams: Mapping[str, SplitRandomness | ReplicatedRandomness],
        bodies: OpenBodies[DrawCounter],
    ) -> None:
        """Draw from `streams` by the kinds that `draws` says, in the body of the module `name`."""
        self.name = name
        self.draws = draws
        self._streams = streams
        self._bodies = bodies

    def __enter__(self) -> None:
        """Count from the first draw."""
        frame = inspect.currentframe()
        self._bodies.enter(DrawCounter(self, frame and frame.f_back))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """See that the body has drawn as often as in the example, or not at all.

        Raises:
            RandomnessError: it has drawn less often.
        """
        counter = self._bodies.innermost
        self._bodies.leave()
        if error is None and counter is not None and 0 < counter.count < len(self.draws):
            raise self._differs(f"{counter.count} times")

    def counts(self, counter: DrawCounter) -> bool:
        """Whether `counter` is that of the innermost body."""
        return self._bodies.innermost is counter

    def stream_of(self, counter: DrawCounter) -> SplitRandomness | ReplicatedRandomness:
        """The stream to draw from next.

        Raises:
            RandomnessError: the body draws more often than the program says, or where it can't be drawn again.
        """
        if counter.count == len(self.draws):
            raise self._differs("more often")
        kind = self.draws[counter.count]
        counter.count += 1
        if kind == "split" and is_checkpointed(counter.frame):
            raise RandomnessError.of(
                "TP119",
                f"the body of {quoted(self.name)} draws random numbers for sharded and for replicated values, and "
                "checkpoints a part of itself, which would draw different numbers when it is recomputed",
                help="put the activation checkpoint around the whole module",
            )
        return self._streams[kind]

    def _differs(self, often: str) -> RandomnessError:
        kinds = ", ".join("sharded" if kind == "split" else "replicated" for kind in self.draws)
        return RandomnessError.of(
            "TP119",
            f"the body of {quoted(self.name)} draws random numbers {often} in this call instead of {len(self.draws)} "
            f"times as in the example ({kinds}), so it isn't known which of them are for sharded values",
            help="call `parallelize` with the dropouts' probabilities as they are in this call, and with inputs that "
            "take the same path",
        )


class DrawCounter(RecordingMode):
    """Sees the operations of one run of a body."""

    def __init__(self, body: MixedStreams, frame: FrameType | None) -> None:
        super().__init__()
        self.body = body
        self.frame = frame
        self.count = 0
        self._is_on = False

    def __torch_dispatch__(
        self, func: OpOverload, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keywords: dict[str, Any] = kwargs or {}
        if not is_draw(func, args, keywords) or not self.body.counts(self):
            return func(*args, **keywords)
        with self.body.stream_of(self):
            return func(*args, **keywords)

    def go_on(self) -> None:
        """See draws again."""
        if not self._is_on:
            self._is_on = True
            self.__enter__()

    def pause(self) -> None:
        """See no draws; below a mode that the body itself has opened it stays on, and lets pass what isn't its own."""
        if innermost_mode() is self:
            self._is_on = False
            self.__exit__(None, None, None)


__all__ = ["CallersStream", "DrawCounter", "MixedStreams", "OneStream", "Randomness", "RandomnessError"]
