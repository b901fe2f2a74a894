"""Conflicts: what can't be served by one module or one parameter at a time.

in:  an assignment
out: modules whose calls were decided differently; parameters whose gradient is partial here and whole there
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Set

from tpplan.compiler.bind.bind import Binding
from tpplan.compiler.ir.region import Instance
from tpplan.compiler.ir.trace import Operation, Trace
from tpplan.compiler.place.assign import Assignment
from tpplan.plan import Diagnostic


def conflicting_modules(assignment: Assignment) -> frozenset[str]:
    """Modules called several times whose calls need different reshards."""
    decided: dict[str, set[object]] = defaultdict(set)
    for held in assignment.frames:
        entries = frozenset((r.path, r.source, r.target) for r in held.entries)
        exits = frozenset((r.path, r.source, r.target) for r in held.exits)
        decided[held.frame.module].add((entries, exits, held.normed is not None and held.normed.layout))
    return frozenset(name for name, kinds in decided.items() if len(kinds) > 1)


def shared_module_findings(names: frozenset[str], binding: Binding) -> list[Diagnostic]:
    """Report modules whose calls still differ when only the plan's own pins remain."""
    found: list[Diagnostic] = []
    for name in sorted(names):
        bound = binding.modules.get(name)
        found.append(
            Diagnostic(
                code="TP109",
                message=f"`{name}` is called several times, and its calls need different reshards",
                span=bound.rule.style_span if bound is not None else None,
                help="give the values that it is called with the same layout, for instance by pinning `output:` of the "
                "modules before it, or remove its rule",
                subject=name,
            )
        )
    return found


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
            help=f"shard the modules that share `{name}` alike, or untie them",
            subject=name,
        )
        for name in sorted(names)
    ]


__all__ = [
    "conflicting_modules",
    "mixed_gradient_findings",
    "mixed_gradients",
    "shared_biases",
    "shared_module_findings",
    "uses_of",
    "uses_of_values",
]
