"""Check: run the model once more, on local shapes, and hold every step against what the program promises.

in:  the trace, the assignment, and the attributes that were made local
out: `PassedCall` if every body does on each rank's shards what the trace did on whole tensors; or the first `Mismatch`

    view(b, s, self.num_heads, d) on a shard  ->  Mismatch: expected (2, 16, 4, 8), got (2, 16, 8, 4)
    arange(x.shape[1]) with x: S(1)           ->  Mismatch: expected (16,), got (8,)

Where the axis divides every sharded dim, all ranks see the same shapes, and one run stands for all. Otherwise there is
a run for each kind of rank: those with a full part, the one with what remains, those with nothing; or those with as
many queries of as many keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from tpplan.compat.modes import without_dispatch_modes
from tpplan.compat.modules import named_modules
from tpplan.compiler.bind.attributes import replaced_attribute
from tpplan.compiler.check.correspond import Correspondence
from tpplan.compiler.check.fingerprint import Fingerprints
from tpplan.compiler.check.of_constants import without_constants
from tpplan.compiler.check.own_backwards import backward_fault
from tpplan.compiler.check.same_steps import (
    REARRANGING,
    CheckInput,
    Mismatch,
    Shown,
    compare,
    compare_call,
    compare_entries,
    compare_passed,
    differing,
    promised_shape,
)
from tpplan.compiler.ir.arrivals import with_parts
from tpplan.compiler.ir.inner_gradient import GRADIENT
from tpplan.compiler.ir.layout import REPLICATED, Collective, Layout, Pack, reshard_between
from tpplan.compiler.ir.locations import Location
from tpplan.compiler.ir.program import LocalAttribute, splits_sequence
from tpplan.compiler.ir.pytree import Walk, leaves
from tpplan.compiler.ir.region import Instance
from tpplan.compiler.ir.steps import Heard, Stream, passed_numbers
from tpplan.compiler.ir.trace import Cut, Frame, Operation, Path, Trace, Value
from tpplan.compiler.place.assign import PlacedReshard, record_of
from tpplan.compiler.rewrite.replay import Replay
from tpplan.compiler.rules.propagate import Propagator
from tpplan.compiler.rules.recurrent import made_layout
from tpplan.compiler.trace.capture import BodyError, Capture, record
from tpplan.compiler.trace.left_state import is_same
from tpplan.compiler.trace.signatures import argument_names
from tpplan.compiler.trace.skeleton import make_skeleton
from tpplan.compiler.trace.slots import ITEMS
from tpplan.ops.issued import ALIAS_COPY, STRIDED_COPY
from tpplan.plan import Style
from tpplan.progress import doing

_PLAIN = frozenset((int, float, bool, str, type(None)))
_COUNTS = _PLAIN - {type(None)}


@dataclass(frozen=True, slots=True)
class PassedCall:
    """Every body does on each rank what the trace does: with the steps that its bodies take there."""

    streams: Mapping[int, Stream]


@doing("checking a rank's shapes")
def check(
    given: CheckInput,
    attributes: Mapping[str, tuple[LocalAttribute, ...]],
    excused: frozenset[str] = frozenset(),
    recorded: frozenset[str] = frozenset(),
    shown: Shown = frozenset(),
) -> Mismatch | PassedCall:
    """Run the model on local shapes, once for each kind of rank.

    Args:
        given: model, trace and assignment.
        attributes: integer attributes to set to local counts, by module.
        recorded: modules whose bodies run from their records.
        excused: modules that are not run, as they were reported already; their results are taken as promised.
        shown: of a mismatch with other attributes: calls that these don't concern aren't run again. What they write
            isn't seen, so that this is for trials alone: the next round's check runs everything.
    """
    alike = ranks_alike(given)
    hidden = _hidden_backward(given.instance)
    if hidden is not None:
        return hidden
    streams: dict[int, Stream] = {}
    for rank in different_ranks(given):
        mismatch, stream = run_rank(replace(given, rank=rank), attributes, excused, recorded, shown=shown)
        if mismatch is not None:
            return replace(mismatch, rank=rank)
        if stream is not None:
            streams.update((other, stream) for other, first in enumerate(alike) if first == rank)
    return PassedCall(streams)


def different_ranks(given: CheckInput) -> list[int]:
    """The first rank, and each whose local shapes no rank before it has."""
    return list(dict.fromkeys(ranks_alike(given)))


def ranks_alike(given: CheckInput) -> list[int]:
    """For each rank the first that has its local shapes."""
    held = {(layout, given.trace.values[value].shape) for value, layout in given.assignment.layouts.items()}
    uneven = [
        (layout, shape)
        for layout, shape in held
        if layout.dim is not None and not (layout.is_even(shape[layout.dim], given.size) and layout.is_everywhere)
    ]
    kinds: dict[tuple[tuple[int, ...], ...], int] = {}
    return [
        kinds.setdefault(tuple(layout.local_shape(shape, given.size, rank) for layout, shape in uneven), rank)
        for rank in range(given.size)
    ]


def run_rank(
    given: CheckInput,
    attributes: Mapping[str, tuple[LocalAttribute, ...]],
    excused: frozenset[str],
    recorded: frozenset[str],
    every_call: bool = False,
    shown: Shown = frozenset(),
) -> tuple[Mismatch | None, Stream | None]:
    """As `check`, on the shapes of one rank, that of `given`; the steps of its bodies are told as well.

    `every_call` runs calls, too, that equal ones have shown right.
    """
    shapes = _local_parameter_shapes(given)
    skeleton = make_skeleton(given.model, shapes)
    modules = dict(named_modules(skeleton.model))
    for name, held in attributes.items():
        for attribute in held:
            setattr(modules[name], *replaced_attribute(modules[name], attribute.name, attribute.on(given.rank)))
    _replay(given, modules, recorded)
    boundary = _LocalBoundary(given, excused, attributes, modules, every_call, shown)
    state = Capture(given.recorder(given.trace.settings), boundary)
    state.recorder.steps.listens = True
    state.recorder.gradients.whole = False
    state.recorder.gradients.unused = dict(_unused_gradients(given.trace))
    run: Trace | None = None
    failed: Frame | None = None
    reason = ""
    try:
        run = record(skeleton, *local_call(given), state)
        local, values = run.recorded, run.values
    except BodyError as error:
        local, values, failed = error.root, tuple(state.recorder.values), error.frame
        reason = str(error.__cause__) or type(error.__cause__).__name__  # a bare `assert` says nothing
    root = _without_unread(given.trace, recorded)
    if failed is None:
        local = without_constants(root, local, recorded)
    frames = {(f.module, f.call): (f, place) for f, place in _in_order(root)}
    given = replace(given, surprising=bool(state.recorder.gradients.surprising))
    operands = Correspondence(root, local, REARRANGING)
    found: list[Mismatch] = []
    for caller, frame in _with_callers(local):
        if (frame.module, frame.call) in boundary.skipped:
            if caller is not None and frame.module not in excused:
                found += _compare_left_out(given, caller, frame, frames, values, operands)
            continue
        if (frame.module, frame.call) not in frames:
            message = f"calls {frame.module} once more than the unsharded model does"
            return min(found, key=_when, default=Mismatch(given.trace.root, None, 0, None, None, message)), None
        whole, place = frames[frame.module, frame.call]
        unfinished = not frame.exits and bool(whole.exits)
        differs = None
        if caller is None or (caller.module, caller.call) in frames:
            calls = None if caller is None else frames[caller.module, caller.call][0]
            differs = compare_entries(given, calls, place[-1] if place else 0, whole, frame, values)
        if differs is not None:
            found.append(replace(differs, when=place if differs.frame is not whole else (*place, 0)))
            continue
        differs = compare(given, whole, frame, values, operands, unfinished, reason if frame is failed else "")
        if differs is None and whole.cuts:
            differs = _cut(given, whole, frame, replays=frame.module in recorded)
        if differs is None and whole.backwards and failed is None:
            differs = _backward(given, whole, frame)
        if differs is not None:
            found.append(replace(differs, when=(*place, differs.position)))
    assert found or failed is None, failed.module
    if run is not None:
        found += _compare_numbers(given, state.results["", 0], run)
        returned = compare_passed(given, root.exits, local.exits, values, operands)
        found += [_at_end(given, f"of what it returns, {returned}")] if returned else []
        # What is reported already may write.
        left = [*_compare_written(given, run), *_compare_kept(given, run, operands, boundary)] if not excused else []
        if left and boundary.skipped and not every_call:
            return run_rank(given, attributes, excused, recorded, every_call=True)  # calls left out write as well
        found += left
    returned = passed_numbers(state.results.get(("", 0)))
    stream = None if state.heard is None else _stream(boundary.filled(state.heard), given.trace, returned)
    first = min(found, key=_when, default=None)
    return first if first is None else replace(first, shown=boundary.shown_before(first.when, frames)), stream


def _stream(heard: Heard, trace: Trace, returned: object) -> Stream:
    return Stream(heard, trace.numbers.chosen, trace.effects.cached, trace.numbers.leaving_out, returned)


def _unused_gradients(trace: Trace) -> Iterator[tuple[tuple[str, int, int], list[bool]]]:
    """Of the gradients that a forward takes itself, which are None, by call and number."""
    for frame in trace.recorded.walk():
        taken = [n for n in frame.body if isinstance(n, Operation) and n.target is GRADIENT]
        for number, node in enumerate(taken):
            yield (frame.module, frame.call, number), [output is None for output in node.outputs]


def _hidden_backward(instance: Instance, style: Style | None = None) -> Mismatch | None:
    """Code in the backward of a body that tpplan's own product takes the place of."""
    style = instance.region.style if instance.region.style in (Style.ROWWISE, Style.VOCAB) else style
    frame = instance.frame
    if style is not None and frame.backwards:
        message = f"a `{style}` module runs tpplan's own product, with its derivative"
        return Mismatch(frame, None, len(frame.body), None, None, message, backward=frame.backwards[0])
    found = (_hidden_backward(child, style) for child in instance.children)
    return next((mismatch for mismatch in found if mismatch is not None), None)


def _without_unread(trace: Trace, recorded: frozenset[str]) -> Frame:
    """The trace with every operation, but of bodies that run from their records with those that somebody reads.

    What such a body calls runs its own code, unless it has a record as well.
    """
    read = {(frame.module, frame.call): frame for frame in trace.root.walk()} if recorded else {}
    every = {(frame.module, frame.call): frame for frame in trace.recorded.walk()} if recorded else {}

    def copied(frame: Frame) -> Frame:
        kept = (read if frame.module in recorded else every)[frame.module, frame.call]
        body = tuple(copied(node) if isinstance(node, Frame) else node for node in kept.body)
        return replace(kept, body=body)

    return copied(trace.recorded) if recorded else trace.recorded


def _cut(given: CheckInput, whole: Frame, local: Frame, replays: bool) -> Mismatch | None:
    """The first slice that takes all of a split sequence, and not all of a longer one.

    A length that the body asks for is a rank's own in the run on local shapes, and another number isn't. A body that
    runs from its record asks for nothing.
    """
    cuts = zip(whole.cuts, whole.cuts if replays else local.cuts, strict=False)
    different = (mine for mine, its in cuts if replays or mine.beyond != its.beyond)
    wrong = next((cut for cut in different if _splits(given, cut)), None)
    if wrong is None:
        return None
    count = given.trace.values[wrong.value].shape[wrong.dim] + wrong.beyond
    message = f"it takes the first {count} entries of a split sequence, which are all of it in the example alone"
    return Mismatch(whole, None, len(whole.body), None, None, message, cut=wrong.value)


def _splits(given: CheckInput, cut: Cut) -> bool:
    layout, shape = given.assignment.layouts.get(cut.value, REPLICATED), given.trace.values[cut.value].shape
    return layout.dim == cut.dim and splits_sequence(layout, shape)


def _backward(given: CheckInput, whole: Frame, local: Frame) -> Mismatch | None:
    """The first code in a call's backward that isn't right on a rank's part."""
    propagator = Propagator(given.size, given.batch, extremes=True)
    if len(whole.backwards) != len(local.backwards):
        message = "it registers different functions or hooks on a rank's part"
        return Mismatch(whole, None, len(whole.body), None, None, message, backward=whole.backwards[0])
    for mine, its in zip(whole.backwards, local.backwards, strict=True):
        fault = backward_fault(given, propagator, mine, its)
        if fault is not None:
            return Mismatch(whole, fault.operation, len(whole.body), None, None, fault.reason, backward=mine)
    return None


def _compare_numbers(given: CheckInput, result: Any, run: Trace) -> list[Mismatch]:
    """Constants among the model's results must be those of the unsharded model: a size may be a rank's own."""
    whole = dict(leaves(given.results["", 0]))
    moved = {crossing.path: given.trace.values[crossing.source].numbers for crossing in given.trace.root.exits}
    constants = [(run.values[crossing.source].numbers, moved.get(crossing.path)) for crossing in run.root.exits]
    place = len(given.trace.recorded.body)
    for path, held in leaves(result):
        expected = whole.get(path)
        if isinstance(held, Tensor):
            if isinstance(expected, Tensor) and not held.is_meta and not expected.is_meta:
                constants.append((held, expected))
            continue
        if type(held) not in _PLAIN or type(expected) not in _PLAIN or held == expected:
            continue
        numbers: tuple[tuple[int, ...] | None, tuple[int, ...] | None] = (None, None)
        if isinstance(held, int) and isinstance(expected, int):
            numbers = ((expected,), (held,))
        at = ".".join(map(str, path)) or "the result"
        reason = f"it returns {held!r} instead of {expected!r} (`{at}`)"
        return [Mismatch(given.trace.recorded, None, place, *numbers, reason, when=(place,))]
    for held, expected in constants:
        if held is not None and expected is not None and not _are_equal(held, expected):
            reason = f"it returns {_listed(held)} instead of {_listed(expected)}"
            return [Mismatch(given.trace.recorded, None, place, None, None, reason, when=(place,))]
    return []


def _are_equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)


def _listed(numbers: Tensor) -> str:
    return str(numbers.tolist())  # pyright: ignore


def _compare_written(given: CheckInput, run: Trace) -> list[Mismatch]:
    """Numbers that the run leaves in attributes and globals must be those of the unsharded model, too."""
    place = len(given.trace.recorded.body)
    for name in sorted(run.effects.written | given.trace.effects.written):
        expected, held = given.trace.effects.state.get(name), run.effects.state.get(name)
        if is_same(held, expected):
            continue
        if _is_new_each_time(given, name):
            reason = f"it leaves another number in `{name}` each time, unsharded as well, as ranks would"
            way_out = (
                "draw that number outside of the forward, the same one on all ranks, and pass it as an argument; "
                "`torch.seed()`, a clock and the like give each rank its own"
            )
            return [replace(_at_end(given, reason), way_out=way_out)]
        sizes = (_as_sizes(expected), _as_sizes(held))
        what = "others" if name.endswith(ITEMS) else f"{held!r} instead of {expected!r}"
        reason = f"it leaves {what} in `{name}`"
        return [Mismatch(given.trace.recorded, None, place, *sizes, reason, when=(place,))]
    return []


def _is_new_each_time(given: CheckInput, name: str) -> bool:
    """Whether two runs of the unsharded model leave different numbers under a name."""
    skeleton, state = make_skeleton(given.model), Capture(given.recorder(given.trace.settings))
    again = record(skeleton, given.arguments, given.keywords, state)
    return not is_same(again.effects.state.get(name), given.trace.effects.state.get(name))


def _compare_kept(
    given: CheckInput, run: Trace, operands: Correspondence, boundary: _LocalBoundary
) -> Iterator[Mismatch]:
    """Tensors that the run leaves in attributes, arguments and objects must be those of the unsharded model."""
    pairs = [
        ({f"`{name}`": value for value, name in trace.effects.kept.items()}
        | {f"`{'.'.join(map(str, path))}`": value for path, value in trace.effects.left.items()}
        | {f"a `{kind}` ({number})": value for number, (value, kind) in enumerate(trace.effects.hidden.items())})
        for trace in (given.trace, run)
    ]  # fmt: skip
    mine, its = pairs
    for name, value in mine.items():
        reason = "is left only in the unsharded model" if not boundary.skipped and name not in its else ""
        if name in its:
            reason = differing(given, value, its[name], run.values, operands)
        if reason:
            yield _at_end(given, f"of what it leaves, {name} {reason}")
            return


def _at_end(given: CheckInput, reason: str) -> Mismatch:
    place = len(given.trace.recorded.body)
    return Mismatch(given.trace.recorded, None, place, None, None, reason, when=(place,))


def _with_callers(frame: Frame, caller: Frame | None = None) -> Iterator[tuple[Frame | None, Frame]]:
    """A frame and those inside, in order of calling, each with the one that calls it."""
    yield caller, frame
    for node in frame.body:
        if isinstance(node, Frame):
            yield from _with_callers(node, frame)


def _compare_left_out(
    given: CheckInput,
    caller: Frame,
    frame: Frame,
    frames: Mapping[tuple[str, int], tuple[Frame, tuple[int, ...]]],
    values: Sequence[Value],
    operands: Correspondence,
) -> Iterator[Mismatch]:
    """The arguments of a call that wasn't run must be the trace's as well."""
    whole, place = frames[frame.module, frame.call]
    calls, _ = frames[caller.module, caller.call]
    differs = compare_call(given, calls, place[-1], whole, frame, values, operands)
    if differs is not None:
        yield replace(differs, when=place)


def _as_sizes(held: object) -> tuple[int, ...] | None:
    if isinstance(held, torch.Size):
        return tuple(held)
    return (held,) if isinstance(held, int) else None


def _in_order(frame: Frame, place: tuple[int, ...] = ()) -> Iterator[tuple[Frame, tuple[int, ...]]]:
    """A frame and those inside, each with its position in the body that calls it, and that one's in turn."""
    yield frame, place
    for position, node in enumerate(frame.body):
        if isinstance(node, Frame):
            yield from _in_order(node, (*place, position))


def _when(mismatch: Mismatch) -> tuple[int, ...]:
    return mismatch.when


def _replay(given: CheckInput, modules: Mapping[str, nn.Module], recorded: frozenset[str]) -> None:
    """Let these modules of the local model run from the records of the stock model's bodies."""
    if not recorded:
        return
    stock = dict(named_modules(make_skeleton(given.model).model))
    layouts = given.assignment.layouts
    held = {name: layouts[value] for value, names in given.trace.stored.items() for name in names if value in layouts}
    batch = given.batch
    for name in recorded:
        prefix = f"{name}." if name else ""
        own = {n.removeprefix(prefix): layout for n, layout in held.items() if n.startswith(prefix)}
        replay = Replay(
            stock[name],
            record_of(given.assignment, given.trace, name, given.size),
            own,
            given.size,
            given.rank,
            lambda: batch,
            _Shapes(given.size, given.rank),
        )
        modules[name].__dict__["forward"] = _bound(replay, modules[name])


class _Shapes:
    """Exchanges shapes, by operators that models don't call, by which the comparison knows them."""

    strict = True

    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def reshard(
        self, source: Layout, target: Layout, shape: tuple[int, ...], before: str
    ) -> Callable[[Tensor], Tensor]:
        wanted = target.local_shape(shape, self._size, self._rank)

        def move(tensor: Tensor) -> Tensor:
            if tuple(tensor.shape) == wanted:
                return ALIAS_COPY(tensor)
            if not tensor.numel():  # nothing can be repeated; whose value the result is isn't followed then
                with without_dispatch_modes():
                    return _like(wanted, tensor.dtype, tensor.requires_grad)
            return STRIDED_COPY(tensor, wanted, [0] * len(wanted))

        return move

    def mean(self, count: int, stock: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return stock


def _bound(replay: Replay, module: nn.Module) -> Callable[..., Any]:
    return lambda *args, **kwargs: replay(module, args, kwargs)


def _local_parameter_shapes(given: CheckInput) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for value, names in given.trace.stored.items():
        layout = given.assignment.layouts.get(value, REPLICATED)
        for name in names:
            shapes[name] = layout.local_shape(given.trace.values[value].shape, given.size, given.rank)
    return shapes


def local_call(given: CheckInput) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The example call as a rank gets it."""
    names = argument_names(type(given.model).forward)
    return with_parts(given.parts, given.size, given.rank, given.arguments, given.keywords, names)


class _LocalBoundary:
    """Reshards shapes at boundaries, and stands in for calls that an equal, earlier call has already shown right."""

    def __init__(
        self,
        given: CheckInput,
        excused: frozenset[str],
        attributes: Mapping[str, tuple[LocalAttribute, ...]],
        modules: Mapping[str, nn.Module],
        every_call: bool,
        shown: Shown,
    ) -> None:
        self.given = given
        self.excused = excused
        self.modules = modules
        self.every_call = every_call
        self._shown = shown
        self._keys: dict[tuple[str, int], tuple[int, object]] = {}
        self.skipped: set[tuple[str, int]] = set()
        self._decided = {(d.frame.module, d.frame.call): d for d in given.assignment.frames}
        self._instances: dict[tuple[str, int], Instance] = {}
        self._index(given.instance)
        self._recorded = {(frame.module, frame.call): frame for frame in given.trace.recorded.walk()}
        self._seen: dict[object, tuple[str, int]] = {}
        self._like: dict[tuple[str, int], tuple[str, int]] = {}
        self._fingerprints = Fingerprints(given.model, attributes)

    def _index(self, instance: Instance) -> None:
        self._instances[instance.frame.module, instance.frame.call] = instance
        for child in instance.children:
            self._index(child)

    def enter(self, module: str, call: int, path: Path, tensor: Tensor) -> Tensor:
        decided = self._decided.get((module, call))
        return tensor if decided is None else self._moved(decided.entries, path, tensor)

    def leave(self, module: str, call: int, path: Path, tensor: Tensor) -> Tensor:
        decided = self._decided.get((module, call))
        if decided is None or (module, call) in self.skipped:
            return tensor
        return self._moved(decided.exits, path, tensor)

    def _moved(self, reshards: list[PlacedReshard], path: Path, tensor: Tensor) -> Tensor:
        for reshard in reshards:
            if reshard.path == path:
                shape = _moved_shape(reshard, tuple(tensor.shape), self.given)
                collectives = reshard_between(reshard.source, reshard.target)
                stays = collectives is not None and collectives.forward is Collective.NONE
                # What isn't sent keeps its strides, and a body may look at them. If none does, what is sent lies as in
                # the unsharded model: operators of torch run as others where it doesn't.
                asked, value = self.given.trace.asked.memory, self.given.trace.values[reshard.value]
                stride = tensor.stride() if stays else None if asked else _strides(value, shape)
                return _like(shape, tensor.dtype, tensor.requires_grad, stride)
        return tensor

    def stand_in(self, module: str, call: int, passed: Any) -> tuple[Any, Sequence[str]] | None:
        instance = self._instances.get((module, call))
        if instance is None or not module or (module, call) not in self.given.results:  # it raises, and is caught
            return None
        decided = self._decided.get((module, call))
        replaced = decided is not None and decided.normed is not None
        replaced = replaced or instance.region.shared  # see `experts`
        replaced = replaced or instance.region.recurrent is not None  # see `recurrent`
        # An exact look-up, see `rewrite/lemmas`: the padding row may be another rank's.
        replaced = replaced or (instance.region.reduced and instance.region.style is Style.VOCAB)
        replaced = replaced or module in self.excused
        if not replaced and (self.every_call or not self._repeats(module, instance, passed)):
            return None
        _, *inside = frames = [*self._recorded[module, call].walk()]
        self.skipped.update((f.module, f.call) for f in frames)
        return self._promised(self.given.results[module, call], instance), [f.module for f in inside]

    def _repeats(self, module: str, instance: Instance, passed: Any) -> bool:
        region = instance.region
        result = self.given.results[module, instance.frame.call]
        if not isinstance(result, Tensor) and any(type(held) in _COUNTS for _, held in leaves(result)):
            return False  # its caller may count with a number that it returns
        if any(crossing.target in self.given.trace.numbers.known for crossing in instance.frame.exits):
            return False  # or with one that is in a tensor
        if len(region.inputs) > len({b.source for b in region.entries}) or len(region.outputs) > len(region.exits):
            return False  # it reads or leaves values past its boundary: run it
        layouts = tuple(str(self.given.assignment.layouts.get(v, REPLICATED)) for v in instance.values)
        told = [self.given.trace.numbers.reads.get((f.module, f.call)) for f in instance.frame.walk()]
        key = (id(region), layouts, self._fingerprints.of(module))
        key = (*key, self._fingerprints.passed(passed, module, self.modules[module]), repr(told) if any(told) else "")
        key = (*key, _lines(instance.frame))
        self._keys[instance.frame.module, instance.frame.call] = self.given.rank, key
        if (self.given.rank, key) in self._shown:
            return True
        first = self._seen.setdefault(key, (instance.frame.module, instance.frame.call))
        if first == (instance.frame.module, instance.frame.call):
            return False
        self._like[instance.frame.module, instance.frame.call] = first
        return True

    def shown_before(
        self, when: tuple[int, ...], frames: Mapping[tuple[str, int], tuple[Frame, tuple[int, ...]]]
    ) -> Shown:
        """The calls that end before a mismatch."""
        keys = ((key, frames[call][1]) for call, key in self._keys.items())
        return self._shown | {key for key, place in keys if place < when[: len(place)]}

    def filled(self, heard: Heard) -> Heard:
        """The steps of a run, with those that stand for a call that an equal one was run for."""
        inner = tuple(self.filled(step) if isinstance(step, Heard) else step for step in heard.steps)
        return replace(heard, steps=inner, like=self._like.get((heard.module, heard.call)))

    def _promised(self, result: Any, instance: Instance) -> Any:
        targets = {c.path: c.target for c in instance.frame.exits}
        recurrence = instance.region.recurrent

        def local(path: Path, held: Any) -> Any:
            value = self.given.trace.values[targets[path]] if path in targets else None
            if value is None and recurrence is not None and isinstance(held, Tensor):  # which nobody reads
                whole = made_layout(recurrence, path, held.dim())
                shape = whole.local_shape(tuple(held.shape), self.given.size, self.given.rank)
                return _like(shape, held.dtype, held.requires_grad)
            if value is None or not isinstance(held, Tensor):
                return held
            shape = promised_shape(self.given, value)
            return _like(shape, held.dtype, value.differentiable, _strides(value, shape))

        return Walk(local)(result)


def _lines(frame: Frame) -> tuple[Location | None, ...]:
    """Where a call's operations stand in the code, which it may choose by its module's place among others."""
    return tuple(n.location for inner in frame.walk() for n in inner.body if isinstance(n, Operation))


def _moved_shape(reshard: PlacedReshard, shape: tuple[int, ...], given: CheckInput) -> tuple[int, ...]:
    """What a reshard makes of a local shape, be it the promised one or not."""
    whole = given.trace.values[reshard.value].shape
    if shape == reshard.source.local_shape(whole, given.size, given.rank):
        return reshard.target.local_shape(whole, given.size, given.rank)
    moved = list(shape)
    if reshard.source.dim is not None:
        moved[reshard.source.dim] *= given.size
    if reshard.target.dim is not None:
        moved[reshard.target.dim] = Pack(moved[reshard.target.dim]).local(given.size, given.rank)
    return tuple(moved)


def _strides(value: Value, shape: tuple[int, ...]) -> list[int]:
    """The strides of a part of a value: its dims lie in memory in the same order; of what is whole, also as far."""
    if shape == value.shape:
        return [*value.stride]
    made, inner = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (value.stride[dim], -dim)):
        if value.stride[dim]:
            made[dim], inner = inner, inner * max(shape[dim], 1)
    return made


def _like(
    shape: Sequence[int], dtype: torch.dtype, differentiable: bool, stride: Sequence[int] | None = None
) -> Tensor:
    """A tensor without numbers; no leaf, as bodies may write to it."""
    if stride is None:
        made = torch.empty(shape, dtype=dtype, device="meta", requires_grad=differentiable)
    else:
        made = torch.empty_strided(shape, stride, dtype=dtype, device="meta", requires_grad=differentiable)
    if not differentiable:
        return made
    copy = made.clone()
    if stride is None or list(copy.stride()) == list(stride):
        return copy
    reached = 1 + sum((count - 1) * step for count, step in zip(shape, stride, strict=True))  # a copy has no gaps
    return made.new_empty(reached).requires_grad_().clone().as_strided(shape, stride)


__all__ = ["check", "different_ranks", "local_call", "ranks_alike", "run_rank"]
