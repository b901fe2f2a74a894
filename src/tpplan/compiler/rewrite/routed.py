"""Routed: what a body of stacked experts computes for one token and one of the experts that were chosen for it.

in:  the record of a call with tokens (t, …), the numbers (t, k) of the experts chosen for each, and weights (t, k)
out: a term g with result[t] = Σ_k g(tokens[t], weights[t, k], matrices of expert chosen[t, k]); or why there is none

    sort, grouped products, back in order, sum over k    ->   w · (silu(x Wg) · (x Wu)) Wd
    matrices picked by number, one product for each pair ->   the same, by other products
    tanh of the sum over k                               ->   refused at `tanh`

Each value of the record is read as one of a few kinds, by rules that hold for any numbers: rows of tokens, of choices,
of pairs (token, choice) one after the other, or of pairs sorted by expert; the order of the sort and its inverse; how
many pairs each expert has; the stacks. An operation without a rule is the end of it. The experts' numbers may only
sort, count and pick: so a term is the same wherever the counting of experts begins, and terms of two records are equal
if both do the same for each pair.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tpplan.compat.schemas import schema_argument_names, schema_defaults, schema_mutates
from tpplan.compiler.ir.trace import Frame, Operation, Reference, Trace
from tpplan.compiler.rewrite.terms import (
    Blank,
    Counts,
    Found,
    Hits,
    Kind,
    Numbers,
    OneHot,
    Order,
    Own,
    Range,
    Shape,
    Space,
    Stack,
    TermPart,
    TermRows,
    Terms,
    Total,
)
from tpplan.ops.dim_map import DIMS, order_of
from tpplan.ops.registry import lookup

_INNER = frozenset(
    f"aten.{name}"
    for name in (
        "transpose.int", "permute.default", "select.int", "slice.Tensor", "split.Tensor", "split_with_sizes.default",
        "unbind.int", "_softmax.default", "glu.default", "sum.dim_IntList", "mean.dim", "amax.default", "flip.default",
        "cat.default",
    )
)  # fmt: skip
_BLANKS = frozenset(f"aten.{name}.default" for name in ("empty_like", "zeros_like", "empty", "zeros", "new_zeros"))
_ADDS = ("aten.index_add.default", "aten.index_add_.default")
_COUNTING = (torch.int32, torch.int64, torch.float32, torch.float64)  # there are fewer experts than these can count
_ZEROS = frozenset(f"aten.{name}.default" for name in ("zeros_like", "zeros", "new_zeros"))


@dataclass(frozen=True, slots=True)
class RoutedCall:
    """The values of a call: its tokens, the numbers chosen, the weights; the stacks by value, with their names."""

    tokens: int
    chosen: int
    weights: int
    stacks: Mapping[int, str]
    count: int


class NotRoutedError(Exception):
    """A body that is no such sum; where that shows first."""

    def __init__(self, reason: str, operation: Operation | None = None) -> None:
        """Say why, and at which operation."""
        super().__init__(reason)
        self.operation = operation


def routed_term(trace: Trace, frame: Frame, call: RoutedCall, terms: Terms) -> int:
    """The term of a call.

    Raises:
        NotRoutedError: its result isn't such a sum, or nothing shows that it is.
    """
    return _RoutedReader(trace, call, terms).read(frame)


class _RoutedReader:
    """Reads one record."""

    def __init__(self, trace: Trace, call: RoutedCall, terms: Terms) -> None:
        self.values, self.call, self.terms = trace.values, call, terms
        self.token_count, self.choice_count = self.values[call.chosen].shape
        self.pair_count = self.token_count * self.choice_count
        self.sorts = 0
        self.found: dict[str, int] = {}  # how many pairs of one expert the record finds
        self.hit = frozenset(range(call.count))  # the experts that are chosen at all in the record
        self.known: dict[int, Kind] = {}
        self.given = frozenset[int]()
        for value, name in call.stacks.items():
            self.known[value] = Stack(terms.of("stack", name, shape=self.shape(value)[1:]))
        for value in trace.values:
            if value.numbers is not None:
                self.note_constant(value.identifier, value.numbers)

    def note_constant(self, value: int, numbers: Tensor) -> None:
        """A number, or the places of all pairs; nothing else that the model made of Python's numbers is known."""
        if not numbers.dim():
            self.known[value] = TermRows("any", self.terms.of("number", str(numbers.dtype), numbers.item(), shape=()))
        elif numbers.dtype is torch.int64 and torch.equal(numbers, torch.arange(self.pair_count)):
            self.known[value] = Order("all")

    def read(self, frame: Frame) -> int:
        entries = {
            self.call.tokens: ("tokens", "token"),
            self.call.weights: ("choices", "weight"),
        }
        for value, (space, name) in entries.items():
            own = self.shape(value)[1:] if space == "tokens" else ()
            dtype = str(self.values[value].dtype)
            term = self.terms.of(name, dtype, self.values[value].differentiable, shape=own)
            self.known[value] = self.rows(space, term, self.shape(value))
        self.known[self.call.chosen] = Numbers(self.space("choices"))
        self.given = frozenset(self.known)
        self.body(frame)
        (leaving,) = frame.exits
        made = self.known.get(leaving.source)
        alone = self.choice_count == 1 and isinstance(made, TermRows) and made.space == "pairs"
        if isinstance(made, TermPart) and made.experts >= self.hit:
            made = Total(made.term)
        if not (isinstance(made, Total) or alone) or self.shape(leaving.source)[0] != self.token_count:
            raise NotRoutedError("its result isn't known to be a sum over the chosen experts")
        assert isinstance(made, (Total, TermRows))
        return made.term

    def body(self, frame: Frame) -> None:
        if frame.backwards:
            raise NotRoutedError("it has code in its backward that torch didn't derive")
        for node in frame.body:
            if isinstance(node, Frame):
                for crossing in node.entries:
                    self.known[crossing.target] = self.at(crossing.source, None)
                self.body(node)
                for crossing in node.exits:
                    self.known[crossing.target] = self.at(crossing.source, None)
                continue
            made = self.made(node)
            if self.given.intersection(self.written(node)):
                raise NotRoutedError("it writes to what it is given", node)
            for value in node.overwritten:
                self.known.pop(value, None)
            for output, kind in zip(node.outputs, made, strict=True):
                if output is not None and kind is not None:
                    self.known[output] = kind

    # -- values -----------------------------------------------------------------------------------------------------
    def shape(self, value: int) -> Shape:
        return self.values[value].shape

    def at(self, value: int, node: Operation | None) -> Kind:
        if value not in self.known:
            raise NotRoutedError("it reads what is neither an argument nor one of the stacks", node)
        return self.known[value]

    def space(self, name: Space) -> Space:
        """Where one expert is chosen for each token, tokens, choices and pairs are the same."""
        return "pairs" if self.choice_count == 1 and name in ("tokens", "choices") else name

    def lead(self, space: Space) -> int:
        return 2 if space == "choices" else 1

    def sizes(self, space: Space) -> Shape:
        """The leading sizes of what has a row for each of them."""
        if space == "choices":
            return (self.token_count, self.choice_count)
        if space in self.found:
            return (self.found[space],)
        return (self.token_count,) if space == "tokens" else (self.pair_count,)

    def rows(self, name: Space, term: int, shape: Shape) -> TermRows:
        space = self.space(name)
        return TermRows(space, self.terms.reshaped(term, shape[self.lead(space) :]))

    def written(self, node: Operation) -> set[int]:
        given = (a for place in schema_mutates(node.target) for a in node.arguments[place : place + 1])
        return {*node.overwritten, *(a.identifier for a in given if isinstance(a, Reference))}

    # -- operations -------------------------------------------------------------------------------------------------
    def made(self, node: Operation) -> list[Kind | None]:
        kinds = [self.at(value, node) for value in node.inputs]
        rules = (
            self.arranged, self.ordered, self.counted, self.looked_for, self.one_hot, self.of_one, self.multiplied,
            self.picked, self.summed, self.each,
        )  # fmt: skip
        for rule in rules:
            found = rule(node, kinds)
            if found is not None:
                return found
        raise NotRoutedError(f"{node.name} isn't known to do the same for each pair of a token and an expert", node)

    def output(self, node: Operation) -> int:
        (value,) = node.outputs
        assert value is not None
        return value

    def arranged(self, node: Operation, kinds: list[Kind]) -> list[Kind | None] | None:
        """Copies, and other shapes of the same rows."""
        if len(kinds) != 1 or len(node.outputs) != 1:
            return None
        (kind,), before, made = kinds, self.shape(node.inputs[0]), self.output(node)
        after = self.shape(made)
        same = self.values[node.inputs[0]].dtype == self.values[made].dtype
        if node.is_a("alias", "copy") or (node.is_a("cast") and same):
            return [kind]
        if node.is_a("detach") and not isinstance(kind, (TermRows, Total, Stack)):
            return [kind]
        if node.is_a("reshape", "strided reshape", "unsqueeze", "squeeze"):
            return self.reshaped(kind, before, after)
        if not node.is_a("expand") or not isinstance(kind, TermRows):
            return None
        if before == after:
            return [kind]
        if kind.space == "tokens" and before[1:2] == (1,) and after == (before[0], self.choice_count, *before[2:]):
            return [self.rows("choices", kind.term, after)]
        return None

    def reshaped(self, kind: Kind, before: Shape, after: Shape) -> list[Kind | None] | None:
        if isinstance(kind, Stack):
            same = before[:1] == after[:1]
            return [Stack(self.terms.reshaped(kind.term, after[1:]))] if same else None
        if isinstance(kind, Total):
            same = before[:1] == after[:1]
            return [Total(self.terms.reshaped(kind.term, after[1:]))] if same else None
        if isinstance(kind, Own):
            return [Own(kind.expert, self.terms.reshaped(kind.term, after))]
        if isinstance(kind, (Order, Counts)):
            return [kind] if before == after else None
        if not isinstance(kind, (TermRows, Numbers)):
            return None
        if kind.space == "any":
            return None
        spaces = [kind.space, *(s for s in ("choices", "pairs") if kind.space in ("choices", "pairs"))]
        for space in spaces:
            lead = self.lead(space)
            if after[:lead] == self.sizes(space) and math.prod(after) == math.prod(before):
                return [Numbers(space) if isinstance(kind, Numbers) else self.rows(space, kind.term, after)]
        return None

    def ordered(self, node: Operation, kinds: list[Kind]) -> list[Kind | None] | None:
        """The sort of the pairs by expert, its order, and the inverse of that."""
        if node.name in ("aten.sort.default", "aten.sort.stable"):
            return self.sorted(node, kinds[0])
        if node.name in ("aten.floor_divide.default", "aten.div.Tensor_mode", "aten.div.Scalar_mode"):
            divisor = node.arguments[1] if len(node.arguments) == 2 else None
            rounding = node.keywords.get("rounding_mode", "floor" if "floor" in node.name else None)
            (kind,) = kinds if len(kinds) == 1 else (None,)
            if divisor != self.choice_count or rounding != "floor" or not isinstance(kind, Order):
                return None
            if kind.kind != "sorted":
                return None
            return [kind if self.choice_count == 1 else Order("tokens", kind.sort)]
        if node.name == "aten.arange.default" and type(node.arguments[0]) is int:
            return [Range(node.arguments[0])]
        if node.name == "aten.arange.start" and node.arguments[0] == 0 and type(node.arguments[1]) is int:
            return [Range(node.arguments[1])]
        if node.name in _BLANKS:
            return [Blank(node.name in _ZEROS)]
        if node.name.startswith("aten.index_put") and len(kinds) == 3:
            place, held = kinds[1], kinds[2]
            plain = len(node.arguments) == 3 and len(node.arguments[1]) == 1 and not node.keywords
            if not plain or not isinstance(place, Order) or place.kind != "sorted":
                return None
            whole = self.shape(node.inputs[0]) == self.shape(node.inputs[2])  # each row is written, once
            if whole and held in (Order("all"), Range(self.pair_count)):
                return [Order("inverse", place.sort)]
            if whole and isinstance(held, TermRows) and held.space == f"sorted {place.sort}":
                return [TermRows("pairs", held.term)]
        return None

    def sorted(self, node: Operation, kind: Kind) -> list[Kind | None] | None:
        arguments = dict(zip(schema_argument_names(node.target), node.arguments, strict=False)) | node.keywords
        if arguments.get("descending") or len(self.shape(node.inputs[0])) != 1:
            return None
        if isinstance(kind, Order) and kind.kind == "sorted":
            return [Order("all"), Order("inverse", kind.sort)]
        if not isinstance(kind, Numbers) or kind.space != "pairs":
            return None
        self.sorts += 1
        return [Numbers(f"sorted {self.sorts}"), Order("sorted", self.sorts)]

    def counted(self, node: Operation, kinds: list[Kind]) -> list[Kind | None] | None:
        """The experts' numbers in another dtype, and how often each of them occurs."""
        (kind,) = kinds if len(kinds) == 1 else (None,)
        if node.name == "aten._to_copy.default" and isinstance(kind, (Numbers, Counts)):
            return [kind] if self.values[self.output(node)].dtype in _COUNTING else None
        if node.name == "aten.histc.default" and isinstance(kind, Numbers):
            # Of a single expert: between 0 and 0 stands for all that there is, which are zeros.
            given = (*node.arguments[1:], *(100, 0, 0)[len(node.arguments) - 1 :])
            plain = given == (self.call.count, 0, self.call.count - 1) and not node.keywords
            return [Counts()] if plain and len(self.shape(node.inputs[0])) == 1 else None
        if node.name == "aten.cumsum.default" and kind == Counts():
            return [Counts(ends=True)]
        return None

    def looked_for(self, node: Operation, kinds: list[Kind]) -> list[Kind | None] | None:
        """The pairs of one expert: where its number is, and what is picked there."""
        kind = kinds[0] if kinds else None
        arguments: tuple[Any, ...] = node.arguments
        if node.name == "aten.eq.Scalar" and isinstance(kind, Numbers) and type(arguments[1]) is int:
            whole = self.shape(node.inputs[0]) == (self.token_count, self.choice_count)
            return [Found(arguments[1], "mask")] if whole else None
        if node.name == "aten.nonzero.default" and isinstance(kind, Found) and kind.what == "mask":
            self.found[f"of {kind.expert}"] = self.shape(self.output(node))[0]
            return [Found(kind.expert, "places", kind.dims)]
        if node.name == "aten.unbind.int" and isinstance(kind, Found) and arguments[1:] == (1,):
            parts: dict[str, Kind] = {"tokens": Found(kind.expert, "tokens"), "choices": Found(kind.expert, "choices")}
            return [parts[dim] for dim in kind.dims] if kind.what == "places" else None
        places = [other for other in kinds[1:] if isinstance(other, Found)]
        if (
            node.name != "aten.index.Tensor"
            or not isinstance(kind, TermRows)
            or not places
            or len(places) < len(kinds) - 1
        ):
            return None
        wanted = {"tokens": [["tokens"]], "choices": [["tokens", "choices"]]}.get(
            kind.space, [["tokens"], ["tokens", "choices"]] if kind.space == self.space("tokens") else []
        )
        same = len({place.expert for place in places}) == 1 and len(arguments[1]) == len(places)
        if not same or [place.what for place in places] not in wanted:
            return None
        after = self.shape(self.output(node))
        return [TermRows(f"of {places[0].expert}", self.terms.reshaped(kind.term, after[1:]))]

    def one_hot(self, node: Operation, kinds: list[Kind]) -> list[Kind | None] | None:
        """Which numbers were chosen where, and which anywhere: those that weren't have no pairs."""
        kind, arguments = kinds[0] if kinds else None, tuple[Any, ...](node.arguments)
        if node.name == "aten.eq.Tensor" and isinstance(kind, Numbers) and isinstance(kinds[1], Range):
            whole = self.shape(node.inputs[0]) == (self.token_count, self.choice_count, 1)
            return [OneHot(("tokens", "choices", "numbers"))] if whole and kinds[1].count >= self.call.count else None
        if isinstance(kind, OneHot) and len(kinds) == 1:
            if node.name == "aten._to_copy.default":
                return [kind] if self.values[self.output(node)].dtype is torch.int64 else None
            if node.is_a("transposition"):
                order = order_of(node.target, arguments, len(kind.dims))
                return [OneHot(tuple(kind.dims[dim] for dim in order))]
            if node.name == "aten.select.int" and kind.dims[arguments[1]] == "numbers":
                number, others = arguments[2], tuple(dim for dim in kind.dims if dim != "numbers")
                return [Found(number, "mask", others)] if 0 <= number < self.call.count else None
            dims: tuple[int, ...] = arguments[1] if node.name == "aten.sum.dim_IntList" else ()
            summed = {kind.dims[dim] for dim in dims} == {"tokens", "choices"} and len(arguments) == 2
            return [Hits("counts")] if summed else None
        if kind == Hits("counts") and node.name == "aten.gt.Scalar" and arguments[1] == 0:
            return [Hits("whether")]
        if kind == Hits("whether") and node.name == "aten.nonzero.default":
            numbers, found = self.shape(node.inputs[0])[0], self.shape(self.output(node))[0]
            self.hit &= frozenset(range(numbers - found, numbers))  # as the recorder answers
            return [Hits("which")]
        return None

    def of_one(self, node: Operation, kinds: list[Kind]) -> list[Kind | None] | None:
        """One expert's matrices, their products with its rows, and the sums over its pairs."""
        kind, arguments = kinds[0] if kinds else None, tuple[Any, ...](node.arguments)
        if node.name == "aten.select.int" and isinstance(kind, Stack):
            number = arguments[2]
            return [Own(number, self.own(kind))] if arguments[1] == 0 and 0 <= number < self.call.count else None
        if isinstance(kind, Own) and len(kinds) == 1 and node.is_a("transposition"):
            (made,) = self.outputs(node, "any", self.inner(node, 0), [kind.term], 0)
            assert isinstance(made, TermRows)
            return [Own(kind.expert, made.term)]
        shown = [type(held) for held in kinds]
        products = {"aten.mm.default": [TermRows, Own], "aten.addmm.default": [Own, TermRows, Own]}
        if products.get(node.name) == shown:
            (rows,) = (held for held in kinds if isinstance(held, TermRows))
            experts = {f"of {held.expert}" for held in kinds if isinstance(held, Own)}
            bias = len(kinds) == 2 or len(self.shape(node.inputs[0])) == 1
            if experts != {rows.space} or not bias:
                return None
            signature = (arguments, tuple(sorted(node.keywords.items())))
            return self.outputs(
                node, rows.space, signature, [h.term for h in kinds if isinstance(h, (TermRows, Own))], 1
            )
        if node.name not in _ADDS or shown not in ([Blank, Found, TermRows], [TermPart, Found, TermRows]):
            return None
        into, place, rows = kinds
        assert isinstance(place, Found) and isinstance(rows, TermRows)
        fits = self.shape(node.inputs[0]) == (self.token_count, *self.shape(node.inputs[2])[1:])
        plain = arguments[1:2] == (0,) and len(arguments) == 4 and not node.keywords and place.what == "tokens"
        if not fits or not plain or rows.space != f"of {place.expert}":
            return None
        if isinstance(into, TermPart):
            fresh = into.term == rows.term and place.expert not in into.experts
            return [TermPart(rows.term, into.experts | {place.expert})] if fresh else None
        return [TermPart(rows.term, frozenset({place.expert}))] if into == Blank(zeros=True) else None

    def multiplied(self, node: Operation, kinds: list[Kind]) -> list[Kind | None] | None:
        """Products of sorted rows with their experts' matrices, and of pairs of matrices."""
        if node.name == "aten._grouped_mm.default" and len(kinds) == 3:
            rows, stack, ends = kinds
            plain = len(node.arguments) == 3 and not node.keywords
            if not plain and not (len(node.arguments) == 2 and set(node.keywords) == {"offs"}):
                return None
            if not isinstance(rows, TermRows) or not isinstance(stack, Stack) or ends != Counts(ends=True):
                return None
            if not rows.space.startswith("sorted") or len(self.shape(node.inputs[0])) != 2:
                return None
            return [self.named(node, "grouped product", rows.space, ("own", rows.term), ("own", stack.term))]
        if node.name == "aten.bmm.default" and all(isinstance(kind, TermRows) for kind in kinds):
            spaces = {kind.space for kind in kinds if isinstance(kind, TermRows)}
            if len(spaces) == 1 and self.lead(next(iter(spaces))) == 1 and "any" not in spaces:
                held = [("own", kind.term) for kind in kinds if isinstance(kind, TermRows)]
                return [self.named(node, node.name, spaces.pop(), *held)]
        return None

    def picked(self, node: Operation, kinds: list[Kind]) -> list[Kind | None] | None:
        """Rows by an order, and matrices by the experts' numbers."""
        where: Any = node.arguments[1] if len(node.arguments) > 1 else None
        by_row = node.name == "aten.index.Tensor" and len(where) == 1
        by_row = by_row or (node.name == "aten.index_select.default" and where == 0)
        if not by_row or len(kinds) != 2:
            return None
        held, place = kinds
        after = self.shape(self.output(node))
        if isinstance(held, Stack) and isinstance(place, Numbers):
            lead = self.lead(place.space)
            return [TermRows(place.space, self.terms.reshaped(self.own(held), after[lead:]))]
        if not isinstance(place, Order):
            return None
        if isinstance(held, TermRows):
            if held.space == "tokens" and place.kind == "tokens":
                return [TermRows(f"sorted {place.sort}", held.term)]
            if held.space == "pairs" and place.kind == "sorted":
                return [TermRows(f"sorted {place.sort}", held.term)]
            if held.space == f"sorted {place.sort}" and place.kind == "inverse":
                return [TermRows("pairs", held.term)]
        if held == Numbers("pairs") and place.kind == "sorted":
            return [Numbers(f"sorted {place.sort}")]
        return None

    def own(self, stack: Stack) -> int:
        """What a pair picks of a stack: its expert's."""
        return self.terms.of("picked", stack.term, shape=self.terms.shapes[stack.term])

    def summed(self, node: Operation, kinds: list[Kind]) -> list[Kind | None] | None:
        """The sum over a token's choices, and what may be done to that."""
        if node.name == "aten.sum.dim_IntList" and isinstance(kinds[0], TermRows) and not node.keywords:
            given: tuple[int, ...] = node.arguments[1] or ()
            dims = [dim % len(self.shape(node.inputs[0])) for dim in given]
            kept = len(node.arguments) > 2 and node.arguments[2]
            if kinds[0].space == "choices" and dims == [1] and not kept:
                return [Total(kinds[0].term)]
            before, after = self.shape(node.inputs[0]), self.shape(self.output(node))
            if kinds[0].space == "pairs" and dims and 0 not in dims and all(before[dim] == 1 for dim in dims):
                return [self.rows("pairs", kinds[0].term, after)]
        if node.name in _ADDS and len(kinds) == 3:
            into, place, rows = kinds
            arguments: tuple[Any, ...] = node.arguments
            if node.keywords or arguments[1:2] != (0,) or len(arguments) > 4:
                return None
            into_tokens = isinstance(place, Order) and place.kind == ("sorted" if self.choice_count == 1 else "tokens")
            fits = self.shape(node.inputs[0]) == (self.token_count, *self.shape(node.inputs[2])[1:])
            if into == Blank(zeros=True) and into_tokens and fits and isinstance(rows, TermRows):
                assert isinstance(place, Order)
                return [Total(rows.term)] if rows.space == f"sorted {place.sort}" else None
        if len(kinds) == 1 and isinstance(kinds[0], Total) and node.name == "aten._to_copy.default":
            signature = (node.arguments, tuple(sorted(node.keywords.items())))
            (made,) = self.outputs(node, "any", signature, [kinds[0].term], 1)
            assert isinstance(made, TermRows)
            return [Total(made.term)]
        return None

    # -- what is done to each row --------------------------------------------------------------------------------------
    def each(self, node: Operation, kinds: list[Kind]) -> list[Kind | None] | None:
        operator = lookup(node.name)
        if len(kinds) == 1 and isinstance(kinds[0], Stack) and node.is_a("transposition"):
            signature = self.inner(node, 1)
            if signature is None:
                return None
            (made,) = self.outputs(node, "stacks", signature, [kinds[0].term], 1)
            assert isinstance(made, TermRows)
            return [Stack(made.term)]
        if operator is None or not all(isinstance(kind, (TermRows, Own)) for kind in kinds):
            return None
        rows = [
            TermRows(f"of {kind.expert}", kind.term) if isinstance(kind, Own) else kind
            for kind in kinds
            if isinstance(kind, (TermRows, Own))
        ]
        spaces = {kind.space for kind in rows} - {"any"}
        if len(spaces) != 1 or node.name in _BLANKS:
            return None
        (space,) = spaces
        lead = self.lead(space)
        if operator.kind == "entrywise":
            ranks = {len(self.shape(o)) for o in node.outputs if o is not None}
            for value, kind in zip(node.inputs, rows, strict=True):
                if isinstance(kinds[node.inputs.index(value)], Own):
                    if len(self.shape(value)) >= min(ranks):
                        return None
                    continue  # the same for each row
                aligned = {len(self.shape(value))} == ranks and self.shape(value)[:lead] == self.sizes(space)
                if kind.space != "any" and not aligned:
                    return None
            signature: Any = (node.arguments, tuple(sorted(node.keywords.items())))
        elif node.name in _INNER and not any(isinstance(kind, Own) for kind in kinds):
            signature = self.inner(node, lead)
        else:
            return None
        if signature is None:
            return None
        return self.outputs(node, space, signature, [kind.term for kind in rows], lead)

    def inner(self, node: Operation, lead: int) -> object | None:
        """An operation's arguments with its dims counted after the leading ones; None if it concerns those."""
        rank = len(self.shape(node.inputs[0]))
        if node.is_a("transposition"):
            order = order_of(node.target, node.arguments, rank)
            stays = order[:lead] == [*range(lead)]
            return ((node.arguments[0], tuple(dim - lead for dim in order[lead:])), ()) if stays else None
        arguments = list(node.arguments)
        defaults = schema_defaults(node.target)
        for position, name in enumerate(schema_argument_names(node.target)):
            if name not in DIMS or name in node.keywords:
                continue
            if position >= len(arguments):
                arguments += [default for _, default in defaults[len(arguments) : position + 1]]
            held = arguments[position]
            dims: tuple[Any, ...] = held if isinstance(held, tuple) else (held,)  # pyright: ignore
            if not dims or any(type(dim) is not int or dim % rank < lead for dim in dims):  # pyright: ignore
                return None
            inner = tuple(dim % rank - lead for dim in dims)  # pyright: ignore
            arguments[position] = inner if isinstance(held, tuple) else inner[0]
        if DIMS.intersection(node.keywords):
            return None
        return (tuple(arguments), tuple(sorted(node.keywords.items())))

    def outputs(self, node: Operation, space: Space, signature: Any, terms: list[int], lead: int) -> list[Kind | None]:
        order = {value: ("operand", term) for value, term in zip(node.inputs, terms, strict=True)}

        def refer(held: Any) -> Any:
            if isinstance(held, Reference):
                return order[held.identifier]
            if isinstance(held, tuple):
                return tuple(refer(item) for item in held)  # pyright: ignore
            return (type(held).__name__, held)

        made: list[Kind | None] = []
        for place, output in enumerate(node.outputs):
            if output is None:
                made.append(None)
                continue
            value = self.values[output]
            term = self.terms.of(
                node.name, refer(signature), place, value.differentiable, str(value.dtype), shape=value.shape[lead:]
            )
            made.append(TermRows(space, term))
        return made

    def named(self, node: Operation, name: str, space: Space, *terms: tuple[str, int]) -> TermRows:
        value = self.values[self.output(node)]
        made = (name, terms, value.differentiable, str(value.dtype))
        return TermRows(space, self.terms.of(*made, shape=value.shape[1:]))


__all__ = ["NotRoutedError", "RoutedCall", "routed_term"]
