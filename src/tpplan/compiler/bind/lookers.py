"""Lookers: the bodies that themselves look up in a table which the plan splits by rows.

in:  a trace, and what the plan says of modules and parameters
out: the modules, whose look-ups a further capture records as functions over the table's rows (`ir/look_ups`); and what
     is wrong with rules for tables in which nobody looks up

    table: vocab, table[ids] in the model's own body    ->   the model
    tables.*: vocab, of nn.EmbeddingBag                  ->   tables.0, tables.1, …
    tokens: vocab, of nn.Embedding                       ->   none: the runtime has a body for these
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tpplan.compiler.bind.bind import Binding, once
from tpplan.compiler.ir.look_ups import LOOK_UPS
from tpplan.compiler.ir.trace import Operation, Trace
from tpplan.ops.dim_map import picked_dim
from tpplan.plan import Diagnostic, Style


def lookers(trace: Trace, binding: Binding) -> frozenset[str]:
    """The modules whose bodies look up in tables that are split by rows."""
    tables = {value for value, names in trace.parameters.items() if _is_split_by_rows(trace, binding, value, names[0])}
    found: set[str] = set()
    for frame in trace.root.walk() if tables else ():
        bound = binding.modules.get(frame.module)
        if bound is not None and bound.style is Style.VOCAB and not bound.walked:
            continue
        looked_up = (n.inputs[0] for n in frame.body if isinstance(n, Operation) and _reads_rows(n))
        if not tables.isdisjoint(looked_up):
            found.add(frame.module)
    return frozenset(found)


@dataclass(frozen=True, slots=True)
class BareTable:
    """A parameter in which bodies look up rows by themselves.

    Attributes:
        names: its names.
        rows, features: its sizes.
        ids: what names the rows that are looked up first, a value of the trace.
        count: how many rows are looked up in all.
    """

    names: tuple[str, ...]
    rows: int
    features: int
    ids: int
    count: int


def bare_tables(trace: Trace) -> dict[str, BareTable]:
    """The parameters of two dims in which bodies look up rows, by their first names."""
    found: dict[str, BareTable] = {}
    for node in (node for frame in trace.root.walk() for node in frame.body if isinstance(node, Operation)):
        if not _reads_rows(node) or len(node.inputs) < 2 or node.inputs[0] not in trace.parameters:
            continue
        names, shape = trace.parameters[node.inputs[0]], trace.values[node.inputs[0]].shape
        if len(shape) != 2:
            continue
        known = found.get(names[0], BareTable(names, *shape, node.inputs[1], 0))
        found[names[0]] = replace(known, count=known.count + math.prod(trace.values[node.inputs[1]].shape))
    return found


def not_looked_up(trace: Trace, binding: Binding, partly: bool) -> list[Diagnostic]:
    """TP101 for parameters to be split as tables, in which no body looks up; `partly`: or which it doesn't read."""
    nodes = [node for frame in trace.root.walk() for node in frame.body if isinstance(node, Operation)]
    read = {value for node in nodes for value in node.inputs}
    tables = {node.inputs[0] for node in nodes if node.target in LOOK_UPS}
    values = {name: value for value, names in trace.parameters.items() for name in names}
    found: list[Diagnostic] = []
    for name, bound in binding.modules.items():
        value = values.get(name)
        asked = bound.is_parameter and bound.style is Style.VOCAB and not (partly and value not in read)
        if asked and value not in tables:
            found.append(
                Diagnostic(
                    code="TP101",
                    message=f"`vocab` splits a table by rows, but no body of the model looks up rows in `{name}` alone",
                    span=bound.rule.style_span,
                    help="remove the rule, so that the parameter stays replicated",
                    subject=name,
                )
            )
    return once(found)


def _reads_rows(operation: Operation) -> bool:
    """Whether an operation picks rows of its first operand, which are its first dim's."""
    if not operation.is_a("pick", "table") or not operation.inputs:
        return False
    return not operation.is_a("pick") or picked_dim(operation.arguments, 2) == 0


def _is_split_by_rows(trace: Trace, binding: Binding, value: int, name: str) -> bool:
    layout = binding.parameters[name]
    return layout.is_sharded and layout.dim == 0 and layout.is_plain and len(trace.values[value].shape) == 2


__all__ = ["BareTable", "bare_tables", "lookers", "not_looked_up"]
