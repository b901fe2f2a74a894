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

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from torch import nn

from tpplan.compat.modules import PARAMETRIZATIONS, named_modules, parametrized_tensors
from tpplan.compiler.bind.linear import Addend, Product
from tpplan.compiler.bind.products import Dims, find_use, moved
from tpplan.compiler.bind.readers import Readers
from tpplan.compiler.ir.trace import Frame, Operation
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
        in_body: whether the layer's own forward computes it, and no parametrization does.
    """

    made: int
    use: Product | Addend
    parts: Mapping[str, Dims]
    buffers: Collection[str]
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
        """Whether any parameter is."""
        return any(self.form_of(part, style) is not None for part in self.parts if part not in self.buffers)


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
            found[leaves[inner]] = (*found.get(leaves[inner], ()), Computed(made, use, parts, buffers & parts.keys()))
    return found


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
        names = readers.trace.stored.get(held)
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
        if first is not None and place >= first:
            last = len(after) - 1
            into = (*range(last), None) if place == first else (*range(last - 1), None, last)
        elif known is not None and (known.kind in ("entrywise", "random") or first is not None):
            into = _broadcast(before, after)
        elif operation.is_a("convolution"):
            into = _convolved(place, before, after)
        elif operation.is_a("batch norm"):
            into = tuple(range(len(before))) if place == 0 else (1,)
        else:
            into = _inverse(moved(readers, operation, value, tuple(range(len(before)))), len(before))
            into = _broadcast(before, after) if into is None and before == after else into
        yield value, (None,) * len(before) if into is None else tuple(None if d is None else dims[d] for d in into)


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


__all__ = ["Computed", "computed_tensors", "layer_of", "names_among", "parts_of"]
