"""Weights that a layer computes in its own forward, of its parameters and buffers alone.

in:  a model's trace
out: by module, the `Computed` weights that its body multiplies what it is passed by

    F.linear(x, weight + b @ a)                        ->  weight: 0, 1; b (out, rank): 0; a (rank, in): 1
    F.linear(x, weight * mask)                         ->  weight: 0, 1; mask: 0, 1
    F.conv2d(x, (weight - weight.mean(…)) / …)         ->  weight: 0, 1
    F.linear(x, weight.T)                              ->  nothing: the weight is read as it is stored

A body is a layer's if all products with its input are its own, and have the same outputs and inputs. What computes
attention or the like by its own products is none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from torch import nn

from tpplan.compat.modules import named_modules
from tpplan.compiler.bind.computed_weights import Computed, codes_among, computed_tensors, parts_of
from tpplan.compiler.bind.linear import Addend, Product, linear_form
from tpplan.compiler.bind.products import find_buffer_use, find_use, moved
from tpplan.compiler.bind.readers import Readers
from tpplan.compiler.ir.assembly import assemblies_of
from tpplan.compiler.ir.trace import Frame, Location, Operation, Value
from tpplan.ops.registry import lookup
from tpplan.plan import Style

_DEEPEST = 12


def computed_by_layers(model: nn.Module, readers: Readers) -> dict[str, tuple[Computed, ...]]:
    """By module, the tensors that parametrizations compute, and those that layers compute in their own forward."""
    return computed_in_bodies(model, readers) | computed_tensors(model, readers)


def computed_in_bodies(model: nn.Module, readers: Readers) -> dict[str, tuple[Computed, ...]]:
    """By module, the weights that the bodies of layers compute, with what is added to their products."""
    frames: dict[str, Frame] = {}
    for frame in readers.trace.root.walk():
        if frame.exits:
            frames.setdefault(frame.module, frame)
    modules = dict(named_modules(model))
    passed = readers.trace.given
    found: dict[str, tuple[Computed, ...]] = {}
    for name, frame in frames.items():
        if not name or not _is_plain(frame):
            continue
        held = tuple(_with_unread(readers, modules[name], name, weight) for weight in _computed(readers, frame, passed))
        if held and _is_layer(readers, frame, passed) and linear_form(modules[name]) is None:
            found[name] = held
    return found


def members_of(readers: Readers, layer: str, weights: Collection[Computed], style: Style) -> dict[str, Style]:
    """What a style of such a layer makes of its parameters, and of buffers that its weights are computed of."""
    frame = next(frame for frame in readers.trace.root.walk() if frame.module == layer and frame.exits)
    members = dict.fromkeys((name for weight in weights for name in weight.parts), style)
    after = _following(frame, {weight.use.made for weight in weights if isinstance(weight.use, Product)})
    for value, names in readers.stored.items():
        if names[0] in members or not names[0].startswith(f"{layer}."):
            continue
        is_buffer = value in readers.trace.buffers
        use = find_buffer_use(readers, value, is_part=True) if is_buffer else find_use(readers, value)
        if isinstance(use, Product) or (use is not None and use.made in after and use.is_added):
            members[names[0]] = style
        elif use is not None and use.made is not None and (use.made in after) == (style is Style.COLWISE):
            members[names[0]] = Style.COLWISE  # it stands beside features that are split
    return members


def _following(frame: Frame, values: set[int]) -> set[int]:
    """These values of a body, and what it makes of them."""
    found = set(values)
    for node in frame.body:
        if isinstance(node, Operation) and not found.isdisjoint(node.inputs):
            found.update(o for o in node.outputs if o is not None)
    return found


def _computed(readers: Readers, frame: Frame, passed: frozenset[int]) -> Iterator[Computed]:
    """The weights of a body, and the biases, as far as anything is computed for them."""
    buffers = {name for names in readers.trace.buffers.values() for name in names}
    seen, known = set[int](), set[str]()
    for operation in _products(frame):
        for value in operation.inputs if not passed.isdisjoint(operation.inputs) else ():
            if value in passed or value in seen:
                continue
            seen.add(value)
            use = find_use(readers, value)
            parts = {name: dims for name, dims in parts_of(readers, value) if name.startswith(f"{frame.module}.")}
            codes = codes_among(readers, parts)
            if isinstance(use, Addend) and parts.keys() <= known:
                continue  # scales that are computed of the weight
            if use is not None and (codes or (parts and _is_computed(readers, value))):
                known |= parts.keys()
                yield Computed(value, use, parts, buffers & parts.keys(), codes, in_body=True)


def _with_unread(readers: Readers, module: nn.Module, name: str, weight: Computed) -> Computed:
    """A weight, with what its class keeps beside what the body reads: that is cut as the class slices it."""
    parts = dict(weight.parts)
    for assembly in assemblies_of(module).values():
        dims = {part: assembly.dims_of(inner) for inner, part in assembly.parts.items()}
        places = {f"{name}.{part}": held for part, held in dims.items()}
        read = {
            outer: weight.parts[part][dim]
            for part in weight.parts.keys() & places.keys()
            for dim, outer in enumerate(places[part])
            if outer is not None
        }
        for part in places.keys() - parts.keys() if read else ():
            if next(readers.of(readers.named[part]), None) is None:
                parts[part] = tuple(None if outer is None else read.get(outer) for outer in places[part])
    return replace(weight, parts=parts)


def _is_layer(readers: Readers, frame: Frame, passed: frozenset[int]) -> bool:
    """Whether all products with the call's input are its own, and make as many features, of as many."""
    values, sizes = readers.trace.values, set[tuple[int, int]]()
    for inner in frame.walk():
        for operation in _products(inner):
            if passed.isdisjoint(operation.inputs):
                continue
            if inner is not frame:
                return False
            uses = [find_use(readers, i) for i in operation.inputs if i not in passed]
            sizes |= set(_sizes(values, operation, uses)) or {(0, 0)}
    if len(sizes) != 1:
        return False
    ((outputs, inputs),) = sizes
    given, made = values[frame.entries[0].target].shape, values[frame.exits[0].source].shape
    return inputs in given and outputs in made


def why_no_layer(readers: Readers, frame: Frame) -> tuple[str, str, Location | None] | None:
    """Why a body isn't one layer's; what to do instead; and at which line."""
    values, passed, found = readers.trace.values, readers.trace.given, dict[str, Operation]()
    outputs = 0
    for operation in (node for node in _products(frame) if not passed.isdisjoint(node.inputs)):
        factors = [i for i in operation.inputs if i not in passed]
        if not factors:
            what = "both factors of a product follow from its input, as in attention, or where that picks columns"
            way_out = (
                "name the parameters that it multiplies by, or multiply a whole weight by `torch.where(large, x, 0)`"
            )
            return what, way_out, operation.location
        if not any(_is_own(readers, frame, i) for i in factors):
            what = "it multiplies by what it doesn't make of its parameters and buffers, such as a kept tensor"
            return what, "make the weight in each forward, or register it by `register_buffer`", operation.location
        if any(len(values[i].shape) == 3 and values[i].shape[0] > 1 for i in factors):
            what = "it makes a product for each group or head of its input"
            way_out = "scale the weight before a single product, as by `scales.repeat_interleave(group, 1)`"
            return what, way_out, operation.location
        sizes = next(_sizes(values, operation, [find_use(readers, i) for i in factors]), values[factors[0]].shape)
        outputs = sizes[0]
        found.setdefault(" by ".join(map(str, sizes)), operation)
    shapes, line = ", ".join(found), next((operation.location for operation in found.values()), None)
    if len(found) > 1:
        way_out = "make each product a layer of its own, as that which rotates its input or adds a low-rank matrix"
        return f"it multiplies by several matrices, {shapes}", way_out, line
    if found and frame.exits and outputs not in values[frame.exits[0].source].shape:
        way_out = "multiply stacked matrices by `torch.bmm`, or add them up first"
        return f"its result hasn't the features that its product makes, {shapes}", way_out, line
    for kernel in _readers_of_both(readers, frame):
        return f"{kernel.name} has no rule that says how it is split", "multiply by matrix products", kernel.location
    return None


def _readers_of_both(readers: Readers, frame: Frame) -> Iterator[Operation]:
    """The operations without a row in the registry that read what the body is passed, and what is stored for it."""
    for node in frame.body:
        if isinstance(node, Operation) and lookup(node.name) is None:
            given = [i in readers.trace.given for i in node.inputs]
            if any(given) and any(_is_own(readers, frame, i) for i in node.inputs):
                yield node


def _is_own(readers: Readers, frame: Frame, value: int) -> bool:
    return any(name.startswith(f"{frame.module}.") for name, _ in parts_of(readers, value))


def _sizes(
    values: Sequence[Value], operation: Operation, uses: Iterable[Product | Addend | None]
) -> Iterator[tuple[int, int]]:
    """How many features products make, of how many; a convolution in groups goes with the channels by its weight."""
    for use in uses:
        if isinstance(use, Product):
            yield use.outputs, use.inputs
        elif use is not None and not use.is_added and operation.is_a("convolution"):
            yield use.outputs, values[operation.inputs[0]].shape[1]


def _products(frame: Frame) -> Iterator[Operation]:
    for node in frame.body:
        if isinstance(node, Operation) and node.is_a("product", "grouped product", "convolution"):
            yield node


def _is_computed(readers: Readers, value: int) -> bool:
    """Whether more was done to what is stored than to turn, move or cast it."""
    for _ in range(_DEEPEST):
        source, made = readers.maker(value)
        if source in readers.stored or made is None:
            return False
        dims = tuple(range(len(readers.trace.values[made.inputs[0]].shape))) if made.inputs else ()
        if not made.inputs or moved(readers, made, made.inputs[0], dims) is None:
            return bool(made.inputs)
        value = made.inputs[0]
    return False


def _is_plain(frame: Frame) -> bool:
    return len(frame.entries) == 1 and len(frame.exits) == 1 and not frame.exits[0].path


__all__ = ["computed_by_layers", "computed_in_bodies", "members_of", "why_no_layer"]
