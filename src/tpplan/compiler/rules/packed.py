"""Packed: operations on values whose sharded dim is more than one stretch with one holder for each part.

in:  an operation, and the layouts of its operands, at least one of them packed, replicated in groups, or joined
out: the layouts of its results, or the reason why there are none

    split([32, 16, 16]) of S(2, packs=32|16|16)   ->  S(2), S(2), S(2)
    glu of S(2, packs=32|32)                      ->  S(2): halves that lie alike
    view(b, s, 3, h, d) of S(2, packs=hd|hd|hd)   ->  S(3)
    expand(b, 2, 4, s, d) of S(1, replicas=2)     ->  S(1, replicas=2, within=4): a holder keeps its own repeats
    cat([a, b], -1) of S(2), S(2)                 ->  S(2, packs=a|b)

Whatever treats all entries of the dim alike is left to DTensor's rule for a plain shard: the order of the entries is
nothing to it, as long as all operands have the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from tpplan.compiler.ir.heads import head_parts
from tpplan.compiler.ir.layout import REPLICATED_PARTIAL, Layout, Pack, packed, sharded
from tpplan.compiler.ir.region import LocalValue, OperationNode
from tpplan.compiler.ir.trace import Reference
from tpplan.compiler.rules.batch_norm import batch_normed
from tpplan.compiler.rules.convolution import convolved
from tpplan.compiler.rules.folding import folded, sampled
from tpplan.compiler.rules.group_norm import group_normed
from tpplan.compiler.rules.views import viewed
from tpplan.ops.dim_map import dim_of, picked_dim

Layouts = tuple[Layout, ...]
Ask = Callable[[dict[int, Layout]], "Layouts | str"]


def concerns(node: OperationNode, layouts: dict[int, Layout]) -> bool:
    """Whether these rules decide, and not DTensor's alone."""
    return (
        node.is_a("convolution", "group norm", "batch norm", "pool", "fold", "sampling")
        or any(not held.is_plain for held in layouts.values())
        or _joins(node, layouts)
    )


def results(
    node: OperationNode, values: Sequence[LocalValue], layouts: dict[int, Layout], size: int, batch: int, ask: Ask
) -> Layouts | str:
    """The layouts of the results; a text tells why there are none.

    Args:
        node, values: the operation, and the geometry of its region.
        layouts: of its operands, by local number.
        size: of the axis.
        batch: the batch size of the example call.
        ask: DTensor's rules, for layouts that are plain.
    """
    split = [(number, held) for number, held in layouts.items() if held.is_sharded]
    if not split:
        return "needs values that other ranks hold"
    if node.is_a("convolution"):
        return convolved(node.arguments, values, layouts, size)
    if node.is_a("group norm"):
        return group_normed(node.arguments, values, layouts, size)
    if node.is_a("batch norm"):
        return batch_normed(node.arguments, values, layouts)
    number, held = split[0]
    assert held.dim is not None
    if node.is_a("pool"):
        return "needs values that other ranks hold"
    if node.is_a("fold", "sampling"):
        made_of = sampled(node, layouts) if node.is_a("sampling") else folded(node, values, held, size, batch)
        return made_of if isinstance(made_of, str) else (made_of,)
    shape = values[number].shape
    if _joins(node, layouts):
        return _joined(node, values, layouts)
    if node.is_a("reshape"):
        made = viewed(shape, values[_output(node)].shape, held, size, batch)
        return (made,) if made is not None else "cuts across the packs of the sharded dim"
    if every_so_many(node, values, layouts):
        return _every_so_many(held, shape[held.dim], node.arguments[4], size)
    along = _taken_along(node, shape)
    if along is not None and (along == held.dim or held.shares(along, size, 0)[0]):
        stretches = _stretches(node, values, along)
        return (
            stretches if isinstance(stretches, str) else _taken(held, along, stretches, size, not node.is_a("select"))
        )
    if node.is_a("pairs"):
        return "pairs entries of the dim that is sharded"
    if node.is_a("gate") and dim_of(node.target, node.arguments, len(shape)) == held.dim:
        half = shape[held.dim] // 2
        halves = _taken(held, held.dim, ((0, half), (half, half)), size, True)
        alike = not isinstance(halves, str) and halves[0] == halves[1]
        return halves[:1] if alike else "gates one half of the sharded dim by the other"
    if node.is_a("gather"):
        # Every rank looks up its own entries in its own part.
        alike = len(layouts) == 2 and len(set(layouts.values())) == 1 and node.arguments[1] % len(shape) != held.dim
        return (held,) if alike else "looks up elements that other ranks hold"
    if node.is_a("repeat"):
        return _repeated(node, shape, held, size, batch)
    if node.is_a("batched product") and _multiplies_own_rows(node, layouts):
        return (layouts[node.inputs[0]],)
    if node.is_a("expand") and _repeats(values, number, node, held):
        within = _repeats_on(held, values[_output(node)].shape[held.dim + 1], size)
        return (replace(held, within=(within,)),) if within is not None else "repeats heads in another number"
    return _alike(node, values, dict(split), layouts, ask)


def _multiplies_own_rows(node: OperationNode, layouts: dict[int, Layout]) -> bool:
    """Whether ranks that share a matrix multiply it by rows of their own, as queries of which several have one key."""
    if len(node.inputs) != 2 or not all(number in layouts for number in node.inputs):
        return False
    rows, matrix = (layouts[number] for number in node.inputs)
    return bool(rows.within) and not matrix.within and rows.dim == 0 and replace(rows, within=()) == matrix


def every_so_many(node: OperationNode, values: Sequence[LocalValue], layouts: dict[int, Layout]) -> bool:
    """Whether it takes every second (third, …) entry of a sharded dim, from one end to the other."""
    start: int
    end: int | None
    step: int
    if not node.is_a("slice") or len(node.arguments) < 5:
        return False
    held, shape = layouts[node.inputs[0]], values[node.inputs[0]].shape
    start, end, step = node.arguments[2] or 0, node.arguments[3], node.arguments[4]
    along = dim_of(node.target, node.arguments, len(shape))
    return held.dim == along and step > 1 and 0 <= start < step and (end is None or end >= shape[along])


def _every_so_many(held: Layout, count: int, step: int, size: int) -> Layouts | str:
    """Every `step`-th entry of a dim of which each rank has whole groups of so many."""
    even = held.is_plain and held.interleave == 1 and held.is_even(count, size)
    if even and count // size % step == 0:
        return (held,)
    (pack, *others) = held.packs or (None,)
    fewer = pack.scaled(1, step) if pack is not None and pack.parts and not (others or held.within) else None
    return "takes every n-th element of a sharded dim" if fewer is None else (replace(held, packs=(fewer,)),)


def _output(node: OperationNode) -> int:
    return next(o for o in node.outputs if o is not None)


def picked_stretch(picks: Sequence[int] | None, count: int) -> tuple[int, int] | None:
    """The stretch, as start and length, of `count` entries that these are, one after the other; None if they aren't."""
    if not picks:
        return None
    start = picks[0] + (count if picks[0] < 0 else 0)
    return (start, len(picks)) if tuple(picks) == tuple(range(picks[0], picks[0] + len(picks))) else None


def _taken_along(node: OperationNode, shape: tuple[int, ...]) -> int | None:
    """The dim of which an operation takes stretches; None if it doesn't do that."""
    if node.is_a("split", "slice", "select"):
        return dim_of(node.target, node.arguments, len(shape))
    return picked_dim(node.arguments, len(shape)) if node.is_a("pick") else None


def _stretches(node: OperationNode, values: Sequence[LocalValue], along: int) -> list[tuple[int, int]] | str:
    """The stretches of a dim, as starts and lengths, that an operation takes; a text if it takes others."""
    count = values[node.inputs[0]].shape[along]
    if node.is_a("split"):
        lengths = [values[o].shape[along] for o in node.outputs if o is not None]
        return list(zip(_starts(lengths), lengths, strict=True))
    if node.is_a("select"):
        return [(node.arguments[2] % count, 1)]
    if node.is_a("pick"):
        # Numbers that the model's own code holds are a stretch, if they follow one another.
        numbers = [i for i in node.inputs[1:] if values[i].picks is not None]
        stretch = picked_stretch(values[numbers[0]].picks, count) if len(numbers) == 1 else None
        return [stretch] if stretch is not None else "needs values that other ranks hold"
    if len(node.arguments) > 4 and node.arguments[4] != 1:
        return "takes every n-th element of a packed dim"
    start = (node.arguments[2] if len(node.arguments) > 2 else 0) or 0
    return [(max(0, start + (count if start < 0 else 0)), values[_output(node)].shape[along])]


def _starts(lengths: Sequence[int]) -> list[int]:
    return [sum(lengths[:i]) for i in range(len(lengths))]


def _taken(held: Layout, along: int, stretches: Iterable[tuple[int, int]], size: int, keeps: bool) -> Layouts | str:
    """Stretches of a packed dim: each must be whole packs, and more than a rank's part of them if the dim goes away."""
    assert held.dim is not None
    if held.joint:
        return "takes elements that only some ranks hold"
    packs, holders, _ = held.shares(along, size, 0)
    edges = _starts([pack.size for pack in packs])
    found: list[Layout] = []
    for start, length in stretches:
        inside = [p for p, edge in zip(packs, edges, strict=True) if start <= edge < start + length]
        everywhere = all(p.replicas == holders for p in inside)
        if start not in edges or sum(p.size for p in inside) != length or not (keeps or everywhere):
            return "cuts across the packs of the sharded dim"
        if len({(p.first, p.among) for p in packs}) > 1 and inside != list(packs):
            return "takes elements that only some ranks hold"
        if along != held.dim:
            found.append(packed(held.dim, held.packs, inside if keeps else ()))
        else:
            found.append(REPLICATED_PARTIAL if everywhere else packed(held.dim, inside, held.within))
    return tuple(found)


def _repeated(node: OperationNode, shape: tuple[int, ...], held: Layout, size: int, batch: int) -> Layouts | str:
    """A tensor several times, one after the other: along the sharded dim each time is a stretch of its own."""
    assert held.dim is not None
    times: Sequence[int] = node.arguments[1]
    dim = held.dim + len(times) - len(shape)
    if held.interleave != 1 or held.within or not all(pack.fits(size) for pack in held.packs):
        return "repeats a dim that ranks share out in several ways"
    if held.is_plain and held.is_even(shape[held.dim], size) and times[dim] == batch and dim == 0:
        return (sharded(0, interleave=batch),)
    return (packed(dim, [*held.stretches(shape[held.dim])] * times[dim]),)


def _repeats(values: Sequence[LocalValue], number: int, node: OperationNode, held: Layout) -> bool:
    """Whether the replicated heads are repeated, so that each holder needs its own repeats only."""
    before, after = values[number].shape, values[_output(node)].shape
    dim = held.dim
    if dim is None or len(held.packs) != 1 or len(before) != len(after) or dim + 1 >= len(before):
        return False
    if values[number].weight and len(after) == 2:
        return False  # lengths of rows, beside these
    grown = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    (pack,) = held.packs
    return grown == [dim + 1] and (pack.is_shared if pack.parts else after[dim + 1] % pack.replicas == 0)


def _repeats_on(held: Layout, repeats: int, size: int) -> Pack | None:
    """The repeats that each rank keeps of the heads that it has; None for heads that are shared out otherwise."""
    (pack,) = held.packs
    if not pack.parts:
        return Pack(repeats)
    parts = head_parts(pack.size * repeats, pack.size, size)
    return Pack(pack.size * repeats, parts=parts.queries) if parts is not None and parts.keys == pack.parts else None


def _joins(node: OperationNode, layouts: dict[int, Layout]) -> bool:
    """Whether it is a concatenation of sharded tensors; `_joined` tells whether along the sharded dim."""
    return node.is_a("join") and bool(layouts) and all(held.is_sharded for held in layouts.values())


def _joined(node: OperationNode, values: Sequence[LocalValue], layouts: dict[int, Layout]) -> Layouts | str:
    tensors: tuple[Reference, ...] = tuple(r for r in node.arguments[0] if r.identifier in layouts)
    held = [layouts[r.identifier] for r in tensors]
    rank = len(values[tensors[0].identifier].shape)
    dim = dim_of(node.target, node.arguments, rank)
    if len(set(held)) == 1 and held[0].dim != dim:
        return (held[0],)
    if any(h.interleave != 1 or h.within for h in held):
        return "concatenates values that are interleaved"
    if all(h.dim == dim for h in held):
        # In the features, or before an image's own dims; of (batch, sequence, hidden) the order of dim 1 matters.
        if dim != rank - 1 and (dim != 1 or rank < 4):
            return "concatenates values along the sharded dim"
        sizes = [values[r.identifier].shape[dim] for r in tensors]
        return (packed(dim, [p for h, n in zip(held, sizes, strict=True) for p in h.packs or (Pack(n),)]),)
    return "concatenates values that are sharded differently"


def _alike(
    node: OperationNode,
    values: Sequence[LocalValue],
    split: dict[int, Layout],
    layouts: dict[int, Layout],
    ask: Ask,
) -> Layouts | str:
    """An operation that does the same to each entry of the dim, whatever their order."""
    kinds = {(held.packs, held.within) for held in split.values()}
    if len(kinds) > 1:
        return "combines a packed value with one that is sharded differently"
    if node.is_a("reorder"):
        return "reorders a packed dim"
    ((packs, within),) = kinds
    number, held = next(iter(split.items()))
    assert held.dim is not None
    made = ask({n: h.bare for n, h in layouts.items()})
    if isinstance(made, str):
        return made
    shape = values[number].shape
    after = None
    if within:
        after = ask({n: sharded((h.dim or 0) + 1) if h.is_sharded else h for n, h in layouts.items()})
        if isinstance(after, str):
            return after
    found: list[Layout] = []
    for position, (output, result) in enumerate(zip(node.outputs, made, strict=True)):
        if output is not None and result.is_sharded:
            assert result.dim is not None
            kept = values[output].shape[result.dim :]
            if kept[0] != shape[held.dim] or result.interleave != 1:
                return "changes the size of a packed dim"
            if after is not None and (after[position].dim != result.dim + 1 or kept[1] != shape[held.dim + 1]):
                return "splits a dim that the ranks with one part share"
            result = packed(result.dim, packs, within)
        elif output is not None and within:
            return "reduces over a dim that the ranks with one part share"
        elif output is not None and result.forward == "P" and any(pack.is_shared for pack in packs):
            return "sums parts that several ranks hold, and would count them more than once"
        found.append(result)
    return tuple(found)


__all__ = ["concerns", "every_so_many", "picked_stretch", "results"]
