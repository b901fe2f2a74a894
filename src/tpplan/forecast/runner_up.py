"""Runners-up: the next best of each placement that a plan leaves open, and what it takes more.

in:  a model with its plan, and the modules that are asked about
out: for each end of a rule that no pin decides: the pin under which the plan is the next best, or why there is none

Each pin that the end could have is compiled, and everything else placed anew around it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tpplan.compat.modules import named_modules
from tpplan.compiler.ir.program import Program
from tpplan.compiler.pipeline import compile_call
from tpplan.compiler.request import Request
from tpplan.cost.traffic import placement_time
from tpplan.plan import CompileError, Pattern, Pin, Plan, Rule, Style
from tpplan.served import Served


@dataclass(frozen=True, slots=True)
class RunnerUp:
    """What comes after the placement that was chosen for one end of a rule.

    Attributes:
        rule: the rule's pattern.
        end: "input" or "output".
        chosen: the pins under which the program stays what it is.
        pin: that of the next best; None if no other compiles.
        seconds: what that takes more in a step, by the model that placement minimises; negative if it takes less.
        collectives: of a step under it, by name.
        refused: for each pin that doesn't compile, why.
    """

    rule: str
    end: str
    chosen: tuple[str, ...]
    pin: str | None
    seconds: float
    collectives: dict[str, int]
    refused: dict[str, str]


def runners_up(inner: Served, tp: int, wanted: Pattern) -> Iterator[RunnerUp]:
    """Those of the rules that apply to the wanted modules, or to modules inside of them.

    Raises:
        CompileError: the plan itself doesn't compile.
    """
    chosen = _program(inner, inner.plan, tp)
    names = [name for name, _ in named_modules(inner.model)]
    found = inner.plan.match(names).rules.items()
    rules = {rule.pattern.text: rule for name, rule in found if _inside(wanted, name)}
    for rule in rules.values():
        for end in ("input", "output"):
            if rule.style not in (Style.NONE, Style.EXPERTS) and getattr(rule, end) is None:
                yield _runner_up(inner, rule, end, chosen)


def _inside(wanted: Pattern, name: str) -> bool:
    parts = name.split(".")
    return any(wanted.matches(".".join(parts[: n + 1])) for n in range(len(parts)))


def _runner_up(inner: Served, rule: Rule, end: str, chosen: Program) -> RunnerUp:
    same, refused, found = list[str](), dict[str, str](), list[tuple[int, str, Program]]()
    for pin in Pin:
        rules = tuple(replace(r, **{end: pin}) if r is rule else r for r in inner.plan.rules)
        try:
            program = _program(inner, replace(inner.plan, rules=rules), chosen.size)
        except CompileError as error:
            refused[str(pin)] = f"{error.code}: {error.diagnostics[0].message}"
            continue
        if _placements(program) == _placements(chosen):
            same.append(str(pin))
        else:
            found.append((placement_time(program), str(pin), program))
    text = rule.pattern.text
    if not found:
        return RunnerUp(text, end, tuple(same), None, 0.0, {}, refused)
    time, pin, program = min(found, key=lambda held: held[0])
    more = (time - placement_time(chosen)) / 1e12
    return RunnerUp(text, end, tuple(same), pin, more, dict(program.count_collectives()), refused)


def _program(inner: Served, plan: Plan, tp: int) -> Program:
    return compile_call(Request(inner.model, plan, tp, *inner.call)).program


def _placements(program: Program) -> list[tuple[object, ...]]:
    """Where what is resharded; and parameters, which a pin may leave whole."""
    moved = [(m.name, way, r.path, r.source, r.target) for m in program.modules
             for way, held in (("in", m.entries), ("out", m.exits)) for r in held if r.source != r.target]  # fmt: skip
    return [*moved, *((p.name, p.layout) for p in program.parameters)]


__all__ = ["RunnerUp", "runners_up"]
