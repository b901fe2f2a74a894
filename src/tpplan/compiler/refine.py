"""Refine: what a check that failed teaches.

in:  a problem, a placement of it, what was learned before, and the first step at which a run on local shapes differs
out: what is known now: attributes that are local, bodies that run from their records, values that must not be sharded;
     or one finding more, if nothing helps
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from tpplan.compat.modules import named_modules
from tpplan.compiler.check import local_run
from tpplan.compiler.check.lessons import (
    equal_modules,
    find_instance,
    propose_attributes,
    read_sizes,
    split_size,
    split_values,
    splits_parameters,
)
from tpplan.compiler.check.same_steps import CheckInput, Mismatch, Shown
from tpplan.compiler.explain import failures
from tpplan.compiler.explain.computed_steps import of_computed
from tpplan.compiler.ir.layout import REPLICATED
from tpplan.compiler.ir.region import Instance
from tpplan.compiler.ir.trace import ForeignBackward, Frame
from tpplan.compiler.ladder import UnplacedError
from tpplan.compiler.place.conflicts import uses_of_values
from tpplan.compiler.place.solution import Name
from tpplan.compiler.problem import Attributes, Learned, Problem
from tpplan.compiler.trace.unread import is_unread
from tpplan.plan import CompileError, Diagnostic

_TRIALS = 96  # of attributes, for one place
_ALONE = 4  # values that are tried, of which one's size is read


def refine(problem: Problem, subject: CheckInput, learned: Learned, mismatch: Mismatch) -> Learned:
    """What makes the next round's program differ where this one failed, or one finding more.

    Raises:
        UnplacedError: the mismatch is in what the trace leaves out.
        CompileError: nothing helps, and nothing can be set aside to look for the next mistake.
    """
    if is_unread(subject.trace, mismatch.frame, mismatch.position):
        raise UnplacedError([*learned.findings, failures.of_check(subject, mismatch, problem.binding)], unread=True)
    replayed = [n for n in subject.assignment.replayed if f"{mismatch.frame.module}.".startswith(f"{n}.")]
    if replayed:
        return unrecorded(subject.instance, learned, replayed)
    if mismatch.backward is not None:
        return _make_whole(problem, subject, learned, mismatch, mismatch.backward)
    if mismatch.cut is not None:
        return _keep_whole(subject, learned, {mismatch.cut}, failures.of_check(subject, mismatch, problem.binding))
    attributes = _localised(problem, subject, learned, mismatch)
    if attributes is not None:
        return replace(learned, attributes=attributes)
    finding = failures.of_check(subject, mismatch, problem.binding)
    finding = of_computed(finding, mismatch.frame.module, subject.model, problem.binding)
    unsharded = learned.constraints.unsharded
    places = read_sizes(subject, mismatch, unsharded)
    recorded = _recorded(subject, learned, mismatch) if _splits_features(subject, mismatch) else None
    if recorded is not None:
        return recorded
    if places:
        places = _read_size(subject, learned, mismatch, places)
        return learned.constrained(finding, unsharded=unsharded | places)
    learned = learned.reporting(finding)
    if mismatch.frame.module == "" or mismatch.frame.module in learned.excused:
        raise CompileError(learned.findings)
    return replace(learned, excused=learned.excused | equal_modules(subject.instance, mismatch.frame))


def unrecorded(root: Instance, learned: Learned, modules: Collection[str]) -> Learned:
    """Let the own code of bodies run whose records don't, so that they slice and move nothing."""
    regions: set[Name] = set()
    for instance in _calls_of(root, modules):
        regions.add(instance.region.example)
        learned = replace(learned, recorded=learned.recorded - equal_modules(root, instance.frame))
    return learned.constrained(unsliced=learned.constraints.unsliced | regions)


def _calls_of(instance: Instance, modules: Collection[str]) -> Iterator[Instance]:
    if instance.frame.module in modules:
        yield instance
    for child in instance.children:
        yield from _calls_of(child, modules)


def _make_whole(
    problem: Problem, subject: CheckInput, learned: Learned, mismatch: Mismatch, backward: ForeignBackward
) -> Learned:
    """Keep whole what a backward reads and makes, if it isn't right for a part; report it where that doesn't help."""
    finding = failures.of_backward(subject, mismatch, backward, problem.binding)
    if backward.sealed:
        raise CompileError([*learned.findings, finding])
    values = {value for value in (*backward.inputs, *backward.outputs) if value is not None}
    return _keep_whole(subject, learned, values, finding)


def _keep_whole(subject: CheckInput, learned: Learned, values: set[int], finding: Diagnostic) -> Learned:
    whole = learned.constraints.whole
    places = uses_of_values(values - subject.trace.parameters.keys(), subject.instance)
    if not places - whole:
        raise CompileError([*learned.findings, finding])
    return learned.constrained(finding, whole=whole | places)


def _read_size(
    subject: CheckInput, learned: Learned, mismatch: Mismatch, places: set[tuple[Name, int]]
) -> set[tuple[Name, int]]:
    """Of values that have one size the first that gets past the mismatch if it alone is whole; all, if none does."""
    instance = find_instance(subject.instance, mismatch.frame.module, mismatch.frame.call)
    others = {frame.module for frame in mismatch.frame.walk() if frame is not mismatch.frame}  # these get what they got
    learned = replace(learned, excused=learned.excused | others)
    if instance is None or len(places) < 2:
        return places
    for place in sorted(places)[:_ALONE]:
        held = subject.assignment
        whole = replace(held, layouts=held.layouts | {instance.values[place[1]]: REPLICATED})
        after = _mismatch(replace(subject, assignment=whole), learned)
        if after is None or after.when > mismatch.when:
            return {place}
    return places


# -- attributes ---------------------------------------------------------------------------------------------------
def _localised(problem: Problem, subject: CheckInput, learned: Learned, mismatch: Mismatch) -> Attributes | None:
    """Attributes, some made local, that get past the mismatch."""
    trial = _try_attributes(problem, subject, learned, mismatch, iter(range(_TRIALS)))
    return None if trial is None else _needed(subject, learned, mismatch, trial)


@dataclass(frozen=True, slots=True)
class _RefinedTrial:
    """Attributes, what the check then finds, and whether the body that they are for passes it."""

    attributes: Attributes
    after: Mismatch | None
    passes: bool


def _try_attributes(
    problem: Problem, subject: CheckInput, learned: Learned, mismatch: Mismatch, trials: Iterator[int]
) -> _RefinedTrial | None:
    """The first attributes with which the body passes; else the first that get past the mismatch.

    Some get past it and then lead nowhere: a wrong factor of the right product.
    """
    first: _RefinedTrial | None = None
    place = mismatch.when[:-1]
    for proposal in propose_attributes(subject, mismatch, learned.attributes, problem.read):
        if next(trials, None) is None:
            break
        proposed = replace(learned, attributes=proposal)
        after = _mismatch(subject, proposed, mismatch)
        if after is not None and after.when <= mismatch.when:
            continue
        if after is None or after.when[: len(place)] != place:
            return _RefinedTrial(proposal, after, True)
        if after.frame is mismatch.frame:
            further = _try_attributes(problem, subject, proposed, after, trials)
            if further is not None and further.passes:
                return further
        first = first or _RefinedTrial(proposal, after, False)
    return first


def _needed(subject: CheckInput, learned: Learned, mismatch: Mismatch, trial: _RefinedTrial) -> Attributes:
    """The proposal without attributes that make no difference: their number is the same by chance alone.

    The example doesn't read those, but another call might.
    """
    needed, after, before = trial.attributes, trial.after, learned.attributes
    added = {a for name, attributes in needed.items() for a in attributes if a not in before.get(name, ())}
    for attribute in sorted(added, key=lambda a: a.name) if len(added) > 1 else ():
        fewer = {name: tuple(a for a in attributes if a != attribute) for name, attributes in needed.items()}
        without = _mismatch(subject, replace(learned, attributes=fewer), mismatch)
        if without is None or (after is not None and _same_place(after, without)):
            needed, after = fewer, without
    return needed


def _mismatch(subject: CheckInput, learned: Learned, before: Mismatch | None = None) -> Mismatch | None:
    """What a check finds; after another, it runs only what that hasn't shown to be right, or what is new."""
    shown: Shown = frozenset() if before is None else before.shown
    checked = local_run.check(subject, learned.attributes, learned.excused, learned.recorded, shown)
    return checked if isinstance(checked, Mismatch) else None


# -- records ------------------------------------------------------------------------------------------------------
def _splits_features(subject: CheckInput, mismatch: Mismatch) -> bool:
    """Whether what the body gets wrong comes from features or heads that are split, and not from the sequence."""
    if splits_parameters(subject, mismatch.frame):
        return True
    layouts, values = subject.assignment.layouts, subject.trace.values
    split = list(split_values(subject, mismatch))
    sizes = {whole for value in split if (whole := split_size(subject, value)) is not None}
    seen = {values[value].shape[layouts[value].dim or 0] for value in split}.intersection(mismatch.sizes(subject.size))
    return bool(sizes & seen) if seen else bool(sizes)


def _recorded(subject: CheckInput, learned: Learned, mismatch: Mismatch) -> Learned | None:
    """Let a body, and those of equal modules, run from their records, if that gets past the mismatch."""
    modules, name = dict(named_modules(subject.model)), mismatch.frame.module
    if any(frame.backwards for frame in mismatch.frame.walk()):
        return None  # its operations would run, with their own derivatives
    if name in learned.recorded or not name or _takes_uneven(subject, mismatch.frame):
        return None
    if name in subject.trace.settings.reducing | subject.trace.settings.looking:
        return None  # a record doesn't know these functions
    run = {held.frame.module for held in subject.assignment.frames}  # of the others nobody reads a result
    equal = {n for n in equal_modules(subject.instance, mismatch.frame) if n in run}
    equal = {n for n in equal if type(modules[n]) is type(modules[name])}
    learned = learned.recording(equal)
    after = _mismatch(subject, learned)
    return None if after is not None and _same_place(after, mismatch) else learned


def _takes_uneven(subject: CheckInput, frame: Frame) -> bool:
    """Whether ranks have different numbers of elements of an argument: from its part a rank can't tell the whole."""
    layouts, values = subject.assignment.layouts, subject.trace.values
    arguments = [(layouts.get(c.target, REPLICATED), values[c.target].shape) for c in frame.entries]
    return any(
        layout.dim is not None and not layout.is_even(shape[layout.dim], subject.size) for layout, shape in arguments
    )


def _same_place(one: Mismatch, other: Mismatch) -> bool:
    return one.frame.module == other.frame.module and one.when <= other.when


__all__ = ["refine", "unrecorded"]
