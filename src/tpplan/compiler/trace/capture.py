"""Capture: run a model once on meta tensors and record what it does.

in:  a skeleton (no numbers, no GPU, no process group) and an example call
out: `Trace`: every aten operation, in the module call it happened in, dead ones removed

    h = self.norm(x)   ->   Frame("norm", entries=x→x', body=(native_layer_norm x'→y',), exits=y'→h)
"""

from __future__ import annotations

import functools
import gc
import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from tpplan.compat.autograd import without_packing
from tpplan.compat.dtensors import local_of
from tpplan.compat.dynamo import nothing_compiled
from tpplan.compat.modes import Unwatched
from tpplan.compat.modules import named_modules, own_parameters
from tpplan.compiler.ir.class_functions import LOSSES
from tpplan.compiler.ir.class_reductions import GATHER
from tpplan.compiler.ir.hidden import hidden_tensors, is_plain
from tpplan.compiler.ir.kept_tensors import is_wrapper, wrapper_on_meta
from tpplan.compiler.ir.objects import fresh_object, is_object, note_alike
from tpplan.compiler.ir.pytree import Walk, leaves, tensors_in, tensors_of, with_items, with_tensors
from tpplan.compiler.ir.steps import Heard
from tpplan.compiler.ir.trace import (
    Asked,
    Crossing,
    ForeignBackward,
    Frame,
    Location,
    Operation,
    Path,
    Sides,
    Trace,
    quoted,
)
from tpplan.compiler.trace.backward import record_backwards
from tpplan.compiler.trace.chance import own_generators
from tpplan.compiler.trace.constants import ConstantWatcher
from tpplan.compiler.trace.effects import held_tensors
from tpplan.compiler.trace.gradient_flow import complete_gradients, unanswered
from tpplan.compiler.trace.gradient_hooks import note_module_hooks
from tpplan.compiler.trace.left_state import Slot, changes, slots_of, told
from tpplan.compiler.trace.noted import PackedSequencesError, UnfollowedError
from tpplan.compiler.trace.recorder import OpenFrame, Recorder
from tpplan.compiler.trace.sequel import Sequel
from tpplan.compiler.trace.skeleton import Skeleton
from tpplan.compiler.trace.surroundings import Surroundings, cached_tensors
from tpplan.compiler.trace.tensor_classes import Wrapped
from tpplan.state.ambient import noting_settings

_TABLES = frozenset(("_parameters", "_buffers", "_modules"))


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
    whether each of them changes state; `leaves` whether to look for what the run leaves behind; `weights` are arguments
    that follow from parameters alone, by path.
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
    weights: Collection[Path] = ()


def capture(skeleton: Skeleton, arguments: Sequence[Any], keywords: Mapping[str, Any], training: bool) -> Trace:
    """Run `skeleton` on an example call and return the trace.

    Args:
        skeleton: its modules' `forward` are wrapped in place; don't use it for anything else afterwards.
        arguments, keywords: the call; tensors may lie on any device, only their geometry counts.
        training: the mode to run in.

    Raises:
        BodyError: a module raised on these inputs.
    """
    return record(skeleton, arguments, keywords, training, Capture(Recorder()))


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
            placed.setdefault(f"{names[id(module)]}.{name}".lstrip("."), Recorder.location())

    handle = register_module_module_registration_hook(note)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def on_shapes(
    model: nn.Module,
    taken: frozenset[Location],
    device: torch.device,
    kind: type[Recorder] = Recorder,
    values: bool = False,
    picking: frozenset[tuple[int, int]] = frozenset(),
) -> Generator[Recorder]:
    """Run what is in the block as a capture runs a model, with its answers to what tensors without numbers can't tell.

    Args:
        model: the model that runs.
        taken: the branches on data to take on their true side.
        device: where bodies are told that their tensors lie.
        kind: what gives the answers.
        values: whether bodies may read the numbers in the call, of which the recorder is to be told (`tell_inputs`).
        picking: see `Trace`.
    """
    recorder = kind(taken, device, values=values, picking=picking)
    recorder.frames.append(OpenFrame("", 0, []))
    recorder.containers = frozenset(_alike(module for _, module in named_modules(model)))
    recorder.containers |= {n for _, module in named_modules(model) for n in _stacked(module)}
    with nothing_compiled(), recorder, ConstantWatcher(recorder), recorder.chances.followed(recorder.compared):
        yield recorder


def record(
    skeleton: Skeleton,
    arguments: Sequence[Any],
    keywords: Mapping[str, Any],
    training: bool,
    state: Capture,
    around: Surroundings | None = None,
) -> Trace:
    """As `capture`, with a state that the caller looks into afterwards.

    Args:
        skeleton, arguments, keywords, training: see `capture`.
        state: the recording.
        around: the model's surroundings, which the caller puts back; None to have that done.
    """
    if around is not None:
        return _record(skeleton, arguments, keywords, training, state, around)
    around = Surroundings(skeleton.model)
    try:
        return _record(skeleton, arguments, keywords, training, state, around)
    finally:
        around.restore()


def _record(
    skeleton: Skeleton,
    arguments: Sequence[Any],
    keywords: Mapping[str, Any],
    training: bool,
    state: Capture,
    around: Surroundings,
) -> Trace:
    recorder = state.recorder
    recorder.begin_draws()
    if skeleton.model.training != training:  # in its own mode, some of its modules may be in the other
        skeleton.model.train(training)
    parameters: dict[int, tuple[str, ...]] = {}
    for parameter, names in skeleton.parameters:
        parameters[recorder.new_value(parameter, parameter.requires_grad)] = names
    modules = dict(named_modules(skeleton.model))
    recorder.modules = {id(module): name for name, module in modules.items()}
    recorder.containers = frozenset(_alike(modules.values()))
    recorder.stacks = {name: sizes for name, module in modules.items() if (sizes := frozenset(_stacked(module)))}
    for name, module in modules.items():
        _wrap(module, name, state)
    for _, tensor in held_tensors(skeleton.model):
        recorder.outlives(tensor)
    standing = slots_of(skeleton.model, around) if state.leaves else {}
    stood = [*_tensors_of(skeleton.model, standing)]
    before, numbers = {id(tensor) for _, tensor in stood}, told(standing)
    buffers = {recorder.value_of(tensor): names for tensor, names in skeleton.buffers}
    called = argument_names(type(skeleton.model).forward)
    example = with_tensors(arguments, keywords, called, _to_meta, fresh_object)
    inputs = {path: recorder.value_of(tensor) for path, tensor in tensors_of(*example, called)}
    recorder.given.update(value for path, value in inputs.items() if path not in state.weights)
    tell_inputs(recorder, (arguments, keywords), example, called)
    for _, tensor in tensors_of(*example, called):
        recorder.outlives(tensor)
    wrapped = Wrapped(recorder)
    wrapped.take(tensor for _, tensor in tensors_of(*example, called))
    outer = OpenFrame("", 0, [])
    recorder.frames.append(outer)
    placed: dict[str, Location | None] = {}
    try:
        with (
            noting_modules(modules, placed), without_collection(), nothing_compiled(), recorder,
            ConstantWatcher(recorder), torch.set_grad_enabled(recorder.records), without_packing(),
            noting_settings(recorder.asked_settings, around.files),
            warnings.catch_warnings(), recorder.chances.followed(recorder.compared),
        ):  # fmt: skip
            warnings.simplefilter("ignore")
            if state.boundary is None:
                read = [*_read_from(skeleton, example, called, around), *wrapped.inner()]
                recorder.familiar = before | set(map(id, read))
            own = own_generators(_names(skeleton.model, around))
            states = [state() for _, state in own]
            skeleton.model(*example[0], **example[1])
            _refuse_drawn([name for (name, state), before in zip(own, states, strict=True) if state() != before])
            recorder.familiar = None
            backwards = record_backwards(recorder, outer.body)
    except Exception as error:
        if state.failed is None:  # raised before any forward ran: by a hook, or for the arguments
            raise
        (root,) = (node for node in outer.body if isinstance(node, Frame))
        standing = slots_of(skeleton.model, around) if state.leaves else {}
        made = (name for name, tensor in _tensors_of(skeleton.model, standing) if id(tensor) not in before)
        put = (names[0] for tensor, names in skeleton.buffers if recorder.held_value(tensor) not in buffers)
        written = tuple(dict.fromkeys((*changes(numbers, told(standing)), *made, *put)))
        raise BodyError(root, state.failed, written) from error
    if recorder.unreadable:
        _refuse_swallowed(recorder, outer)
    (root,) = (node for node in outer.body if isinstance(node, Frame))
    state.heard = next((step for step in outer.steps if isinstance(step, Heard)), None)
    root = _with_backwards(root, backwards) if backwards else root
    replaced = next((n for n, held in named_modules(skeleton.model) if modules.get(n) is not held), None)
    if replaced is not None:
        raise ReplacedModuleError(replaced, placed.get(replaced))
    if recorder.unfamiliar:
        name, at, transformed = recorder.unfamiliar[0]
        if transformed:
            raise UnfollowedError(
                f"{quoted(name)} calls modules inside of a transform of `torch.func`, such as `torch.vmap`, at {at}",
                "call the modules on the whole batch, outside of the transform",
            )
        raise UnfollowedError(
            f"{quoted(name)} uses a tensor at {at} that no recorded operation made",
            "compute it in the thread of the forward, by operations of torch",
        )
    standing = slots_of(skeleton.model, around) if state.leaves else {}
    kept = {
        value: name
        for name, tensor in _tensors_of(skeleton.model, standing)
        if id(tensor) not in before and (value := wrapped.held_value(tensor)) is not None
    }
    outside = frozenset(value for value, name in kept.items() if name in standing and standing[name].outside)
    for cache in around.touched():
        for tensor in cached_tensors(cache):
            value = recorder.held_value(tensor)
            if value is not None:
                kept[value] = f"the cache of {cache.__qualname__}"
    left = {
        path: value
        for path, tensor in tensors_of(*example, called)
        if (value := wrapped.held_value(tensor)) is not None and value != inputs.get(path)
    }
    passed = _passed_on(skeleton.model, called) | example[1].keys()
    in_objects = _in_objects(example, called) | dict(_returned(state, passed))
    left |= {path: value for path, tensor in in_objects.items() if (value := wrapped.held_value(tensor)) is not None}
    left = {path: value for path, value in left.items() if value != inputs.get(path)}
    foreign = {
        value
        for held in backwards.values()
        for backward in held
        for value in (*backward.inputs, *backward.outputs, *backward.saved)
        if value is not None
    }
    hidden = dict(_hidden(state, wrapped, passed))
    kept_values = recorder.effects.union(kept, left.values(), hidden, foreign, recorder.tested)
    root = wrapped.settled(root)
    live = without_dead_operations(root, kept_values)
    root = wrapped.stripped(root, live, kept_values)
    tests = Sides.of(recorder.tests, recorder.tests_in)
    values = complete_gradients(root, recorder.values, recorder.surprising)
    return Trace(
        live,
        root,
        values,
        parameters,
        tuple(inputs.values()),
        training,
        tuple(dict.fromkeys(recorder.assumptions)),
        kept,
        frozenset(recorder.chosen),
        inputs,
        left,
        buffers,
        hidden,
        recorder.device or torch.device("cpu"),
        frozenset(recorder.gradless),
        recorder.takes_gradients,
        tests if recorder.replays or recorder.taken.exact else recorder.taken,
        frozenset(code for cache in around.caches.values() if (code := getattr(cache.__wrapped__, "__code__", None))),
        dict(recorder.tested),
        frozenset(changes(numbers, told(standing))),
        told(standing),
        outside,
        frozenset(recorder.seeded),
        Asked(
            frozenset(recorder.asked_memory),
            frozenset(name for value in recorder.asked_flags for name in parameters.get(value, ())[:1]),
            frozenset(recorder.asked_settings),
        ),
        recorder.reducing,
        frozenset(in_objects),
        None if recorder.known is None else recorder.known.facts(),
        {call: tuple(told) for call, told in recorder.reads.items()},
        frozenset() if recorder.known is None else recorder.known.values,
        wrapped.has_any,
        unanswered(root, values, recorder.passed),
        recorder.looking,
        picking=frozenset(recorder.picking.items()),
        effects=frozenset(kept_values),
        given=frozenset(recorder.given),
        of_buffers=frozenset(
            value.identifier
            for value in recorder.values
            if value.numbers is not None and any(recorder.is_one_storage(value.identifier, held) for held in buffers)
        ),
        drawn=frozenset(recorder.chances.drawn),
        draws_unseen=recorder.chances.unseen,
        tests=tests,
        records=recorder.records,
        reread=_reread(root, recorder, stood) if outside else frozenset(),
    )


def _reread(root: Frame, recorder: Recorder, stood: Iterable[tuple[str, Tensor]]) -> frozenset[str]:
    """The places of which operations read the tensor that stood there before the run."""
    nodes = (node for frame in root.walk() for node in frame.body)
    read = {value for node in nodes if isinstance(node, Operation) for value in node.inputs}
    return frozenset(name for name, tensor in stood if recorder.held_value(tensor) in read)


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


def tell_inputs(
    recorder: Recorder,
    call: tuple[Sequence[Any], Mapping[str, Any]],
    copied: tuple[tuple[Any, ...], dict[str, Any]],
    names: Sequence[str],
) -> None:
    """Tell a recorder that lets bodies read numbers of those in a call; `copied` is the call on `meta`."""
    if recorder.known is not None:
        stock = dict(tensors_of(*call, names))
        for path, tensor in tensors_of(*copied, names):
            recorder.known.take_input(path, recorder.value_of(tensor), stock[path])


def _read_from(
    skeleton: Skeleton, call: tuple[tuple[Any, ...], dict[str, Any]], names: Sequence[str], around: Surroundings
) -> list[Tensor]:
    """The tensors that a run may read which it hasn't made."""
    attributes: list[Any] = [
        held
        for _, module in named_modules(skeleton.model)
        for name, held in vars(module).items()
        if name not in _TABLES and (type(held) is not dict or held)
    ]
    return [
        *(parameter for parameter, _ in skeleton.parameters),
        *(buffer for buffer, _ in skeleton.buffers),
        *(tensor for _, tensor in tensors_of(*call, names)),
        *(tensor for _, tensor in hidden_tensors(attributes)),
        *(tensor for cache in around.caches.values() for tensor in cached_tensors(cache)),
    ]


def _tensors_of(model: nn.Module, slots: Mapping[str, Slot]) -> Iterator[tuple[str, Tensor]]:
    """The tensors that modules, their hooks and their surroundings hold."""
    yield from ((name, slot.value) for name, slot in slots.items() if isinstance(slot.value, Tensor))
    yield from held_tensors(model)


def _refuse_swallowed(recorder: Recorder, outer: OpenFrame) -> NoReturn:
    """A body that goes on after a value couldn't be read takes a path of which nothing is known."""
    error, frame = recorder.unreadable[0]
    (root,) = (node for node in outer.body if isinstance(node, Frame))
    raise BodyError(root, Frame(frame.module, frame.call, (), (), tuple(frame.body))) from error


def _passed_on(model: nn.Module, names: Sequence[str]) -> set[str]:
    """The names by which a call may pass arguments: the root's, and with `**kwargs` those of the modules inside."""
    kinds = {type(module) for module in model.modules()} if takes_keywords(type(model).forward) else ()
    return {*names, *(name for kind in kinds for name in argument_names(kind.forward))}


def _in_objects(call: tuple[tuple[Any, ...], dict[str, Any]], names: Sequence[str]) -> dict[Path, Tensor]:
    """The tensors of a call that an object holds, which is no container of Python's."""
    plain = {
        at for i, held in enumerate(call[0]) for at, _ in tensors_in(held, (names[i] if i < len(names) else f"*{i}",))
    }
    plain |= {at for name, held in call[1].items() for at, _ in tensors_in(held, (name,))}
    return {path: tensor for path, tensor in tensors_of(*call, names) if path not in plain}


def _objects(state: Capture, names: Collection[str]) -> Iterator[tuple[Path, object]]:
    """What is no container among the results, with the path by which a call would pass it; () if it wouldn't.

    An object that goes by an argument's name, such as a cache, is for a later call to be passed. In a tuple it has the
    name by which modules were passed it.
    """
    for path, held in leaves(state.results["", 0]):
        if not (isinstance(held, Tensor) or is_plain(held)):
            name = state.named.get(id(held), ("",))[0]
            yield path if path[:1] in {(each,) for each in names} else (name,) if name in names else (), held


def _returned(state: Capture, names: Collection[str]) -> Iterator[tuple[Path, Tensor]]:
    """Tensors in objects among the results that will be passed."""
    for path, held in _objects(state, names):
        if path and is_object(held):
            yield from tensors_in(held, path, objects=True)


def _hidden(state: Capture, wrapped: Wrapped, names: Collection[str]) -> Iterator[tuple[int, str]]:
    """Values in other objects among the results."""
    for held in (held for path, held in _objects(state, names) if not path):
        for _, tensor in hidden_tensors(held):
            value = wrapped.held_value(tensor)
            if value is not None:
                yield value, type(held).__name__


def _alike(modules: Iterable[nn.Module]) -> Iterator[int]:
    """How many modules of one class the lists and dicts of modules hold."""
    for module in modules:
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            yield from Counter(map(type, module.children())).values()


def _stacked(module: nn.Module) -> Iterator[int]:
    """How many matrices a module's own tensors stack, of which it may pick; with one number for none of them."""
    for held in own_parameters(module).values():
        if held is not None and held.dim() >= 3 and not type(module).__module__.startswith("torch.nn."):
            for count in {held.shape[0], local_of(held).shape[0]} - {0}:
                yield from (count, count + 1)


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
        note_module_hooks(state.recorder, module, name, args, result)
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
            state.failed = state.failed or partial
            raise
        recorder.frames.pop()
    else:
        result, inside = stand_in
        if any(recorder.is_given(tensor) for _, tensor in tensors_in((args, kwargs))):
            recorder.given.update(recorder.value_of(tensor) for _, tensor in tensors_in(result))
        for module in inside:  # later calls of these are counted from there
            state.calls[module] = state.calls.get(module, 0) + 1
    outward = _Crosser(recorder, True, None if boundary is None else functools.partial(boundary.leave, name, call))
    result = outward(result, ())
    if recorder.frames[-1].differentiates and not torch.is_grad_enabled():
        recorder.gradless.update(crossing.target for crossing in outward.crossings)
        recorder.passed.update(crossing.target for crossing in inward.crossings)
    # The caller may write to what it is handed.
    state.results[name, call] = result if isinstance(result, Tensor) else with_items(result, lambda item: item)
    recorder.frames[-1].body.append(
        Frame(name, call, tuple(inward.crossings), tuple(outward.crossings), tuple(frame.body), cuts=tuple(frame.cuts))
    )
    if recorder.listening:
        recorder.frames[-1].steps.append(Heard(name, call, tuple(frame.steps)))
    return result


CALLING = _record_call.__code__
"""What calls a module's own `forward`, of arguments that this may not take."""


@functools.cache
def argument_names(forward: Callable[..., Any]) -> tuple[str, ...]:
    """The names by which a `forward`'s positional arguments can be passed, without `self`."""
    try:
        signature = inspect.signature(forward)
    except (TypeError, ValueError):
        return ()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(name for name, parameter in signature.parameters.items() if parameter.kind in kinds)[1:]


def takes_keywords(forward: Callable[..., Any]) -> bool:
    """Whether a `forward` takes any keyword, which it may pass on."""
    try:
        parameters = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)


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
                    source = self.recorder.value_of(tensor)
                    target = self.recorder.new_value(moved, self.recorder.values[source].differentiable)
                    self.recorder.follow_given((source,), (target,))
                    self.crossings.append(Crossing(path, source, target))
                    return moved
        alias, source, target = self.recorder.cross(tensor)
        self.crossings.append(Crossing(path, source, target))
        return alias


def _with_backwards(frame: Frame, found: Mapping[tuple[str, int], Sequence[ForeignBackward]]) -> Frame:
    body = tuple(_with_backwards(node, found) if isinstance(node, Frame) else node for node in frame.body)
    return replace(frame, body=body, backwards=tuple(found.get((frame.module, frame.call), ())))


def _to_meta(_: Path, tensor: Tensor) -> Tensor:
    if is_wrapper(tensor):
        return wrapper_on_meta(tensor)
    meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return note_alike(meta.requires_grad_(tensor.requires_grad), tensor)


def without_dead_operations(root: Frame, effects: set[int]) -> Frame:
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
