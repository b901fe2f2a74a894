"""Conflicts: what can't be served by one module or one parameter at a time.

in:  an assignment
out: modules whose calls were decided differently; parameters whose gradient is partial here and whole there
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence, Set

from tpplan.compiler.bind.bind import Binding
from tpplan.compiler.ir.class_reductions import CLASS_OPERATIONS
from tpplan.compiler.ir.layout import REPLICATED, REPLICATED_PARTIAL, Layout
from tpplan.compiler.ir.region import Instance
from tpplan.compiler.ir.trace import Frame, Operation, Path, Trace, quoted
from tpplan.compiler.place.assign import Assignment, FrameAssignment
from tpplan.compiler.rules.classes import splits_classes
from tpplan.plan import Diagnostic

Ways = dict[str, tuple[str, str]]


def conflicting_modules(assignment: Assignment, trace: Trace) -> frozenset[str]:
    """Modules called several times whose calls need different reshards.

    A value without a gradient may be resharded like one with it: nothing comes back.
    """
    calls: dict[str, list[FrameAssignment]] = defaultdict(list)
    for held in assignment.frames:
        calls[held.frame.module].append(held)
    return frozenset(name for name, held in calls.items() if len(held) > 1 and _conflict(held, assignment, trace))


def _conflict(calls: Sequence[FrameAssignment], assignment: Assignment, trace: Trace) -> bool:
    decided = {
        (d.normed is not None and d.normed.layout, d.dispatched is not None, *_split_classes(d.frame, assignment))
        for d in calls
    }
    inward, outward = ([_resharded(held, trace, way) for held in calls] for way in (True, False))
    return len(decided) > 1 or _differ(inward) or _differ(outward)


_Resharded = dict[Path, tuple[bool, tuple[Layout, Layout] | None]]


def _resharded(held: FrameAssignment, trace: Trace, inward: bool) -> _Resharded:
    """Of each argument or result, whether it has a gradient, and the layouts before and after; None where it stays."""
    moved = {r.path: (r.source, r.target) for r in (held.entries if inward else held.exits)}
    crossings = held.frame.entries if inward else held.frame.exits
    return {c.path: (trace.sends_back(c.target), moved.get(c.path)) for c in crossings}


def _differ(calls: Sequence[_Resharded]) -> bool:
    for path in dict.fromkeys(path for held in calls for path in held):
        ways = [held.get(path, (True, None)) for held in calls]
        if len({way for has_gradient, way in ways if has_gradient}) > 1 or len({_forward(way) for _, way in ways}) > 1:
            return True
    return False


def _forward(way: tuple[Layout, Layout] | None) -> tuple[Layout, Layout] | None:
    """The layouts before and after as the forward sees them."""
    if way is None:
        return None
    before, after = (REPLICATED if held == REPLICATED_PARTIAL else held for held in way)
    return None if before == after else (before, after)


def differing_moves(assignment: Assignment) -> frozenset[str]:
    """Modules called several times whose calls move other operands inside of their bodies."""
    decided: dict[str, set[object]] = defaultdict(set)
    for held in assignment.frames:
        decided[held.frame.module].add(tuple((m.place, m.source, m.again) for m in held.moves))
    return frozenset(name for name, kinds in decided.items() if len(kinds) > 1)


def _split_classes(frame: Frame, assignment: Assignment) -> tuple[bool, ...]:
    """Of each function over classes that a body calls, whether they are split."""
    return tuple(
        splits_classes(node.target, node.arguments, assignment.layouts.get(node.inputs[0], REPLICATED))
        for node in frame.body
        if isinstance(node, Operation) and node.target in CLASS_OPERATIONS
    )


def shared_module_findings(names: frozenset[str], assignment: Assignment, binding: Binding) -> list[Diagnostic]:
    """Report modules whose calls still differ when only the plan's own pins remain."""
    found: list[Diagnostic] = []
    for name in sorted(names):
        bound = binding.modules.get(name)
        found.append(
            Diagnostic(
                code="TP109",
                message=f"{quoted(name)} is called several times, and its calls need different reshards: "
                f"{_difference(name, assignment)}",
                span=bound.rule.style_span if bound is not None else None,
                help="give the values that it is called with the same layout, for instance by pinning `output:` of the "
                "modules before it, or remove its rule",
                subject=name,
            )
        )
    return found


def _difference(name: str, assignment: Assignment) -> str:
    """The first boundary at which two calls differ, with the layout in each."""
    calls = [
        (held.frame.call + 1, _ways(held.frame, assignment)) for held in assignment.frames if held.frame.module == name
    ]
    first, one = calls[0]
    second, other = next(((call, ways) for call, ways in calls if ways != one), calls[-1])
    place = next((p for p in one if p in other and one[p] != other[p]), None)
    if place is None:
        return f"calls {first} and {second} take other arguments"
    (before, after), (its_before, its_after) = one[place], other[place]
    if before != its_before:
        return f"{place} comes as {before} in call {first} and as {its_before} in call {second}"
    return f"{place} is needed as {after} in call {first} and as {its_after} in call {second}"


def _ways(frame: Frame, assignment: Assignment) -> Ways:
    """The layouts of arguments and results on either side of the boundary, by their place."""
    return {
        f"{what} {'.'.join(map(str, crossing.path))}".strip(): (
            str(assignment.layouts.get(crossing.source, REPLICATED)),
            str(assignment.layouts.get(crossing.target, REPLICATED)),
        )
        for what, crossings in (("argument", frame.entries), ("the result", frame.exits))
        for crossing in crossings
    }


def mixed_gradients(assignment: Assignment) -> frozenset[str]:
    """Replicated parameters whose gradient is partial in one body and whole in another: the two can't be added."""
    return frozenset(set(assignment.partial) & set(assignment.whole))


def shared_biases(assignment: Assignment, trace: Trace) -> frozenset[str]:
    """Biases that one rank adds to a partial result in one body, and that another body reads as they are."""
    values = {value: names[0] for value, names in trace.parameters.items() if names[0] in assignment.once}
    found: set[str] = set()
    for frame in trace.root.walk() if values else ():
        read = (values.get(i) for node in frame.body if isinstance(node, Operation) for i in node.inputs)
        found.update(n for n in read if n is not None and frame.module not in assignment.once[n])
    return frozenset(found)


def uses_of(names: frozenset[str], instance: Instance, trace: Trace) -> set[tuple[tuple[str, int], int]]:
    """Where parameters stand in regions, as (region's example, local number)."""
    found: set[tuple[tuple[str, int], int]] = set()
    for number, value in enumerate(instance.values):
        if value in trace.parameters and trace.parameters[value][0] in names:
            found.add((instance.region.example, number))
    for child in instance.children:
        found |= uses_of(names, child, trace)
    return found


def uses_of_values(values: Set[int], instance: Instance) -> set[tuple[tuple[str, int], int]]:
    """Where values stand in regions, as (region's example, local number)."""
    found = {(instance.region.example, number) for number, value in enumerate(instance.values) if value in values}
    return found.union(*(uses_of_values(values, child) for child in instance.children))


def mixed_gradient_findings(names: frozenset[str], assignment: Assignment) -> list[Diagnostic]:
    """Report parameters whose two gradients can't be reconciled."""
    return [
        Diagnostic(
            code="TP109",
            message=f"the gradient of `{name}` is partial in `{assignment.partial[name][0]}` and whole in "
            f"`{assignment.whole[name][0]}`, so that they can't be added",
            help=f"shard the modules that share `{name}` in the same way, or untie them",
            subject=name,
        )
        for name in sorted(names)
    ]


__all__ = [
    "conflicting_modules",
    "differing_moves",
    "mixed_gradient_findings",
    "mixed_gradients",
    "shared_biases",
    "shared_module_findings",
    "uses_of",
    "uses_of_values",
]
