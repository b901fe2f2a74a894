"""Functions over all classes, where the classes are split: what each rank then has of their results.

in:  the operation that stands for such a call, and how its operands lie
out: how its result lies; the reason where it can't be computed

    cross_entropy(z: S(1), t: R)   ->   R, for one all-gather of a few numbers a row, and none in the backward
    logsumexp(z: S(1), 1)          ->   R, likewise; or R·∂P, for an all-reduce of its gradient
    log_softmax(z: S(1), 1)        ->   S(1), likewise, and an all-reduce of a number a row in the backward
    nll_loss(p: S(1), t: R)        ->   R, for an all-reduce of a number a row, and none in the backward
    softmax(z: S(1), 1)            ->   S(1), as log_softmax
    sum, mean, amax, gather …      ->   R, for a number or two a row; or R·∂P, for an all-reduce of its gradient
    look_up(table: S(0), ids: R)   ->   P; or R or R·∂P, for an all-reduce of the rows

These are the only operations that communicate inside of a body without a record: the runtime meets the very calls
(`runtime/classes`).
Where the result is replicated, so is its gradient, of which each rank makes that of its own classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tpplan.compat.schemas import OpOverload
from tpplan.compiler.ir.class_functions import CROSS_ENTROPY, LOG_SOFTMAX, LOGSUMEXP, LOSSES, NLL_LOSS
from tpplan.compiler.ir.class_reductions import (
    AMAX,
    AMIN,
    MEAN,
    REDUCTIONS,
    SOFTMAX,
    SUM,
)
from tpplan.compiler.ir.layout import PARTIAL, REPLICATED, REPLICATED_PARTIAL, Layout, sharded
from tpplan.compiler.ir.look_ups import BAG, LOOK_UPS
from tpplan.compiler.ir.region import LocalValue, OperationNode
from tpplan.ops.issued import OF_CLASSES
from tpplan.ops.registry import base_name

Rule = Callable[[OperationNode, Sequence[LocalValue], dict[int, Layout]], Layout | str]
Layouts = tuple[Layout, ...]
_DIM: dict[OpOverload, int] = {CROSS_ENTROPY: 3, NLL_LOSS: 3} | dict.fromkeys(
    (LOGSUMEXP, LOG_SOFTMAX, *REDUCTIONS, *LOOK_UPS), 1
)
_OF_DIMS = frozenset((LOGSUMEXP, SUM, MEAN, AMAX, AMIN))
_ALONG = frozenset((LOG_SOFTMAX, SOFTMAX))


def class_dim(arguments: Sequence[Any], target: OpOverload) -> int:
    """The class dim of such an operation's input."""
    return arguments[_DIM[target]]


def splits_classes(target: OpOverload, arguments: Sequence[Any], held: Layout) -> bool:
    """Whether an input that lies so has its classes split."""
    return held.is_sharded and held.dim == class_dim(arguments, target)


def class_layouts(
    node: OperationNode, values: Sequence[LocalValue], layouts: Mapping[int, Layout], rule: Rule
) -> tuple[Layouts, ...] | str:
    """How the results may lie where not all operands are replicated, or why it can't be told.

    Args:
        node: the operation.
        values: of its region.
        layouts: of its operands, by local number.
        rule: DTensor's, for the operation of torch that it stands for.
    """
    if node.target in LOOK_UPS:
        return _looked_up(node, values, layouts)
    logits, *others = node.inputs
    held = layouts[logits]
    if held.is_sharded and splits_classes(node.target, node.arguments, held):
        if not held.is_plain or held.interleave != 1:
            return "reads classes that lie in several stretches on a rank"
        if any(not layouts[i].is_replicated for i in others) or any(values[i].differentiable for i in others):
            return "needs whole labels and whole weights of classes, without gradients"
        if node.target in _ALONG:
            return ((held,),)
        others_made = (REPLICATED,) * (len(node.outputs) - 1)  # the indices beside a maximum
        partial = node.target not in LOSSES and any(o is not None and values[o].differentiable for o in node.outputs)
        return tuple((made, *others_made) for made in ((REPLICATED, REPLICATED_PARTIAL) if partial else (REPLICATED,)))
    made = _of_rows(node, layouts) if node.target in LOSSES else _stock(node, values, layouts, rule)
    return made if isinstance(made, str) else ((made,) * len(node.outputs),)


def _looked_up(
    node: OperationNode, values: Sequence[LocalValue], layouts: Mapping[int, Layout]
) -> tuple[Layouts, ...] | str:
    """Rows of a table, by numbers that all ranks know, and perhaps reduced bag by bag.

    The weights of rows in bags have their gradient where the rows are.
    """
    table, *others = node.inputs
    held, made = layouts[table], node.outputs[0]
    if any(layouts[i] != (REPLICATED_PARTIAL if values[i].differentiable else REPLICATED) for i in others):
        return "needs whole numbers of rows, and weights whose gradients are partial"
    if any(values[i].differentiable and values[i].parameter is not None for i in others) or not held.is_plain:
        return "needs values that other ranks hold"
    if held == sharded(1):
        return ((sharded(len(values[made].shape) - 1),),) if made is not None else "makes nothing"
    if held != sharded(0) or (node.target is BAG and node.arguments[5] == "max"):
        return "needs all rows"
    gradient = made is not None and values[made].differentiable
    return ((PARTIAL,), (REPLICATED,), (REPLICATED_PARTIAL,)) if gradient else ((PARTIAL,), (REPLICATED,))


def sums_rows(target: OpOverload, held: Layout, made: Layout) -> bool:
    """Whether a look-up in a table that lies so sums its ranks' terms, for such a result."""
    return target in LOOK_UPS and held.is_sharded and held.dim == 0 and made.is_replicated


def _stock(
    node: OperationNode, values: Sequence[LocalValue], layouts: Mapping[int, Layout], rule: Rule
) -> Layout | str:
    """The result of classes that each rank has all of, such as those of its rows."""
    _, dim, *further = node.arguments
    if node.target in _ALONG:
        if further[0] not in (None, values[node.inputs[0]].dtype):
            return "needs values that other ranks hold"
        further = [False]
    if node.target in (SUM, MEAN):
        further = further[:1]
    dims = (dim,) if node.target in _OF_DIMS else dim
    stock = replace(node, target=OF_CLASSES[base_name(node.name)], arguments=(node.arguments[0], dims, *further))
    return rule(stock, values, dict(layouts))


def _of_rows(node: OperationNode, layouts: Mapping[int, Layout]) -> Layout | str:
    """A loss of split rows, each rank with all classes and the labels of its own rows."""
    logits, labels, *weight = node.inputs
    held, dim, reduction = layouts[logits], class_dim(node.arguments, node.target), node.arguments[4]
    whole = all(layouts[i].is_replicated for i in weight)
    if not held.is_sharded or not held.is_plain or held.dim is None or not whole or reduction == "mean":
        return "needs values that other ranks hold"
    rows = sharded(held.dim - (held.dim > dim), held.interleave)
    if layouts[labels] != rows:
        return "needs the labels of the rows that each rank has"
    return rows if reduction == "none" else PARTIAL


__all__ = ["class_dim", "class_layouts", "splits_classes", "sums_rows"]
