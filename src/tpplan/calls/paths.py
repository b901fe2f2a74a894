"""Paths: the ways through the model's code that are proved for each kind of call, and which calls are watched.

The first real call of a kind is watched, as its device, backends and settings aren't the capture's. So is every call,
if a branch on a tensor's value has a side that isn't proved.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tpplan.calls.key import CallKey, Kind, Part
from tpplan.calls.mixture import Mixture, signature
from tpplan.calls.proofs import Proof
from tpplan.calls.watch import Departure, Proved, departure
from tpplan.compiler.ir.steps import Step, Stream
from tpplan.compiler.ir.trace import Location
from tpplan.compiler.pipeline import Compiled


@dataclass(slots=True)
class Path:
    """What is known of one kind of call.

    Attributes:
        streams: the steps of its proofs, one for each combination of sides of branches, and of sizes that matter, each
            with the proof whose program it was found to run by.
        sides: branches on data that one side is proved of.
        both: whether the other sides were looked at.
        free: branches that run by one program whichever side they take.
        drawn: branches on random numbers.
        watched: whether each call is watched, as a side isn't proved.
    """

    streams: list[tuple[Proof, Stream]] = field(default_factory=list[tuple[Proof, Stream]])
    sides: dict[Location, bool] = field(default_factory=dict[Location, bool])
    both: bool = False
    free: set[Location] = field(default_factory=set[Location])
    drawn: set[Location] = field(default_factory=set[Location])
    watched: bool = False
    _known: dict[tuple[int, frozenset[str]], tuple[int, Proved]] = field(
        default_factory=dict[tuple[int, frozenset[str]], tuple[int, Proved]]
    )

    def known_steps(self, proof: Proof, replaced: frozenset[str]) -> Proved:
        """The steps of calls that run by the program of `proof`, the latest first."""
        count, proved = self._known.get((id(proof), replaced), (0, None))
        if proved is None or count != len(self.streams):
            streams = [stream for owner, stream in reversed(self.streams) if owner is proof]
            proved = Proved.of(streams, replaced)
            self._known[id(proof), replaced] = len(self.streams), proved
        return proved


class Paths:
    """The paths of all kinds of calls of one model, as one rank takes them."""

    def __init__(self, rank: int, always: bool = False) -> None:
        """Be `rank`; watch each call if `always`."""
        self._rank = rank
        self._always = always
        self._paths: dict[Part, Path] = {}

    def forget(self) -> None:
        """Know nothing of any call, as the model was changed."""
        self._paths.clear()

    def note(self, kind: Kind, proof: Proof, compiled: Compiled) -> None:
        """Take the steps of calls of a kind that run by the program of `proof`."""
        path = self._paths.setdefault(kind.traced, Path())
        for streams in (compiled.streams, compiled.later):
            if self._rank in streams:
                path.streams.append((proof, streams[self._rank]))
        for assumed in compiled.assumptions:
            if assumed.location is not None and not assumed.drawn:
                path.sides[assumed.location] = assumed.taken
            elif assumed.location is not None:  # which layers are skipped by chance is for no proof to say
                path.drawn.add(assumed.location)

    def free(self, kind: Kind, branches: Iterable[Location]) -> None:
        """Let branches take either side, as one program was proved for both."""
        path = self.of(kind)
        path.free.update(branches)
        path.watched = path.watched and not path.free.issuperset(path.sides)

    def of(self, kind: Kind) -> Path:
        """What is known of a kind of call."""
        path = self._paths.get(kind.traced)
        if path is None:
            path = self._paths[kind.traced] = Path()
        return path

    def must_watch(self, key: CallKey, proof: Proof) -> bool:
        """Whether a call is to be watched."""
        path = self._paths.get(key.kind.traced)
        if path is None or not path.streams:
            return False
        return self._always or path.watched or key.kind not in proof.met

    def departure(
        self, key: CallKey, proof: Proof, steps: Sequence[Step], replaced: frozenset[str]
    ) -> Departure | None:
        """Where a call left all paths that are proved for its program; None if it kept to one.

        How branches alternate, as in a loop over experts, is for the data to say: a call may be put together from
        pieces of several proofs, if one of them took the same sides of all branches.
        """
        path = self.of(key.kind)
        known = path.known_steps(proof, replaced)
        real, proved = known.without_varying(steps), known.steps
        departures = [departure(each, real) for each in proved]
        if None in departures:
            return None
        if not departures:
            return Departure(None, real[0]) if real else None
        drawn = frozenset(path.drawn)
        left = Mixture(proved, drawn).departure(real)
        if left is not None:
            return left
        taken = signature(real, drawn)
        if any(signature(each, drawn) == taken for each in proved):
            return None
        return next((each for each in departures if each is not None and each.is_branch), departures[0])


__all__ = ["Path", "Paths"]
