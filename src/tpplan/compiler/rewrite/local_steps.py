"""Localise: the operations of a record as a rank runs them.

in:  a record, and how its values lie
out: its operations with the sizes that a rank has; attention as one call; slices of whole values, and reshards, before
     what reads them

    view(x, (2, 16, 8, 4)) with x: S(2), 2 ranks   ->   view(x, (2, 16, 4, 4))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tpplan.compat.schemas import schema_mutates, takes_device
from tpplan.compiler.ir.class_reductions import CLASS_OPERATIONS, stock_function
from tpplan.compiler.ir.layout import REPLICATED, Layout, in_packs
from tpplan.compiler.ir.script import OwnBackward, ReplayError, Run
from tpplan.compiler.ir.trace import ForeignBackward, Frame, Operation, Reference, Trace, filled, made_inside
from tpplan.compiler.rewrite.attention import Attention, attentions, references
from tpplan.compiler.rewrite.settle import Settled
from tpplan.compiler.rules.backwards import BackwardLayouts
from tpplan.compiler.rules.own_arguments import with_own_arguments
from tpplan.ops.dim_map import dim_of, dims_of, size_argument
from tpplan.ops.flex import is_flex
from tpplan.ops.issued import SLICE_COPY, VIEWS_OF_PARTS


class Exchanges(Protocol):
    """What a body does between its operations, at run time or on shapes."""

    @property
    def strict(self) -> bool:
        """Whether it must be what the program says, as in the example; calls of other sizes may need more."""
        ...

    def reshard(
        self, source: Layout, target: Layout, shape: tuple[int, ...], before: str
    ) -> Callable[[Tensor], Tensor]:
        """A reshard: of the layouts before and after, the whole's shape, and the operation that it stands before."""
        ...

    def mean(self, count: int, stock: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """What runs in place of a mean over `count` entries of which a rank has a part."""
        ...


def local_steps(
    trace: Trace, settled: Settled, size: int, rank: int, exchanges: Exchanges | None
) -> Iterator[Run | Frame]:
    """What a rank runs of a body, and the bodies that it calls, in order.

    Raises:
        ReplayError: an operation can't run on shards that lie so.
    """
    count = 0
    inside = made_inside(trace.root, trace.gradients.gradless)
    writes = _writes(trace.root.body)
    moved: dict[tuple[int, Layout], int] = {}
    for node in _with_attentions(trace, settled):
        if isinstance(node, Frame):
            yield node
            continue
        if isinstance(node, Operation) and node.overwritten:
            moved.clear()
        if isinstance(node, Operation) and is_flex(node.name):
            raise ReplayError("the body calls `flex_attention` with functions of its own, which a record hasn't")
        here = _before(node, settled.moves)
        instead: dict[int, int] = {}
        for value, target in here.items():
            if (value, target) not in moved:
                count += 1
                moved[value, target] = -count
                assert exchanges is not None and isinstance(node, Operation)
                shape = trace.values[value].shape
                step = exchanges.reshard(settled.layouts.get(value, REPLICATED), target, shape, node.name)
                local = target.local_shape(shape, size, rank)
                yield Run(step, (Reference(value),), {}, (-count,), (local,), False, _made(node) in inside)
            instead[value] = moved[value, target]
        taken = _before(node, settled.slices)
        for value, lies in taken.items():
            count += 1
            part = _slice(instead.get(value, value), -count, trace.values[value].shape, lies, size, rank)
            yield replace(part, gradless=_made(node) in inside)
            instead[value] = -count
        layouts = {**settled.layouts, **here, **taken}
        run = (
            _attended(node, trace, layouts, size, rank)
            if isinstance(node, Attention)
            else localised(node, trace, layouts, size, rank)
        )
        if exchanges is not None and isinstance(node, Operation) and node.is_a("mean"):
            run = _averaged(run, node, trace, layouts, exchanges)
        run = replace(run, gradless=run.gradless or _made(node) in inside)
        if not writes and run.target in VIEWS_OF_PARTS:
            run = replace(run, target=VIEWS_OF_PARTS[run.target])
        yield _reading(run, instead) if instead else run


def _writes(body: Sequence[Operation | Frame]) -> bool:
    """Whether a body writes to more than to results that it has just made and that are known by no other name."""
    made = set[int | None]()
    for node in body:
        if not isinstance(node, Operation):
            continue
        if not schema_mutates(node.target):
            made.update(node.outputs if node.is_a("product", "arithmetic") else ())
        elif node.overwritten or not node.is_a("arithmetic") or node.inputs[0] not in made:
            return True
        else:
            made.update(node.outputs)
    return False


def own_backward(
    held: ForeignBackward, found: BackwardLayouts, trace: Trace, size: int, rank: int, exchanges: Exchanges | None
) -> OwnBackward:
    """What a rank runs of a backward that torch didn't derive.

    Raises:
        ReplayError: an operation can't run on shards that lie so.
    """
    graph = held.graph
    if graph.writes or _writes(graph.body):
        raise ReplayError(f"{held.name} writes to what outlasts it, or is a view or a copy by a gradient's strides")
    alone = replace(trace, root=Frame("", 0, (), (), graph.body), values=graph.values)
    steps = local_steps(alone, Settled(found.layouts, {}, found.moves), size, rank, exchanges)
    given = {*graph.arriving, *graph.saved, *(output for node in graph.body for output in node.outputs)}
    read = {value for node in graph.body for value in node.inputs} | {v for v in graph.results if v is not None}
    constants = [(value, graph.values[value].numbers) for value in sorted(read - given)]
    numbers = tuple((value, held) for value, held in constants if held is not None)
    if len(numbers) < len(constants):
        raise ReplayError(f"{held.name} reads a tensor that is neither a gradient nor a value of its forward")
    runs = tuple(step for step in steps if isinstance(step, Run))
    return OwnBackward(held.name, graph.arriving, graph.saved, numbers, runs, graph.results)


def _made(node: Operation | Attention) -> int | None:
    """What a step makes first."""
    return node.made if isinstance(node, Attention) else next((o for o in node.outputs if o is not None), None)


def _averaged(run: Run, node: Operation, trace: Trace, layouts: Mapping[int, Layout], exchanges: Exchanges) -> Run:
    """A mean; over a split dim a rank makes its part of the whole's."""
    (x,) = node.inputs
    shape, held = trace.values[x].shape, layouts.get(x, REPLICATED)
    dims = dims_of(node.target, node.arguments, len(shape))
    if held.dim not in dims:
        return run
    return replace(run, target=exchanges.mean(math.prod(shape[dim] for dim in dims), node.target))


def _attended(node: Attention, trace: Trace, layouts: Mapping[int, Layout], size: int, rank: int) -> Run:
    shape = layouts.get(node.made, REPLICATED).local_shape(trace.values[node.made].shape, size, rank)
    return Run(scaled_dot_product_attention, (), references(node), (node.made,), (shape,), False)


def localised(node: Operation, trace: Trace, layouts: Mapping[int, Layout], size: int, rank: int) -> Run:
    """An operation of the record with local sizes for whole ones."""

    def local(value: int) -> tuple[int, ...]:
        return layouts.get(value, REPLICATED).local_shape(trace.values[value].shape, size, rank)

    node = with_own_arguments(node, trace.values, layouts, size, rank)
    arguments, place = list(node.arguments), size_argument(node.target)
    shapes = tuple(None if o is None else local(o) for o in node.outputs)
    made = next((o for o in node.outputs if o is not None), None)
    split = made is not None and layouts.get(made, REPLICATED).is_sharded
    if split and place is not None and node.is_a("reshape", "expand", "fill", "new"):
        arguments[place] = shapes[0]
    elif split and node.is_a("repeat") and math.prod(trace.values[node.inputs[0]].shape) == 1:
        arguments[1] = shapes[0]
    elif node.is_a("split", "select", "slice"):
        held = layouts.get(node.inputs[0], REPLICATED)
        whole = trace.values[node.inputs[0]].shape
        along = dim_of(node.target, arguments, len(whole))
        packs = held.shares(along, size, rank)[0]
        if node.is_a("split") and (packs or held.dim == along):
            lengths = [shape[along] for shape in shapes if shape is not None]
            arguments[1] = tuple(lengths) if node.is_a("split by sizes") else lengths[0]
        elif packs and arguments[4:5] not in ([], [1]):  # every so many entries, from one end to the other
            arguments[3] = None
        elif packs and made is not None:
            first: int = arguments[2] or 0
            start = held.local_start(along, first + (whole[along] if first < 0 else 0), whole[along], size, rank)
            arguments[2:4] = [start] if node.is_a("select") else [start, start + local(made)[along]]
    elif node.is_a("pick") and layouts.get(node.inputs[0], REPLICATED).packs:
        raise ReplayError("the body picks elements of a packed dim by index")
    if node.target in CLASS_OPERATIONS:
        return Run(stock_function(node.target), tuple(arguments), node.keywords, node.outputs, shapes, False)
    on_device = not node.inputs and takes_device(node.target)
    return Run(node.target, tuple(arguments), node.keywords, node.outputs, shapes, on_device, _is_gradless(node, trace))


def _is_gradless(node: Operation, trace: Trace) -> bool:
    """Whether no result of an operation has a gradient, though an operand and numbers that it makes could have one."""
    made = [trace.values[o] for o in node.outputs if o is not None]
    if node.overwritten or not any(held.dtype.is_floating_point for held in made):
        return False
    return not any(held.differentiable for held in made) and any(trace.values[i].differentiable for i in node.inputs)


def _with_attentions(trace: Trace, settled: Settled) -> Iterator[Operation | Frame | Attention]:
    """A record's body, in which attention is one call instead of its pieces."""
    found = {held.made: held for held in attentions(trace, settled.layouts)}
    found = {made: held for made, held in found.items() if _before(held, settled.slices).keys() <= {held.mask}}
    found = {made: held for made, held in found.items() if not _before(held, settled.moves)}
    pieces = frozenset[int]().union(*(held.pieces for held in found.values()))
    for node in trace.root.body:
        made = next((o for o in node.outputs if o is not None), None) if isinstance(node, Operation) else None
        if made in found:
            yield found[made]
        elif made not in pieces:
            yield node


def _before(node: Operation | Attention, settled: Mapping[int, Mapping[int, Layout]]) -> dict[int, Layout]:
    """The operands of a step to which something is done before it, and how they lie then."""
    made = node.pieces if isinstance(node, Attention) else [o for o in node.outputs if o is not None][:1]
    return {value: lies for o in made for value, lies in settled.get(o, {}).items()}


def _slice(value: int, part: int, shape: tuple[int, ...], held: Layout, size: int, rank: int) -> Run:
    """The part of a whole value that a rank takes, as another value."""
    held = in_packs(held, shape)
    assert held.dim is not None
    packs = held.stretches(shape[held.dim])
    arguments = (Reference(value), held.dim, len(packs), *packs[0].part(size, rank))
    return Run(_part, arguments, {}, (part,), (held.local_shape(shape, size, rank),), False)


def _part(tensor: Tensor, dim: int, times: int, start: int, length: int) -> Tensor:
    """So many entries of a dim from `start` on, of each of `times` equal stretches of it."""
    if times == 1:
        return SLICE_COPY(tensor, dim, start, start + length)
    shape = (*tensor.shape[:dim], times, -1, *tensor.shape[dim + 1 :])
    apart = tensor.reshape(shape)
    return SLICE_COPY(apart, dim + 1, start, start + length).flatten(dim, dim + 1)


def _reading(run: Run, parts: Mapping[int, int]) -> Run:
    """An operation that reads the parts of values in place of these."""

    def instead(value: int) -> Reference:
        return Reference(parts.get(value, value))

    keywords = {name: filled(held, instead) for name, held in run.keywords.items()}
    return replace(run, arguments=filled(run.arguments, instead), keywords=keywords)


__all__ = ["Exchanges", "local_steps", "localised", "own_backward"]
