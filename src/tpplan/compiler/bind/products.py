"""Products: the product that a body itself makes with a parameter, without calling a linear layer for it.

in:  a trace, and a parameter's value
out: `Product`: which of the parameter's dims the product contracts and which it makes; None if there is no product

    grouped_mm(x, gate_up.transpose(1, 2))   ->  gate_up (experts, outputs, inputs): makes dim 1, contracts dim 2
    addmm(in_proj_bias, x, in_proj.t())      ->  in_proj (outputs, inputs): makes dim 0; in_proj_bias is an addend
    convolution(x, weight)                   ->  weight (outputs, inputs, width): makes dim 0, contracts dim 1
    convolution(x, weight, groups=channels)  ->  weight (channels, 1, width): goes with the channels by dim 0
    exp(a)[:, None] * x[..., None]           ->  a (features, states): goes with the features by dim 0
    einsum("btd,dhk->bthk", x, weight)       ->  weight (inputs, heads, width): makes dim 1, contracts dim 0
    cat((keys, key))                         ->  key (1, 1, features): goes with the features by dim 2
    einsum("bthd,hdc->bthc", q, weight.view(heads, width, inputs))  ->  weight: goes with the heads by dim 0
    my.product(x, w), "... i+, o i+ -> ... o"   ->  w (outputs, inputs): makes dim 0, contracts dim 1
    my.biased(scores, b), "h q k, h k! -> h q k"  ->  b (heads, keys): goes with the heads by dim 0
    embedding(table, ids), table[ids]        ->  table (rows, features): goes with the features by dim 1
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from tpplan.compiler.bind.linear import Addend, Product
from tpplan.compiler.bind.readers import Readers
from tpplan.compiler.ir.heads import ROW_BYTES
from tpplan.compiler.ir.trace import Operation, Reference
from tpplan.compiler.rules.batch_norm import kept_statistics
from tpplan.compiler.rules.convolution import GROUPS, TRANSPOSED
from tpplan.compiler.rules.scaled_products import BIAS
from tpplan.compiler.rules.users_operators import operands_of, result_terms
from tpplan.ops.declared import rule_of
from tpplan.ops.dim_map import dim_map, dim_of, picked_dim
from tpplan.ops.dims import dims_of
from tpplan.ops.registry import first_factor, is_entrywise

_MOVES = (
    "alias", "copy", "detach", "cast", "transposition", "unsqueeze", "squeeze", "select", "along", "slice", "pad",
    "pick", "repeat", "expand",
)  # fmt: skip
_MASKS = (torch.bool, torch.uint8)
_DEEPEST = 12

Dims = tuple[int | None, ...]
_Named = tuple[str, ...]  # a dim by the names of a rule


class JoinedDim(int):
    """A dim of a parameter that a view has joined with others: as `heads` in (…, heads · features).

    Attributes:
        times: how many entries of others stand before it, so that its own come so often, one after the other.
    """

    times: int

    def __new__(cls, dim: int, times: int) -> JoinedDim:
        """Dim number `dim`."""
        made = super().__new__(cls, dim)
        made.times = times
        return made


def times_of(dim: int) -> int:
    """How often the entries of a parameter's dim come in the dim that it has become."""
    return dim.times if isinstance(dim, JoinedDim) else 1


def find_use(readers: Readers, value: int) -> Product | Addend | None:
    """What is done with the parameter `value` first: multiplied by, or added; None for anything else.

    One of which neither is seen, but that stands beside features or heads entry by entry, can be split as these are. So
    can any vector.
    """
    shape = readers.trace.values[value].shape
    found, *others = [*_uses(readers, value, tuple(range(len(shape))), shape, 0)] or [None]
    if isinstance(found, Product) and len(shape) > 2 and not found.following:
        alike = [other for other in others if isinstance(other, Product) and not other.following]
        return replace(found, alike=tuple(other for other in alike if _kind(other) == _kind(found)))
    return _beside(readers, value) if found is None else found


def contracting(readers: Readers, value: int, dim: int) -> list[Product]:
    """The products that contract a dim of a parameter, as a tied decoder does what its encoder makes."""
    shape = readers.trace.values[value].shape
    uses = _uses(readers, value, tuple(range(len(shape))), shape, 0)
    return [use for use in uses if isinstance(use, Product) and use.input_dim == dim]


def _kind(product: Product) -> Product:
    return replace(product, made=0, given=0)


def find_buffer_use(readers: Readers, value: int, is_part: bool = False) -> Product | Addend | None:
    """How the buffer `value` can be split: as the features or heads that it stands beside; None if it can't.

    One that the model writes to stays whole, as the whole is read again after the call; except for the statistics of
    batch norms, which are made whole again.

    Args:
        readers, value: the trace, and the buffer.
        is_part: whether it belongs to a layer that computes its weight, and is used as a parameter there.
    """
    replaced = not {*readers.trace.buffers[value]}.isdisjoint(readers.trace.effects.kept.values())
    read = [(operation, seen) for _, operation, seen in readers.of(value)]
    kept = [seen == value and seen in kept_statistics(operation.name, operation.arguments) for operation, seen in read]
    if replaced or (any(kept) and not all(kept)) or readers.is_written(value):
        return None
    return find_use(readers, value) if is_part else _beside(readers, value)


def derived(readers: Readers, value: int) -> Iterator[tuple[int, Dims]]:
    """What moving entries, or changing each by itself, makes of a parameter; with where its dims are then."""
    pending: list[tuple[int, Dims, int]] = [(value, tuple(range(len(readers.trace.values[value].shape))), 0)]
    while pending:
        held, dims, depth = pending.pop()
        yield held, dims
        for _, operation, seen in readers.of(held) if depth < _DEEPEST else ():
            if seen != held:
                yield seen, dims
            entrywise = is_entrywise(operation.name) and set(operation.inputs) == {seen}
            after = dims if entrywise else moved(readers, operation, seen, dims)
            made = next((o for o in operation.outputs if o is not None), None)
            if after is not None and made is not None:
                pending.append((made, after, depth + 1))


def _beside(readers: Readers, parameter: int) -> Addend | None:
    """Where a parameter or buffer stands beside entries of another tensor: by the first dim that both have."""
    values = readers.trace.values
    shape = values[parameter].shape
    found: dict[int, Addend] = {}
    for value, dims in derived(readers, parameter):
        for _, operation, seen in readers.of(value):
            others = [i for i in operation.inputs if i != seen]
            made = operation.outputs[0]
            for dim, its in _by_its_names(readers, operation, seen, dims) if seen == value else ():
                found.setdefault(dim, Addend(shape[dim], dim, made, its, is_added=False))
            if not _stands_beside(operation) or len(others) != 1 or seen != value or made is None:
                continue
            rank = len(values[made].shape)
            joined = _joined_dim(operation, rank)
            its = values[others[0]].shape
            for back, dim in enumerate(reversed(dims), 1):
                if dim is not None and back <= len(its) and shape[dim] == its[-back] != 1 and rank - back != joined:
                    found.setdefault(dim, Addend(shape[dim], dim, made, rank - back, is_added=False))
    lone = Addend(shape[0], 0, None, 0, is_added=False) if len(shape) == 1 else None
    return found[min(found)] if found else lone


def _by_its_names(readers: Readers, operation: Operation, value: int, dims: Dims) -> Iterator[tuple[int, int]]:
    """The parameter's dims that a rule tells by a name of the result, as a table's by heads, with the result's.

    So do scales of a scaled product, by their places from the end.
    """
    made = operation.outputs[0]
    if operation.is_a("scaled product") and made is not None and Reference(value) not in operation.arguments[:2]:
        before, after = readers.trace.values[value].shape, readers.trace.values[made].shape
        for its, (dim, count) in enumerate(zip(dims, before, strict=True), len(after) - len(dims)):
            if dim is not None and count == after[its]:
                yield dim, its
        return
    rule, told = rule_of(operation.name), _names(readers, operation, value)
    if rule is None or told is None:
        return
    own, _, result = told
    for dim, names in zip(dims, own, strict=True):
        if dim is not None and names and names in result and rule.whole.isdisjoint(names):
            yield dim, result.index(names)


def _stands_beside(operation: Operation) -> bool:
    """Whether an operation puts entries of its operands beside each other, one by one or row by row."""
    return operation.is_a("arithmetic of two", "join")


def _joined_dim(operation: Operation, rank: int) -> int | None:
    """The dim along which an operation concatenates; None if it doesn't."""
    return dim_of(operation.target, operation.arguments, rank) if operation.is_a("join") else None


def _uses(readers: Readers, value: int, dims: Dims, shape: tuple[int, ...], depth: int) -> Iterator[Product | Addend]:
    for _, operation, seen in readers.of(value):
        first = first_factor(operation.name)
        if first is not None:
            yield from _in_product(readers, operation, seen, dims, shape, first)
        elif operation.is_a("addition"):
            yield from _added(readers, operation, dims, shape)
        elif operation.is_a("table"):
            yield from _looked_up(readers, operation, seen, dims, shape)
        elif operation.is_a("convolution"):
            yield from _convolved(operation, seen, dims, shape)
        elif operation.is_a("split") and depth < _DEEPEST:
            yield from _of_parts(readers, operation, seen, dims, shape, depth)
        elif rule_of(operation.name) is not None:
            yield from _by_rule(readers, operation, seen, dims, shape)
        elif depth < _DEEPEST:
            after = moved(readers, operation, seen, dims)
            made = next((o for o in operation.outputs if o is not None), None)
            if after is not None and made is not None:
                yield from _uses(readers, made, after, shape, depth + 1)
            rows = operation.is_a("pick") and picked_dim(operation.arguments, len(dims)) == 0
            if rows and len(shape) == 2 and dims == (0, 1):
                yield from _looked_up(readers, operation, seen, dims, shape)


def _of_parts(
    readers: Readers, operation: Operation, value: int, dims: Dims, shape: tuple[int, ...], depth: int
) -> Iterator[Product | Addend]:
    """The uses of a parameter that is split first, along the features that its products make."""
    along = dim_of(operation.target, operation.arguments, len(dims))
    split = dims[along]
    if operation.inputs[0] != value or split is None:
        return
    uses: list[Product | Addend] = []
    for part in operation.outputs:
        if part is None:
            return
        length = readers.trace.values[part].shape[along]
        narrowed = (*shape[:split], length, *shape[split + 1 :])
        use = next(_uses(readers, part, dims, narrowed, depth + 1), None)
        if use is None or use.output_dim != split or type(use) is not type(uses[0] if uses else use):
            return
        uses.append(use)
    first, *others = uses
    yield replace(first, following=tuple(others))  # pyright: ignore[reportArgumentType]


def _in_product(
    readers: Readers, operation: Operation, value: int, dims: Dims, shape: tuple[int, ...], first: int
) -> Iterator[Product | Addend]:
    factors = operation.arguments[first : first + 2]
    (made,) = (o for o in operation.outputs if o is not None)
    last = len(readers.trace.values[made].shape) - 1
    mine = Reference(value)
    if first == 1 and operation.arguments[0] == mine:
        yield from _added(readers, operation, dims, shape)
    elif factors[1] == mine and factors[0] != mine:
        found = _made(shape, dims[-1], dims[-2], made, last, factors[0])
        unit = ROW_BYTES // readers.trace.values[made].dtype.itemsize if operation.is_a("grouped product") else 1
        yield from (replace(held, unit=unit) for held in found)
    elif factors[0] == mine and factors[1] != mine:
        yield from _made(shape, dims[-2], dims[-1], made, last - 1, factors[1])
    elif operation.is_a("scaled product") and mine in operation.arguments[BIAS:]:
        yield from _added(readers, operation, dims, shape)
    if len(dims) == 3 and mine in factors and None in dims[1:] and dims[0] is not None:  # a matrix for each head
        yield Addend(shape[dims[0]], int(dims[0]), made, 0, is_added=False)


def _added(readers: Readers, operation: Operation, dims: Dims, shape: tuple[int, ...]) -> Iterator[Addend]:
    (made,) = (o for o in operation.outputs if o is not None)
    rank = len(readers.trace.values[made].shape)
    by_head = dims == (0, 1) and rank > 3  # as of (heads, features) beside (batch, sequence, heads, features)
    if by_head:
        yield Addend(shape[0], 0, made, rank - 2)
    elif dims and dims[-1] is not None:
        yield Addend(shape[dims[-1]], dims[-1], made, rank - 1)


def _convolved(operation: Operation, value: int, dims: Dims, shape: tuple[int, ...]) -> Iterator[Product | Addend]:
    """The weight or the bias of a convolution; in groups, their first dim goes with the channels."""
    (made,) = (o for o in operation.outputs if o is not None)
    x, weight, bias = operation.arguments[:3]
    if operation.arguments[GROUPS] == 1 and weight == Reference(value) != x:
        one, other = (dims[1], dims[0]) if operation.arguments[TRANSPOSED] else (dims[0], dims[1])
        yield from (replace(found, given_dim=1) for found in _made(shape, one, other, made, 1, x))
    if operation.arguments[GROUPS] == 1 and bias == Reference(value) and dims[0] is not None:
        yield Addend(shape[dims[0]], dims[0], made, 1)
    if operation.arguments[GROUPS] > 1 and Reference(value) in operation.arguments[1:3] and dims[0] is not None:
        yield Addend(shape[dims[0]], dims[0], made, 1, is_added=False)


def _by_rule(
    readers: Readers, operation: Operation, value: int, dims: Dims, shape: tuple[int, ...]
) -> Iterator[Product]:
    """A product by a rule of the user's: one name of the parameter is a dim of the result, one of another argument."""
    told, made = _names(readers, operation, value), operation.outputs[0]
    if told is None or made is None or len(operation.outputs) != 1:
        return
    own, others, result = told
    outputs = [dim for dim, names in enumerate(own) if names in result and names]
    inputs = [(dim, i, other) for dim, names in enumerate(own) for i, other in others if names in other]
    if len(outputs) != 1 or len(inputs) != 1 or outputs[0] == inputs[0][0]:
        return
    dim, given, other = inputs[0]
    found = _made(shape, dims[outputs[0]], dims[dim], made, result.index(own[outputs[0]]), Reference(given))
    yield from (replace(held, given_dim=other.index(own[dim])) for held in found)


def _names(
    readers: Readers, operation: Operation, value: int
) -> tuple[Sequence[_Named], Sequence[tuple[int, Sequence[_Named]]], Sequence[_Named]] | None:
    """What a rule calls the dims of a value, of the other arguments, and of the first result; None without a rule."""
    values, rule, made = readers.trace.values, rule_of(operation.name), operation.outputs[0]
    if rule is None or made is None:
        return None
    named = [
        (i, [dim.names for dim in dims_of(term, len(values[i].shape))])
        for _, term, i in operands_of(operation, rule)
        if i is not None and term.dims is not None
    ]
    own, others = dict(named).get(value), [held for held in named if held[0] != value]
    result = result_terms(rule, operation)[0]
    return None if own is None else (own, others, [dim.names for dim in dims_of(result, len(values[made].shape))])


def _looked_up(
    readers: Readers, operation: Operation, value: int, dims: Dims, shape: tuple[int, ...]
) -> Iterator[Addend]:
    """A table of which rows are read, whose last dim goes with the features."""
    made = operation.outputs[0]
    if operation.arguments[0] == Reference(value) and made is not None and dims[-1] is not None:
        last = len(readers.trace.values[made].shape) - 1
        yield Addend(shape[dims[-1]], dims[-1], made, last, is_added=False)


def _made(
    shape: tuple[int, ...], output_dim: int | None, input_dim: int | None, made: int, made_dim: int, given: Reference
) -> Iterator[Product]:
    if output_dim is not None and input_dim is not None:
        outputs, inputs = shape[output_dim], shape[input_dim]
        times = times_of(output_dim)
        yield Product(outputs, inputs, int(output_dim), int(input_dim), made, made_dim, given.identifier, times=times)


def moved(readers: Readers, operation: Operation, value: int, dims: Dims) -> Dims | None:
    """The parameter's dims after an operation that moves or picks entries; None for one that computes."""
    values = readers.trace.values
    made = next((o for o in operation.outputs if o is not None), None)
    if made is None or not operation.inputs or operation.inputs[0] != value:
        return None
    before, after = values[value].shape, values[made].shape
    if operation.is_a("reshape"):
        return _viewed(dims, before, after)
    if operation.is_a("index"):
        return _indexed(readers, operation, dims)
    kept = dim_map(operation.target, operation.arguments, before, after) if operation.is_a(*_MOVES) else None
    return None if kept is None else tuple(None if dim is None else dims[dim] for dim in kept)


def _indexed(readers: Readers, operation: Operation, dims: Dims) -> Dims | None:
    """Where the dims are after numbers picked entries of some that stand side by side: `biases[:, places]`."""
    rows: dict[int, Reference] = {d: held for d, held in enumerate(operation.arguments[1]) if held is not None}
    kinds = [readers.trace.values[held.identifier] for held in rows.values()]
    first, count = min(rows), max(len(kind.shape) for kind in kinds)
    masks = any(kind.dtype in _MASKS for kind in kinds)
    if [*rows] != [*range(first, first + len(rows))] or (masks and (len(rows), count) != (1, 1)):
        return None
    return (*dims[:first], *(None,) * count, *dims[first + len(rows) :])


def _viewed(dims: Dims, before: tuple[int, ...], after: tuple[int, ...]) -> Dims | None:
    """Where the dims are after a view that adds or drops dims of size 1, splits dims, or joins them.

    Heads stand for features: of a parameter's dims that are joined, the first one tells which are a rank's.
    """
    kept = [(dim, count) for dim, count in zip(dims, before, strict=True) if count != 1]
    found: list[int | None] = []
    dim, left = None, 1
    for count in after:
        if count == 1:
            found.append(None)
            continue
        first = left == 1
        if first:
            if not kept:
                return None
            dim, left = kept.pop(0)
            joined = [(dim, left)]
            while left < count and kept:
                joined.append(kept.pop(0))
                left *= joined[-1][1]
            if len(joined) > 1:
                dim = _first_of(joined)
            elif isinstance(dim, JoinedDim) and left != count:
                dim = None  # which of the parts it goes into isn't known
        if left % count:
            return None
        found.append(dim if first else None)
        left //= count
    return None if kept or left != 1 else tuple(found)


def _first_of(joined: Sequence[tuple[int | None, int]]) -> int | None:
    """Of dims that are joined, the parameter's first; None if there is none, or one that was joined already."""
    own = [dim for dim, _ in joined if dim is not None]
    if not own or any(isinstance(dim, JoinedDim) for dim in own):
        return None
    place = [dim for dim, _ in joined].index(min(own))
    return JoinedDim(min(own), math.prod(count for _, count in joined[:place]))


__all__ = ["Dims", "contracting", "derived", "find_use", "moved"]
