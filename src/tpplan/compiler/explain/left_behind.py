"""Findings about what a forward leaves behind besides its results, such as an auxiliary loss in an attribute.

in:  the effects of a trace, the layouts of its values
out: findings for what is only a rank's part, there or with the caller

    self.usage = x.sum()   with x: S(1)   ->   TP107: the attribute would hold a rank's own sum
    cache.append(k)        with k: S(2)   ->   TP125: the caller's list holds a rank's own heads
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tpplan.compiler.ir.layout import PARTIAL, REPLICATED, UNKNOWN, Layout
from tpplan.compiler.ir.locations import Location
from tpplan.compiler.ir.program import splits_sequence
from tpplan.compiler.ir.trace import Path, Trace
from tpplan.plan import Diagnostic


def effect_findings(trace: Trace, layouts: Mapping[int, Layout]) -> list[Diagnostic]:
    """Report what the forward leaves behind and what isn't as in the unsharded model.

    A part that a hook or a global gets shows in its shape, unless a later call reads it. A term of a sum doesn't, and a
    module may read its own.
    """
    outside = trace.effects.outside
    parts = {value: name for value, name in trace.effects.kept.items() if layouts.get(value, REPLICATED) != REPLICATED}
    seen = {value: name for value, name in parts.items() if value in outside and name not in trace.effects.reread}
    shown = [name for value, name in seen.items() if layouts[value].is_sharded]
    findings = [
        Diagnostic(
            code="TP107",
            message=f"the forward leaves a tensor of layout {layouts[value]} in `{name}`: its values or its gradient "
            "differ from what the unsharded model would leave there",
            help="return the tensor from the forward, or pin `output: replicate` for the module that it comes from",
            subject=None if value in outside else name.rpartition(".")[0] or None,
        )
        for value, name in parts.items()
        if name not in shown
    ]
    if shown:
        findings.append(
            Diagnostic(
                code="TP125",
                message=f"the forward, or a hook, leaves tensors of which each rank has its part, such as `{shown[0]}`",
                help="nothing is wrong if that is expected; pin `output: replicate` for the module that they come from "
                "to have them whole",
            )
        )
    return findings


def branch_findings(tested: Mapping[int, Location | None], layouts: Mapping[int, Layout]) -> list[Diagnostic]:
    """Report branches on values that each rank has its own part of, so that the ranks would go different ways."""
    return [
        Diagnostic(
            code="TP107",
            message=f"the model branches on a value of layout {layouts[value]}: each rank would see its own part of it",
            help="pin `output: replicate` for the module that the value comes from",
            notes=(f"at {location}",) if location is not None else (),
        )
        for value, location in tested.items()
    ]


def seeded_findings(seeded: Collection[int], layouts: Mapping[int, Layout]) -> list[Diagnostic]:
    """Report numbers that a forward draws after seeding: a rank's part would get those of another part."""
    return [
        Diagnostic(
            code="TP107",
            message="the model seeds the random numbers that it draws for a value whose layout is "
            f"{layouts[value]}: every rank would draw the same for its part, and not what the unsharded model draws",
            help="seed outside of the forward, draw such numbers once and keep them in a buffer, or pin `output: "
            "replicate` for the module that the value comes from",
        )
        for value in sorted(seeded)
        if layouts.get(value, REPLICATED) != REPLICATED
    ][:1]


def hidden_findings(hidden: Mapping[int, str], layouts: Mapping[int, Layout]) -> list[Diagnostic]:
    """Report objects among the results that would take a rank's part with them, as nobody can look into them."""
    parts = {kind: layouts[value] for value, kind in hidden.items() if layouts.get(value, REPLICATED) != REPLICATED}
    return [
        Diagnostic(
            code="TP107",
            message=f"the model returns a `{kind}` with a tensor of layout {layout}: it can't be gathered there, as "
            "tpplan doesn't know how to rebuild such an object",
            help="return a tuple, a dict or a dataclass instead, or leave the object out, as `use_cache=False` does "
            "with a cache; or pin `output: replicate` for the module that the tensor comes from",
        )
        for kind, layout in parts.items()
    ]


def left_findings(trace: Trace, layouts: Mapping[int, Layout], lengths: Collection[int]) -> list[Diagnostic]:
    """Say of which tensors the caller's lists and dicts will hold a part; report those that no later call could take.

    Features and heads have the example's size in every call, so that a part of them is known by its size. A part of a
    sequence isn't, nor is a term of a sum.

    Args:
        trace: what calls leave.
        layouts: by value.
        lengths: of the sequences that are split; the states of a mixer are (batch, features, more) as well.
    """
    found: list[Diagnostic] = []
    parts: list[Path] = []
    for path, value in trace.effects.left.items():
        layout = layouts.get(value, REPLICATED)
        shape = trace.values[value].shape
        length = shape[layout.dim or 0] // layout.interleave if splits_sequence(layout, shape) and shape else None
        unlike = layout in (PARTIAL, UNKNOWN) or layout.is_extreme or layout.tail
        if unlike or (layout.is_sharded and length in lengths):
            found.append(
                Diagnostic(
                    code="TP107",
                    message=f"the forward leaves a tensor of layout {layout} in the caller's `{_path_name(path)}`: a "
                    "later call couldn't tell it from a whole one",
                    help="return the tensor from the forward, or pin `output: replicate` for the module that it comes "
                    "from",
                )
            )
        elif layout.is_sharded and path not in trace.effects.in_objects:
            parts.append(path)
    if parts:
        found.append(
            Diagnostic(
                code="TP125",
                message=f"the forward leaves each rank's own part of tensors in the caller's `{parts[0][0]}`, such as "
                f"`{_path_name(parts[0])}`",
                help="nothing is wrong if only later calls of the model read them; return from the forward what the "
                "caller reads itself",
            )
        )
    return found


def _path_name(path: Path) -> str:
    """A place in a call's arguments as Python writes it: `caches[0][1]`."""
    first, *rest = path
    return f"{first}{''.join(f'[{part!r}]' for part in rest)}"


__all__ = [
    "branch_findings",
    "effect_findings",
    "hidden_findings",
    "left_findings",
    "seeded_findings",
]
