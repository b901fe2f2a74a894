"""Capture: run a model once on meta tensors and record what it does.

in:  a skeleton (no numbers, no GPU, no process group) and an example call
out: `Trace`: every aten operation, in the module call it happened in, dead ones removed

    h = self.norm(x)   ->   Frame("norm", entries=x→x', body=(native_layer_norm x'→y',), exits=y'→h)
"""

from __future__ import annotations

import functools
import gc
import warnings
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Generator, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from tpplan.compat.autograd import without_packing
from tpplan.compat.dynamo import nothing_compiled
from tpplan.compat.modes import Unwatched
from tpplan.compat.modules import named_modules
from tpplan.compiler.ir.class_functions import LOSSES
from tpplan.compiler.ir.class_reductions import GATHER
from tpplan.compiler.ir.kept_tensors import is_wrapper, wrapper_on_meta
from tpplan.compiler.ir.locations import Location, location_now
from tpplan.compiler.ir.objects import fresh_object, is_object, note_alike
from tpplan.compiler.ir.observations import CaptureSettings
from tpplan.compiler.ir.pytree import Walk, tensors_in, tensors_of, with_items, with_tensors
from tpplan.compiler.ir.steps import Heard
from tpplan.compiler.ir.trace import Crossing, ForeignBackward, Frame, Operation, Path, Trace
from tpplan.compiler.trace.backward import record_backwards
from tpplan.compiler.trace.chance import own_generators
from tpplan.compiler.trace.constants import ConstantWatcher
from tpplan.compiler.trace.effects import held_tensors
from tpplan.compiler.trace.gradient_flow import complete_gradients
from tpplan.compiler.trace.left_state import State
from tpplan.compiler.trace.own_attributes import OwnAttributes
from tpplan.compiler.trace.recorder import Recorder
from tpplan.compiler.trace.remains import Remains
from tpplan.compiler.trace.sequel import Sequel
from tpplan.compiler.trace.signatures import argument_names
from tpplan.compiler.trace.skeleton import Skeleton
from tpplan.compiler.trace.stock_again import stock_again
from tpplan.compiler.trace.surroundings import Surroundings
from tpplan.compiler.trace.tape import OpenFrame
from tpplan.compiler.trace.tensor_classes import Wrapped
from tpplan.compiler.trace.unfollowed import PackedSequencesError, UnfollowedError, unlike_dense
from tpplan.plan.wording import with_article
from tpplan.state.ambient import noting_settings
from tpplan.state.reads import note_reads


def _looks_up(node: Operation) -> bool:
    """Whether it reads or writes entries by number, and so refuses numbers that are out of range."""
    return node.is_a("row look-up", "gather", "pick", "write", "take") or node.target in LOSSES | {GATHER}


class BoundaryRule(Protocol):
    """What a run on local shapes does at module boundaries; see the check pass."""

    def enter(self, module: str, call: int, path: Path, tensor: Tensor) -> Tensor:
        """The argument as the body gets it."""
        ...

    def leave(self, module: str, call: int, path: Path, tensor: Tensor) -> Tensor:
        """The result as the caller gets it."""
        ...

    def stand_in(self, module: str, call: int, passed: Any) -> tuple[Any, Sequence[str]] | None:
        """A result that makes running the body unnecessary, with the modules that it would call; None to run it.

        `passed` is the call's arguments and keywords.
        """
        ...


class BodyError(Exception):
    """A model's body raised; `__cause__` is what it raised.

    Attributes:
        root: what was recorded until then; calls that were open have no exits.
        frame: the innermost call that was open.
        written: what the model had changed of its state by then, by name.
        side: the branch on data of which each call that takes this side raises; None if it has nothing to do with one.
    """

    def __init__(self, root: Frame, frame: Frame, written: Sequence[str] = ()) -> None:
        """Remember the record so far."""
        super().__init__(frame.module)
        self.root = root
        self.frame = frame
        self.written = written
        self.side: Location | None = None


class ReplacedModuleError(Exception):
    """A model put another module in the place of one of its own while it ran.

    Attributes:
        module: the module that holds it.
        location: the line, if that is known.
    """

    def __init__(self, replaced: str, location: Location | None) -> None:
        """Of the module of this name."""
        super().__init__(replaced)
        self.module = replaced.rpartition(".")[0]
        self.location = location


@dataclass(slots=True)
class Capture:
    """One recording under way.

    `results` keeps what each module call returned, for runs that stand in for it; `arguments`, where it isn't None,
    what each was called with; `named` the objects that modules were passed, by id, with the arguments' names; `heard`
    is the steps of the run, if the recorder listens; `sequel` says whether later calls run other operations, and
    whether each of them changes state; `leaves` whether to look for what the run leaves behind; `states` are what can
    be told of the state before and after it; `weights` are arguments that follow from parameters alone, by path.
    """

    recorder: Recorder
    boundary: BoundaryRule | None = None
    calls: dict[str, int] = field(default_factory=dict[str, int])
    results: dict[tuple[str, int], Any] = field(default_factory=dict[tuple[str, int], Any])
    failed: Frame | None = None
    heard: Heard | None = None
    arguments: dict[tuple[str, int], tuple[tuple[Any, ...], dict[str, Any]]] | None = None
    named: dict[int, tuple[str, object]] = field(default_factory=dict[int, tuple[str, object]])
    sequel: Sequel = field(default_factory=lambda: Sequel(False, False))
    leaves: bool = True
    states: tuple[State, State] = field(default_factory=lambda: (State(), State()))
    weights: Collection[Path] = ()


@contextmanager
def without_collection() -> Generator[None]:
    """Spare Python the search for garbage in a block whose objects live as long as its result, or are few."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@contextmanager
def noting_modules(modules: Mapping[str, nn.Module], placed: dict[str, Location | None]) -> Generator[None]:
    """Note where modules are set on others in a block, by name."""
    names = {id(module): name for name, module in modules.items()}

    def note(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        if id(module) in names:
            placed.setdefault(f"{names[id(module)]}.{name}".lstrip("."), location_now())

    handle = register_module_module_registration_hook(note)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def on_shapes(model: nn.Module, settings: CaptureSettings, kind: type[Recorder] = Recorder) -> Generator[Recorder]:
    """Run what is in the block as a capture runs a model, with its answers to what tensors without numbers can't tell.

    Args:
        model: the model that runs.
        settings: how to answer; if bodies may read `values`, the recorder is to be told of the call (`tell_inputs`).
        kind: what gives the answers.
    """
    recorder = kind(settings)
    recorder.frames.append(OpenFrame("", 0, []))
    recorder.picker.know_anywhere(module for _, module in named_modules(model))
    with nothing_compiled(), recorder, ConstantWatcher(recorder), recorder.draws.followed(recorder.sides.compared):
        yield recorder


def record(
    skeleton: Skeleton,
    arguments: Sequence[Any],
    keywords: Mapping[str, Any],
    state: Capture,
    around: Surroundings | None = None,
) -> Trace:
    """Run `skeleton` on an example call and return the trace.

    Args:
        skeleton: its modules' `forward` are wrapped in place; don't use it for anything else afterwards.
        arguments, keywords: the call; tensors may lie on any device, only their geometry counts.
        state: the recording, which the caller may look into afterwards.
        around: the model's surroundings, which the caller puts back; None to have that done.

    Raises:
        BodyError: a module raised on these inputs.
    """
    if around is not None:
        return _record(skeleton, arguments, keywords, state, around)
    around = Surroundings(skeleton.model)
    try:
        return _record(skeleton, arguments, keywords, state, around)
    finally:
        around.restore()


def _record(
    skeleton: Skeleton, arguments: Sequence[Any], keywords: Mapping[str, Any], state: Capture, around: Surroundings
) -> Trace:
    recorder, model = state.recorder, skeleton.model
    settings = recorder.settings
    recorder.draws.begin()
    if model.training != settings.training:  # in its own mode, some of its modules may be in the other
        model.train(settings.training)
    parameters: dict[int, tuple[str, ...]] = {}
    for parameter, names in skeleton.parameters:
        parameters[recorder.new_value(parameter, parameter.requires_grad)] = names
    modules = dict(named_modules(model))
    recorder.steps.modules = {id(module): name for name, module in modules.items()}
    recorder.picker.know(modules)
    for name, module in modules.items():
        _wrap(module, name, state)
    for _, tensor in held_tensors(model):
        recorder.effects.outlives(tensor)
    recorder.real.large = around.large
    remains = Remains(skeleton, around, recorder, state.leaves)
    called = argument_names(type(model).forward)
    example = with_tensors(arguments, keywords, called, _to_meta, fresh_object)
    inputs = remains.take(example)
    recorder.origins.given.update(value for path, value in inputs.items() if path not in state.weights)
    tell_inputs(recorder, (arguments, keywords), example, called)
    passed = [tensor for _, tensor in tensors_of(*example, called)]
    for tensor in passed:
        recorder.effects.outlives(tensor)
    wrapped = Wrapped(recorder)
    wrapped.take(passed)
    outer = OpenFrame("", 0, [])
    recorder.frames.append(outer)
    placed: dict[str, Location | None] = {}
    try:
        with (
            noting_modules(modules, placed), without_collection(), nothing_compiled(), recorder,
            ConstantWatcher(recorder), torch.set_grad_enabled(settings.records), without_packing(),
            noting_settings(recorder.asked.settings, around.files),
            warnings.catch_warnings(), recorder.draws.followed(recorder.sides.compared),
            ExitStack() as stack,
        ):  # fmt: skip
            warnings.simplefilter("ignore")
            if state.boundary is None:
                recorder.origins.familiar = remains.readable() | set(map(id, wrapped.inner()))
                stack.enter_context(stock_again(modules.values()))
            note_reads(modules.values(), OwnAttributes)
            own = own_generators(_names(model, around))
            states = [state() for _, state in own]
            _refuse_unfinished(model(*example[0], **example[1]))
            _refuse_drawn([name for (name, state), before in zip(own, states, strict=True) if state() != before])
            recorder.origins.familiar = None
            backwards = record_backwards(recorder, outer.body)
    except Exception as error:
        if state.failed is None:  # raised before any forward ran: by a hook, or for the arguments
            raise
        # torch asks some arguments for a number, and raises an error of its own if they have none
        asked = next((told for told, _ in recorder.numbers.refused if told.counts), None)
        cause = error if asked is None else asked.with_traceback(error.__traceback__)
        raise BodyError(_root(outer), state.failed, remains.changed()) from cause
    if recorder.numbers.refused:
        _refuse_swallowed(recorder, outer)
    root = _root(outer)
    state.heard = next((step for step in outer.steps if isinstance(step, Heard)), None)
    root = _with_backwards(root, backwards) if backwards else root
    replaced = next((n for n, held in named_modules(model) if modules.get(n) is not held), None)
    if replaced is not None:
        raise ReplacedModuleError(replaced, placed.get(replaced))
    recorder.origins.refuse_unfamiliar()
    foreign = {
        value
        for held in backwards.values()
        for backward in held
        for value in (*backward.inputs, *backward.outputs, *backward.saved)
        if value is not None
    }
    effects = remains.effects(state.results["", 0], state.named, wrapped, foreign.union(recorder.numbers.tested))
    state.states = remains.states
    root = wrapped.settled(root)
    live = without_dead_operations(root, effects.made)
    root = wrapped.stripped(root, live, effects.made)
    if effects.outside:
        effects = replace(effects, reread=remains.reread(root))
    values = complete_gradients(root, recorder.values, recorder.gradients.surprising)
    branches, taken = recorder.sides.result()
    return Trace(
        root=live,
        recorded=root,
        values=values,
        parameters=parameters,
        buffers=remains.buffers,
        arguments=inputs,
        given=frozenset(recorder.origins.given),
        settings=replace(settings, taken=taken, replays=False),
        asked=recorder.asked.result(parameters),
        branches=branches,
        numbers=recorder.numbers.result(remains.buffers),
        draws=recorder.draws.result(),
        gradients=recorder.gradients.result(root, values),
        effects=effects,
    )


def _root(outer: OpenFrame) -> Frame:
    """The call of the whole model."""
    (root,) = (node for node in outer.body if isinstance(node, Frame))
    return root


def _names(model: nn.Module, around: Surroundings) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """What the attributes of modules, and the names around them, stand for."""
    yield from ((name, vars(module)) for name, module in named_modules(model))
    yield from ((name, space.names()) for name, space in around.spaces)


def _refuse_drawn(generators: Sequence[str]) -> None:
    """Refuse numbers of generators of the model's own, which later calls draw and a proof doesn't."""
    if generators:
        raise UnfollowedError(
            f"it draws from `{generators[0]}`, a generator of its own, by which a call may take any way",
            "draw from torch's default generator, from `random` or from `numpy.random`",
        )


def _refuse_unfinished(result: object) -> None:
    """Refuse a result that is still to be computed, by whoever iterates over it."""
    if isinstance(result, (Iterator, Coroutine, AsyncIterator)):
        name = with_article(type(result).__name__)  # pyright: ignore[reportUnknownArgumentType]
        raise UnfollowedError(
            f"its forward returns {name}, whose code runs after the call, whenever it is asked for more",
            "return a list of what it yields; or shard the module that makes each item, and leave this loop outside",
        )


def tell_inputs(
    recorder: Recorder,
    call: tuple[Sequence[Any], Mapping[str, Any]],
    copied: tuple[tuple[Any, ...], dict[str, Any]],
    names: Sequence[str],
) -> None:
    """Tell a recorder that lets bodies read numbers of those in a call; `copied` is the call on `meta`."""
    known = recorder.numbers.known
    if known is not None:
        stock = dict(tensors_of(*call, names))
        for path, tensor in tensors_of(*copied, names):
            known.take_input(path, recorder.value_of(tensor), stock[path])


def _refuse_swallowed(recorder: Recorder, outer: OpenFrame) -> NoReturn:
    """A body that goes on after a value couldn't be read takes a path of which nothing is known."""
    error, frame = recorder.numbers.refused[0]
    raise BodyError(_root(outer), Frame(frame.module, frame.call, (), (), tuple(frame.body))) from error


def _wrap(module: nn.Module, name: str, state: Capture) -> None:
    forward = module.forward
    names = argument_names(type(module).forward)

    @functools.wraps(forward)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        if state.recorder.beside is not None:
            state.recorder.beside.calls += 1
            return forward(*args, **kwargs)
        if isinstance(module, nn.TransformerEncoder):
            _refuse_packing(module, name, args, kwargs)
        result = _record_call(name, names, forward, args, kwargs, state)
        state.recorder.gradients.note_module_hooks(module, name, args, result)
        return result

    module.__dict__["forward"] = recorded


def _refuse_packing(module: nn.TransformerEncoder, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse an encoder of torch that packs padded sequences, of which padding then comes out as 0."""
    padding = kwargs.get("src_key_padding_mask", args[2] if len(args) > 2 else None)
    packs = module.use_nested_tensor and not module.layers[0].training
    if packs and padding is not None:
        raise PackedSequencesError(name)


def _record_call(
    name: str,
    names: tuple[str, ...],
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    state: Capture,
) -> Any:
    recorder, boundary = state.recorder, state.boundary
    call = state.calls.get(name, 0)
    state.calls[name] = call + 1
    if state.arguments is not None:
        state.arguments[name, call] = (args, kwargs)
    for at, held in (*zip(names, args, strict=False), *kwargs.items()):
        if is_object(held):
            state.named.setdefault(id(held), (at, held))
    inward = _Crosser(recorder, False, None if boundary is None else functools.partial(boundary.enter, name, call))
    inner_args = tuple(inward(arg, (names[i] if i < len(names) else f"*{i}",)) for i, arg in enumerate(args))
    inner_kwargs = {key: inward(arg, (key,)) for key, arg in kwargs.items()}
    frame = OpenFrame(name, call, [])
    with Unwatched():
        stand_in = None if boundary is None else boundary.stand_in(name, call, (inner_args, inner_kwargs))
    if stand_in is None:
        recorder.frames.append(frame)
        try:
            result = forward(*inner_args, **inner_kwargs)
        except Exception:
            recorder.frames.pop()
            partial = Frame(name, call, tuple(inward.crossings), (), tuple(frame.body))
            recorder.frames[-1].body.append(partial)
            recorder.steps.left(frame)  # whoever catches it goes on from there
            state.failed = state.failed or partial
            raise
        recorder.frames.pop()
    else:
        result, inside = stand_in
        if any(recorder.origins.is_given(tensor) for _, tensor in tensors_in((args, kwargs))):
            recorder.origins.given.update(recorder.value_of(tensor) for _, tensor in tensors_in(result))
        for module in inside:  # later calls of these are counted from there
            state.calls[module] = state.calls.get(module, 0) + 1
    outward = _Crosser(recorder, True, None if boundary is None else functools.partial(boundary.leave, name, call))
    result = outward(result, ())
    recorder.gradients.left(inward.crossings, outward.crossings)
    # The caller may write to what it is handed.
    state.results[name, call] = result if isinstance(result, Tensor) else with_items(result, lambda item: item)
    recorder.frames[-1].body.append(
        Frame(name, call, tuple(inward.crossings), tuple(outward.crossings), tuple(frame.body), cuts=tuple(frame.cuts))
    )
    recorder.steps.left(frame)
    return result


CALLING = _record_call.__code__
"""What calls a module's own `forward`, of arguments that this may not take."""


class _Crosser:
    """Replaces every tensor in a call's arguments or results by an alias with its own value.

    Lists, mappings and records passed *in* are left alone: a body may write to them. Their tensors are then read across
    the boundary, and no reshard can be put there.
    """

    def __init__(self, recorder: Recorder, outward: bool, transform: Callable[[Path, Tensor], Tensor] | None) -> None:
        self.recorder = recorder
        self.transform = transform
        self.crossings: list[Crossing] = []
        self._memo: dict[int, tuple[Tensor, int]] = {}
        self._walk = Walk(self._leaf, immutable=not outward)

    def __call__(self, held: Any, path: Path) -> Any:
        return self._leaf(path, held) if isinstance(held, Tensor) else self._walk(held, path)

    def _leaf(self, path: Path, held: Any) -> Any:
        if not isinstance(held, Tensor):
            return held
        known = self._memo.get(id(held))
        if known is None:
            known = self._memo[id(held)] = (self._cross(held, path), len(self.crossings) - 1)
        else:
            crossing = self.crossings[known[1]]
            self.crossings[known[1]] = replace(crossing, aliases=(*crossing.aliases, path))
        return known[0]

    def _cross(self, tensor: Tensor, path: Path) -> Tensor:
        if self.transform is not None:
            with Unwatched():
                moved = self.transform(path, tensor)
                if moved is not tensor:
                    self.crossings.append(Crossing(path, *self.recorder.replace(tensor, moved)))
                    return moved
        alias, source, target = self.recorder.cross(tensor)
        self.crossings.append(Crossing(path, source, target))
        return alias


def _with_backwards(frame: Frame, found: Mapping[tuple[str, int], Sequence[ForeignBackward]]) -> Frame:
    body = tuple(_with_backwards(node, found) if isinstance(node, Frame) else node for node in frame.body)
    return replace(frame, body=body, backwards=tuple(found.get((frame.module, frame.call), ())))


def _to_meta(_: Path, tensor: Tensor) -> Tensor:
    unlike = unlike_dense(tensor)
    if unlike is not None:
        raise UnfollowedError(f"it is passed {unlike[0]}", unlike[1])
    if is_wrapper(tensor):
        return wrapper_on_meta(tensor)
    meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return note_alike(meta.requires_grad_(tensor.requires_grad), tensor)


def without_dead_operations(root: Frame, effects: Set[int]) -> Frame:
    """Drop operations whose results nobody reads, now or after the run: autograd's own detaches, unused masks.

    Lookups stay: they run all the same, and raise for an index beyond a rank's part, which no run on meta shows.
    Of the aliases that an in-place operation overwrites, those are dropped that nobody reads afterwards; of a call's
    results those that nobody reads and a dropped operation made.
    """
    live = {crossing.source for crossing in root.exits} | effects
    dropped: set[int] = set()

    def clean(frame: Frame) -> Frame:
        body: list[Operation | Frame] = []
        for crossing in frame.exits:
            if crossing.target in live:
                live.add(crossing.source)
        for node in reversed(frame.body):
            if isinstance(node, Frame):
                body.append(clean(node))
                continue
            overwritten = tuple(identifier for identifier in node.overwritten if identifier in live)
            if overwritten or _looks_up(node) or any(output in live for output in node.outputs):
                live.update(node.inputs)
                body.append(node if overwritten == node.overwritten else replace(node, overwritten=overwritten))
            else:
                dropped.update(output for output in node.outputs if output is not None)
        live.update(crossing.source for crossing in frame.entries if crossing.target in live)
        exits = tuple(crossing for crossing in frame.exits if crossing.source not in dropped)
        if len(exits) < len(frame.exits):
            dropped.update({c.target for c in frame.exits} - {c.target for c in exits})
        return replace(frame, exits=exits, body=tuple(reversed(body)))

    return clean(root)
