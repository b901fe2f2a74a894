"""Localise: learn from a failed check what would make the body run on local shards.

in:  a mismatch between the trace and the run on local shapes
out: integer attributes to divide (`self.num_heads`), to be tried and proved by another check; or values that must not
     be sharded, since the body reads their size

    view(b, s, self.num_heads, d) on q: S(2)   ->   num_heads: 8 -> 4
    arange(x.shape[1]) with x: S(1)            ->   x must not be S(1) in this body
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence, Set

from tpplan.compat.modules import named_modules
from tpplan.compiler.bind.attributes import integer_attributes
from tpplan.compiler.check.same_steps import CheckInput, Mismatch
from tpplan.compiler.ir.layout import REPLICATED, Layout
from tpplan.compiler.ir.program import LocalAttribute
from tpplan.compiler.ir.region import Instance
from tpplan.compiler.ir.trace import Frame, Operation
from tpplan.compiler.rules.users_operators import told_sizes, with_local_sizes
from tpplan.ops.declared import rule_of

_PAIRED = 12

Attributes = dict[str, tuple[LocalAttribute, ...]]


def propose_attributes(
    given: CheckInput,
    mismatch: Mismatch,
    current: Mapping[str, tuple[LocalAttribute, ...]],
    read: Callable[[str], Set[str]],
) -> Iterator[Attributes]:
    """Attribute settings worth a try: first one attribute, then pairs, then all that count a sharded dim.

    Only those that the module's code has `read` can make a difference; if there are any, it is called with the module.
    """
    modules = dict(named_modules(given.model))
    name = mismatch.frame.module
    taken = {a.name for a in current.get(name, ())}
    sizes = _sharded_sizes(given, mismatch.frame)
    candidates = [
        LocalAttribute.of(key, whole, local)
        for key, value in integer_attributes(modules[name])
        for whole, local in sizes
        if value == whole and key not in taken
    ]
    candidates = [held for held in candidates if held.name in read(name)]
    for subset in _subsets(candidates):
        proposal = dict(current)
        for other in equal_modules(given.instance, mismatch.frame):
            counts = dict(integer_attributes(modules[other]))
            if all(counts.get(added.name) == added.whole for added in subset):
                proposal[other] = (*proposal.get(other, ()), *subset)
        yield proposal


def _subsets(candidates: Sequence[LocalAttribute]) -> Iterator[tuple[LocalAttribute, ...]]:
    """One, two, and all; the module's own attributes come before those of its settings."""
    yield from ((c,) for c in candidates)
    if len(candidates) <= _PAIRED:
        yield from (pair for pair in itertools.combinations(candidates, 2) if pair[0].name != pair[1].name)
    distinct = list({c.name: c for c in candidates}.values())
    if len(distinct) > 2:
        yield tuple(distinct)


def _sharded_sizes(given: CheckInput, frame: Frame) -> list[tuple[int, tuple[int, ...]]]:
    """Sizes that are sharded in a body: whole, and on each rank."""
    ranks = range(given.size)
    found: dict[tuple[Layout, tuple[int, ...]], None] = {}
    for value in _values_before(frame, len(frame.body)):
        layout = given.assignment.layouts.get(value)
        if layout is not None and layout.dim is not None:
            found[layout, given.trace.values[value].shape] = None
    sizes: set[tuple[int, tuple[int, ...]]] = set()
    for layout, whole in found:
        local = zip(*(layout.local_shape(whole, given.size, rank) for rank in ranks), strict=True)
        sizes.update((a, b) for a, b in zip(whole, local, strict=True) if set(b) != {a})
        sizes.update((p.size, tuple(p.local(given.size, rank) for rank in ranks)) for p in layout.packs)
    for node in frame.body:  # of features, a user's operator may be told how many heads they are
        rule = rule_of(node.name) if isinstance(node, Operation) else None
        if isinstance(node, Operation) and rule is not None and rule.sizes:
            held = (given.trace.values, given.assignment.layouts, given.size)
            own = [told_sizes(rule, with_local_sizes(rule, node, *held, rank)) for rank in ranks]
            told = told_sizes(rule, node).items()
            sizes.update((count, tuple(local[name] for local in own)) for name, count in told)
    return sorted(sizes)


def split_values(given: CheckInput, mismatch: Mismatch) -> Iterator[int]:
    """The values that are sharded in a body until it departs from its promise."""
    for value in _values_before(mismatch.frame, mismatch.position):
        layout = given.assignment.layouts.get(value)
        if layout is not None and layout.dim is not None:
            yield value


def splits_parameters(given: CheckInput, frame: Frame) -> bool:
    """Whether a body itself reads a parameter, or a buffer, that is sharded."""
    layouts = given.assignment.layouts
    read = (i for node in frame.body if isinstance(node, Operation) for i in node.inputs)
    return any(i in given.trace.stored and layouts.get(i, REPLICATED).is_sharded for i in read)


def split_size(given: CheckInput, value: int) -> int | None:
    """The size of a value's sharded dim, if that counts features or heads; None for one along the sequence.

    A dim before the last is of heads, if no stream is split that is as long.
    """
    layout, shape = given.assignment.layouts[value], given.trace.values[value].shape
    assert layout.dim is not None
    if layout.interleave != 1 or layout.dim == 0:
        return None
    counts = layout.dim == len(shape) - 1 or shape[layout.dim] not in _split_lengths(given)
    return shape[layout.dim] if counts else None


def _split_lengths(given: CheckInput) -> set[int]:
    """The lengths of streams, (batch, sequence, hidden), that are split along the sequence."""
    shapes = ((given.trace.values[value].shape, layout) for value, layout in given.assignment.layouts.items())
    return {shape[1] for shape, layout in shapes if layout.dim == 1 and len(shape) == 3}


def _values_before(frame: Frame, position: int) -> list[int]:
    found = [c.target for c in frame.entries]
    for node in frame.body[:position]:
        if isinstance(node, Operation):
            found.extend(o for o in node.outputs if o is not None)
        else:
            found.extend(c.target for c in node.exits)
    return found


def equal_modules(instance: Instance, frame: Frame) -> frozenset[str]:
    """The modules that have a call with the same region as `frame`."""
    mine = find_instance(instance, frame.module, frame.call)
    if mine is None:
        return frozenset({frame.module})
    return frozenset(_with_region(instance, mine))


def _with_region(instance: Instance, wanted: Instance) -> Iterator[str]:
    if instance.region is wanted.region:
        yield instance.frame.module
    for child in instance.children:
        yield from _with_region(child, wanted)


def find_instance(instance: Instance, module: str, call: int) -> Instance | None:
    """The instance of one call."""
    if (instance.frame.module, instance.frame.call) == (module, call):
        return instance
    for child in instance.children:
        found = find_instance(child, module, call)
        if found is not None:
            return found
    return None


def read_sizes(
    given: CheckInput, mismatch: Mismatch, known: Set[tuple[tuple[str, int], int]]
) -> set[tuple[tuple[str, int], int]]:
    """Values (region's example, local number) that must not be sharded, as the mismatch comes from their local size.

    They are what the operation itself reads, if that is sharded: what that was made of needn't be whole as well. Else
    they are those of a size that shows in the mismatch, or as large as what the operation reads. Where the body took
    another turn, it doesn't show which size it read: then all that were sharded until there. Those that are `known`
    don't count.
    """
    whole = {size for size, _ in _sharded_sizes(given, mismatch.frame)}
    operands = frozenset(mismatch.operation.inputs) if mismatch.operation is not None else frozenset[int]()
    found = _of_sizes(given, mismatch, _sizes_of_operands(given, mismatch), operands) - known
    if found:
        return found
    for wanted in (set(mismatch.sizes(given.size)), _sizes_of_operands(given, mismatch), whole):
        found = _of_sizes(given, mismatch, wanted) - known
        if found:
            return found
    return set()


def _sizes_of_operands(given: CheckInput, mismatch: Mismatch) -> set[int]:
    """The whole sizes of the sharded dims that an operation reads of which the result has another shape."""
    if mismatch.operation is None or mismatch.expected is None:
        return set()
    held = ((given.assignment.layouts.get(value), value) for value in mismatch.operation.inputs)
    return {
        given.trace.values[value].shape[layout.dim]
        for layout, value in held
        if layout is not None and layout.dim is not None
    }


def _of_sizes(
    given: CheckInput, mismatch: Mismatch, wanted: Set[int], among: Set[int] | None = None
) -> set[tuple[tuple[str, int], int]]:
    """The values before the mismatch, or those `among` them, that are split along a dim of such a size."""
    instance = find_instance(given.instance, mismatch.frame.module, mismatch.frame.call)
    if instance is None:
        return set()
    numbers = {value: number for number, value in enumerate(instance.values)}
    found: set[tuple[tuple[str, int], int]] = set()
    for value in _values_before(mismatch.frame, mismatch.position):
        layout = given.assignment.layouts.get(value)
        if layout is None or layout.dim is None or value not in numbers or (among is not None and value not in among):
            continue
        if given.trace.values[value].shape[layout.dim] in wanted:
            found.add((instance.region.example, numbers[value]))
    return found
