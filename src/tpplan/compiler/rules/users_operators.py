"""Declared: operators with a rule of the user's, on operands of given layouts.

in:  an operation, its rule, and the layouts of its operands, of which one is split or partial
out: the layouts of its results, or the reason why there are none

    b h s! d!, b h t! d!, b h t! d! -> b h s! d!    of S(1), S(1), S(1)   ->  S(1)
    ... i+, o i+ -> ... o                           of S(2), S(1)         ->  P

Each rank's part is followed name by name: all operands must have the same entries of a name, in the same order. So
uneven parts, heads that several ranks share, and dims of two names need no rules of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from torch.distributed.tensor.placement_types import Replicate

from tpplan.compat.propagator import OperatorMeta
from tpplan.compat.schemas import schema_argument_names, tensor_arguments, written_tensors
from tpplan.compiler.ir.layout import PARTIAL, REPLICATED, Layout, Pack, packed, sharded
from tpplan.compiler.ir.region import LocalValue, OperationNode
from tpplan.compiler.ir.trace import Operation, Reference, Value
from tpplan.ops.declared import rule_of
from tpplan.ops.dims import dims_of, sizes_of
from tpplan.ops.shardings import ShardingCall, TensorArgument, is_placed, rules_of_shardings
from tpplan.plan.operator_rule import Dim, OperatorRule, Term, flattened

Entries = tuple[int, ...] | range  # a range wherever they are one, as sequences may be long
Names = dict[str, Entries]


class _NoLayoutError(Exception):
    """There is no layout for the results, for this reason."""


def operands_of(node: OperationNode | Operation, rule: OperatorRule) -> list[tuple[str, Term, int | None]]:
    """The tensor arguments of an operation: name, term and value of each, those of lists one by one.

    Raises:
        ValueError: a list has another length than its term.
    """
    given = dict(zip(schema_argument_names(node.target), node.arguments, strict=False)) | dict(node.keywords)
    tensors, _ = tensor_arguments(node.target)
    held = [given.get(name) for name in tensors]
    lists: list[tuple[Any, ...] | None] = [cast("Any", item) if isinstance(item, tuple) else None for item in held]
    lengths = tuple(None if items is None else len(items) for items in lists)
    terms = (*rule.operands, *(Term(None),) * (len(tensors) - len(rule.operands)))
    names = [name for name, n in zip(tensors, lengths, strict=True) for _ in range(1 if n is None else n)]
    flat = [leaf for item, items in zip(held, lists, strict=True) for leaf in ((item,) if items is None else items)]
    values = [leaf.identifier if isinstance(leaf, Reference) else None for leaf in flat]
    return list(zip(names, flattened(terms, lengths), values, strict=True))


def rules_of(
    node: OperationNode | Operation, values: Sequence[LocalValue] | Sequence[Value], size: int
) -> tuple[OperatorRule, ...] | None:
    """The rules of an operation, each by itself true: one of the user's, or what torch was told; None without any.

    Raises:
        OperatorRuleError: TP022 for what torch was told, and can't be read.
    """
    rule = rule_of(node.name)
    if rule is not None or not is_placed(node.target):
        return None if rule is None else (rule,)
    keywords = dict(node.keywords)
    given = dict(zip(schema_argument_names(node.target), node.arguments, strict=False)) | keywords
    tensors: list[TensorArgument] = []
    for name in tensor_arguments(node.target)[0]:
        held: Any = given.get(name)
        shapes = [_shape(values, i.identifier) if isinstance(i, Reference) else None for i in _listed_of(held)]
        tensors.append(TensorArgument(name, (*shapes,), isinstance(held, tuple)))
    call = ShardingCall(
        node.target, _described(node.arguments, values), (*((n, _described(k, values)) for n, k in keywords.items()),),
        (*tensors,), tuple(None if o is None else _shape(values, o) for o in node.outputs),
    )  # fmt: skip
    return rules_of_shardings(call, size)


def _shape(values: Sequence[LocalValue] | Sequence[Value], value: int) -> tuple[int, ...]:
    return (*map(int, values[value].shape),)


def _listed_of(held: Any) -> tuple[Any, ...]:
    return cast("tuple[Any, ...]", held) if isinstance(held, tuple) else (held,)


def _described(held: Any, values: Sequence[LocalValue] | Sequence[Value]) -> Any:
    if isinstance(held, Reference):
        value = values[held.identifier]
        return OperatorMeta(_shape(values, held.identifier), (*map(int, value.stride),), value.dtype, Replicate())
    return tuple(_described(item, values) for item in _listed_of(held)) if isinstance(held, tuple) else held


def layouts_by_rules(
    rules: Sequence[OperatorRule],
    node: OperationNode,
    values: Sequence[LocalValue],
    layouts: Mapping[int, Layout],
    size: int,
) -> tuple[Layout, ...] | str:
    """The layouts of the results by the first rule that tells them; a text tells why there are none."""
    found: tuple[Layout, ...] | str = "has no sharding that splits it, by what `register_sharding` was given"
    for rule in rules:
        found = declared_layouts(rule, node, values, layouts, size)
        if not isinstance(found, str):
            return found
    return found if len(rules) < 2 else "isn't split in a way that `register_sharding` was told"


def declared_layouts(
    rule: OperatorRule, node: OperationNode, values: Sequence[LocalValue], layouts: Mapping[int, Layout], size: int
) -> tuple[Layout, ...] | str:
    """The layouts of the results; a text tells why there are none."""
    try:
        return tuple(_results(rule, node, values, layouts, size))
    except (_NoLayoutError, ValueError) as error:
        return str(error)


def _results(
    rule: OperatorRule, node: OperationNode, values: Sequence[LocalValue], layouts: Mapping[int, Layout], size: int
) -> Iterator[Layout]:
    operands = [(name, term, value) for name, term, value in operands_of(node, rule) if value is not None]
    partial = [name for name, _, value in operands if layouts[value].forward == "P"]
    split = [(term, value) for _, term, value in operands if layouts[value].is_sharded]
    gradients = [layouts[value] for name, _, value in operands if name == "gradients"] if rule.derived else []
    if partial and not split and len(gradients) == len(partial) and all(held.forward == "P" for held in gradients):
        yield from (PARTIAL for _ in node.outputs)  # what differentiates is linear in all of them together
        return
    if partial:
        if split or len(partial) > 1 or partial[0] not in rule.linear:
            raise _NoLayoutError(f"isn't linear in {partial[0]} by its rule, and would need the sum over the ranks")
        yield from (PARTIAL for _ in node.outputs)
        return
    if any(term.dims is None for term, _ in split):
        raise _NoLayoutError("needs all of an argument that is split, as its rule has `_` there")
    named = [(dims_of(term, len(values[v].shape)), v) for _, term, v in operands if term.dims is not None]
    results = [(term, o) for term, o in zip(result_terms(rule, node), node.outputs, strict=True)]
    shapes = [(dims, values[v].shape) for dims, v in named]
    shapes += [
        (dims_of(term, len(values[o].shape)), values[o].shape)
        for number, (term, o) in enumerate(results)
        if o is not None and term.dims is not None and number not in rule.own
    ]
    counts = sizes_of(shapes, told_sizes(rule, node))
    ranks = [_names_on(rule, rank, named, values, layouts, counts, size) for rank in range(size)]
    parted = [n for n in ranks[0] if any(len(held[n]) != counts.get(n) for held in ranks)]
    for number, (term, output) in enumerate(results):
        if output is not None and number in rule.own and len(term.dims or ()) != len(values[output].shape):
            yield REPLICATED
            continue
        if output is None or term.dims is None:  # the gradient of an argument that is whole
            yield PARTIAL if parted and output is not None else REPLICATED
            continue
        dims, shape = dims_of(term, len(values[output].shape)), values[output].shape
        place = next((i for i, dim in enumerate(dims) if any(name in parted for name in dim.names)), None)
        summed = [name for name in parted if name not in term_names(dims)]
        if summed and place is None:
            has_gradient = values[output].dtype.is_floating_point or values[output].dtype.is_complex
            yield PARTIAL if has_gradient or not rule.derived else REPLICATED  # zeros, of a mask
            continue
        if summed and not (rule.derived and _is_shared_out(summed, term_names(dims), ranks, counts)):
            raise _NoLayoutError("would be a sum over parts of one dim, and split by another")
        if place is None:
            yield REPLICATED
            continue
        split_dims = [any(name in parted for name in dim.names) for dim in dims]
        parts = [
            [
                _entries(dim, held, counts) if is_split else range(count)
                for dim, is_split, count in zip(dims, split_dims, shape, strict=True)
            ]
            for held in ranks
        ]
        sources = [layouts[value] for _, value in split]
        candidates = _candidates(place, shape, sources, values, split)
        found = next((held for held in candidates if _fits(held, shape, parts, size)), None)
        if found is None or (summed and not found.has_replicas):
            raise _NoLayoutError("makes a result of parts that no layout describes")
        yield found


def _is_shared_out(
    summed: Sequence[str], own: frozenset[str], ranks: Sequence[Names], counts: Mapping[str, int]
) -> bool:
    """Whether the ranks that have the same part of a gradient share out what it is summed over.

    The gradient of what several ranks have, as keys, is partial among these: each has the term of its own queries.
    """
    shares: dict[object, list[Names]] = {}
    for held in ranks:
        shares.setdefault(tuple(sorted((name, part) for name, part in held.items() if name in own)), []).append(held)
    return all(
        sorted(entry for held in group for entry in held[name]) == list(range(counts[name]))
        for group in shares.values()
        for name in summed
    )


def term_names(dims: Sequence[Dim]) -> frozenset[str]:
    """The names of some dims."""
    return frozenset(name for dim in dims for name in dim.names)


def told_sizes(rule: OperatorRule, node: OperationNode | Operation) -> dict[str, int]:
    """The sizes of names that arguments tell."""
    given = dict(zip(schema_argument_names(node.target), node.arguments, strict=False)) | dict(node.keywords)
    return {name: given[argument] for argument, name in rule.sizes if type(given.get(argument)) is int}


def with_local_sizes(
    rule: OperatorRule,
    operation: Operation,
    values: Sequence[Value],
    layouts: Mapping[int, Layout],
    size: int,
    rank: int,
) -> Operation:
    """An operation with the arguments that count a dim as they have to be on a rank."""
    operands = [(term, value) for _, term, value in operands_of(operation, rule) if value is not None]
    named = [(dims_of(term, len(values[v].shape)), v) for term, v in operands if term.dims is not None]
    try:
        counts = sizes_of([(dims, values[value].shape) for dims, value in named], told_sizes(rule, operation))
        own = {value: layouts.get(value, REPLICATED) for _, value in named}
        held = _names_on(rule, rank, named, values, own, counts, size)
    except (_NoLayoutError, ValueError):
        return operation
    sizes = {argument: len(held[name]) for argument, name in rule.sizes if name in held}
    names = schema_argument_names(operation.target)
    arguments = tuple(
        sizes.get(name, item) for name, item in zip(names, operation.arguments, strict=False)
    )  # fmt: skip
    keywords = {name: sizes.get(name, item) for name, item in operation.keywords.items()}
    return replace(operation, arguments=arguments, keywords=keywords)


def result_terms(rule: OperatorRule, node: OperationNode | Operation) -> tuple[Term, ...]:
    """The terms of an operation's results, and of the arguments that it writes to."""
    if len(rule.results) == 1 and rule.results[0].items:
        return tuple(flattened(rule.results, (len(node.outputs),)))
    written = tuple(rule.operands[i] for i in written_tensors(node.target)) if rule.operands else ()
    if len(rule.results) + len(written) != len(node.outputs):
        raise _NoLayoutError(f"returns {len(node.outputs)} tensors, and its rule has terms for {len(rule.results)}")
    return (*rule.results, *written)


def _names_on(
    rule: OperatorRule,
    rank: int,
    named: Sequence[tuple[tuple[Dim, ...], int]],
    values: Sequence[LocalValue] | Sequence[Value],
    layouts: Mapping[int, Layout],
    counts: Mapping[str, int],
    size: int,
) -> Names:
    """The entries of each name that a rank has."""
    found: Names = {}
    for dims, value in named:
        held, shape = layouts[value], values[value].shape
        for dim, entries in zip(dims, _held(held, shape, size, rank), strict=True):
            for name, part in _by_name(dim, entries, shape, counts):
                if name in rule.whole and len(part) != counts.get(name):
                    why = dict(rule.reasons).get(name)
                    raise _NoLayoutError(why or f"needs all of `{name}` by its rule, which is split")
                if found.setdefault(name, part) != part:
                    raise _NoLayoutError(f"would get another part of `{name}` from each of two arguments")
    return found


def _held(held: Layout, shape: tuple[int, ...], size: int, rank: int) -> list[Entries]:
    """The entries of each dim that a rank holds."""
    found: list[Entries] = [range(count) for count in shape]
    if held.dim is None:
        return found
    if held.joint or held.inner_dim is not None or held.interleave != 1:
        raise _NoLayoutError("has an argument that is split by two dims in one")
    found[held.dim] = _listed(held.intervals(shape[held.dim], size, rank))
    if held.within:
        packs, holders, place = held.shares(held.next_dim, size, rank)
        found[held.next_dim] = _listed(Layout("S", "S", 0, packs=packs).intervals(shape[held.next_dim], holders, place))
    return found


def _listed(intervals: Sequence[tuple[int, int]]) -> Entries:
    return _in_one_form(
        tuple(itertools.chain.from_iterable(range(start, start + length) for start, length in intervals))
    )


def _in_one_form(entries: tuple[int, ...]) -> Entries:
    whole = range(entries[0], entries[0] + len(entries)) if entries else range(0)
    return whole if all(map(int.__eq__, entries, whole)) else entries


def _by_name(
    dim: Dim, entries: Entries, shape: tuple[int, ...], counts: Mapping[str, int]
) -> Iterator[tuple[str, Entries]]:
    """The entries of each of a dim's names, whose products, in order, are the dim's."""
    if len(dim.names) < 2:
        yield from ((name, entries) for name in dim.names)
        return
    if any(name not in counts for name in dim.names):
        raise _NoLayoutError(f"has a dim `{' '.join(dim.names)}` of which no argument tells how it is made up")
    rest, parts = tuple(entries), list[Entries]()
    for name in reversed(dim.names):
        parts.append(_in_one_form(tuple(dict.fromkeys(entry % counts[name] for entry in rest))))
        rest = tuple(entry // counts[name] for entry in rest)
    found = dict(zip(dim.names, reversed(parts), strict=True))
    if _entries(dim, found, counts) != entries:
        raise _NoLayoutError(f"has a part of `{' '.join(dim.names)}` that is no part of each")
    yield from found.items()


def _entries(dim: Dim, names: Mapping[str, Entries], counts: Mapping[str, int]) -> Entries:
    """The entries of a dim that belong to these of its names."""
    if len(dim.names) == 1:
        return names[dim.names[0]]
    found: tuple[int, ...] = (0,)
    for name in dim.names:
        found = tuple(entry * counts[name] + part for entry in found for part in names[name])
    return _in_one_form(found)


def _candidates(
    place: int,
    shape: tuple[int, ...],
    sources: Sequence[Layout],
    values: Sequence[LocalValue],
    split: Sequence[tuple[Term, int]],
) -> Iterator[Layout]:
    yield sharded(place)
    for held, (_, value) in zip(sources, split, strict=True):
        assert held.dim is not None
        count = values[value].shape[held.dim]
        packs = [pack.scaled(shape[place], count) for pack in held.stretches(count)]
        whole = [pack for pack in packs if pack is not None]
        if len(whole) == len(packs):
            yield packed(place, whole, held.within)
            yield packed(place, [pack._replace(replicas=1) for pack in whole])
        yield packed(place, [Pack(shape[place])])


def _fits(held: Layout, shape: tuple[int, ...], parts: Sequence[Sequence[Entries]], size: int) -> bool:
    return all(_held(held, shape, size, rank) == list(parts[rank]) for rank in range(size))


__all__ = [
    "declared_layouts",
    "layouts_by_rules",
    "operands_of",
    "result_terms",
    "rules_of",
    "told_sizes",
    "with_local_sizes",
]
