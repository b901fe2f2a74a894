"""The ladder: what a program is allowed one after the other, the cheapest first, until a plan compiles.

in:  why a search is stuck, and what is allowed already
out: `Freedoms` with one rung more, or None at the top

    columns are gathered   features, heads, slices, moving
    no layouts suit        slice_constants, features, heads, slices, lengths_as_heads, once, moving
    the search gave up     unread, reducing, moves, bases: captured or bound anew, and from the first rung on

What a rung allows is told with its field of `Freedoms`. A rung that a plan doesn't need isn't climbed: its program is
that of the lowest rung at which it compiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

from tpplan.compat.modules import named_modules
from tpplan.compiler.bind.recurrent_layers import is_recurrent
from tpplan.compiler.ir.class_reductions import CLASS_OPERATIONS
from tpplan.compiler.ir.freedoms import Freedoms
from tpplan.compiler.ir.region import Instance, OperationNode
from tpplan.compiler.problem import Learned, Problem
from tpplan.compiler.request import Request
from tpplan.plan import CompileError, Diagnostic, Pin

T = TypeVar("T")


class UnplacedError(CompileError):
    """No layouts suit some bodies, in spite of all that is allowed.

    Attributes:
        modules: whose bodies no layouts suit.
        unread: whether a layer can't work on what it gets, and has no layouts, as nobody reads what it computes.
        bases: whether modules wrap layers beside which something is split, too.
    """

    def __init__(
        self, findings: Iterable[Diagnostic], modules: frozenset[str] = frozenset(), *, unread: bool = False
    ) -> None:
        """Tell the findings, and remember the rest."""
        super().__init__([*findings])
        self.modules, self.unread = modules, unread
        self.bases = False


@dataclass(frozen=True, slots=True)
class Stuck:
    """Where a placement is stuck.

    Attributes:
        problem: what is searched for.
        learned: what was learned so far.
        reach: the bodies that moves could help.
        gathers: whether there is a placement, but one that gathers columns.
    """

    problem: Problem
    learned: Learned
    reach: Iterable[Instance]
    gathers: bool = False


def widened(stuck: Stuck) -> Learned | None:
    """What was learned, with the next rung for the same trace."""
    held = stuck.learned.constraints.freedoms
    for rung in _FOR_GATHERS if stuck.gathers else _FOR_THE_TRACE:
        freedoms = rung(stuck, held)
        if freedoms is not None:
            return stuck.learned.constrained(freedoms=freedoms)
    return None


def climb(compiled: Callable[[Request], T], request: Request) -> tuple[Request, T]:
    """Compile; while a search gives up, allow what needs another capture or another binding.

    Raises:
        CompileError: no rung helps; the first error.
    """
    try:
        return request, compiled(request)
    except UnplacedError as error:
        first = stuck = error
    rungs = [*_ANEW]
    while True:
        for rung in rungs:
            freedoms = rung(request, stuck)
            if freedoms is not None:
                break
        else:
            raise first
        tried = replace(request, freedoms=freedoms)
        try:
            return tried, compiled(tried)
        except UnplacedError as error:
            request, stuck = tried, error
        except CompileError:  # it doesn't help
            rungs.remove(rung)


# -- for the same trace -------------------------------------------------------------------------------------------
def _slice_constants(stuck: Stuck, held: Freedoms) -> Freedoms | None:
    wanted = stuck.learned.constraints.sequence and not held.slice_constants
    return replace(held, slice_constants=True) if wanted else None


def _features(stuck: Stuck, held: Freedoms) -> Freedoms | None:
    wanted = stuck.problem.features and not held.features
    return replace(held, features=stuck.problem.features) if wanted else None


def _heads(stuck: Stuck, held: Freedoms) -> Freedoms | None:
    return replace(held, heads=stuck.problem.heads) if stuck.problem.heads and not held.heads else None


def _slices(stuck: Stuck, held: Freedoms) -> Freedoms | None:
    del stuck
    return None if held.slices else replace(held, slices=True)


def _lengths_as_heads(stuck: Stuck, held: Freedoms) -> Freedoms | None:
    """Of use where the example is as long as there are heads."""
    trace, counted = stuck.problem.trace, {pack.size for (pack,) in held.heads}
    lengths = trace.values[trace.inputs[0]].shape[:2] if trace.inputs else ()
    wanted = not counted.isdisjoint(lengths) and not held.lengths_as_heads
    return replace(held, lengths_as_heads=True) if wanted else None


def _once(stuck: Stuck, held: Freedoms) -> Freedoms | None:
    del stuck
    return None if held.once else replace(held, once=True)


def _moving(stuck: Stuck, held: Freedoms) -> Freedoms | None:
    """Let operations of these bodies move their operands.

    A layer that is split has a body of the runtime's own, and a record knows no functions over classes. What torch runs
    as one kernel would run step by step from a record: a recurrent layer is split by its rule, or not at all.
    """
    request = stuck.problem.request
    if not request.exchanges or (_stays_split(request) and not held.moves):
        return None
    modules = dict(named_modules(request.model))
    found = {
        i.region.example
        for i in stuck.reach
        if i.frame.module
        and i.region.style is None
        and not i.region.shared
        and not _reduces_classes(i)
        and not is_recurrent(modules[i.frame.module])
    }
    wanted = not found <= held.moving | stuck.learned.constraints.unsliced
    return replace(held, moving=held.moving | found) if wanted else None


def _reduces_classes(instance: Instance) -> bool:
    return any(isinstance(n, OperationNode) and n.target in CLASS_OPERATIONS for n in instance.region.nodes)


_FOR_THE_TRACE = (_slice_constants, _features, _heads, _slices, _lengths_as_heads, _once, _moving)
_FOR_GATHERS = (_features, _heads, _slices, _moving)


# -- anew ---------------------------------------------------------------------------------------------------------
def _stays_split(request: Request) -> bool:
    """Whether the plan leaves a result split: then functions over split classes come before moves."""
    return any(rule.output is Pin.SHARD for rule in request.plan.rules)


def _unread(request: Request, stuck: UnplacedError) -> Freedoms | None:
    wanted = stuck.unread and not request.freedoms.unread
    return replace(request.freedoms, unread=True) if wanted else None


def _reducing(request: Request, stuck: UnplacedError) -> Freedoms | None:
    held = request.freedoms
    wanted = _stays_split(request) and not stuck.modules <= held.reducing
    return replace(held, reducing=held.reducing | stuck.modules) if wanted else None


def _moves(request: Request, stuck: UnplacedError) -> Freedoms | None:
    held = request.freedoms
    wanted = stuck.modules and request.exchanges and _stays_split(request) and not held.moves
    return replace(held, moves=True) if wanted else None


def _bases(request: Request, stuck: UnplacedError) -> Freedoms | None:
    held = request.freedoms
    wanted = stuck.bases and request.members is None and not held.bases
    return replace(held, bases=True) if wanted else None


_ANEW = (_unread, _reducing, _moves, _bases)


__all__ = ["Stuck", "UnplacedError", "climb", "widened"]
