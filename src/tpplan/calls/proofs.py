"""Proofs: the programs of one model, which calls each covers, and whether one can stand beside another.

in:  programs compiled for several calls
out: for a kind of call its proof; what keeps two programs from serving one model, in words
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tpplan.calls.coverage import Coverage, FindCover, Leans, Sizes, Written
from tpplan.calls.key import CallKey, CallKind, Part, in_state, state_of
from tpplan.compiler.cover import Subject
from tpplan.compiler.ir.layout import REPLICATED, REPLICATED_PARTIAL, Collective, Layout
from tpplan.compiler.ir.program import KernelUse, ModuleProgram, ParameterPlacement, Program, Reshard
from tpplan.compiler.ir.replaced_bodies import Body, RecordedBody
from tpplan.compiler.pipeline import Compiled
from tpplan.parity.tree import Path
from tpplan.plan import Plan
from tpplan.runtime.around.results import Results

_ANY_BATCH = -1
_MOST = 4096  # sizes of one kind of call that are remembered to be covered


@dataclass(slots=True, eq=False)
class Proof:
    """A program, and the plan that it follows.

    Attributes:
        plan, program: what was compiled.
        met: the kinds of calls that have run by it.
        results: where the calls that were proved to run by it return tensors.
    """

    plan: Plan
    program: Program
    met: set[CallKind] = field(default_factory=set[CallKind])
    results: Results = field(default_factory=Results)


class Proofs:
    """All proofs of one model, the first of which is the example's, and which calls each covers."""

    def __init__(self, main: Proof, find: FindCover) -> None:
        """Start with the example's; `find` finds the sizes for which what was checked holds."""
        self.main = main
        self._all = [main]
        self._find = find
        self._known: dict[Part, dict[Sizes, Proof]] = {}
        self._covered: dict[Part, list[tuple[Proof, Coverage]]] = {}

    def __iter__(self) -> Iterator[Proof]:
        return iter(self._all)

    def of(self, key: CallKey) -> Proof | None:
        """The proof of such a call; None if there is none."""
        known = self._known.setdefault(key.kind.traced, {})
        proof = known.get(key.sizes)
        if proof is None:
            found = self._coverage(key)
            if found is None:
                return None
            if len(known) >= _MOST:
                known.clear()
            proof = known[key.sizes] = found[0]
        return proof

    def cover(self, key: CallKey, proof: Proof, compiled: Compiled, subject: Subject | None) -> None:
        """Note that a call is covered by `proof`, of which `subject` was checked; the latest comes first.

        Where nothing was found of other sizes once, nothing is looked for again.
        """
        kind = key.kind.traced
        every = self._covered.setdefault(kind, [])
        own = next((coverage for other, coverage in every if other is proof and coverage.is_exact), None)
        if own is not None and every[0][1] is own:
            own.add(key.sizes, Leans(compiled.reads, compiled.idle))
        else:
            every.insert(0, (proof, Coverage(key.sizes, subject, Leans(compiled.reads, compiled.idle))))
        self._known.pop(kind, None)

    def join(self, key: CallKey, compiled: Compiled) -> None:
        """Let a covered call lean on another side of a branch, too, which the same program was proved for."""
        every = self._covered[key.kind.traced]
        found = self._coverage(key)
        assert found is not None
        proof, coverage = found
        every[every.index(found)] = (
            proof,
            coverage.joined(key.sizes, compiled.subject, Leans(compiled.reads, compiled.idle)),
        )
        if coverage.without(key.sizes):
            every.append(found)
        self._known.pop(key.kind.traced, None)

    def conditions(self, key: CallKey) -> Callable[[Sequence[int]], bool] | None:
        """Whether other calls of its kind run by the proof of a covered one, by all their sizes."""
        every = self._covered.get(key.kind.traced, ())
        return every[0][1].covers if len(every) == 1 else None

    def broken(self, key: CallKey) -> list[str]:
        """The conditions on sizes that keep a call from running by a proof of its kind."""
        for _, coverage in self._covered.get(key.kind.traced, ()):
            broken = [*coverage.broken(key.sizes)]
            if broken:
                return broken
        return []

    def _coverage(self, key: CallKey) -> tuple[Proof, Coverage] | None:
        every = self._covered.get(key.kind.traced, ())
        return next((held for held in every if held[1].holds(key.sizes, self._find)), None)

    def carry(self, ran: CallKey | None, written: Sequence[Written], before: int, now: int) -> list[Part] | None:
        """Let what a call has written be another state, if proofs of other calls lean on it.

        That call's own holds in both, as its proof shows; so do those that don't lean on what was written.

        Args:
            ran: the call; None if its proof doesn't show that.
            written: where it has written.
            before, now: the states of the model.

        Returns:
            The kinds of calls of which proofs hold in both states; None if no proof leans on it.
        """
        own, sizes = (None, ()) if ran is None else (self._coverage(ran), ran.sizes)
        here = {kind: every for kind, every in self._covered.items() if state_of(kind) == before}
        holds = {
            kind: [(p, kept) for p, c in every if (kept := c.after(written, sizes if own and c is own[1] else None))]
            for kind, every in here.items()
        }
        if holds == here:
            return None
        if len(self._covered) > _MOST:
            self._covered.clear()
        for kind, every in holds.items():
            there = self._covered.setdefault(in_state(kind, now), [])
            there[:0] = [each for each in every if each not in there]
            self._known.pop(in_state(kind, now), None)
        for proof in self._all:
            proof.met |= {k._replace(traced=in_state(k.traced, now)) for k in proof.met if holds.get(k.traced)}
        return [kind for kind, every in holds.items() if every]

    def add(self, proof: Proof) -> None:
        """Let calls run by another program."""
        self._all.append(proof)

    def forget(self) -> None:
        """Have every call proved, and met, anew; the programs stay."""
        self._known.clear()
        self._covered.clear()
        for proof in self._all:
            proof.met.clear()


def covers(program: Program, compiled: Compiled) -> bool:
    """Whether a call that was compiled can run by `program`, which does the same in every module that it calls."""
    other, called = compiled.program, compiled.called
    known = {module.name: module for module in program.modules}
    batches = (_batch(program), _batch(other))
    for module in other.modules:
        ours = known.get(module.name)
        if module.calls and (ours is None or not _same_body(_answered(ours, called), module, *batches)):
            return False
    listed = {module.name for module in other.modules}
    if any(_has_work(module) for name, module in known.items() if name in called.keys() - listed):
        return False  # the call runs this module, and has nothing to do there
    placed = {p.names: p for p in program.parameters}
    read = {name for module in other.modules for name in module.reads}
    if not all(_serves(placed.get(p.names), p) for p in other.parameters if read.intersection(p.names)):
        return False
    if other.takes_gradients and not program.takes_gradients:
        return False
    summed = {p.name for p in program.summed_parameters if read.intersection(p.names)}
    if summed != {p.name for p in other.summed_parameters}:
        return False
    ran = {module.name for module in other.modules if module.calls}
    return _kernels(program, ran) == _kernels(other, ran)


def _answered(module: ModuleProgram, called: Mapping[str, frozenset[Path]]) -> ModuleProgram:
    """A module without what it does for gradients that don't come back in a call."""
    back = called.get(module.name, frozenset())
    kept = tuple(held for held in module.entries if held.path in back or not _sums_gradients(held))
    return module if len(kept) == len(module.entries) else replace(module, entries=kept)


def _sums_gradients(reshard: Reshard) -> bool:
    """Whether it does nothing forward."""
    return (reshard.source, reshard.target) == (REPLICATED, REPLICATED_PARTIAL)


def _has_work(module: ModuleProgram) -> bool:
    """Whether calls of the module do more than read parameters."""
    replaced = module.body is not None
    return bool(module.reshards or module.local_attributes or module.random or replaced or module.class_calls)


def _serves(ours: ParameterPlacement | None, other: ParameterPlacement) -> bool:
    """Whether a parameter lies as another program has it, and has a gradient if it has one there."""
    return ours is not None and ours.layout == other.layout and ours.trainable >= other.trainable


def _same_body(ours: ModuleProgram, other: ModuleProgram, batch: int, other_batch: int) -> bool:
    return (
        all(map(_moves_alike, _moves(ours, batch), _moves(other, other_batch)))
        and ours.local_attributes == other.local_attributes
        and _of_any_call(ours.body, batch) == _of_any_call(other.body, other_batch)
        and ours.walked == other.walked
        and (ours.class_calls, ours.counted_apart) == (other.class_calls, other.counted_apart)
        and {*other.reads} <= {*ours.reads}
        and other.random in (None, ours.random)
    )


def cache_difference(program: Program, other: Program) -> str:
    """Where features of a value are split by one program alone, so that neither can read what the other has cached."""
    ours, theirs = program.feature_reshards, other.feature_reshards
    called = {module.name for module in other.modules if module.calls}
    places: list[Any] = [held for held in ours ^ theirs if isinstance(held, tuple)]
    named = sorted({str(place[0]) for place in places if place[0] in called})
    return f"features are split differently at `{named[0] or 'the model'}`" if named else ""


def left_difference(known: dict[Path, Layout], other: Program) -> str:
    """What calls leave with their caller in other parts than calls before."""
    for held in other.left:
        ours = known.get(held.path)
        if ours is not None and ours != held.layout:
            return f"it leaves `{'.'.join(map(str, held.path))}` as {held.layout}, and other calls as {ours}"
    return ""


def _batch(program: Program) -> int:
    shape = program.inputs[0].shape if program.inputs else ()
    return shape[0] if shape else 1


def _of_any_batch(layout: Layout, batch: int) -> Layout:
    """A sequence that is flattened with its batch is split alike whatever the batch size, which each call tells."""
    if layout.interleave == 1 or layout.interleave != batch:
        return layout
    return replace(layout, interleave=_ANY_BATCH)


Moves = frozenset[tuple[object, Collective]]
"""Moves of values, each with what sends the gradient back."""


def _moves(module: ModuleProgram, batch: int) -> tuple[Moves, ...]:
    """The moves at a module's entries, inside of it and at its exits."""

    def move(reshard: Reshard) -> tuple[object, Collective]:
        layouts = (_of_any_batch(reshard.source, batch), _of_any_batch(reshard.target, batch))
        return (reshard.path, *layouts), reshard.backward

    return tuple(frozenset(map(move, row)) for row in (module.entries, module.inner, module.exits))


def _moves_alike(ours: Moves, other: Moves) -> bool:
    """Whether they are the same, and every gradient is sent back that is in the other's.

    A value without a gradient is moved without a way back. It goes by a move that has one, and not the other way round.
    """
    if {move for move, _ in ours} != {move for move, _ in other}:
        return False
    return all(held in ours for held in other if held[1] is not Collective.NONE)


def _of_any_call(record: Body | None, batch: int) -> object:
    """A body, without the batch size of the call that it was compiled for."""
    if not isinstance(record, RecordedBody):
        return record

    def shown(layouts: tuple[tuple[tuple[str | int, ...], Layout], ...]) -> frozenset[object]:
        return frozenset((path, _of_any_batch(layout, batch)) for path, layout in layouts)

    calls, passed = (
        frozenset((name, number, shown(held)) for name, number, held in every)
        for every in (record.calls, record.passed)
    )
    rest = (record.moves, passed, record.partial, record.averages, record.lengths)
    return shown(record.inputs), calls, shown(record.results), *rest


def _kernels(program: Program, called: set[str]) -> frozenset[KernelUse]:
    """The bodies that kernels replace; for which dtype doesn't matter, as others take the model's own."""
    return frozenset(
        replace(use, dtype="", note="", refused="")
        for use in program.kernels
        if not use.refused and use.module in called
    )


__all__ = ["Proof", "Proofs", "cache_difference", "covers", "left_difference"]
