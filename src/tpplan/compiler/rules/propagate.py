"""Propagate: what one operation yields, forward and backward, for operands of given layouts, without communication.

in:  an operation and the layouts of its operands
out: the possible layouts of its results (`Outcome`s), or a `Refusal` with the reason

    mm(x: R·∂P, w: S(1)) -> S(1)        mm(x: R, w: S(1)) -> refused: x's gradient would be partial
    mul(x: R, w: R parameter) -> R      mul(x: S(1), w: R parameter) -> S(1), and w's gradient is partial

Forward placements are DTensor's own rules. The gradient side follows from one fact: where a result is sharded or
partial, each rank differentiates its own part, so the gradient of a replicated operand is a sum over the ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor.placement_types import Placement, Shard

from tpplan.compat.propagator import NoRule, OperatorMeta, propagate
from tpplan.compiler.ir.class_reductions import CLASS_OPERATIONS
from tpplan.compiler.ir.inner_gradient import GRADIENT
from tpplan.compiler.ir.layout import (
    PARTIAL,
    REPLICATED,
    REPLICATED_PARTIAL,
    UNKNOWN,
    Features,
    Layout,
    Pack,
    in_packs,
    layout_of,
    sharded,
)
from tpplan.compiler.ir.layout import packed as split_in_packs
from tpplan.compiler.ir.program import splits_sequence
from tpplan.compiler.ir.region import LocalValue, OperationNode
from tpplan.compiler.ir.trace import Reference, filled
from tpplan.compiler.rules import packed, scaled_products
from tpplan.compiler.rules.classes import class_layouts, sums_rows
from tpplan.compiler.rules.extremes import extremes, ways_to_compare
from tpplan.compiler.rules.gradient import gradient_layouts
from tpplan.compiler.rules.kept import kept_layouts
from tpplan.compiler.rules.moves import averages, may_move, ways_to_move
from tpplan.compiler.rules.slices import ways_to_slice
from tpplan.compiler.rules.users_operators import layouts_by_rules, rules_of
from tpplan.ops.declared import registering
from tpplan.ops.dim_map import with_dims_from_the_front
from tpplan.ops.issued import ALIAS, INT_MM, MM, RULED_AS
from tpplan.ops.registry import Operator, lookup

_END = sys.maxsize
_MODE, _MAXIMUM = 4, 2  # of bags


@dataclass(frozen=True, slots=True)
class Outcome:
    """One way in which an operation can run on local tensors.

    Attributes:
        outputs: a layout for each result (also for those that aren't tensors, where it means nothing).
        partial_parameters: replicated parameters (local numbers) whose gradient comes out partial here.
        replicated_parameters: replicated parameters whose gradient comes out whole here.
        slices: whole operands (local numbers) of which the operation takes a part, with the layouts of these.
        moves: operands that are resharded before the operation, with their layouts after that; slices come later.
        averages: whether it is a mean of which each rank makes its part.
        sums: whether it sums the ranks' terms of its result.
    """

    outputs: tuple[Layout, ...]
    partial_parameters: frozenset[int] = frozenset()
    replicated_parameters: frozenset[int] = frozenset()
    slices: tuple[tuple[int, Layout], ...] = ()
    moves: tuple[tuple[int, Layout], ...] = ()
    averages: bool = False
    sums: bool = False


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why an operation can't run on local tensors.

    Attributes:
        kind: "no-rule", "communication", "gradient", "in-place", "reduction", "dispatch" for tokens that aren't split,
            or "unaudited" for an operator outside of the table.
        reason: in words.
        operands: the operands' layouts, by local number.
    """

    kind: str
    reason: str
    operands: tuple[tuple[int, Layout], ...]


class Propagator:
    """Answers for one axis size; remembers what it asked."""

    def __init__(
        self,
        size: int,
        batch: int,
        heads: Features = frozenset(),
        features: Features = frozenset(),
        slices: bool = False,
        moves: bool = False,
        averages: bool = False,
        extremes: bool = False,
    ) -> None:
        """Answer for an axis of `size` ranks and an example call of batch size `batch`.

        A value that is repeated for one of these numbers of `heads`, and a tensor that is made for one of them or for
        one of `features`, may be split. With `slices`, an operation that can't run otherwise may take parts of whole
        operands; with `moves`, its operands may be resharded before it. With `averages`, of a mean over a split dim
        each rank may make its part; with `extremes`, each may find the largest entries of its own part.
        """
        self.size = size
        self.batch = batch
        self.heads = heads
        self.features = features
        self.slices = slices
        self.moves = moves
        self.averages = averages
        self.extremes = extremes
        self._rules: dict[object, tuple[Layout | None, ...] | str | None] = {}

    def splitting(
        self,
        heads: Features,
        features: Features = frozenset(),
        slices: bool = False,
        moves: bool = False,
        averages: bool = False,
        extremes: bool = False,
    ) -> Propagator:
        """The same rules for these numbers of heads and features; what either asks, both remember."""
        other = Propagator(self.size, self.batch, heads, features, slices, moves, averages, extremes)
        other._rules = self._rules
        return other

    def repeating(self, widths: Features) -> Propagator:
        """The same rules, where values may be repeated for these widths as well."""
        heads = self.heads | widths
        return self.splitting(heads, self.features, self.slices, self.moves, self.averages, self.extremes)

    def outcomes(
        self,
        node: OperationNode,
        values: Sequence[LocalValue],
        layout: Callable[[int], Layout],
        kept: Set[int] = frozenset(),
    ) -> list[Outcome] | Refusal:
        """The ways in which `node` can run, given its operands' layouts by local number; `kept` ones aren't moved."""
        found = self._unmoved(node, values, layout)
        if not isinstance(found, Refusal):
            return found
        if self.averages and averages(node, values, layout):
            return [Outcome((PARTIAL,), averages=True)]  # what is left is less than what would be gathered
        made = extremes(node, values, layout, self.size) if self.extremes else None
        if made is not None:
            return [Outcome(made)]
        ways = [*ways_to_compare(node.inputs, values, layout)] if self.extremes and not node.overwritten else []
        if not ways and (not self.moves or not may_move(node)):
            return found
        ways = ways or ways_to_move(_meaningful_inputs(node, values), values, layout, kept)
        moved = (self.moved(node, values, layout, way) for way in ways)
        return [outcome for way in moved if not isinstance(way, Refusal) for outcome in way] or found

    def moved(
        self,
        node: OperationNode,
        values: Sequence[LocalValue],
        layout: Callable[[int], Layout],
        way: Mapping[int, Layout],
    ) -> list[Outcome] | Refusal:
        """The ways in which `node` can run after some of its operands were resharded."""
        found = self._unmoved(node, values, lambda i: way.get(i) or layout(i))
        return found if isinstance(found, Refusal) else [replace(held, moves=(*way.items(),)) for held in found]

    def _unmoved(
        self, node: OperationNode, values: Sequence[LocalValue], layout: Callable[[int], Layout]
    ) -> list[Outcome] | Refusal:
        found = self._unsliced(node, values, layout)
        if not self.slices or not isinstance(found, Refusal) or node.overwritten:
            return found
        for slices in ways_to_slice(_meaningful_inputs(node, values), values, layout):
            sliced = self._unsliced(node, values, lambda i: slices.get(i) or layout(i))  # noqa: B023 -- asked at once
            if isinstance(sliced, Refusal):
                continue
            parameters = {i for i in slices if values[i].parameter is not None and values[i].differentiable}
            return [
                replace(way, slices=(*slices.items(),), partial_parameters=way.partial_parameters | parameters)
                for way in sliced
            ]
        return found

    def _unsliced(
        self, node: OperationNode, values: Sequence[LocalValue], layout: Callable[[int], Layout]
    ) -> list[Outcome] | Refusal:
        node_inputs = _meaningful_inputs(node, values)
        operands = tuple((i, layout(i)) for i in dict.fromkeys((*node_inputs, *node.overwritten)))
        if any(held.tail for _, held in operands):
            if _keeps_tail(node, values, dict(operands)):
                return [Outcome((operands[0][1],))]
            return Refusal("communication", "reads more of a split sequence than its last entries", operands)
        if any(held.is_extreme or held == UNKNOWN for _, held in operands):
            return Refusal("communication", "needs the largest or smallest entries of all ranks", operands)
        if node.target is GRADIENT:
            made = gradient_layouts(node, values, layout)
            return Refusal("communication", made, operands) if isinstance(made, str) else [Outcome(made)]
        if node.is_a("new") or (node.is_a("like") and any(held == PARTIAL for _, held in operands)):
            return self._new(node, values, operands)
        if node.target in CLASS_OPERATIONS and not all(held.is_replicated for _, held in operands):
            found = class_layouts(node, values, dict(operands), self._class_rule)
            if isinstance(found, str):
                return Refusal("communication", found, operands)
            table = layout(node.inputs[0])
            return [Outcome(outputs, sums=sums_rows(node.target, table, outputs[0])) for outputs in found]
        if all(held.is_replicated for _, held in operands):
            found = self._replicated(node, values, operands)
            if isinstance(found, Refusal):
                return found
            made_anew = _unread_gradient(node, values) if node.is_a("fill", "new") else []
            return [*found, *self._by_heads(node, values, operands), *_partial_zeros(node, values), *made_anew]
        if node.overwritten:
            if node.is_a("copy into") and len({held for _, held in operands}) == 1 and not operands[0][1].within:
                return [Outcome((operands[0][1],))]  # each rank fills its part of the tensor from its part of the other
            return Refusal("in-place", "writes in place to a tensor that is read again elsewhere", operands)
        operator = lookup(node.name)
        if operator is None:
            given = registering(node.target)
            way_out = f"has no rule for parts; `{given}` gives it one" if given else ""
            return Refusal("unaudited", way_out or "isn't in the table of audited operators", operands)
        if not _takes_partial(operator, node, dict(operands), values):
            return Refusal("communication", "needs values that other ranks hold", operands)
        if _counts_rows(node, dict(operands)):
            return Refusal("gradient", "scales its gradient by how often each row is read, on all ranks", operands)
        node = _with_dims_from_the_front(operator, node, values)
        if _counts_from_the_end(node, dict(operands), values):
            return Refusal("communication", "takes the last entries of a sequence that is split", operands)
        forward = self._forward(node, values, dict(operands))
        if isinstance(forward, Refusal):
            return forward
        partial: set[int] = set()
        differentiable = any(o is not None and values[o].differentiable for o in node.outputs)
        for identifier, held in operands:
            value = values[identifier]
            if not (differentiable and held.is_replicated and value.differentiable):
                continue
            if value.parameter is not None:
                partial.add(identifier)
            elif held == REPLICATED:
                reason = "reads a replicated value beside a sharded one, so that the value's gradient is partial"
                return Refusal("gradient", reason, operands)
        outputs: list[Layout] = []
        for output, held in zip(node.outputs, forward, strict=True):
            if output is not None and held == REPLICATED and values[output].differentiable:
                return Refusal("reduction", "makes a replicated value from a sharded one", operands)
            if output is not None and held == PARTIAL and values[output].dtype is torch.bool:
                # DTensor calls `any` a sum; two ranks that both say yes make 2 of it in another dtype.
                return Refusal("reduction", "reduces over a sharded dim with something other than a sum", operands)
            outputs.append(held if output is None else self._in_one_form(held, values[output].shape))
        return [Outcome(tuple(outputs), frozenset(partial))]

    def _class_rule(
        self, node: OperationNode, values: Sequence[LocalValue], layouts: dict[int, Layout]
    ) -> Layout | str:
        """What DTensor's rule says of a function over classes that are whole on each rank."""
        found = self._forward(node, values, layouts)
        return found.reason if isinstance(found, Refusal) else found[0]

    def _in_one_form(self, held: Layout, shape: tuple[int, ...]) -> Layout:
        """Heads that are flattened with their batch: at the front a strided shard, as of sequences; elsewhere packs."""
        if held.dim == 0 and len(held.packs) == self.batch and len(shape) > 2 and not held.within:
            first, *rest = held.packs
            alike = all(pack == first for pack in rest) and first.replicas == 1 and not (first.among or first.parts)
            return sharded(0, interleave=self.batch) if alike and first.is_even(self.size) else held
        return in_packs(held, shape) if held.dim else held

    def _new(
        self, node: OperationNode, values: Sequence[LocalValue], operands: tuple[tuple[int, Layout], ...]
    ) -> list[Outcome]:
        """A tensor made anew beside another, of which it takes the dtype; if it has its shape, its layout as well."""
        (output,) = (o for o in node.outputs if o is not None)
        like, held = operands[0]
        same = values[like].shape == values[output].shape and held.is_sharded
        made = Outcome((held if same else REPLICATED,))
        by_heads = self._by_heads(node, values, ()) if node.is_a("new") else []
        return [made, *by_heads, *_partial_zeros(node, values), *_unread_gradient(node, values)]

    def _replicated(
        self, node: OperationNode, values: Sequence[LocalValue], operands: tuple[tuple[int, Layout], ...]
    ) -> list[Outcome] | Refusal:
        activations = {held for i, held in operands if values[i].differentiable and values[i].parameter is None}
        if not any(o is not None and values[o].differentiable for o in node.outputs):
            return [Outcome(tuple(REPLICATED for _ in node.outputs))]
        if len(activations) > 1:
            reason = "mixes a value whose gradient is partial with one whose gradient is whole"
            return Refusal("gradient", reason, operands)
        parameters = frozenset(i for i, _ in operands if values[i].differentiable and values[i].parameter is not None)
        kinds = activations or ({REPLICATED, REPLICATED_PARTIAL} if parameters else {REPLICATED})
        found: list[Outcome] = []
        for kind in sorted(kinds, key=lambda held: held.gradient, reverse=True):
            outputs = tuple(kind if o is not None and values[o].differentiable else REPLICATED for o in node.outputs)
            if kind == REPLICATED:
                found.append(Outcome(outputs, replicated_parameters=parameters))
            else:
                found.append(Outcome(outputs, partial_parameters=parameters))
        return found

    def _by_heads(
        self, node: OperationNode, values: Sequence[LocalValue], operands: tuple[tuple[int, Layout], ...]
    ) -> list[Outcome]:
        """The ways in which each rank makes what belongs to its heads or features, from replicated values or none."""
        if not node.is_a("fill", "new", "expand"):
            return []
        ways = self.heads | self.features
        if not ways:
            return []
        (output,) = (o for o in node.outputs if o is not None)
        after = values[output]
        before = values[operands[0][0]].shape if operands else ()
        whole_gradient = bool(operands) and operands[0][1] == REPLICATED and after.differentiable
        if node.is_a("expand") and (len(before) != len(after.shape) or whole_gradient):
            return []
        parameter = frozenset(i for i, _ in operands if values[i].parameter is not None and values[i].differentiable)
        grown = [
            split_in_packs(dim, packs)
            for dim, count in enumerate(after.shape)
            for packs in sorted(ways)
            if sum(pack.size for pack in packs) == count and (not before or before[dim] == 1)
        ]
        rows = after.shape[0] if after.shape and self.batch > 1 and (not before or before[0] == 1) else 0
        grown += [flat_heads(pack, self.batch) for (pack,) in sorted(self.heads) if self.batch * pack.size == rows]
        return [Outcome((held,), partial_parameters=parameter) for held in grown]

    def _forward(
        self, node: OperationNode, values: Sequence[LocalValue], layouts: dict[int, Layout]
    ) -> tuple[Layout, ...] | Refusal:
        def describe(identifier: int) -> OperatorMeta:
            value, layout = values[identifier], layouts.get(identifier, REPLICATED)
            return OperatorMeta(value.shape, value.stride, value.dtype, layout.placement)

        rules = rules_of(node, values, self.size)
        if rules is not None:
            plain = {i: in_packs(held, values[i].shape) for i, held in layouts.items()}
            made = layouts_by_rules(rules, node, values, plain, self.size)
            return Refusal("communication", made, tuple(layouts.items())) if isinstance(made, str) else made
        kept = kept_layouts(node, values, layouts)
        if kept is not None:
            return kept
        if node.is_a("fourier"):
            return Refusal("communication", "transforms along a split dim", tuple(layouts.items()))
        if packed.concerns(node, layouts) or self._views_uneven(node, values, layouts):
            return self._packed(node, values, layouts)
        arguments = _drop_empty_operands(node, values)
        arguments = filled(arguments, describe)
        keywords = tuple((name, filled(argument, describe)) for name, argument in node.keywords)
        key = (node.target, arguments, keywords)
        try:
            known = self._rules.get(key)
            cached = known is not None
        except TypeError:
            known, cached, key = None, False, None
        if not cached:
            known = self._ask(node, arguments, keywords)
            if key is not None:
                self._rules[key] = known
        operands = tuple(layouts.items())
        if isinstance(known, str):
            kind, _, reason = known.partition(":")
            if node.is_a("reshape", "repeat", "gather") or packed.every_so_many(node, values, layouts):
                retried = self._packed(node, values, layouts)
                return Refusal(kind, reason, operands) if isinstance(retried, Refusal) else retried
            strided = self._strided(node, values, layouts)
            return Refusal(kind, reason, operands) if strided is None else strided
        assert known is not None
        outputs: list[Layout] = []
        for held in known:
            if held is None:
                return Refusal("reduction", "reduces over a sharded dim with something other than a sum", operands)
            if held.interleave != 1 and (held.interleave != self.batch or held.dim != 0):
                return self._packed(node, values, layouts)
            outputs.append(held)
        flat = node.is_a("reshape") and len(values[node.outputs[0] or 0].shape) == 2
        flat = flat and len(values[node.inputs[0]].shape) < 4  # of four dims, the second are heads
        if self.batch == 1 and flat and _flattens(operands, outputs[0]):
            reason = "flattens a sharded sequence at batch size 1; compile with an example batch of 2 or more"
            return Refusal("communication", reason, operands)
        return tuple(outputs)

    def _strided(
        self, node: OperationNode, values: Sequence[LocalValue], layouts: dict[int, Layout]
    ) -> tuple[Layout, ...] | None:
        """What comes of sequences flattened with their batch where DTensor has a rule for plain shards alone.

        A strided shard is as many packs as there are sequences, and rules for packs don't mind the order of rows.
        """
        if all(held.interleave == 1 for held in layouts.values()):
            return None
        made = self._packed(node, values, {i: in_packs(held, values[i].shape) for i, held in layouts.items()})
        if isinstance(made, Refusal):
            return None
        return tuple(
            sharded(0, interleave=self.batch)
            if o is not None and held.dim == 0 and held == in_packs(sharded(0, interleave=self.batch), values[o].shape)
            else held
            for o, held in zip(node.outputs, made, strict=True)
        )

    def _views_uneven(self, node: OperationNode, values: Sequence[LocalValue], layouts: dict[int, Layout]) -> bool:
        """Whether it views a dim that the axis doesn't divide, or nothing: DTensor's rules of views aren't for that."""
        if not node.is_a("reshape"):
            return False
        held, shape = layouts[node.inputs[0]], values[node.inputs[0]].shape
        return held.dim is not None and (0 in shape or not held.is_even(shape[held.dim], self.size))

    def _packed(
        self, node: OperationNode, values: Sequence[LocalValue], layouts: dict[int, Layout]
    ) -> tuple[Layout, ...] | Refusal:
        def ask(plain: dict[int, Layout]) -> tuple[Layout, ...] | str:
            if plain == layouts:
                return "needs values that other ranks hold"
            answer = self._forward(node, values, plain)
            return answer.reason if isinstance(answer, Refusal) else answer

        made = packed.results(node, values, layouts, self.size, self.batch, ask)
        return Refusal("no-rule", made, tuple(layouts.items())) if isinstance(made, str) else made

    def _ask(
        self, node: OperationNode, arguments: tuple[Any, ...], keywords: tuple[tuple[str, Any], ...]
    ) -> tuple[Layout | None, ...] | str:
        target = node.target
        if node.is_a("grouped product"):
            grouped = _one_group(arguments)
            if grouped is None:
                return "communication:needs rows that other ranks hold, to know which group they are of"
            target, arguments, keywords = MM, grouped, ()
        if node.is_a("bag"):
            return _of_bags(arguments)
        if node.is_a("scaled product"):
            reason = scaled_products.misfit(target, arguments, dict(keywords))
            if reason:
                return f"communication:{reason}"
            target, arguments, keywords = MM, arguments[:2], ()
        if node.is_a("other dtype"):
            if arguments[0].dtype.itemsize != arguments[1].itemsize:
                return "no-rule:takes entries of several bytes apart, or joins them"
            target, arguments = ALIAS, arguments[:1]
        target = RULED_AS.get(target, target)
        if target in RULED_AS.values() and _all_partial(arguments):
            return tuple(PARTIAL for _ in node.outputs)
        target = MM if target is INT_MM else target
        try:
            placements = propagate(target, arguments, dict(keywords), self.size)
        except NoRule as error:
            return f"no-rule:{error}"
        if placements is None and node.is_a("times") and isinstance(arguments[1], OperatorMeta):
            # torch 2.11 has some rules for one order only.
            placements = propagate(target, arguments[1::-1], {}, self.size)
        if placements is None:
            return "communication:needs values that other ranks hold"
        if len(placements) == 1 and len(node.outputs) > 1:
            placements = placements * len(node.outputs)
        if len(placements) != len(node.outputs):
            return "no-rule:DTensor's rule doesn't tell the placement of every result"
        return tuple(REPLICATED if p is None else layout_of(p) for p in placements)


def flat_heads(pack: Pack, batch: int) -> Layout:
    """The split by heads of a dim in which they are flattened with the batch before them."""
    return split_in_packs(0, [pack] * batch) if pack.parts else sharded(0, interleave=batch)


def _takes_partial(
    operator: Operator, node: OperationNode, layouts: dict[int, Layout], values: Sequence[LocalValue]
) -> bool:
    """Whether the operator is linear in those of its operands that are partial."""
    if not any(held.forward == "P" for held in layouts.values()):
        return True
    made = node.outputs[0]
    if node.is_a("cast") and made is not None and values[made].dtype.itemsize == 1:
        return False  # to a byte: a sum of terms that are rounded so coarsely isn't the sum
    inputs = [i for i in node.inputs if i in layouts]
    return operator.takes_partial(tuple(layouts[i].forward == "P" for i in inputs))


def _counts_rows(node: OperationNode, layouts: dict[int, Layout]) -> bool:
    """Whether it is a table whose gradient is scaled by the counts of ids that each rank has some of."""
    scales = node.is_a("row look-up") and len(node.arguments) > 3 and node.arguments[3]
    return bool(scales) and layouts[node.inputs[1]].is_sharded


def _with_dims_from_the_front(operator: Operator, node: OperationNode, values: Sequence[LocalValue]) -> OperationNode:
    """The operation with no dim by its negative number, which some of DTensor's rules take for another dim.

    The first operand of a concatenation may be empty and have one dim.
    """
    like = node.outputs[0] if operator.new_dim or node.is_a("join") else node.inputs[0]
    if like is None:
        return node
    rank = len(values[like].shape)
    arguments, keywords = with_dims_from_the_front(node.target, node.arguments, node.keywords, rank)
    if arguments is node.arguments and keywords is node.keywords:
        return node
    return replace(node, arguments=arguments, keywords=keywords)


def _unread_gradient(node: OperationNode, values: Sequence[LocalValue]) -> list[Outcome]:
    """A tensor made anew, into which something is written: nothing reads the gradient of what was there before."""
    written = any(o is not None and values[o].differentiable for o in node.outputs)
    return [Outcome((REPLICATED_PARTIAL,))] if written else []


def _partial_zeros(node: OperationNode, values: Sequence[LocalValue]) -> list[Outcome]:
    """Zeros are the sum of every rank's zeros: partial products may be added to them before they are reduced."""
    output = next((o for o in node.outputs if o is not None), None)
    if not node.is_a("blank") or output is None:
        return []
    made = values[output]
    return [Outcome((PARTIAL,))] if made.dtype.is_floating_point and len(made.shape) > 1 else []


def _all_partial(arguments: tuple[Any, ...]) -> bool:
    """Whether partial values are written or added to entries of a partial tensor, at places that all ranks know."""
    given, *others = (a for a in _flat(arguments) if isinstance(a, OperatorMeta))
    values = [a for a in others if a.dtype.is_floating_point]
    places = [a for a in others if not a.dtype.is_floating_point]
    partial = all(layout_of(a.placement) == PARTIAL for a in (given, *values))
    return bool(values) and partial and all(layout_of(a.placement) == REPLICATED for a in places)


def _flat(arguments: tuple[Any, ...]) -> Iterator[Any]:
    for argument in arguments:
        if isinstance(argument, tuple) and not isinstance(argument, OperatorMeta):
            yield from _flat(argument)  # pyright: ignore[reportUnknownArgumentType]
        else:
            yield argument


def _of_bags(arguments: tuple[Any, ...]) -> tuple[Layout, ...] | str:
    """Rows of a table that are reduced bag by bag: each rank reduces its own features."""
    table, *others = (a for a in _flat(arguments) if isinstance(a, OperatorMeta))
    if not table.placement.is_shard(1) or any(not a.placement.is_replicate() for a in others):
        return "communication:needs values that other ranks hold"
    of_largest = sharded(1) if len(arguments) > _MODE and arguments[_MODE] == _MAXIMUM else REPLICATED
    return (sharded(1), REPLICATED, REPLICATED, of_largest)


def _one_group(arguments: tuple[Any, ...]) -> tuple[OperatorMeta, OperatorMeta] | None:
    """The product of one group of rows with its matrix, whose rule all groups share: all ranks have the same offsets.

    None for rows that are split, or matrices that are shared out whole.
    """
    rows, matrices = arguments[:2]
    if len(rows.shape) != 2 or len(matrices.shape) != 3 or rows.placement.is_shard(0) or matrices.placement.is_shard(0):
        return None
    split: Placement = matrices.placement
    if isinstance(split, Shard):
        split = Shard(split.dim - 1)
    return rows, OperatorMeta(matrices.shape[1:], matrices.stride[1:], matrices.dtype, split)


def _flattens(operands: tuple[tuple[int, Layout], ...], output: Layout) -> bool:
    """Whether a view joined a sharded sequence, dim 1, with a batch of size 1 before it."""
    return len(operands) == 1 and operands[0][1].dim == 1 and output.dim == 0


def tail_of(node: OperationNode, values: Sequence[LocalValue]) -> int:
    """How many entries from the end of dim 1 it takes, by their number; 0 if it takes others."""
    if not node.is_a("slice") or len(node.arguments) < 3:
        return 0
    operand: Reference
    operand, dim, start, *others = node.arguments
    rank = len(values[operand.identifier].shape)
    end, step = (*others, *(_END, 1)[len(others) :])
    return -start if dim % rank == 1 and start is not None and start < 0 and end >= _END and step == 1 else 0


def copies(node: OperationNode, values: Sequence[LocalValue]) -> bool:
    """Whether its result is its operand, of the same shape, perhaps in another dtype."""
    made = node.outputs[0]
    viewed = node.is_a("reshape") and made is not None and values[made].shape == values[node.inputs[0]].shape
    return viewed or node.is_a("alias", "detach", "copy", "cast")


def _keeps_tail(node: OperationNode, values: Sequence[LocalValue], layouts: dict[int, Layout]) -> bool:
    """Whether of a tensor whose last entries are known no others are read."""
    if copies(node, values):
        return True
    if not node.is_a("slice"):
        return False
    operand: Reference = node.arguments[0]
    if len(node.arguments) > 1 and node.arguments[1] % len(values[operand.identifier].shape) != 1:
        return True
    return 0 < tail_of(node, values) <= layouts[operand.identifier].tail


def _counts_from_the_end(node: OperationNode, layouts: dict[int, Layout], values: Sequence[LocalValue]) -> bool:
    """Whether it takes so many entries from the end of a split sequence, all of them only by the example's length."""
    if not node.is_a("slice") or len(node.arguments) < 3:
        return False
    operand: Reference
    operand, dim, start = node.arguments[:3]
    held, shape = layouts[operand.identifier], values[operand.identifier].shape
    return start is not None and start < 0 and held.dim == dim and splits_sequence(held, shape)


def _meaningful_inputs(node: OperationNode, values: Sequence[LocalValue]) -> tuple[int, ...]:
    """The operands that carry data: `cat` ignores empty one-dim tensors (a key-value cache starts with one)."""
    if node.is_a("join"):
        kept = tuple(i for i in node.inputs if values[i].shape != (0,))
        return kept or node.inputs
    return node.inputs


def _drop_empty_operands(node: OperationNode, values: Sequence[LocalValue]) -> tuple[Any, ...]:
    if not node.is_a("join"):
        return node.arguments
    tensors, *rest = node.arguments
    kept = tuple(t for t in tensors if not isinstance(t, Reference) or values[t.identifier].shape != (0,))
    return (kept or tensors, *rest)


__all__ = ["PARTIAL", "Outcome", "Propagator", "Refusal", "copies", "flat_heads", "tail_of"]
