"""Paths: the ways through the model's code that are proved for each kind of call, and which calls are watched.

The first real call of a kind is watched, as its device, backends and settings aren't the capture's. So is every call,
if a branch on a tensor's value has a side that isn't proved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tpplan.calls.key import CallKey, CallKind, Part, in_state
from tpplan.calls.mixture import Mixture, signature
from tpplan.calls.proofs import Proof
from tpplan.calls.watch import Departure, Proved, departure
from tpplan.compiler.ir.locations import Location
from tpplan.compiler.ir.observations import Sides
from tpplan.compiler.ir.steps import Step, Stream
from tpplan.compiler.pipeline import Compiled
from tpplan.compiler.trace.chance import TORCH


@dataclass(slots=True)
class Path:
    """What is known of one kind of call.

    Attributes:
        streams: the steps of its proofs, one for each combination of sides of branches, and of sizes that matter, each
            with the proof whose program it was found to run by.
        sides: branches on data that one side is proved of.
        both: whether the other sides were looked at.
        free: branches that run by one program whichever side they take.
        tests: how often each branch is tested in a call.
        drawn: generators of random numbers that Python is told numbers of.
        watched: whether each call is watched, as a side isn't proved, or what steers it isn't seen.
    """

    streams: list[tuple[Proof, Stream]] = field(default_factory=list[tuple[Proof, Stream]])
    sides: dict[Location, bool] = field(default_factory=dict[Location, bool])
    both: bool = False
    free: set[Location] = field(default_factory=set[Location])
    tests: dict[Location, int] = field(default_factory=dict[Location, int])
    drawn: frozenset[str] = frozenset()
    watched: bool = False
    unseen: bool = False
    _known: dict[tuple[int, frozenset[str], bool], tuple[int, Proved]] = field(
        default_factory=dict[tuple[int, frozenset[str], bool], tuple[int, Proved]]
    )

    @property
    def is_named(self) -> bool:
        """Whether steps are compared with their modules: not where experts, all alike, are called by what data say.

        A branch on a number of Python's takes no step, and a set of modules has another order in the stock model.
        """
        return not self.sides or not self.drawn <= {TORCH}

    def begin_again(self, proof: Proof, kind: CallKind) -> None:
        """Have calls at new sizes watched, and the other sides of branches proved there, if there are any."""
        if self.sides:
            self.both = False
            self.free.clear()
            proof.met.discard(kind)

    def known_steps(self, proof: Proof, replaced: frozenset[str], names: Mapping[str, str]) -> Proved:
        """The steps of calls that run by the program of `proof`, the latest first; `names` are modules' first ones."""
        key = id(proof), replaced, self.is_named
        count, proved = self._known.get(key, (0, None))
        if proved is None or count != len(self.streams):
            streams = [stream for owner, stream in reversed(self.streams) if owner is proof]
            proved = Proved.of(streams, replaced, names if self.is_named else None)
            self._known[key] = len(self.streams), proved
        return proved

    def others(self, location: Location) -> Iterator[Sides]:
        """The sides of calls that take the other side of a branch, at its first test and every second one, or between.

        Where layers are skipped in a loop, the value between two of them is once one that a layer has made, and once
        one that it was to get. So any of them may be skipped if both calls run by one program.
        """
        count, side = max(1, self.tests.get(location, 0)), self.sides[location]
        taken = [at for at, other in self.sides.items() if other and at != location]
        for first in range(min(count, 2)):
            yield Sides.of((location, side != (test % 2 == first)) for test in range(count)).also(taken)


class Paths:
    """The paths of all kinds of calls of one model, as one rank takes them."""

    def __init__(self, rank: int, always: bool, names: Mapping[str, str]) -> None:
        """Be `rank`; watch each call if `always`; `names` are the first names of modules, by all of theirs."""
        self._rank = rank
        self._always = always
        self._names = names
        self._paths: dict[Part, Path] = {}

    def forget(self) -> None:
        """Know nothing of any call, as the model was changed."""
        self._paths.clear()

    def note(self, kind: CallKind, proof: Proof, compiled: Compiled) -> None:
        """Take the steps of calls of a kind that run by the program of `proof`."""
        path = self._paths.setdefault(kind.traced, Path())
        for streams in (compiled.streams, compiled.later, *compiled.fewer):
            if self._rank in streams:
                path.streams.append((proof, streams[self._rank]))
        for assumed in compiled.assumptions:
            if assumed.location is not None:
                path.sides[assumed.location] = assumed.taken
        for location, found in compiled.tests.exact.items():
            path.tests[location] = max(len(found), path.tests.get(location, 0))
        path.drawn |= compiled.drawn
        path.unseen |= compiled.draws_unseen or bool(compiled.fewer)

    def carry(self, kinds: Iterable[Part], state: int) -> None:
        """Take what is known of kinds of calls as known in another state of the model, too."""
        for kind in kinds:
            if kind in self._paths:
                self._paths[in_state(kind, state)] = self._paths[kind]

    def free(self, kind: CallKind, branches: Iterable[Location]) -> None:
        """Let branches take either side, as one program was proved for both."""
        path = self.of(kind)
        path.free.update(branches)
        path.watched = path.watched and not path.free.issuperset(path.sides)

    def of(self, kind: CallKind) -> Path:
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
        return self._always or path.watched or path.unseen or key.kind not in proof.met

    def departure(
        self, key: CallKey, proof: Proof, steps: Sequence[Step], replaced: frozenset[str]
    ) -> Departure | None:
        """Where a call left all paths that are proved for its program; None if it kept to one.

        How branches alternate, as in a loop over experts, is for the data to say: where both sides run by one program,
        a call may be put together from pieces of several proofs, if one of them took the same sides of all branches.
        """
        path = self.of(key.kind)
        known = path.known_steps(proof, replaced, self._names)
        other = known.other_side(steps, path.free) or known.other_order(steps)
        if other is not None:
            return other
        real, proved = known.without_varying(steps), known.steps
        departures = [departure(each, real) for each in proved]
        if None in departures:
            return None
        if not departures:
            return Departure(None, real[0]) if real else None
        taken = signature(real)
        if path.free.issuperset(at for at, side in taken if side and (at, False) in taken):
            left = Mixture(proved).departure(real)
            if left is not None:
                return left
            if any(signature(each) == taken for each in proved):
                return None
        return next((each for each in departures if each is not None and each.is_branch), departures[0])


__all__ = ["Path", "Paths"]
