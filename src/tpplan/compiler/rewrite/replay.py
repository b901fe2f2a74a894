"""Replay: run a body from its record, where its own Python doesn't work on a rank's shards.

in:  the stock module without its numbers, how the body's values lie, a call with local tensors
out: the call's result: the operations that the stock body runs on whole tensors, one by one on the local ones

    y.view(batch, length, self.width // self.heads)   with y: S(2)   ->   the same view, to the local size

`nn.MultiheadAttention` and bodies like it derive sizes from sizes, so that no attribute of theirs could be made local.
For every new geometry of the arguments the body is recorded once on meta tensors of the whole shapes; its operations
then run on local tensors, with those of their arguments that are sizes made local. The layouts come from the rules that
placed the program (`propagate`), so that the check, which replays the body as well, holds for each call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from tpplan.compat import takes_device, without_dispatch_modes
from tpplan.compiler.bind.bind import Binding
from tpplan.compiler.bind.regions import build_regions
from tpplan.compiler.ir.class_reductions import CLASS_OPERATIONS, stock_function
from tpplan.compiler.ir.layout import REPLICATED, Features, Layout
from tpplan.compiler.ir.program import RecordedBody
from tpplan.compiler.ir.pytree import tensors_in
from tpplan.compiler.ir.region import CallNode, Instance, OperationNode
from tpplan.compiler.ir.script import Call, ReplayError, Run, Script, attribute_at, play
from tpplan.compiler.ir.trace import Crossing, Frame, Operation, Path, Reference, Trace
from tpplan.compiler.rewrite.attention import Attention, attentions, references
from tpplan.compiler.rules.convolution import CONVOLUTION, GROUPS, local_groups
from tpplan.compiler.rules.group_norm import CHANNELS, GROUP_NORM, local_sizes
from tpplan.compiler.rules.group_norm import GROUPS as GROUPS_OF_NORM
from tpplan.compiler.rules.packed import PICKS, SELECT, SPLITS, VIEWS
from tpplan.compiler.rules.propagate import NEW, Outcome, Propagator, Refusal, in_packs
from tpplan.compiler.trace.capture import Capture, argument_names, record, without_dead_operations
from tpplan.compiler.trace.effects import held_tensors
from tpplan.compiler.trace.recorder import Recorder
from tpplan.compiler.trace.skeleton import make_skeleton

_SHAPED = VIEWS | NEW | {"aten.expand.default"}
_FILLS = frozenset(f"aten.{name}.default" for name in ("zeros", "ones", "full", "empty"))
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device)


class Replay:
    """Runs one body from its record, and records it again for every new geometry."""

    def __init__(
        self,
        stock: nn.Module,
        body: RecordedBody,
        parameters: Mapping[str, Layout],
        size: int,
        rank: int,
        batch: Callable[[], int | None],
    ) -> None:
        """Replay a body.

        Args:
            stock: the stock module on meta tensors of whole shapes; it is copied before it runs.
            body: how its arguments, its results and those of its calls lie.
            parameters: the layouts of all parameters, and of split buffers, in it, by their names there.
            size, rank: the number of ranks, and which of them this is.
            batch: tells the batch size of the model's call, for sequences flattened with their batch.
        """
        self._stock = stock
        self._body = body
        self._parameters = parameters
        self._size, self._rank = size, rank
        self._batch = batch
        self._names = argument_names(type(stock).forward)
        self._scripts: dict[object, Script] = {}

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a call of `module`, whose parameters are local tensors, as are those in the arguments.

        Raises:
            ReplayError: the body can't be recorded on such arguments, or its operations can't run on shards.
        """
        batch = self._batch()
        casts = tuple(map(_autocast, ("cpu", "cuda")))
        key = (_geometry((args, kwargs), {}), module.training, torch.is_grad_enabled(), batch, casts)
        script = self._scripts.get(key)
        first = script is None
        if script is None:
            with without_dispatch_modes():
                script = self._scripts[key] = self._write(module.training, args, kwargs, batch)
        return play(script, module, self._names, args, kwargs, first)

    # -- recording ------------------------------------------------------------------------------------------------
    def _write(self, training: bool, args: tuple[Any, ...], kwargs: dict[str, Any], batch: int | None) -> Script:
        names = self._names
        layouts = dict(self._body.inputs)
        wholes: dict[int, Tensor] = {}

        def whole(held: Any, path: Path) -> Any:
            if isinstance(held, Tensor):
                if id(held) not in wholes:
                    wholes[id(held)] = self._whole(held, layouts.get(path, REPLICATED))
                return wholes[id(held)]
            if isinstance(held, tuple):
                return tuple(whole(item, (*path, i)) for i, item in enumerate(held))  # pyright: ignore
            return held

        given = tuple(whole(a, (names[i] if i < len(names) else f"*{i}",)) for i, a in enumerate(args))
        named = {name: whole(a, (name,)) for name, a in kwargs.items()}
        first = next((tensor for _, tensor in tensors_in((args, kwargs)) if not tensor.is_meta), None)
        state = Capture(_BodyRecorder(device=None if first is None else first.device), arguments={}, leaves=False)
        skeleton = make_skeleton(self._stock)
        try:
            trace = record(skeleton, given, named, training, state)
        except Exception as error:
            raise ReplayError(f"the body can't be recorded on such arguments: {error}") from error
        trace = self._wanted(trace, state.recorder.effects)
        held_by = [*trace.stored.values(), *(names for _, names in skeleton.parameters)]
        parameters = {name: self._parameters.get(name, REPLICATED) for names in held_by for name in names}
        root = build_regions(trace, Binding({}, parameters, {}))
        number = batch if batch is not None else (given[0].shape[0] if given and isinstance(given[0], Tensor) else 1)
        settled = _Settler(root, trace, self._body, self._size, number).settle()
        held = {value: parameters[names[0]] for value, names in trace.stored.items()}
        return self._script(trace, state, skeleton.model, {**held, **settled.layouts}, settled.slices)

    def _wanted(self, trace: Trace, effects: Collection[int]) -> Trace:
        """The record without results that the caller drops, and without what only these are made by."""
        wanted, root = {path for path, _ in self._body.results}, trace.root
        exits = tuple(c for c in root.exits if not wanted.isdisjoint((c.path, *c.aliases)))
        if len(exits) < len(root.exits):
            root = without_dead_operations(replace(root, exits=exits), {*effects})
        # Calls are made with all that they are passed, even where they don't read it.
        passed = {c.source for node in root.body if isinstance(node, Frame) for c in node.entries}
        if passed <= {*_made(replace(trace, root=root)), *trace.parameters}:
            return replace(trace, root=root)
        kept = {o for node in root.body if isinstance(node, Operation) for o in node.outputs if o is not None}
        whole = replace(trace.recorded, exits=root.exits)
        return replace(trace, root=without_dead_operations(whole, passed | kept))

    def _whole(self, local: Tensor, layout: Layout) -> Tensor:
        shape = list(local.shape)
        if layout.dim is not None:
            packs = sum(pack.size for pack in layout.packs)
            shape[layout.dim] = packs or shape[layout.dim] * self._size
            if layout.joint:
                shape[layout.dim + 1] = sum(pack.size for pack in layout.joint) // packs
            elif layout.within:
                shape[layout.dim + 1] = sum(pack.size for pack in layout.within)
        made = torch.empty_strided(shape, _strides(local, shape), dtype=local.dtype, device="meta")
        return made.requires_grad_(local.requires_grad and torch.is_grad_enabled())

    def _script(
        self,
        trace: Trace,
        state: Capture,
        model: nn.Module,
        layouts: Mapping[int, Layout],
        slices: Mapping[int, Mapping[int, Layout]],
    ) -> Script:
        recorder = state.recorder
        if trace.chosen or trace.assumptions:
            raise ReplayError("what the body runs depends on its tensors' values")
        read = set(_read(trace))
        held = {value: names[0] for value, names in trace.parameters.items() if value in read}
        attributes = {id(tensor): name for name, tensor in held_tensors(model)}
        for name, tensor in held_tensors(model):
            value = recorder.held_value(tensor)
            if value is not None and value in read:
                held.setdefault(value, _readable(model, name, tensor))
        made = set(_made(trace)) | held.keys()
        constants: list[tuple[int, Tensor]] = []
        for value in sorted(read - made):
            numbers = trace.values[value].numbers
            if numbers is None:
                raise ReplayError("the body reads a tensor that is neither a parameter, nor a buffer, nor an argument")
            if id(numbers) in attributes:
                held[value] = _readable(model, attributes[id(numbers)], numbers)
            else:
                constants.append((value, numbers))
        steps: list[Run | Call] = []
        for node in _with_attentions(trace, layouts, slices):
            if isinstance(node, Frame):
                args, kwargs = (state.arguments or {})[node.module, node.call]
                results = tuple((c.path, c.target) for c in node.exits)
                steps.append(Call(node.module, _referred(args, recorder), _referred(kwargs, recorder), results))
                continue
            taken = _sliced(node, slices)
            parts = {value: -1 - len(steps) - i for i, value in enumerate(taken)}
            steps += [_slice(v, parts[v], trace, lies, self._size, self._rank) for v, lies in taken.items()]
            if isinstance(node, Attention):
                shape = layouts.get(node.made, REPLICATED).local_shape(
                    trace.values[node.made].shape, self._size, self._rank
                )
                run = Run(scaled_dot_product_attention, (), references(node), (node.made,), (shape,), False)
            else:
                run = _localised(node, trace, {**layouts, **taken}, self._size, self._rank)
            steps.append(_reading(run, parts) if parts else run)
        entries = tuple((path, c.target) for c in trace.root.entries for path in (c.path, *c.aliases))
        sources: dict[int, int | None] = {c.target: c.source for c in trace.root.exits}
        result = state.results["", 0]
        made_by_call = {recorder.value_of(tensor) for _, tensor in tensors_in(result)}
        sources |= dict.fromkeys(made_by_call - sources.keys())
        return Script(
            entries, tuple(held.items()), tuple(constants), tuple(steps), _referred(result, recorder, sources)
        )


class _BodyRecorder(Recorder):
    """A recorder of bodies that leave autocast as it is: tensors on `meta` don't show what it casts."""

    def __init__(self, device: torch.device | None) -> None:
        super().__init__(device=device)
        self._kind = "cpu" if device is None else device.type
        self._around = _autocast(self._kind)

    def cross(self, tensor: Tensor) -> tuple[Tensor, int, int]:
        """As any recorder, and with the numbers of a constant that a call is passed."""
        alias, outside, inside = super().cross(tensor)
        if not tensor.is_meta and self.values[outside].numbers is None:
            self.values[outside] = replace(self.values[outside], numbers=tensor)
        return alias, outside, inside

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _autocast(self._kind) != self._around:
            raise ReplayError("it turns autocast on or off itself")
        return super().__torch_dispatch__(func, types, args, kwargs)


def _autocast(kind: str) -> torch.dtype | None:
    """What autocast casts to on a kind of device; None where it's off."""
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _readable(model: nn.Module, name: str, tensor: Tensor) -> str:
    """The path of attributes that leads to a tensor of the model, by which each call reads it anew."""
    if attribute_at(model, name) is not tensor:
        raise ReplayError(f"the body reads a tensor that `{name}` holds in a list or dict; make it a buffer")
    return name


@dataclass(frozen=True, slots=True)
class _Settled:
    """How a body's values lie, and of what it takes parts.

    Attributes:
        layouts: by value of the record.
        slices: by the first result of an operation, the whole operands of which it takes parts, and how these lie.
    """

    layouts: Mapping[int, Layout]
    slices: Mapping[int, Mapping[int, Layout]]

    def also(self, layouts: Mapping[int, Layout], slices: Mapping[int, Mapping[int, Layout]]) -> _Settled:
        """With more of both."""
        return _Settled({**self.layouts, **layouts}, {**self.slices, **slices})


class _Settler:
    """Finds the layouts of a body's values from those of its arguments and of what its calls return."""

    def __init__(self, root: Instance, trace: Trace, body: RecordedBody, size: int, batch: int) -> None:
        self.root, self.trace = root, trace
        self.propagator = Propagator(size, batch, frozenset(body.heads))
        self.inputs, self.results = dict(body.inputs), dict(body.results)
        self.calls = {(module, call): dict(results) for module, call, results in body.calls}
        self.refused: Refusal | None = None

    def settle(self) -> _Settled:
        """The layouts by value of the record.

        Raises:
            ReplayError: an operation can't run on shards that lie so.
        """
        known = {c.target: self.inputs.get(c.path, REPLICATED) for c in self.root.frame.entries}
        found = self._from(0, _Settled(known, {}))
        if found is None:  # as in the placement, whole values are sliced where nothing else works
            self.propagator = self.propagator.splitting(self.propagator.heads, slices=True)
            found = self._from(0, _Settled(known, {}))
        if found is None:
            raise ReplayError(
                self.refused.reason if self.refused is not None else "its results would have other layouts"
            )
        return found

    def _from(self, position: int, settled: _Settled) -> _Settled | None:
        region = self.root.region
        children = self.root.children
        calls = sum(1 for node in region.nodes[:position] if isinstance(node, CallNode))
        while position < len(region.nodes):
            node = region.nodes[position]
            position += 1
            if isinstance(node, CallNode):
                frame = children[calls].frame
                calls += 1
                promised = self.calls.get((frame.module, frame.call), {})
                settled = settled.also({c.target: promised.get(c.path, REPLICATED) for c in frame.exits}, {})
                continue
            outcomes = self._outcomes(node, settled.layouts)
            if len(outcomes) > 1:
                branches = (self._from(position, self._made(settled, node, o)) for o in outcomes)
                return next((found for found in branches if found is not None), None)
            if not outcomes:
                return None
            settled = self._made(settled, node, outcomes[0])
        return settled if self._leaves(settled.layouts) else None

    def _made(self, settled: _Settled, node: OperationNode, outcome: Outcome) -> _Settled:
        values = self.root.values
        made = {values[o]: held for o, held in zip(node.outputs, outcome.outputs, strict=True) if o is not None}
        slices = {values[i]: held for i, held in outcome.slices}
        first = next(o for o in node.outputs if o is not None)
        return settled.also(made, {values[first]: slices} if slices else {})

    def _outcomes(self, node: OperationNode, known: Mapping[int, Layout]) -> list[Outcome]:
        region, values = self.root.region, self.root.values

        def layout(i: int) -> Layout:
            own = region.values[i].parameter
            return known.get(values[i]) or (own if own is not None else REPLICATED)

        found = self.propagator.outcomes(node, region.values, layout)
        if isinstance(found, Refusal):
            self.refused = found
            return []
        return sorted(found, key=lambda o: not o.outputs[0].is_sharded) if self.propagator.slices else found

    def _leaves(self, known: Mapping[int, Layout]) -> bool:
        return all(
            _kind(known.get(c.source, REPLICATED)) == _kind(self.results.get(c.path, REPLICATED))
            for c in self.root.frame.exits
        )


def _strides(local: Tensor, shape: Sequence[int]) -> list[int]:
    """The strides of a whole tensor that lies in memory as its part does: its dims in the same order."""
    made, inner = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (local.stride(dim), -dim)):
        if local.stride(dim) or local.shape[dim] == 1 == shape[dim]:
            made[dim], inner = inner, inner * max(shape[dim], 1)
    return made


def _kind(layout: Layout) -> tuple[str, str, int | None]:
    return layout.forward, layout.gradient, layout.dim


def _read(trace: Trace) -> Iterator[int]:
    for node in trace.root.body:
        yield from node.inputs if isinstance(node, Operation) else (c.source for c in node.entries)
    yield from (c.source for c in trace.root.exits)


def _made(trace: Trace) -> Iterator[int]:
    yield from (c.target for c in trace.root.entries)
    for node in trace.root.body:
        if isinstance(node, Operation):
            yield from (value for value in node.outputs if value is not None)
        else:
            yield from (c.target for c in node.exits)


def _referred(held: Any, recorder: Recorder, instead: Mapping[int, int | None] | None = None) -> Any:
    """Arguments or results with `Reference`s for tensors; other objects than plain data can't be replayed."""
    if isinstance(held, Tensor):
        value = recorder.value_of(held)
        source = (instead or {}).get(value, value)
        return None if source is None else Reference(source)
    if type(held) is tuple:
        return tuple(_referred(item, recorder, instead) for item in held)  # pyright: ignore
    if type(held) is list:
        return [_referred(item, recorder, instead) for item in held]  # pyright: ignore
    if type(held) is dict:
        return {key: _referred(item, recorder, instead) for key, item in held.items()}  # pyright: ignore
    if isinstance(held, _PLAIN):
        return held
    raise ReplayError(f"the body passes on an object of class `{type(held).__name__}`")


def _geometry(held: Any, seen: dict[int, int]) -> object:
    """What a record depends on; also which places hold one and the same tensor, as attention looks at that."""
    if isinstance(held, Tensor):
        geometry = (tuple(held.shape), held.stride(), held.dtype, held.requires_grad)
        return (*geometry, seen.setdefault(id(held), len(seen)))
    if type(held) is tuple:
        return tuple(_geometry(item, seen) for item in held)  # pyright: ignore
    if type(held) is dict:
        return tuple((name, _geometry(item, seen)) for name, item in held.items())  # pyright: ignore
    if isinstance(held, _PLAIN):
        return (type(held).__name__, held)
    raise ReplayError(f"the body takes an object of class `{type(held).__name__}`")


# -- local sizes ------------------------------------------------------------------------------------------------------
def _localised(node: Operation, trace: Trace, layouts: Mapping[int, Layout], size: int, rank: int) -> Run:
    """An operation of the record with local sizes for whole ones."""

    def local(value: int) -> tuple[int, ...]:
        return layouts.get(value, REPLICATED).local_shape(trace.values[value].shape, size, rank)

    name, arguments = node.name, list(node.arguments)
    shapes = tuple(None if o is None else local(o) for o in node.outputs)
    made = next((o for o in node.outputs if o is not None), None)
    split = made is not None and layouts.get(made, REPLICATED).is_sharded
    if split and name in _SHAPED:
        arguments[1] = shapes[0]
    elif split and name in _FILLS:
        arguments[0] = shapes[0]
    elif name in SPLITS or name in (SELECT, "aten.slice.Tensor"):
        held = layouts.get(node.inputs[0], REPLICATED)
        whole = trace.values[node.inputs[0]].shape
        position = 2 if name in SPLITS else 1
        along: int = (arguments[position] if len(arguments) > position else 0) % len(whole)
        packs = held.shares(along, size, rank)[0]
        if name in SPLITS and (packs or held.dim == along):
            lengths = [shape[along] for shape in shapes if shape is not None]
            arguments[1] = tuple(lengths) if name == "aten.split_with_sizes.default" else lengths[0]
        elif packs and made is not None:
            first: int = arguments[2] or 0
            start = held.local_start(along, first + (whole[along] if first < 0 else 0), whole[along], size, rank)
            arguments[2:4] = [start] if name == SELECT else [start, start + local(made)[along]]
    elif name in PICKS and layouts.get(node.inputs[0], REPLICATED).packs:
        raise ReplayError("the body picks elements of a packed dim by index")
    elif name == CONVOLUTION:
        x = node.inputs[0]
        channels = trace.values[x].shape[1]
        arguments[GROUPS] = local_groups(arguments[GROUPS], layouts.get(x, REPLICATED), channels, size, rank)
    elif name == GROUP_NORM:
        own = local_sizes(arguments, layouts.get(node.inputs[0], REPLICATED), size, rank)
        arguments[CHANNELS], arguments[GROUPS_OF_NORM] = own
    if node.target in CLASS_OPERATIONS:
        return Run(stock_function(node.target), tuple(arguments), node.keywords, node.outputs, shapes, False)
    on_device = not node.inputs and takes_device(node.target)
    return Run(node.target, tuple(arguments), node.keywords, node.outputs, shapes, on_device)


def _with_attentions(
    trace: Trace, layouts: Mapping[int, Layout], slices: Mapping[int, Mapping[int, Layout]]
) -> Iterator[Operation | Frame | Attention]:
    """A record's body, in which attention is one call instead of its pieces."""
    found = {held.made: held for held in attentions(trace, layouts)}
    found = {made: held for made, held in found.items() if _sliced(held, slices).keys() <= {held.mask}}
    pieces = frozenset[int]().union(*(held.pieces for held in found.values()))
    for node in trace.root.body:
        made = next((o for o in node.outputs if o is not None), None) if isinstance(node, Operation) else None
        if made in found:
            yield found[made]
        elif made not in pieces:
            yield node


def _sliced(node: Operation | Attention, slices: Mapping[int, Mapping[int, Layout]]) -> dict[int, Layout]:
    """The whole operands of which a step takes parts."""
    made = node.pieces if isinstance(node, Attention) else [o for o in node.outputs if o is not None][:1]
    return {value: lies for o in made for value, lies in slices.get(o, {}).items()}


def _slice(value: int, part: int, trace: Trace, held: Layout, size: int, rank: int) -> Run:
    """The part of a whole value that a rank takes, as another value."""
    shape = trace.values[value].shape
    held = in_packs(held, shape)
    assert held.dim is not None
    packs = held.stretches(shape[held.dim])
    arguments = (Reference(value), held.dim, len(packs), *packs[0].part(size, rank))
    return Run(_part, arguments, {}, (part,), (held.local_shape(shape, size, rank),), False)


def _part(tensor: Tensor, dim: int, times: int, start: int, length: int) -> Tensor:
    """So many entries of a dim from `start` on, of each of `times` equal stretches of it.

    The operator is one that models don't call, by which the check knows it.
    """
    if times == 1:
        return torch.ops.aten.slice_copy.Tensor(tensor, dim, start, start + length)
    shape = (*tensor.shape[:dim], times, -1, *tensor.shape[dim + 1 :])
    apart = tensor.reshape(shape)
    return torch.ops.aten.slice_copy.Tensor(apart, dim + 1, start, start + length).flatten(dim, dim + 1)


def _reading(run: Run, parts: Mapping[int, int]) -> Run:
    """An operation that reads the parts of values in place of these."""

    def instead(held: Any) -> Any:
        if isinstance(held, Reference):
            return Reference(parts.get(held.identifier, held.identifier))
        if isinstance(held, tuple):
            return tuple(map(instead, held))  # pyright: ignore[reportUnknownArgumentType]
        return held

    return replace(run, arguments=instead(run.arguments), keywords={k: instead(v) for k, v in run.keywords.items()})


def recorded_body(frame: Frame, layouts: Mapping[int, Layout], heads: Features) -> RecordedBody:
    """How the values at the boundaries of a frame's body lie, in an assignment for these numbers of heads."""

    def at(crossings: Sequence[Crossing], inside: bool) -> tuple[tuple[Path, Layout], ...]:
        return tuple(
            (path, layouts.get(c.target if inside else c.source, REPLICATED))
            for c in crossings
            for path in (c.path, *c.aliases)
        )

    prefix = f"{frame.module}." if frame.module else ""
    counts: dict[str, int] = {}
    calls: list[tuple[str, int, tuple[tuple[Path, Layout], ...]]] = []
    for node in frame.body:
        if isinstance(node, Frame):
            name = node.module.removeprefix(prefix)
            calls.append((name, counts.get(name, 0), at(node.exits, inside=True)))
            counts[name] = counts.get(name, 0) + 1
    results = at(frame.exits, inside=False)
    return RecordedBody(at(frame.entries, inside=True), tuple(calls), results, tuple(sorted(heads)))


__all__ = ["Replay", "ReplayError", "recorded_body"]
