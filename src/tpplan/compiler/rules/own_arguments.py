"""Own arguments: what an operator is told of channels, groups and heads, as it is on one rank.

in:  an operation of the whole, and how its operands lie
out: the operation with a rank's counts

    convolution(x, w, …, groups=8)   with x: S(1) on 2 ranks               ->   groups=4
    my::attn(q, k, v, num_heads=8)   with q: S(2), sizes={"num_heads": "h"}   ->   num_heads=4

A record that a rank runs is told these, and a check expects them of the model's own code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tpplan.compiler.ir.layout import REPLICATED, Layout
from tpplan.compiler.ir.trace import Operation, Value
from tpplan.compiler.rules.convolution import GROUPS, local_groups
from tpplan.compiler.rules.group_norm import CHANNELS, local_sizes
from tpplan.compiler.rules.group_norm import GROUPS as GROUPS_OF_NORM
from tpplan.compiler.rules.users_operators import with_local_sizes
from tpplan.ops.declared import rule_of


def with_own_arguments(
    operation: Operation, values: Sequence[Value], layouts: Mapping[int, Layout], size: int, rank: int
) -> Operation:
    """The operation as `rank` calls it, but for shapes, sizes of parts, and where slices begin."""
    rule = rule_of(operation.name)
    if rule is not None and rule.sizes:
        return with_local_sizes(rule, operation, values, layouts, size, rank)
    if not operation.is_a("convolution", "group norm"):
        return operation
    arguments, x = list(operation.arguments), operation.inputs[0]
    held = layouts.get(x, REPLICATED)
    if operation.is_a("convolution"):
        arguments[GROUPS] = local_groups(arguments[GROUPS], held, values[x].shape[1], size, rank)
    else:
        arguments[CHANNELS], arguments[GROUPS_OF_NORM] = local_sizes(arguments, held, size, rank)
    return replace(operation, arguments=tuple(arguments))


__all__ = ["with_own_arguments"]
