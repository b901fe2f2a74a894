"""Computed weights: parameters of which a module's weight is computed in each forward, by torch's parametrizations.

in:  a model and its trace
out: by module, `Computed`: the product that the weight is a factor of, and where the dims of its parts go into its own

    v * (g / sqrt(sum(v * v)))           ->  v (out, in): 0, 1; g (out, 1): 0
    original + b @ a                     ->  original: 0, 1; b (out, rank): 0; a (rank, in): 1
    original * softplus(scale)[:, None]  ->  original: 0, 1; scale (out): 0
    original @ rotation                  ->  original: 0; rotation: 1

What is found here is where a part is split with the weight. Whether the steps can work on the parts is for the
placement to say, which walks them like any body.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from tpplan.compat.modules import PARAMETRIZATIONS, named_modules, parametrized_tensors
from tpplan.compiler.bind.linear import Addend, Product
from tpplan.compiler.bind.misfits import is_coded
from tpplan.compiler.bind.products import Dims, find_use, moved
from tpplan.compiler.bind.readers import Readers
from tpplan.compiler.ir.trace import Frame, Operation
from tpplan.ops.dim_map import dim_of, dims_of
from tpplan.ops.registry import first_factor, lookup
from tpplan.plan import Style

_DEEPEST = 32


@dataclass(frozen=True, slots=True)
class Computed:
    """A tensor of a module that is computed whenever it is read.

    Attributes:
        made: its value in the trace.
        use: the product that it is a factor of, or what it is added to.
        parts: the parameters and buffers that it is computed of, by name; for each of their dims, which of its own it
            goes into.
        buffers: which of them are buffers.
        codes: which of them hold what stands for most of the numbers, such as int8, or int4 two to a byte.
        in_body: whether the layer's own forward computes it, and no parametrization does.
    """

    made: int
    use: Product | Addend
    parts: Mapping[str, Dims]
    buffers: Collection[str]
    codes: Collection[str] = ()
    in_body: bool = False

    def form_of(self, part: str, style: Style) -> Product | Addend | None:
        """What a style splits of a part, as if it were the factor or the addend itself; None if it stays whole."""
        dims, use = self.parts[part], self.use
        if isinstance(use, Addend):
            place = _place(dims, use.output_dim) if style is Style.COLWISE or self.in_body else None
            return None if place is None else replace(use, output_dim=place, is_added=False)
        outputs, inputs = _place(dims, use.output_dim), _place(dims, use.input_dim)
        split, other = (outputs, inputs) if style is Style.COLWISE else (inputs, outputs)
        if split is None:
            return None
        other = split if other is None else other
        outputs, inputs = (split, other) if style is Style.COLWISE else (other, split)
        return replace(use, output_dim=outputs, input_dim=inputs, alike=())

    def is_split(self, style: Style) -> bool:
        """Whether the codes are, if it has any; else whether any parameter is."""
        own = self.codes or [part for part in self.parts if part not in self.buffers]
        return any(self.form_of(part, style) is not None for part in own)


def computed_tensors(model: nn.Module, readers: Readers) -> dict[str, tuple[Computed, ...]]:
    """By module, the tensors that parametrizations compute, as far as anything is multiplied by or added to them."""
    leaves = {
        f"{name}.{PARAMETRIZATIONS}.{leaf}".lstrip("."): name
        for name, module in named_modules(model)
        for leaf in parametrized_tensors(module)
    }
    if not leaves:
        return {}
    frames: dict[str, Frame] = {}
    for frame in readers.trace.root.walk():
        if frame.module in leaves and frame.exits:
            frames.setdefault(frame.module, frame)
    buffers = {name for names in readers.trace.buffers.values() for name in names}
    found: dict[str, tuple[Computed, ...]] = {}
    for inner, frame in frames.items():
        made = frame.exits[0].target
        use = find_use(readers, made)
        if use is not None:
            parts = {name: dims for name, dims in parts_of(readers, made) if name.startswith(f"{inner}.")}
            computed = Computed(made, use, parts, buffers & parts.keys(), codes_among(readers, parts))
            found[leaves[inner]] = (*found.get(leaves[inner], ()), computed)
    return found


def codes_among(readers: Readers, parts: Collection[str]) -> frozenset[str]:
    """Of stored tensors the largest that stand for numbers, of four bits or more, if no other holds more of them.

    A boolean one stands for as many numbers as it has entries: signs, unless it is a mask of others.
    """
    kinds = {part: readers.trace.values[readers.named[part]] for part in parts}
    sizes = {part: math.prod(held.shape) for part, held in kinds.items()}
    coded = {p: 2 * sizes[p] * held.dtype.itemsize for p, held in kinds.items() if is_coded(held.shape, held.dtype)}
    coded |= {p: sizes[p] for p, held in kinds.items() if held.dtype is torch.bool}
    most = max(coded.values(), default=0)
    plain = max((size for part, size in sizes.items() if part not in coded), default=0)
    return frozenset(part for part, size in coded.items() if size == most > plain)


def layer_of(name: str) -> str:
    """The module whose weight a module or a part inside of it computes; "" if there is none."""
    layer, inside, _ = name.rpartition(f".{PARAMETRIZATIONS}.")
    return layer if inside else ""


def parts_of(readers: Readers, value: int) -> Iterator[tuple[str, Dims]]:
    """The stored tensors that a value is computed of, each with the dims by which most of it goes into the value."""
    rank = len(readers.trace.values[value].shape)
    found: dict[str, Dims] = {}
    pending: list[tuple[int, Dims, int]] = [(value, tuple(range(rank)), 0)]
    seen: set[tuple[int, Dims]] = set()
    while pending:
        held, dims, depth = pending.pop(0)
        if (held, dims) in seen or depth > _DEEPEST:
            continue
        seen.add((held, dims))
        names = readers.stored.get(held)
        if names is not None:
            dims = (None,) * len(dims) if readers.is_written(held) else dims
            found |= {name: max(found.get(name, dims), dims, key=_known) for name in names}
            continue
        source, made = readers.maker(held)
        if source != held:
            pending.append((source, dims, depth))
        elif made is not None:
            pending += [(i, before, depth + 1) for i, before in _before(readers, made, held, dims)]
    yield from found.items()


def _before(readers: Readers, operation: Operation, made: int, dims: Dims) -> Iterator[tuple[int, Dims]]:
    """Where the dims of an operation's operands go, if those of its result go there; None where one ends."""
    values = readers.trace.values
    after, known = values[made].shape, lookup(operation.name)
    first = first_factor(operation.name)
    for place, value in enumerate(operation.inputs):
        before = values[value].shape
        if first is not None and first <= place < first + 2:
            last = len(after) - 1
            into = (*range(last), None) if place == first else (*range(last - 1), None, last)
        elif known is not None and (known.kind in ("entrywise", "random") or first is not None):
            into = _broadcast(before, after)
        elif operation.is_a("convolution"):
            into = _convolved(place, before, after)
        elif operation.is_a("batch norm"):
            into = tuple(range(len(before))) if place == 0 else (1,)
        elif operation.is_a("join", "stack") and before:
            along = dim_of(operation.target, operation.arguments, len(after))
            kept = [None if d == along else d for d in range(len(after))]
            into = tuple(kept if len(before) == len(after) else kept[:along] + kept[along + 1 :])
        elif operation.is_a("reshape"):
            into = _reshaped(before, after)
        elif operation.is_a("sum", "mean"):
            summed = dims_of(operation.target, operation.arguments, len(before))
            kept = [d for d in range(len(before)) if d not in summed or len(after) == len(before)]
            into = tuple(None if d in summed else kept.index(d) for d in range(len(before)))
        elif place > 0 and operation.is_a("pick", "row look-up", "take") and len(before) <= len(after):
            first = _first_picked(operation)  # the numbers that say which
            into = tuple(range(first, first + len(before)))
        else:
            into = _inverse(moved(readers, operation, value, tuple(range(len(before)))), len(before))
            into = _broadcast(before, after) if into is None and before == after else into
        yield value, (None,) * len(before) if into is None else tuple(None if d is None else dims[d] for d in into)


def _first_picked(operation: Operation) -> int:
    """Where the dims of the numbers by which entries are picked stand in what is picked."""
    if operation.is_a("index"):
        return next((d for d, held in enumerate(operation.arguments[1]) if held is not None), 0)
    return operation.arguments[1] if operation.is_a("pick") else 0


def _reshaped(before: tuple[int, ...], after: tuple[int, ...]) -> Dims:
    """Where the dims go that a view takes apart and joins: of each run of dims that it rearranges, the first stays so.

    (outputs, groups, 8) -> (outputs, inputs): 0, 1, None. A part of the first is a part of what the run has become.
    """
    into: list[int | None] = [None] * len(before)
    mine, theirs = [d for d, n in enumerate(before) if n != 1], [d for d, n in enumerate(after) if n != 1]
    while mine and theirs:
        own, other = mine.pop(0), theirs.pop(0)
        into[own] = other
        counts = [before[own], after[other]]
        while counts[0] != counts[1]:
            side, dims, shape = (0, mine, before) if counts[0] < counts[1] else (1, theirs, after)
            if not dims:
                return tuple(into)
            counts[side] *= shape[dims.pop(0)]
    return tuple(into)


def _convolved(place: int, before: tuple[int, ...], after: tuple[int, ...]) -> Dims:
    """Where the dims of a convolution's input, weight and bias go: those of images stay, channels come of weights."""
    images = tuple(d if n == after[d] else None for d, n in enumerate(before[2:], 2))
    return (0, None, *images) if place == 0 else (1, *(None for _ in before[1:]))


def _broadcast(before: tuple[int, ...], after: tuple[int, ...]) -> Dims:
    """The dims of a result that those of an operand are, from the last on."""
    grown = len(after) - len(before)
    return tuple(d + grown if n == after[d + grown] else None for d, n in enumerate(before))


def _inverse(dims: Dims | None, rank: int) -> Dims | None:
    return None if dims is None else tuple(dims.index(d) if d in dims else None for d in range(rank))


def _known(dims: Dims) -> int:
    return sum(d is not None for d in dims)


def _place(dims: Dims, dim: int) -> int | None:
    return dims.index(dim) if dim in dims else None


def names_among(computed: Collection[Computed]) -> frozenset[str]:
    """The names of all parts."""
    return frozenset(name for held in computed for name in held.parts)


__all__ = ["Computed", "codes_among", "computed_tensors", "layer_of", "names_among", "parts_of"]
