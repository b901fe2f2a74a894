"""Attention: the pieces of torch's `scaled_dot_product_attention` in a record, as the one call that they were.

in:  a record's operations, and how its values lie
out: `Attention` for each that is found: the call's operands and numbers, and the operations that it stands for

    q·√s, kᵀ·√s, their product, + mask, safe softmax, its product with v   ->   attention(q, k, v, mask, scale=s)

On `meta`, torch takes attention apart before a record sees it. Played one by one on a device, the pieces need memory
for all scores; the call has kernels that do not. Only pieces in torch's own form are put together, where queries, keys
and values are split before their last two dims at most.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tpplan.compiler.ir.layout import REPLICATED, Layout
from tpplan.compiler.ir.trace import Frame, Operation, Reference, Trace
from tpplan.ops.dim_map import order_of

_SAME = ("reshape", "expand", "copy")
_DROPOUT = ("empty like", "coin in place", "quotient in place", "times")  # the operations of a dropout, in order


@dataclass(frozen=True, slots=True)
class Attention:
    """One call.

    Attributes:
        query, key, value: operands, by value of the record.
        mask: what is added to the scores; None if nothing is, or if the call is causal.
        causal: whether it is.
        scale: of the scores.
        dropout: of the weights, the probability.
        made: the result.
        pieces: the results of all operations that it stands for.
    """

    query: int
    key: int
    value: int
    mask: int | None
    causal: bool
    scale: float
    dropout: float
    made: int
    pieces: frozenset[int]


def attentions(trace: Trace, layouts: Mapping[int, Layout]) -> Iterator[Attention]:
    """The calls that a record's body consists of."""
    reader = _Reader(trace)
    for node in trace.root.body:
        if isinstance(node, Operation) and node.is_a("safe softmax"):
            found = reader.read(node)
            if found is not None and all(_lies_well(held, trace, layouts) for held in _operands(found)):
                yield found


def _operands(found: Attention) -> list[int]:
    return [value for value in (found.query, found.key, found.value, found.mask) if value is not None]


def _lies_well(value: int, trace: Trace, layouts: Mapping[int, Layout]) -> bool:
    held, dims = layouts.get(value, REPLICATED), len(trace.values[value].shape)
    return held.is_replicated or (held.dim is not None and held.dim < dims - 2 - bool(held.within))


class _Reader:
    """Follows values through the pieces."""

    def __init__(self, trace: Trace) -> None:
        self._values = trace.values
        self._makers: dict[int, Operation] = {}
        self._readers: dict[int, list[Operation | None]] = {}
        for node in trace.root.body:
            read: Sequence[int] = [c.source for c in node.entries] if isinstance(node, Frame) else node.inputs
            for value in read:
                self._readers.setdefault(value, []).append(None if isinstance(node, Frame) else node)
            if isinstance(node, Operation):
                self._makers |= {o: node for o in node.outputs if o is not None}
                self._readers |= {v: [*self._readers.get(v, []), None] for v in node.overwritten}
        for crossing in trace.root.exits:
            self._readers.setdefault(crossing.source, []).append(None)
        self._pieces: set[int] = set()

    def read(self, softmax: Operation) -> Attention | None:
        """The call around a softmax; None if these aren't its pieces."""
        self._pieces = set()
        if softmax.arguments[1:] != (-1,) or softmax.keywords:
            return None
        scores = self._before(softmax.inputs[0])
        mask, causal = None, False
        if scores is not None and scores.is_a("plus") and len(scores.inputs) == 2 and not scores.keywords:
            self._take(scores)
            mask = scores.inputs[1]
            causal = self._is_causal(mask)
            scores = self._before(scores.inputs[0])
        weights, dropout = self._dropped(self._take(softmax))
        given = None if scores is None or not scores.is_a("batched product") else self._scores(scores)
        made = self._result(weights)
        if given is None or made is None or not self._is_closed(made[1]):
            return None
        (query, key, scale), (value, result) = given, made
        shapes = [self._values[v].shape for v in (query, key, value, result)]
        if len({shape[:-2] for shape in shapes}) > 1 or len(shapes[0]) < 3:
            return None
        mask = None if causal else mask
        return Attention(query, key, value, mask, causal, scale, dropout, result, frozenset(self._pieces))

    def _take(self, node: Operation) -> int:
        """Note a piece; its result."""
        made = next(o for o in node.outputs if o is not None)
        self._pieces.add(made)
        return made

    def _before(self, value: int) -> Operation | None:
        """What makes a value, before views of it."""
        node = self._makers.get(value)
        while node is not None and node.is_a(*_SAME):
            self._take(node)
            node = self._makers.get(node.inputs[0])
        return node

    def _scores(self, product: Operation) -> tuple[int, int, float] | None:
        """The queries, the keys and the scale of a product."""
        self._take(product)
        left, right = (self._before(value) for value in product.inputs)
        if left is None or right is None or not (left.is_a("times number") and right.is_a("times number")):
            return None
        root: Any = left.arguments[1]
        scale = _whose_root_is(root) if right.arguments[1] == root else None
        turned = self._makers.get(right.inputs[0])
        if scale is None or turned is None or not turned.is_a("transposition"):
            return None
        rank = len(self._values[turned.inputs[0]].shape)
        if order_of(turned.target, turned.arguments, rank) != [*range(rank - 2), rank - 1, rank - 2]:
            return None
        for node in (left, right, turned):
            self._take(node)
        return left.inputs[0], turned.inputs[0], scale

    def _dropped(self, weights: int) -> tuple[int, float]:
        """Weights after dropout, and its probability; the weights themselves and 0 if there is none."""
        readers = [node for node in self._readers.get(weights, []) if node is not None]
        node, chain = next((n for n in readers if n.is_a(_DROPOUT[0])), None), list[Operation]()
        while node is not None and node.is_a(_DROPOUT[len(chain)]):
            chain.append(node)
            if len(chain) == len(_DROPOUT):
                break
            after = self._readers.get(next(o for o in node.outputs if o is not None), [])
            node = after[0] if len(after) == 1 else None
        if len(chain) < len(_DROPOUT) or not any(n is chain[-1] for n in readers) or chain[-1].inputs[0] != weights:
            return weights, 0.0
        kept: Any = chain[1].arguments[1]
        dropout = 1.0 - kept
        if chain[2].arguments[1] != kept or 1.0 - dropout != kept:
            return weights, 0.0
        return [self._take(node) for node in chain][-1], dropout

    def _result(self, weights: int) -> tuple[int, int] | None:
        """The values, and the result, of a product with these weights."""
        product = self._after(weights)
        if product is None or not product.is_a("batched product"):
            return None
        made = self._take(product)
        value = product.inputs[1]
        node = self._makers.get(value)
        while node is not None and node.is_a(*_SAME) and self._alone(value):
            self._take(node)
            value = node.inputs[0]
            node = self._makers.get(value)
            if len(self._values[value].shape) == len(self._values[weights].shape):
                break
        readers = self._readers.get(made, [])
        shaped = readers[0] if len(readers) == 1 else None
        return None if shaped is None or not shaped.is_a(*_SAME) else (value, self._take(shaped))

    def _after(self, value: int) -> Operation | None:
        """What reads a value, after views of it."""
        while True:
            readers = self._readers.get(value, [])
            node = readers[0] if len(readers) == 1 else None
            if node is None or not node.is_a(*_SAME):
                return node
            value = self._take(node)

    def _alone(self, value: int) -> bool:
        return len(self._readers.get(value, [])) == 1

    def _is_closed(self, made: int) -> bool:
        """Whether nothing else reads what lies between."""
        readers = [node for value in self._pieces - {made} for node in self._readers.get(value, [])]
        return all(node is not None and not self._pieces.isdisjoint(node.outputs) for node in readers)

    def _is_causal(self, mask: int) -> bool:
        """Whether a mask is the lower triangle that torch makes for a causal call."""
        where = self._makers.get(mask)
        if where is None or not where.is_a("choice of two") or len(where.inputs) != 3:
            return False
        triangle, *numbers = (self._makers.get(value) for value in where.inputs)
        ones = None if triangle is None else self._makers.get(triangle.inputs[0])
        if triangle is None or not triangle.is_a("triangle") or len(triangle.arguments) > 1:
            return False
        if ones is None or not ones.is_a("ones"):
            return False
        held = [None if node is None or not node.is_a("number") else node.arguments[0] for node in numbers]
        if held != [0.0, float("-inf")]:
            return False
        for node in (where, triangle, ones, *numbers):
            if node is not None:
                self._take(node)
        return True


def _whose_root_is(root: float) -> float | None:
    """The scale of which torch takes this square root, to the last digit."""
    square = root * root
    near = (square, math.nextafter(square, 0.0), math.nextafter(square, math.inf))
    return next((scale for scale in near if math.sqrt(scale) == root), None) if root > 0 else None


def references(found: Attention) -> dict[str, Any]:
    """The operands, by the names that torch has for them."""
    named = {"query": found.query, "key": found.key, "value": found.value}
    named |= {} if found.mask is None else {"attn_mask": found.mask}
    held: dict[str, Any] = {name: Reference(value) for name, value in named.items()}
    held |= {"dropout_p": found.dropout} if found.dropout else {}
    return held | {"scale": found.scale} | ({"is_causal": True} if found.causal else {})


__all__ = ["Attention", "attentions", "references"]
