"""Declared: the rules of the user's on which a placement leans are tried before a program does.

in:  a trace, and the layouts of its values
out: the rules that couldn't be tried, with the reason, for the program to say; a TP151 for one that isn't true
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tpplan.compat.schemas import TORCH_NAMESPACES, OpOverload, schema_argument_names
from tpplan.compiler.ir.layout import REPLICATED, Layout
from tpplan.compiler.ir.trace import Operation, Reference, Trace, Value
from tpplan.compiler.rules.users_operators import operands_of, result_terms, rules_of, told_sizes
from tpplan.ops.declared import OperatorRuleError, check_rule
from tpplan.ops.dims import dims_of, sizes_of
from tpplan.ops.functions import SPACE
from tpplan.ops.trial import DRAWS, UNTRIED, ClaimError, Operand, TrialCall, tried
from tpplan.plan import Diagnostic, Plan, Severity
from tpplan.plan.nearest import did_you_mean
from tpplan.plan.operator_rule import OperatorRule
from tpplan.plan.positions import SourceText

_held: set[object] = set()  # the trials whose claims all hold


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """A rule, and a call of its operator on which a program leans.

    Attributes:
        name: of the operator.
        known: what tells the call from others.
        ranks: how many share out the call.
    """

    name: str
    rule: OperatorRule
    known: object
    call: TrialCall
    ranks: int

    def __call__(self, device: torch.device) -> str:
        """Try it, once a process; why that can't be done, or "".

        Raises:
            OperatorRuleError: TP151 for a rule that isn't true.
        """
        if (self.known, device.type) in _held:
            return ""
        try:
            failed = tried(self.rule, self.call, device, self.ranks)
        except ClaimError as error:
            raise OperatorRuleError([_untrue(self.name, self.rule, str(error))]) from error
        if not failed:
            _held.add((self.known, device.type))
        return failed


def try_rules(
    trace: Trace, layouts: Mapping[int, Layout] | None, device: torch.device, ranks: int
) -> dict[str, Trial | None]:
    """Try the rules on which layouts lean, or all; of those that couldn't be, what is assumed and the reason.

    With each comes what may be tried elsewhere; None where no device changes the reason.

    Raises:
        OperatorRuleError: TP151 for a rule that isn't true.
    """
    found: dict[str, Trial | None] = {}
    for operation, rule, values in _leaned_on(trace, layouts, ranks):
        if rule.derived:
            continue
        name = operation.target.name().removesuffix(".default")
        if not rule.placed:
            check_rule(name, rule, None)  # it may have been defined after its rule
        if not rule.audit:
            found[f"{name}: {rule.text} ({UNTRIED})"] = None
            continue
        try:
            trial = _trial(name, rule, operation, values, ranks)
        except ClaimError as error:
            raise OperatorRuleError([_untrue(name, rule, str(error))]) from error
        failed = trial(device)
        if failed:
            found[f"{name}: {rule.text} ({failed})"] = None if failed == DRAWS else trial
    return found


def _untrue(name: str, rule: OperatorRule, why: str) -> Diagnostic:
    return Diagnostic(
        code="TP151",
        message=f"the rule of `{name}` isn't true: {why}",
        span=SourceText.of(f"the rule of {name}", rule.text).span(0, len(rule.text)),
        label="isn't true",
        help="leave this sharding out of what `register_sharding` is given"
        if rule.placed
        else "mark what each rank needs whole with `!`, what is summed with `+`",
    )


def unused_rules(plan: Plan, trace: Trace) -> Iterator[Diagnostic]:
    """A TP022 for each operator in a plan that the model doesn't call."""
    frames = trace.recorded.walk() if plan.operators else ()
    bodies = [body for frame in frames for body in (frame.body, *(held.graph.body for held in frame.backwards))]
    called = {node.target.name() for body in bodies for node in body if isinstance(node, Operation)}
    known = {*called, *(name.partition(".")[0] for name in called)}
    for entry in plan.operators:
        if entry.name not in known:
            nearest = did_you_mean(
                entry.name, sorted(name for name in known if name.partition("::")[0] not in TORCH_NAMESPACES)
            )
            yield Diagnostic(
                code="TP022",
                message=f"the model doesn't call the operator `{entry.name}`",
                span=entry.span,
                label="of nothing",
                help=f"did you mean `{nearest}`?" if nearest else "remove it, or leave it where another model calls it",
                severity=Severity.WARNING,
            )


Leaned = tuple[Operation, OperatorRule, Sequence[Value]]


def _leaned_on(trace: Trace, layouts: Mapping[int, Layout] | None, ranks: int) -> Iterator[Leaned]:
    def is_split(values: Iterable[int | None]) -> bool:
        if layouts is None:
            return True
        return any(not layouts.get(value, REPLICATED).is_replicated for value in values if value is not None)

    def leans(node: Operation) -> bool:  # on the shapes and dtypes that a function's rule tells, in any case
        return node.target.namespace == SPACE or is_split(node.inputs)

    for frame in trace.recorded.walk():
        own = [node for node in frame.body if isinstance(node, Operation) and leans(node)]
        inside = [held.graph for held in frame.backwards if is_split((*held.inputs, *held.outputs))]
        bodies = [(own, trace.values), *((graph.body, graph.values) for graph in inside)]
        for body, values in bodies:
            for node in body:
                for rule in rules_of(node, values, ranks) or ():
                    yield node, rule, values


def _trial(name: str, rule: OperatorRule, operation: Operation, values: Sequence[Value], ranks: int) -> Trial:
    held = operands_of(operation, rule)
    operands = [
        None
        if value is None
        else Operand(
            name,
            None if term.dims is None else dims_of(term, len(values[value].shape)),
            tuple(map(int, values[value].shape)),
            values[value].dtype,
            values[value].dtype.is_floating_point,
        )
        for name, term, value in held
    ]
    shapes = [(o.dims, o.shape) for o in operands if o is not None and o.dims is not None]
    results = [
        (dims_of(term, len(values[value].shape)), tuple(map(int, values[value].shape)))
        for term, value in zip(result_terms(rule, operation), operation.outputs, strict=True)
        if value is not None
    ]
    call = TrialCall(
        _Run(operation, [value for _, _, value in held]),
        tuple(operands),
        tuple(dims for dims, _ in results),
        tuple(values[output].dtype for output in operation.outputs if output is not None),
        sizes_of([*shapes, *results], told_sizes(rule, operation)),
    )
    return Trial(name, rule, (name, rule, call.operands, repr(_numbers(operation)), ranks), call, ranks)


def _numbers(operation: Operation) -> list[Any]:
    return [held for held in (*operation.arguments, *operation.keywords.items()) if not isinstance(held, Reference)]


class _Run:
    """Makes a call of the trace again, on other tensors."""

    def __init__(self, operation: Operation, values: Sequence[int | None]) -> None:
        self._target: OpOverload = operation.target
        self._arguments = operation.arguments
        self._keywords = operation.keywords
        self._values = values

    def __call__(self, tensors: Sequence[Tensor | None], sizes: Mapping[str, int]) -> Any:
        pairs = zip(tensors, self._values, strict=True)
        given = iter([tensor for tensor, value in pairs if value is not None and tensor is not None])
        names = schema_argument_names(self._target)
        arguments = [
            sizes.get(name, self._filled(held, given)) for name, held in zip(names, self._arguments, strict=False)
        ]
        keywords = {name: sizes.get(name, self._filled(held, given)) for name, held in self._keywords.items()}
        return self._target(*arguments, **keywords)

    def _filled(self, held: Any, given: Iterator[Tensor]) -> Any:
        if isinstance(held, Reference):
            return next(given)
        return [self._filled(item, given) for item in held] if isinstance(held, tuple) else held  # pyright: ignore


__all__ = ["Trial", "try_rules", "unused_rules"]
