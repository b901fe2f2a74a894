"""Judge: whether the compiler proves a trial plan, and finds nothing in it that a plan's author wouldn't want.

in:  a subject and the settings of some modules
out: `Verdict`: the program, or the finding that speaks against the settings
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from tpplan.compat.modules import named_modules
from tpplan.compiler.ir.program import Program
from tpplan.compiler.pipeline import Compiled, compile_call
from tpplan.compiler.queries import stored_names
from tpplan.compiler.request import Request
from tpplan.plan import CompileError, Diagnostic, Plan, PlanError, Rule, Severity, TpplanError
from tpplan.plan.pattern import Pattern
from tpplan.rehearsal.rehearse import rehearse
from tpplan.suggest.patterns import patterns_for
from tpplan.suggest.roles import RoleSetting
from tpplan.suggest.subject import SuggestSubject

# Right, but a sign that the modules don't belong together: work that a collective undoes.
_UNWANTED = frozenset(("TP103", "TP104", "TP105", "TP106"))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a trial.

    Attributes:
        compiled: the compiled plan; None if it doesn't compile or isn't wanted.
        finding: what speaks against it.
    """

    compiled: Compiled | None
    finding: Diagnostic | None = None

    @property
    def program(self) -> Program | None:
        """The program of the compiled plan."""
        return None if self.compiled is None else self.compiled.program

    @property
    def ok(self) -> bool:
        """Whether the plan is proved, and wanted."""
        return self.compiled is not None

    @property
    def compiles(self) -> bool:
        """Whether the plan is proved, wanted or not."""
        return self.ok or (self.finding is not None and self.finding.severity is not Severity.ERROR)

    @property
    def reason(self) -> str:
        """What speaks against it, in a line, with where."""
        if self.finding is None:
            return ""
        where = f" ({self.finding.notes[0]})" if self.finding.notes else ""
        return f"{self.finding.code}: {self.finding.message}{where}"


def plan_of(subject: SuggestSubject, settings: Mapping[str, RoleSetting], name: str = "plan") -> Plan:
    """A plan that says this of these modules, and nothing of others."""
    return Plan(name=name, rules=tuple(rule_of(*pair) for pair in patterns_for(settings, all_names(subject.model))))


def all_names(model: nn.Module) -> list[str]:
    """Of what a pattern can match: modules, then parameters and buffers."""
    modules = [name for name, _ in named_modules(model, remove_duplicate=False)]
    return modules + stored_names(model)


def rule_of(pattern: str, setting: RoleSetting) -> Rule:
    """One line of a plan."""
    return Rule(Pattern.parse(pattern), setting.style, output=setting.output, packed=setting.packed)


def judge(subject: SuggestSubject, settings: Mapping[str, RoleSetting], exchanges: bool = False) -> Verdict:
    """Compile a trial plan; `exchanges`: operands may be exchanged inside of bodies.

    Where the model keeps more in evaluation, as tables that it looks up once, the plan has to serve it there as well.
    """
    found = _compiled(subject, settings, exchanges, None)
    if found.ok and subject.study.keeps:
        evaluated = _compiled(subject, settings, exchanges, False)
        return found if evaluated.ok else evaluated
    return found


def _compiled(
    subject: SuggestSubject, settings: Mapping[str, RoleSetting], exchanges: bool, training: bool | None
) -> Verdict:
    try:
        compiled = compile_call(
            Request(
                subject.model,
                plan_of(subject, settings),
                subject.size,
                subject.arguments,
                subject.keywords,
                training=training,
                exchanges=exchanges,
                captures=subject.study.captures,
            )
        )
        if subject.rehearsed:
            rehearse(subject.model, compiled, subject.arguments, subject.keywords)
    except PlanError as error:
        return Verdict(None, next(iter((*error.errors, *error.diagnostics))))
    except Exception as error:  # a trial that trips the compiler up is a trial that failed
        text = (str(error).strip() or type(error).__name__).splitlines()[0]
        return Verdict(None, Diagnostic(code="TP199", message=f"{type(error).__name__}: {text}"))
    unwanted = next((d for d in compiled.program.diagnostics if d.code in _UNWANTED), None)
    return Verdict(None, unwanted) if unwanted is not None else Verdict(compiled)


def runs(subject: SuggestSubject, verdict: Verdict) -> bool:
    """Whether the program of a trial that was proved runs, forward and backward, which is tried on shapes."""
    assert verdict.compiled is not None
    try:
        rehearse(subject.model, verdict.compiled, subject.arguments, subject.keywords)
    except TpplanError:
        return False
    return True


__all__ = ["CompileError", "Severity", "Verdict", "judge", "plan_of", "rule_of", "runs"]
