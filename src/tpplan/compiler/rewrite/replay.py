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
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tpplan.compat.modes import without_dispatch_modes
from tpplan.compiler.bind.bind import Binding
from tpplan.compiler.bind.regions import build_regions
from tpplan.compiler.ir.layout import REPLICATED, Features, Layout
from tpplan.compiler.ir.observations import CaptureSettings
from tpplan.compiler.ir.pytree import children, rebuilt, tensors_in
from tpplan.compiler.ir.replaced_bodies import MovedOperand, RecordedBody
from tpplan.compiler.ir.script import ReplayError, Run, Script, ScriptCall, attribute_at, play
from tpplan.compiler.ir.trace import Crossing, Frame, Operation, Path, Reference, Trace, made_inside
from tpplan.compiler.rewrite.local_steps import Exchanges, local_steps, own_backward
from tpplan.compiler.rewrite.settle import Settled, settle
from tpplan.compiler.rules.backwards import Around, BackwardFault, backward_layouts
from tpplan.compiler.rules.propagate import Propagator
from tpplan.compiler.trace.capture import Capture, record, without_dead_operations
from tpplan.compiler.trace.effects import held_tensors
from tpplan.compiler.trace.recorder import Recorder
from tpplan.compiler.trace.signatures import argument_names
from tpplan.compiler.trace.skeleton import make_skeleton

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
        exchanges: Exchanges | None = None,
    ) -> None:
        """Replay a body.

        Args:
            stock: the stock module on meta tensors of whole shapes; it is copied before it runs.
            body: how its arguments, its results and those of its calls lie.
            parameters: the layouts of all parameters, and of split buffers, in it, by their names there.
            size, rank: the number of ranks, and which of them this is.
            batch: tells the batch size of the model's call, for sequences flattened with their batch.
            exchanges: makes what stands between the body's operations.
        """
        self._stock = stock
        self._body = body
        self._parameters = parameters
        self._size, self._rank = size, rank
        self._batch = batch
        self._exchanges = exchanges
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
        layouts, lengths = dict(self._body.inputs), dict(self._body.lengths)
        wholes: dict[int, Tensor] = {}

        def whole(held: Any, path: Path) -> Any:
            if isinstance(held, Tensor):
                if id(held) not in wholes:
                    wholes[id(held)] = self._whole(held, layouts.get(path, REPLICATED), lengths.get(path))
                return wholes[id(held)]
            if isinstance(held, tuple):
                return tuple(whole(item, (*path, i)) for i, item in enumerate(held))  # pyright: ignore
            return held

        given = tuple(whole(a, (names[i] if i < len(names) else f"*{i}",)) for i, a in enumerate(args))
        named = {name: whole(a, (name,)) for name, a in kwargs.items()}
        first = next((tensor for _, tensor in tensors_in((args, kwargs)) if not tensor.is_meta), None)
        device = torch.device("cpu") if first is None else first.device
        settings = CaptureSettings(training, device=device, records=torch.is_grad_enabled())
        state = Capture(_BodyRecorder(settings), arguments={}, leaves=False)
        state.weights = self._body.weights
        skeleton = make_skeleton(self._stock)
        try:
            trace = record(skeleton, given, named, state)
        except Exception as error:
            raise ReplayError(f"the body can't be recorded on such arguments: {error}") from error
        trace = self._wanted(trace, state.recorder.effects.made)
        held_by = [*trace.stored.values(), *(names for _, names in skeleton.parameters)]
        parameters = {name: self._parameters.get(name, REPLICATED) for names in held_by for name in names}
        root = build_regions(trace, Binding({}, parameters, {}))
        number = batch if batch is not None else (given[0].shape[0] if given and isinstance(given[0], Tensor) else 1)
        held = {value: parameters[names[0]] for value, names in trace.stored.items()}
        found = settle(root, trace, self._body, self._size, number)
        if self._exchanges is not None and self._exchanges.strict and not found.followed:
            raise ReplayError("its record would exchange other values than the placement")
        settled = Settled(held, {}, {}).also(found.layouts, found.slices, found.moves)
        rules = Propagator(self._size, number, extremes=True)
        return self._script(trace, state, skeleton.model, settled, rules)

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

    def _whole(self, local: Tensor, layout: Layout, length: int | None) -> Tensor:
        shape = list(local.shape)
        if layout.dim is not None:
            packs = sum(pack.size for pack in layout.packs)
            shape[layout.dim] = packs or length or shape[layout.dim] * self._size
            if layout.joint:
                shape[layout.dim + 1] = sum(pack.size for pack in layout.joint) // packs
            elif layout.within:
                shape[layout.dim + 1] = sum(pack.size for pack in layout.within)
        made = torch.empty_strided(shape, _strides(local, shape), dtype=local.dtype, device="meta")
        return made.requires_grad_(local.requires_grad and torch.is_grad_enabled())

    def _script(self, trace: Trace, state: Capture, model: nn.Module, settled: Settled, rules: Propagator) -> Script:
        recorder = state.recorder
        if trace.numbers.chosen or trace.branches.assumptions:
            raise ReplayError("what the body runs depends on its tensors' values")
        read = set(_read(trace))
        held = {value: names[0] for value, names in trace.parameters.items() if value in read}
        attributes = {id(tensor): name for name, tensor in held_tensors(model)}
        own = {*_made(trace)}  # the body may have put what it made where it, or a later call, looks for it
        for name, tensor in held_tensors(model):
            value = recorder.held_value(tensor)
            if value is not None and value in read and value not in own:
                held.setdefault(value, _readable(model, name, tensor))
        made = own | held.keys()
        constants: list[tuple[int, Tensor]] = []
        for value in sorted(read - made):
            numbers = trace.values[value].numbers
            if numbers is None:
                raise ReplayError("the body reads a tensor that is neither a parameter, nor a buffer, nor an argument")
            if id(numbers) in attributes:
                held[value] = _readable(model, attributes[id(numbers)], numbers)
            else:
                constants.append((value, numbers))
        sources: dict[int, int | None] = {c.target: c.source for c in trace.root.exits}
        result = state.results["", 0]
        made_by_call = {recorder.value_of(tensor) for _, tensor in tensors_in(result)}
        sources |= dict.fromkeys(made_by_call - sources.keys())
        unread = own - read - sources.keys() - {*sources.values()}
        steps: list[Run | ScriptCall] = []
        waiting = [
            (needed, run) for needed, run in self._functions(trace, settled, rules) if not own.isdisjoint(run.outputs)
        ]
        missing = {value for node in trace.root.body for value in _results(node)}
        for node in local_steps(trace, settled, self._size, self._rank, self._exchanges):
            if isinstance(node, Run):
                outputs = tuple(None if value in unread else value for value in node.outputs)
                steps.append(replace(node, outputs=outputs))
            else:
                args, kwargs = (state.arguments or {})[node.module, node.call]
                results = tuple((c.path, c.target) for c in node.exits)
                steps.append(ScriptCall(node.module, _referred(args, recorder), _referred(kwargs, recorder), results))
            missing.difference_update(_results(node))
            steps += [run for needed, run in waiting if missing.isdisjoint(needed)]
            waiting = [(needed, run) for needed, run in waiting if not missing.isdisjoint(needed)]
        if waiting:
            raise ReplayError("a function in it keeps what its record doesn't make")
        entries = tuple((path, c.target) for c in trace.root.entries for path in (c.path, *c.aliases))
        return Script(
            entries, tuple(held.items()), tuple(constants), tuple(steps), _referred(result, recorder, sources)
        )

    def _functions(self, trace: Trace, settled: Settled, rules: Propagator) -> Iterator[tuple[set[int], Run]]:
        """For each function with a backward of its own, the step that has gradients go back by that one's record.

        Yields:
            the values that it needs, and the step.
        """
        partial = frozenset(self._body.partial)

        def sums(value: int) -> bool | None:
            names = trace.parameters.get(value)
            return None if names is None else not partial.isdisjoint(names)

        around = Around(lambda value: settled.layouts.get(value, REPLICATED), trace.values, sums)
        inside = made_inside(trace.root, trace.gradients.gradless)
        for held in trace.root.backwards:
            if held.is_hook:
                continue  # which a record hasn't: the check tells of a body that registers one
            if held.sealed or held.graph.failure or None in held.inputs or not inside.issuperset(held.outputs):
                raise ReplayError(f"{held.name} isn't recorded: {held.graph.failure}")
            found = backward_layouts(around, rules, held)
            if isinstance(found, BackwardFault):
                raise ReplayError(f"{held.name} can't run on shards: {found.reason}")
            shapes = tuple(
                settled.layouts.get(value, REPLICATED).local_shape(trace.values[value].shape, self._size, self._rank)
                for value in held.outputs
            )
            own = own_backward(held, found, trace, self._size, self._rank, self._exchanges)
            made, saved, inputs = (tuple(map(Reference, values)) for values in (held.outputs, held.saved, held.inputs))  # pyright: ignore
            yield {*held.outputs, *held.saved}, Run(own.attach, (made, saved, *inputs), {}, held.outputs, shapes, False)


class _BodyRecorder(Recorder):
    """A recorder of bodies that leave autocast as it is: tensors on `meta` don't show what it casts."""

    def __init__(self, settings: CaptureSettings) -> None:
        super().__init__(settings)
        self._around = _autocast(settings.device.type)

    def cross(self, tensor: Tensor) -> tuple[Tensor, int, int]:
        """As any recorder, and with the numbers of a constant that a call is passed."""
        alias, outside, inside = super().cross(tensor)
        if not tensor.is_meta and self.values[outside].numbers is None:
            self.values[outside] = replace(self.values[outside], numbers=tensor)
        return alias, outside, inside

    def count_of_calls(self) -> int:
        """Refuse: a record has one number for all calls."""
        raise self.numbers.refuse()

    def meet(self) -> None:
        """Compare autocast, which is off below the function modes, whatever it is outside."""
        if _autocast(self.settings.device.type) != self._around:
            raise ReplayError("it turns autocast on or off itself")


def _autocast(kind: str) -> torch.dtype | None:
    """What autocast casts to on a kind of device; None where it's off."""
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _readable(model: nn.Module, name: str, tensor: Tensor) -> str:
    """The path of attributes that leads to a tensor of the model, by which each call reads it anew."""
    if attribute_at(model, name) is not tensor:
        raise ReplayError(f"the body reads a tensor that `{name}` holds in a list or dict; make it a buffer")
    return name


def _strides(local: Tensor, shape: Sequence[int]) -> list[int]:
    """The strides of a whole tensor that lies in memory as its part does: its dims in the same order.

    Of one that is whole, its own, gaps and all.
    """
    if tuple(shape) == tuple(local.shape):
        return [*local.stride()]
    made, inner = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (local.stride(dim), -dim)):
        if local.stride(dim) or local.shape[dim] == 1 == shape[dim]:
            made[dim], inner = inner, inner * max(shape[dim], 1)
    return made


def _read(trace: Trace) -> Iterator[int]:
    for node in trace.root.body:
        yield from node.inputs if isinstance(node, Operation) else (c.source for c in node.entries)
    yield from (c.source for c in trace.root.exits)
    made = {*_made(trace)}
    for held in trace.root.backwards:
        if not held.is_hook and not made.isdisjoint(held.outputs):  # else nobody reads what the function makes
            yield from (*held.saved, *held.outputs)


def _made(trace: Trace) -> Iterator[int]:
    yield from (c.target for c in trace.root.entries)
    for node in trace.root.body:
        yield from _results(node)


def _results(node: Operation | Frame | Run) -> Iterator[int]:
    if isinstance(node, Frame):
        yield from (c.target for c in node.exits)
    else:
        yield from (value for value in node.outputs if value is not None)


def _referred(held: Any, recorder: Recorder, instead: Mapping[int, int | None] | None = None) -> Any:
    """Arguments or results with `Reference`s for tensors; other objects than plain data can't be replayed."""
    if isinstance(held, Tensor):
        value = recorder.value_of(held)
        source = (instead or {}).get(value, value)
        return None if source is None else Reference(source)
    items = children(held)
    if items is not None:
        return rebuilt(held, [_referred(item, recorder, instead) for _, item in items])
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


def recorded_body(
    frame: Frame,
    layouts: Mapping[int, Layout],
    heads: Features,
    features: Features = frozenset(),
    moves: Sequence[MovedOperand] = (),
    partial: Iterable[str] = (),
) -> RecordedBody:
    """How the values at the boundaries of a frame's body lie, and what is moved inside, in an assignment.

    Args:
        frame: a call.
        layouts: of the assignment's values.
        heads: the numbers of heads that it's for.
        features: the ways to split features that it's for.
        moves: of the body.
        partial: names of parameters whose gradients are summed over the ranks.
    """

    def at(crossings: Sequence[Crossing], inside: bool) -> tuple[tuple[Path, Layout], ...]:
        return tuple(
            (path, layouts.get(c.target if inside else c.source, REPLICATED))
            for c in crossings
            for path in (c.path, *c.aliases)
        )

    prefix = f"{frame.module}." if frame.module else ""
    counts: dict[str, int] = {}
    calls: list[tuple[str, int, tuple[tuple[Path, Layout], ...]]] = []
    passed: list[tuple[str, int, tuple[tuple[Path, Layout], ...]]] = []
    for node in frame.body:
        if isinstance(node, Frame):
            name = node.module.removeprefix(prefix)
            calls.append((name, counts.get(name, 0), at(node.exits, inside=True)))
            passed.append((name, counts.get(name, 0), at(node.entries, inside=False)))
            counts[name] = counts.get(name, 0) + 1
    body = RecordedBody(
        at(frame.entries, inside=True), tuple(calls), at(frame.exits, inside=False), tuple(sorted(heads)),
        features=tuple(sorted(features)),
    )  # fmt: skip
    if not moves and not frame.backwards:
        return body
    own = tuple(sorted(name.removeprefix(prefix) for name in partial if name.startswith(prefix)))
    return replace(body, moves=tuple(moves), passed=tuple(passed), partial=own)


__all__ = ["Replay", "ReplayError", "recorded_body"]
