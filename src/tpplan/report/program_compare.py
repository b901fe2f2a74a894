"""Compare two programs of one model.

in:  two programs of one model, call and number of ranks; their estimates, where a GPU is given
out: `ProgramDiff`: changed parameters and reshards, equal layers once; amounts before and after; warnings
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from tpplan.compiler.ir.program import ModuleProgram, ParameterPlacement, Program
from tpplan.cost.traffic import Traffic, gradient_sum_traffic, memory, module_traffic
from tpplan.plan import Diagnostic, Severity, TpplanError
from tpplan.report.program_diff import ComparedReshard, DiffAmount, ParameterChange, ProgramDiff, ReshardChange
from tpplan.report.program_outline import shown_indices
from tpplan.report.quantities import path_text, shape_text

if TYPE_CHECKING:
    from tpplan.cost.estimates import Estimate

_INDEX = re.compile(r"(?<![^.])\d+(?![^.])")
_PLACE = re.compile(r"\S+:\d+(:\d+)?")
_SHOWN_APART = frozenset({"plan", "parameters", "modules", "inputs", "training", "model", "size", "version"})
_OF_A_MODULE = frozenset({"name", "origin", "entries", "inner", "exits"})


class ComparisonError(TpplanError):
    """Two programs can't be compared: they are of different models, calls or numbers of ranks."""


@dataclass(frozen=True, slots=True)
class ComparedProgram:
    """One of the two.

    Attributes:
        name: the plan or file, as the user wrote it.
        program: what it makes of the model.
        warnings: its warnings; None where the program doesn't say.
        cost: what it costs, where a GPU is given.
    """

    name: str
    program: Program
    warnings: tuple[Diagnostic, ...] | None
    cost: Estimate | None = None


def compare(one: ComparedProgram, other: ComparedProgram) -> ProgramDiff:
    """What changes from one program to the other.

    Raises:
        ComparisonError: TP231, they are of different models, calls or numbers of ranks.
    """
    _require_comparable(one, other)
    new = gone = tuple[str, ...]()
    notes: list[str] = []
    if one.warnings is not None and other.warnings is not None:
        new, gone = _beyond(other.warnings, one.warnings), _beyond(one.warnings, other.warnings)
    else:
        silent = [held.name for held in (one, other) if held.warnings is None]
        notes.append(f"Warnings aren't compared: {' and '.join(silent)} has none with it, written by an older version.")
    return ProgramDiff(
        one.program.model, one.program.size, one.name, other.name,
        *((one.cost.gpu, one.cost.batch, one.cost.sequence) if one.cost is not None else ("", 0, 0)),
        tuple(_parameters(one.program, other.program)), tuple(_reshards(one.program, other.program)),
        tuple(_amounts(one, other)), new, gone, tuple(_others(one.program, other.program)), tuple(notes),
    )  # fmt: skip


# -- what can't be compared ---------------------------------------------------------------------------------------
def _require_comparable(one: ComparedProgram, other: ComparedProgram) -> None:
    same_model = "compare plans for one model, with the same `--model`, `--set` and versions of its library"
    asked: tuple[tuple[str, str, Callable[[Program], dict[str, str]]], ...] = (
        ("models", same_model, lambda p: {"the model": p.model}),
        ("numbers of ranks", "compile both with the same `--tp`", lambda p: {"the axis": f"{p.size} ranks"}),
        (
            "parameters",
            same_model,
            lambda p: {", ".join(q.names): f"{shape_text(q.shape)} {q.dtype}" for q in p.parameters},
        ),
        (
            "example calls",
            "compile both with the same `--batch`, `--sequence` or inputs",
            lambda p: {path_text(i.path): f"{shape_text(i.shape)} {i.dtype}" for i in p.inputs},
        ),
        (
            "modes",
            "capture both in training or both in evaluation",
            lambda p: {"the mode": "training" if p.training else "evaluation"},
        ),
    )
    for what, way_out, of in asked:
        before, after = of(one.program), of(other.program)
        if before != after:
            name = next(n for n in (*before, *after) if before.get(n) != after.get(n))
            told = f"{name} is {before.get(name, 'missing')} in one, {after.get(name, 'missing')} in the other"
            message = f"the programs are of different {what}: {told}"
            raise ComparisonError.of("TP231", message, help=way_out, subject=f"{one.name} and {other.name}")


# -- placements ---------------------------------------------------------------------------------------------------
def _parameters(one: Program, other: Program) -> Iterator[ParameterChange]:
    before = {p.name: replace(p, origin="") for p in one.parameters}
    after = {p.name: replace(p, origin="") for p in other.parameters}
    groups: dict[object, list[str]] = {}
    for name, held in before.items():
        if held != after[name]:
            groups.setdefault((_starred(name), *_unnamed(held), *_unnamed(after[name])), []).append(name)
    for names in groups.values():
        yield ParameterChange(_shown(names, before), len(names), before[names[0]], after[names[0]])


def _unnamed(held: ParameterPlacement) -> tuple[object, ...]:
    return replace(held, names=()), tuple(map(_starred, held.names))


Slot = tuple[str, str, tuple[str | int, ...], int]
"""Where a reshard stands: module, way, path, and which of several at one path."""


def _reshards(one: Program, other: Program) -> Iterator[ReshardChange]:
    before, after = _slots(one), _slots(other)
    groups: dict[object, list[Slot]] = {}
    for slot in dict.fromkeys((*before, *after)):
        pair = before.get(slot), after.get(slot)
        if pair[0] != pair[1]:
            groups.setdefault((_starred(slot[0]), *slot[1:], *pair), []).append(slot)
    known = {name: place for place, name in enumerate(dict.fromkeys(m.name for p in (other, one) for m in p.modules))}
    for slots in sorted(groups.values(), key=lambda slots: known[slots[0][0]]):
        _, way, path, _ = slots[0]
        name = _shown([slot[0] for slot in slots], known)
        yield ReshardChange(name, len(slots), way, path_text(path), before.get(slots[0]), after.get(slots[0]))


def _slots(program: Program) -> dict[Slot, ComparedReshard]:
    found: dict[Slot, ComparedReshard] = {}
    for module in program.modules:
        for way, reshards in (("in", module.entries), ("mid", module.inner), ("out", module.exits)):
            seen: Counter[object] = Counter()
            for reshard in reshards:
                slot = (module.name, way, reshard.path, seen[reshard.path])
                seen[reshard.path] += 1
                found[slot] = ComparedReshard(replace(reshard, origin=""), module.calls, program.size)
    return found


def _starred(name: str) -> str:
    return _INDEX.sub("*", name)


def _shown(names: list[str], known: Iterable[str]) -> str:
    """One name for several that differ in indices: `*` for all that there are, or the indices if one differs."""
    if len(names) == 1:
        return names[0]
    starred = _starred(names[0])
    if len(names) == sum(_starred(name) == starred for name in known):
        return starred
    columns = [sorted(set(column)) for column in zip(*(map(int, _INDEX.findall(n)) for n in names), strict=True)]
    shown = iter(str(column[0]) if len(column) == 1 else shown_indices(column) for column in columns)
    if sum(len(column) > 1 for column in columns) == 1:
        return _INDEX.sub(lambda _: next(shown), names[0])
    return f"{starred} ({', '.join(names[:3])}{', …' if len(names) > 3 else ''})"


# -- numbers ------------------------------------------------------------------------------------------------------
def _amounts(one: ComparedProgram, other: ComparedProgram) -> Iterator[DiffAmount]:
    before, after = _passes(one.program), _passes(other.program)
    sums = [sum(passes.values(), Traffic()) for passes in (before, after)]
    for way in before:
        for name in dict.fromkeys((*before[way].counts, *after[way].counts)):
            counts = [held[way].counts.get(name, 0) for held in (before, after)]
            yield DiffAmount(f"{name}, {way}", "collectives", counts[0], counts[1])
    yield DiffAmount("collectives", "collectives", sums[0].number, sums[1].number, True)
    for way in before:
        yield DiffAmount(f"bytes sent, {way}", "bytes", before[way].total, after[way].total)
    yield DiffAmount("bytes sent", "bytes", sums[0].total, sums[1].total, True)
    held = [memory(compared.program.parameters).local for compared in (one, other)]
    yield DiffAmount("memory of parameters", "bytes", held[0], held[1], True)
    if one.cost is not None and other.cost is not None:
        parts, later = one.cost.memory.parts, other.cost.memory.parts
        for name in parts:
            if name != "parameters":
                yield DiffAmount(f"memory of {name}", "bytes", parts[name], later[name])
        yield DiffAmount("memory", "bytes", one.cost.memory.total, other.cost.memory.total, True)
        step, next_step = one.cost.step, other.cost.step
        yield DiffAmount("time of compute", "seconds", step.compute_seconds, next_step.compute_seconds)
        yield DiffAmount(
            "time of communication", "seconds", step.communication_seconds, next_step.communication_seconds
        )
        yield DiffAmount("time of a step", "seconds", step.total_seconds, next_step.total_seconds, True)


def _passes(program: Program) -> dict[str, Traffic]:
    step = module_traffic(program.modules, program.size)
    return {"forward": step.forward, "backward": step.backward, "gradients": gradient_sum_traffic(program)}


# -- the rest -----------------------------------------------------------------------------------------------------
def _beyond(held: Iterable[Diagnostic], known: Iterable[Diagnostic]) -> tuple[str, ...]:
    """The warnings that aren't known, each as often as it is; the plans' lines don't matter."""
    spare = Counter(map(_warning_key, known))
    lines: list[str] = []
    for warning in held:
        if warning.severity is not Severity.WARNING:
            continue
        key = _warning_key(warning)
        if spare[key]:
            spare[key] -= 1
        else:
            lines.append(warning.headline)
    return tuple(lines)


def _warning_key(warning: Diagnostic) -> tuple[str, str, str]:
    return warning.code, warning.subject or "", _PLACE.sub("", warning.message)


def _others(one: Program, other: Program) -> Iterator[str]:
    """What differs beside placements and reshards, counted."""
    counted: Counter[str] = Counter()
    modules = {m.name: m for m in one.modules}, {m.name: m for m in other.modules}
    for name in dict.fromkeys((*modules[0], *modules[1])):
        before, after = (held.get(name) for held in modules)
        before, after = before or _blank(after), after or _blank(before)
        for f in fields(ModuleProgram):
            if f.name not in _OF_A_MODULE and getattr(before, f.name) != getattr(after, f.name):
                counted[f.name.replace("_", " ")] += 1
    yield from (f"{name} of {count} module{'s' if count > 1 else ''}" for name, count in counted.items())
    for f in fields(Program):
        if f.compare and f.name not in _SHOWN_APART and _of(one, f.name) != _of(other, f.name):
            yield f.name.replace("_", " ")


def _blank(other: ModuleProgram | None) -> ModuleProgram:
    """A module of which nothing becomes."""
    assert other is not None
    return ModuleProgram(other.name, other.kind, None, "", other.calls, reads=other.reads)


def _of(program: Program, name: str) -> object:
    return [replace(b, origin="") for b in program.buffers] if name == "buffers" else getattr(program, name)


__all__ = ["ComparedProgram", "ComparisonError", "compare"]
