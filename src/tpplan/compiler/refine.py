"""Learning: what a check that failed teaches.

in:  the work so far, and the first step at which a run on local shapes differs
out: the work with attributes made local, bodies that run from their records, or values that must not be sharded; or
     with a finding, if nothing helps
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tpplan.compat import named_modules
from tpplan.compiler.check import local_run
from tpplan.compiler.check.attribute_reads import attributes_read
from tpplan.compiler.check.compare import CheckInput, Mismatch
from tpplan.compiler.check.localise import (
    equal_modules,
    propose_attributes,
    read_sizes,
    split_size,
    split_values,
    splits_parameters,
)
from tpplan.compiler.explain import failures
from tpplan.compiler.ir.layout import REPLICATED
from tpplan.compiler.ir.program import LocalAttribute
from tpplan.compiler.ir.trace import ForeignBackward, Frame
from tpplan.compiler.place.conflicts import uses_of_values
from tpplan.compiler.work import Work
from tpplan.plan import CompileError

_TRIALS = 96  # of attributes, for one place


def learn(work: Work, given: CheckInput, mismatch: Mismatch) -> None:
    """Make the next round's program differ where this one was found wanting, or report that nothing helps."""
    if mismatch.backward is not None:
        _make_whole(work, given, mismatch, mismatch.backward)
        return
    if _localise(work, given, mismatch):
        return
    finding = failures.of_check(given, mismatch, work.binding)
    learned = read_sizes(given, mismatch, work.constraints.unsharded)
    if _splits_features(given, mismatch) and _record_body(work, given, mismatch):
        return
    if learned:
        work.constraints.unsharded |= learned
        work.learned_from = finding
        work.learned.append(finding)
        return
    work.findings.append(finding)
    if mismatch.frame.module == "" or mismatch.frame.module in work.excused:
        raise CompileError(work.findings)
    work.excused |= equal_modules(given.instance, mismatch.frame)


def _make_whole(work: Work, given: CheckInput, mismatch: Mismatch, backward: ForeignBackward) -> None:
    """Keep whole what a backward reads and makes, if it isn't right for a part; report it where that doesn't help."""
    finding = failures.of_backward(given, mismatch, backward, work.binding)
    values = {value for value in (*backward.inputs, *backward.outputs) if value is not None}
    places = uses_of_values(values - given.trace.parameters.keys(), given.instance) - work.constraints.whole
    if not places or backward.sealed:
        raise CompileError([*work.findings, finding])
    work.constraints.whole |= places
    work.learned_from = finding
    work.learned.append(finding)


def _localise(work: Work, given: CheckInput, mismatch: Mismatch) -> bool:
    """Make attributes local, if that gets past the mismatch."""
    found = _try_attributes(work, given, mismatch, work.attributes, iter(range(_TRIALS)))
    if found is None:
        return False
    work.attributes = _needed(work, given, found.attributes, found.after)
    return True


@dataclass(frozen=True, slots=True)
class _Trial:
    """Attributes, what the check then finds, and whether the body that they are for passes it."""

    attributes: Mapping[str, tuple[LocalAttribute, ...]]
    after: Mismatch | None
    passes: bool


def _try_attributes(
    work: Work,
    given: CheckInput,
    mismatch: Mismatch,
    current: Mapping[str, tuple[LocalAttribute, ...]],
    trials: Iterator[int],
) -> _Trial | None:
    """The first attributes with which the body passes; else the first that get past the mismatch.

    Some get past it and then lead nowhere: a wrong factor of the right product.
    """

    def read(module: str) -> frozenset[str]:
        if module not in work.read:
            work.read[module] = attributes_read(given, module)
        return work.read[module]

    first: _Trial | None = None
    place = mismatch.when[:-1]
    for proposal in propose_attributes(given, mismatch, current, read):
        if next(trials, None) is None:
            break
        after = local_run.check(given, proposal, work.excused, work.recorded)
        if after is not None and after.when <= mismatch.when:
            continue
        if after is None or after.when[: len(place)] != place:
            return _Trial(proposal, after, True)
        if after.frame is mismatch.frame:
            further = _try_attributes(work, given, after, proposal, trials)
            if further is not None and further.passes:
                return further
        first = first or _Trial(proposal, after, False)
    return first


def _needed(
    work: Work, given: CheckInput, proposal: Mapping[str, tuple[LocalAttribute, ...]], after: Mismatch | None
) -> dict[str, tuple[LocalAttribute, ...]]:
    """The proposal without attributes that make no difference: their number is the same by chance alone.

    The example doesn't read those, but another call might.
    """
    needed = dict(proposal)
    added = {a for name, held in proposal.items() for a in held if a not in work.attributes.get(name, ())}
    for attribute in sorted(added, key=lambda a: a.name) if len(added) > 1 else ():
        fewer = {name: tuple(a for a in held if a != attribute) for name, held in needed.items()}
        found = local_run.check(given, fewer, work.excused, work.recorded)
        if found is None or (after is not None and _same_place(after, found)):
            needed, after = fewer, found
    return needed


def _splits_features(given: CheckInput, mismatch: Mismatch) -> bool:
    """Whether what the body gets wrong comes from features or heads that are split, and not from the sequence."""
    if splits_parameters(given, mismatch.frame):
        return True
    layouts, values = given.assignment.layouts, given.trace.values
    split = list(split_values(given, mismatch))
    sizes = {whole for value in split if (whole := split_size(given, value)) is not None}
    seen = {values[value].shape[layouts[value].dim or 0] for value in split}.intersection(mismatch.sizes(given.size))
    return bool(sizes & seen) if seen else bool(sizes)


def _record_body(work: Work, given: CheckInput, mismatch: Mismatch) -> bool:
    """Let a body run from its record, if that gets past the mismatch."""
    modules, name = dict(named_modules(work.model)), mismatch.frame.module
    equal = {n for n in equal_modules(given.instance, mismatch.frame) if type(modules[n]) is type(modules[name])}
    recorded = work.recorded | equal
    if any(frame.backwards for frame in mismatch.frame.walk()):
        return False  # its operations would run, with their own derivatives
    if name in work.recorded or not name or _takes_uneven(given, mismatch.frame):
        return False
    attributes = {name: held for name, held in work.attributes.items() if name not in recorded}
    after = local_run.check(given, attributes, work.excused, recorded)
    if after is not None and _same_place(after, mismatch):
        return False
    work.recorded, work.attributes = recorded, attributes
    return True


def _takes_uneven(given: CheckInput, frame: Frame) -> bool:
    """Whether ranks hold different numbers of entries of an argument: from its part a rank can't tell the whole."""
    layouts, values = given.assignment.layouts, given.trace.values
    held = [(layouts.get(c.target, REPLICATED), values[c.target].shape) for c in frame.entries]
    return any(layout.dim is not None and not layout.is_even(shape[layout.dim], given.size) for layout, shape in held)


def _same_place(one: Mismatch, other: Mismatch) -> bool:
    return one.frame.module == other.frame.module and one.when <= other.when


__all__ = ["learn"]
