"""Declared operators: the rules that users give, by operator.

    tpplan.register_operator("my::attn", "b h s! d!, b h t! d!, b h t! d! -> b h s! d!")

A rule is held against the operator's schema where it is given. Whether it is true is tried before a program leans on it
(`ops/trial.py`).
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from types import MappingProxyType
from typing import Any, cast

import torch

from tpplan.compat.schemas import (
    TORCH_NAMESPACES,
    OpOverload,
    OpOverloadPacket,
    qualified_name,
    schema_argument_names,
    schema_mutates,
    tensor_arguments,
)
from tpplan.ops.library_rules import library_rule
from tpplan.plan import Diagnostic, PlanError
from tpplan.plan.operator_rule import OperatorRule, RuleTextError, read_rule
from tpplan.plan.positions import SourceText, Span


class OperatorRuleError(PlanError):
    """A rule of an operator can't be read, doesn't fit its schema, or isn't true."""

    def __str__(self) -> str:
        """Each finding, with a caret under the rule's text."""
        return "\n".join(_with_caret(finding) for finding in self.diagnostics)


def _with_caret(finding: Diagnostic) -> str:
    span = finding.span
    if span is None or span.line_text is None:
        return finding.text
    first, *rest = finding.text.split("\n")
    width = max(span.end.column - span.start.column, 1)
    caret = f"{' ' * (span.start.column - 1)}{'^' * width}"
    return "\n".join([first, f"  | {span.line_text}", f"  | {caret}", *rest])


_rules: dict[str, OperatorRule] = {}
_NONE: Mapping[str, OperatorRule] = MappingProxyType({})
_scoped: ContextVar[Mapping[str, OperatorRule]] = ContextVar("tpplan_operator_rules", default=_NONE)


def register_by_name(
    operator: Any,
    rule: str,
    *,
    linear: Sequence[str],
    sizes: Mapping[str, str] | None,
    random: bool,
    audit: bool,
) -> None:
    """Let an operator of `torch.library` have a rule; see `tpplan.register_operator`."""
    name = name_of_operator(operator)
    made = read_or_refuse(rule, f"the rule of {name}")
    made = replace(made, linear=tuple(linear), sizes=tuple((sizes or {}).items()), random=random, audit=audit)
    check_rule(name, made, SourceText.of(f"the rule of {name}", rule).span(0, len(rule)))
    _rules[name] = made


def name_of_operator(operator: Any) -> str:
    """`my::attn`, or with an overload `my::attn.out`, of whatever stands for an operator."""
    if isinstance(operator, str):
        name = operator
    elif isinstance(operator, OpOverload):
        name = operator.name()
    elif isinstance(operator, OpOverloadPacket):
        name = qualified_name(cast("Any", operator))
    else:
        name = str(getattr(operator, "_qualname", ""))
    space, divides, rest = name.partition("::")
    if not (space and divides and rest):
        raise refused(
            f"{operator!r} is no operator of torch.library",
            'give its name, `"my::attn"`, or `torch.ops.my.attn`; for a function of Python use `tpplan.operator`',
        )
    return name.removesuffix(".default")


def refused(message: str, way_out: str) -> OperatorRuleError:
    """The error for a rule that doesn't fit what it is for: one TP022."""
    return OperatorRuleError.of("TP022", message, help=way_out)


def read_or_refuse(rule: str, where: str) -> OperatorRule:
    """Read a rule; raises OperatorRuleError with a TP022."""
    if not isinstance(rule, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise refused(f"a rule is a text, not a {type(rule).__name__}", 'write `"b h s! d!, … -> b h s! d!"`')
    try:
        return read_rule(rule)
    except RuleTextError as error:
        place = SourceText.of(where, rule).span(error.offset, error.offset + error.length)
        raise OperatorRuleError(
            [Diagnostic(code="TP022", message=error.message, span=place, label=error.message, help=error.help)]
        ) from None


def check_rule(name: str, rule: OperatorRule, span: Span | None) -> None:
    """Hold a rule against the schemas of its operator, if that is known already.

    Raises:
        OperatorRuleError: TP022.
    """

    def fail(message: str, help_text: str) -> None:
        raise OperatorRuleError([Diagnostic(code="TP022", message=message, span=span, help=help_text)])

    for overload in overloads(name):
        tensors, results = tensor_arguments(overload)
        shown = f"`{overload.name()}`"
        written = [f"`{schema_argument_names(overload)[place]}`" for place in schema_mutates(overload)]
        if written:
            fail(
                f"{shown} writes to {' and '.join(written)}, and no rule tells what of an argument is written",
                "let an operator return what it makes, and let the model write that: `cache.copy_(…)`, "
                "`cache.index_copy_(…)`",
            )
        if len(rule.operands) > len(tensors):
            fail(
                f"{shown} has {len(tensors)} tensor arguments, and the rule terms for {len(rule.operands)}",
                f"write a term for each of {', '.join(tensors) or 'none'}",
            )
        if any(term.dims is None for term in rule.results):
            fail(f"{shown} returns tensors, and the rule has `_` for one, which is None", "give the result's dims")
        if results is not None and len(rule.results) != results:
            fail(f"{shown} returns {results} tensors, and the rule has terms for {len(rule.results)}",
                 "write a term for each result")  # fmt: skip
        for argument in rule.linear:
            if argument not in tensors:
                fail(f"{shown} has no tensor argument `{argument}`, in which it could be linear",
                     f"name one of {', '.join(tensors)}")  # fmt: skip
        names = schema_argument_names(overload)
        for argument, dim in rule.sizes:
            if argument not in names or dim not in rule.names:
                fail(f"`sizes` says that `{argument}` counts `{dim}`, of which the operator or its rule has none",
                     "name an argument of the operator and a dim of the rule")  # fmt: skip


def overloads(name: str) -> list[OpOverload]:
    """The overloads that a name stands for; none while nobody has defined them."""
    space, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    packet: Any = getattr(getattr(torch.ops, space), base, None)
    if packet is None:
        return []
    return [getattr(packet, held) for held in packet.overloads() if not overload or held == overload]


def declare(name: str, rule: OperatorRule) -> None:
    """Let an operator have a rule."""
    _rules[name] = rule


def registering(operator: OpOverload) -> str:
    """The call that gives an operator a rule, with its arguments in place; "" for torch's own, and what writes."""
    if operator.namespace in (*TORCH_NAMESPACES, "tpplan") or schema_mutates(operator):
        return ""
    tensors, results = tensor_arguments(operator)
    terms = ", ".join(f"<{name}>" for name in tensors)
    made = ", ".join(["<result>"] * (results or 1))
    return f'tpplan.register_operator("{operator.name().removesuffix(".default")}", "{terms} -> {made}")'


def rule_of(name: str) -> OperatorRule | None:
    """The rule of an operator, by its full name `my.attn.default`; None if nobody gave one."""
    scoped = _scoped.get()
    space, _, rest = name.partition(".")
    base, _, overload = rest.partition(".")
    keys = (f"{space}::{base}.{overload}", f"{space}::{base}")
    return next((held[key] for held in (scoped, _rules) for key in keys if key in held), None) or library_rule(keys[1])


@contextmanager
def scoped_rules(rules: Mapping[str, OperatorRule]) -> Generator[None]:
    """A block in which these rules hold as well: those of a plan."""
    token = _scoped.set({**_scoped.get(), **rules})
    try:
        yield
    finally:
        _scoped.reset(token)


__all__ = [
    "OperatorRuleError",
    "check_rule",
    "declare",
    "name_of_operator",
    "overloads",
    "read_or_refuse",
    "refused",
    "register_by_name",
    "registering",
    "rule_of",
    "scoped_rules",
]
