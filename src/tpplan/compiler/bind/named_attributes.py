"""Named attributes: those that the plan's `local:` lists.

in:  the model and the bound plan
out: the attributes to divide, by module; findings for names that no integer attribute has

    local: [num_heds]  on a module with `num_heads` = 8   ->   did you mean `num_heads`?
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch import nn

from tpplan.compat.modules import named_modules
from tpplan.compiler.bind.attributes import integer_attributes
from tpplan.compiler.bind.bind import Binding, Bound
from tpplan.compiler.ir.layout import Pack
from tpplan.compiler.ir.program import LocalAttribute
from tpplan.plan import Diagnostic
from tpplan.plan.nearest import word_help
from tpplan.plan.wording import all_of


def named_attributes(
    model: nn.Module, binding: Binding, size: int
) -> tuple[dict[str, tuple[LocalAttribute, ...]], list[Diagnostic]]:
    """The attributes that the plan's `local:` names, and a finding for each name that stands for none."""
    modules = dict(named_modules(model))
    found: dict[str, tuple[LocalAttribute, ...]] = {}
    missing: dict[tuple[int, str], list[Diagnostic]] = {}
    for name, bound in binding.modules.items():
        if bound.wrapper:
            continue  # the wrapper's own rule names its attributes
        counts = {} if bound.is_parameter or not bound.rule.local else dict(integer_attributes(modules[name]))
        held: list[LocalAttribute] = []
        for attribute in bound.rule.local:
            if attribute not in counts:
                finding = _missing(bound, attribute, counts, modules)
                missing.setdefault((id(bound.rule), attribute), []).append(finding)
                continue
            whole = counts[attribute]
            counted = Pack(whole, 1, *bound.group)
            held.append(LocalAttribute.of(attribute, whole, [counted.local(size, rank) for rank in range(size)]))
        if held:
            found[name] = tuple(held)
    return found, [_once(findings) for findings in missing.values()]


def _once(findings: list[Diagnostic]) -> Diagnostic:
    first, *rest = findings
    return (
        replace(
            first,
            notes=(
                *first.notes,
                f"the same holds for {len(rest)} more",
            ),
        )
        if rest
        else first
    )


def _missing(bound: Bound, attribute: str, counts: Iterable[str], modules: Mapping[str, nn.Module]) -> Diagnostic:
    known = list(counts)
    holder = _holder(bound.name, attribute, modules)
    if holder is not None:
        way_out = f"`{holder}` has it: write `local` in a rule for that module"
    else:
        way_out = word_help(attribute, known) if known else "remove it: the module has no integer attributes"
    return Diagnostic(
        code="TP135",
        message=f"`{bound.name}` has no integer attribute `{attribute}`",
        span=bound.rule.span_of("local"),
        help=way_out,
        notes=(f"its integer attributes are {all_of(known)}",) if len(known) > 1 else (),
        subject=bound.name,
    )


def _holder(name: str, attribute: str, modules: Mapping[str, nn.Module]) -> str | None:
    """The nearest module around `name` that has the attribute."""
    while "." in name:
        name = name.rpartition(".")[0]
        if name in modules and attribute in dict(integer_attributes(modules[name])):
            return name
    return None


__all__ = ["named_attributes"]
