"""Check: run the model once more, on local shapes, and hold every step against what the program promises.

in:  the trace, the assignment, and the attributes that were made local
out: None if every body does on one rank's shards what the trace did on whole tensors; the first `Mismatch` otherwise

    view(b, s, self.num_heads, d) on a shard  ->  Mismatch: expected (2, 16, 4, 8), got (2, 16, 8, 4)
    arange(x.shape[1]) with x: S(1)           ->  Mismatch: expected (16,), got (8,)

Where the axis divides every sharded dim, all ranks see the same shapes, and one run stands for all. Otherwise there is
a run for each kind of rank: those with a full part, the one with what remains, those with nothing. Operations that only
rearrange (views, copies) may differ from the trace, as a rank with a single head takes other paths; all others must
come in the same order, with the same scalars, and make results of the promised local shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from tpplan.compat import is_registered_container, named_modules, rebuild_container
from tpplan.compiler.assign import Assignment, PlacedReshard
from tpplan.compiler.attributes import replaced_attribute
from tpplan.compiler.capture import BodyError, Capture, record
from tpplan.compiler.convolution import CONVOLUTION, GROUPS, local_groups
from tpplan.compiler.layout import REPLICATED, Layout, Pack
from tpplan.compiler.packed import PICKS, SPLITS, picked_dim
from tpplan.compiler.program import LocalAttribute
from tpplan.compiler.recorder import Recorder
from tpplan.compiler.region import Instance, picks_of
from tpplan.compiler.replay import Replay, recorded_body
from tpplan.compiler.skeleton import make_skeleton
from tpplan.compiler.trace import Crossing, Frame, Operation, Path, Reference, Trace, Value
from tpplan.plan import Style

_REARRANGING = frozenset(
    f"aten.{name}"
    for name in (
        "view.default", "_unsafe_view.default", "reshape.default", "expand.default", "clone.default",
        "contiguous.default", "transpose.int", "permute.default", "unsqueeze.default", "squeeze.default",
        "squeeze.dim", "squeeze.dims", "t.default", "alias.default", "detach.default", "_reshape_alias.default",
        "lift_fresh.default", "as_strided.default", "mT.default", "unflatten.int",
    )
)  # fmt: skip
_SIZED = tuple(
    f"aten.{name}"
    for name in ("full.", "zeros.", "ones.", "empty.", "rand", "new_", "expand", "split_with_sizes", "normal.")
)
_PLAIN = frozenset((int, float, bool, str, type(None)))


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Where a run on local shapes departs from what was promised.

    Attributes:
        frame: the call in the trace.
        operation: the operation in the trace that should have come; None at a boundary or past the end.
        position: its position in the frame's body.
        expected, found: local shapes, or numbers passed to the operation, where these differ.
        reason: in words.
        rank: whose shapes they are.
    """

    frame: Frame
    operation: Operation | None
    position: int
    expected: tuple[int, ...] | None
    found: tuple[int, ...] | None
    reason: str
    rank: int = 0

    def sizes(self, ranks: int) -> list[int]:
        """Global sizes of which the run on local shapes saw only a rank's part."""
        if self.expected is None or self.found is None or len(self.expected) != len(self.found):
            return []
        pairs = [(a, b) for a, b in zip(self.expected, self.found, strict=True) if a != b]
        return [ours for ours, theirs in pairs if Pack(ours).local(ranks, self.rank) == theirs]


@dataclass(frozen=True, slots=True)
class CheckInput:
    """What a check needs to know; `rank` is whose shapes it runs on."""

    model: nn.Module
    trace: Trace
    assignment: Assignment
    instance: Instance
    size: int
    arguments: Sequence[Any]
    keywords: Mapping[str, Any]
    results: Mapping[tuple[str, int], Any]
    rank: int = 0


def check(
    given: CheckInput,
    attributes: Mapping[str, tuple[LocalAttribute, ...]],
    excused: frozenset[str] = frozenset(),
    recorded: frozenset[str] = frozenset(),
) -> Mismatch | None:
    """Run the model on local shapes, once for each kind of rank.

    Args:
        given: model, trace and assignment.
        attributes: integer attributes to set to local counts, by module.
        recorded: modules whose bodies run from their records.
        excused: modules that are not run, as they were reported already; their results are taken as promised.
    """
    for rank in different_ranks(given):
        found = _check_rank(replace(given, rank=rank), attributes, excused, recorded)
        if found is not None:
            return replace(found, rank=rank)
    return None


def different_ranks(given: CheckInput) -> list[int]:
    """The first rank, and each whose local shapes no rank before it has."""
    held = {(layout, given.trace.values[value].shape) for value, layout in given.assignment.layouts.items()}
    uneven = [
        (layout, shape[layout.dim])
        for layout, shape in held
        if layout.dim is not None and not layout.is_even(shape[layout.dim], given.size)
    ]
    kinds: dict[tuple[int, ...], int] = {}
    for rank in range(given.size):
        kinds.setdefault(tuple(layout.local_size(count, given.size, rank) for layout, count in uneven), rank)
    return list(kinds.values())


def _check_rank(
    given: CheckInput,
    attributes: Mapping[str, tuple[LocalAttribute, ...]],
    excused: frozenset[str],
    recorded: frozenset[str],
) -> Mismatch | None:
    shapes = _local_parameter_shapes(given)
    skeleton = make_skeleton(given.model, shapes)
    modules = dict(named_modules(skeleton.model))
    for name, held in attributes.items():
        for attribute in held:
            setattr(modules[name], *replaced_attribute(modules[name], attribute.name, attribute.on(given.rank)))
    _replay(given, modules, recorded)
    boundary = _LocalBoundary(given, excused, attributes)
    state = Capture(Recorder(given.trace.taken), boundary)
    failed: Frame | None = None
    reason = ""
    try:
        local = record(skeleton, given.arguments, given.keywords, given.trace.training, state).recorded
    except BodyError as error:
        local, failed, reason = error.root, error.frame, str(error.__cause__)
    frames = {(f.module, f.call): f for f in given.trace.recorded.walk()}
    for frame in local.walk():
        if (frame.module, frame.call) in boundary.skipped:
            continue
        whole = frames.get((frame.module, frame.call))
        if whole is None:
            message = f"calls {frame.module} once more than the unsharded model does"
            return Mismatch(given.trace.root, None, 0, None, None, message)
        unfinished = not frame.exits and bool(whole.exits)
        found = _compare(given, whole, frame, state.recorder.values, unfinished, reason if frame is failed else "")
        if found is not None:
            return found
    assert failed is None, failed.module
    return None


def _replay(given: CheckInput, modules: Mapping[str, nn.Module], recorded: frozenset[str]) -> None:
    """Let these modules of the local model run from the records of the stock model's bodies."""
    if not recorded:
        return
    stock = dict(named_modules(make_skeleton(given.model).model))
    frames = {frame.module: frame for frame in given.trace.root.walk()}
    layouts = given.assignment.layouts
    held = {
        name: layouts[value] for value, names in given.trace.parameters.items() for name in names if value in layouts
    }
    batch = given.trace.values[given.trace.inputs[0]].shape[0] if given.trace.inputs else 1
    for name in recorded:
        prefix = f"{name}." if name else ""
        own = {n.removeprefix(prefix): layout for n, layout in held.items() if n.startswith(prefix)}
        replay = Replay(stock[name], recorded_body(frames[name], layouts), own, given.size, given.rank, lambda: batch)
        modules[name].__dict__["forward"] = _bound(replay, modules[name])


def _bound(replay: Replay, module: nn.Module) -> Callable[..., Any]:
    return lambda *args, **kwargs: replay(module, args, kwargs)


def _local_parameter_shapes(given: CheckInput) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for value, names in given.trace.parameters.items():
        layout = given.assignment.layouts.get(value, REPLICATED)
        for name in names:
            shapes[name] = layout.local_shape(given.trace.values[value].shape, given.size, given.rank)
    return shapes


class _LocalBoundary:
    """Reshards shapes at boundaries, and stands in for calls that an equal, earlier call has already shown right."""

    def __init__(
        self, given: CheckInput, excused: frozenset[str], attributes: Mapping[str, tuple[LocalAttribute, ...]]
    ) -> None:
        self.given = given
        self.excused = excused
        self.attributes = attributes
        self.skipped: set[tuple[str, int]] = set()
        self._decided = {(d.frame.module, d.frame.call): d for d in given.assignment.frames}
        self._instances: dict[tuple[str, int], Instance] = {}
        self._index(given.instance)
        self._seen: set[object] = set()
        self._modules = dict(named_modules(given.model))

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
                return _like(shape, tensor.dtype, tensor.requires_grad)
        return tensor

    def stand_in(self, module: str, call: int) -> tuple[Any] | None:
        instance = self._instances.get((module, call))
        if instance is None or not module:
            return None
        decided = self._decided.get((module, call))
        replaced = decided is not None and decided.normed is not None
        # The runtime's own body is run in place of a table's, whose padding row may be another rank's.
        replaced = replaced or instance.region.style is Style.VOCAB
        if module not in self.excused and not replaced and not self._repeats(module, instance):
            return None
        self.skipped.update((f.module, f.call) for f in instance.frame.walk())
        return (self._promised(self.given.results[module, call], instance.frame),)

    def _repeats(self, module: str, instance: Instance) -> bool:
        region = instance.region
        if len(region.inputs) > len({b.source for b in region.entries}) or len(region.outputs) > len(region.exits):
            return False  # it reads or leaves values past its boundary: run it
        layouts = tuple(str(self.given.assignment.layouts.get(v, REPLICATED)) for v in instance.values)
        key = (id(region), layouts, self._fingerprint(module))
        if key in self._seen:
            return True
        self._seen.add(key)
        return False

    def _fingerprint(self, module: str) -> object:
        """The classes and plain attributes of a module and all inside it: what its code may depend on, besides tensors.

        A number that is the module's own position among its siblings (`layer_idx`) counts as a position.
        """
        positions = {int(part) for part in module.split(".") if part.isdigit()}
        found: list[object] = []
        for name, inner in named_modules(self._modules[module]):
            plain = [
                (key, "position" if type(held) is int and held in positions else held)
                for key, held in vars(inner).items()
                if type(held) in _PLAIN
            ]
            full = f"{module}.{name}" if name else module
            found.append((name, type(inner), tuple(plain), self.attributes.get(full)))
        return tuple(found)

    def _promised(self, result: Any, frame: Frame) -> Any:
        targets = {c.path: c.target for c in frame.exits}

        def local(held: Any, path: Path) -> Any:
            if isinstance(held, Tensor):
                value = self.given.trace.values[targets[path]] if path in targets else None
                if value is None:
                    return held
                shape = _promised_shape(self.given, value)
                return _like(shape, held.dtype, value.differentiable)
            if isinstance(held, tuple):
                items = [local(item, (*path, i)) for i, item in enumerate(held)]  # pyright: ignore
                return type(held)(*items) if hasattr(held, "_fields") else tuple(items)  # pyright: ignore
            if type(held) is list:
                return [local(item, (*path, i)) for i, item in enumerate(held)]  # pyright: ignore
            if type(held) is dict:
                return {key: local(item, (*path, key)) for key, item in held.items()}  # pyright: ignore
            if is_registered_container(held):
                keys = iter(list(held) if isinstance(held, dict) else range(1 << 30))  # pyright: ignore
                return rebuild_container(held, lambda item: local(item, (*path, next(keys))))  # pyright: ignore
            return held

        return local(result, ())


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


def _like(shape: Sequence[int], dtype: torch.dtype, differentiable: bool) -> Tensor:
    """A tensor without numbers; no leaf, as bodies may write to it."""
    made = torch.empty(shape, dtype=dtype, device="meta", requires_grad=differentiable)
    return made.clone() if differentiable else made


def _promised_shape(given: CheckInput, value: Value) -> tuple[int, ...]:
    layout: Layout = given.assignment.layouts.get(value.identifier, REPLICATED)
    return layout.local_shape(value.shape, given.size, given.rank)


def _compare(
    given: CheckInput, whole: Frame, local: Frame, values: Sequence[Value], unfinished: bool, failure: str
) -> Mismatch | None:
    """The first difference between a call in the trace and the same call on local shapes."""
    found = _compare_crossings(given, whole, whole.entries, local.entries, values, 0)
    if found is not None:
        return found
    steps = [(i, n) for i, n in enumerate(whole.body) if isinstance(n, Operation) and n.name not in _REARRANGING]
    runs = [n for n in local.body if isinstance(n, Operation) and n.name not in _REARRANGING]
    rearranged = zip(_rearranging_before(whole), _rearranging_before(local), strict=False)
    for (position, ours), theirs in zip(steps, runs, strict=False):
        found = _compare_rearranged(given, whole, *next(rearranged), values)
        found = found or _compare_operation(given, whole, position, ours, theirs, values)
        if found is not None:
            return found
    if failure:
        return _failed_at(given, whole, local, values, failure.splitlines()[0])
    if unfinished:
        return None
    end = len(whole.body)
    if len(steps) != len(runs):
        return Mismatch(whole, None, end, None, None, f"runs {len(runs)} operations instead of {len(steps)}")
    found = _compare_rearranged(given, whole, *next(rearranged), values)
    return found or _compare_crossings(given, whole, whole.exits, local.exits, values, end)


_Rearranging = list[tuple[int, Operation]]


def _rearranging_before(frame: Frame) -> Iterator[_Rearranging]:
    """For each operation that computes, the views and copies since the one before; at last, those at the end."""
    since: _Rearranging = []
    for position, node in enumerate(frame.body):
        if not isinstance(node, Operation):
            continue
        if node.name in _REARRANGING:
            since.append((position, node))
        else:
            yield since
            since = []
    yield since


def _compare_rearranged(
    given: CheckInput, whole: Frame, ours: _Rearranging, theirs: _Rearranging, values: Sequence[Value]
) -> Mismatch | None:
    """Views and copies must yield what's promised too, wherever the two runs take the same ones."""
    if [o.target for _, o in ours] != [o.target for _, o in theirs]:
        return None
    for (position, mine), (_, its) in zip(ours, theirs, strict=True):
        found = _compare_shapes(given, whole, position, mine, its, values)
        if found is not None:
            return found
    return None


def _compare_crossings(
    given: CheckInput,
    whole: Frame,
    ours: Sequence[Crossing],
    theirs: Sequence[Crossing],
    values: Sequence[Value],
    position: int,
) -> Mismatch | None:
    for mine, its in zip(ours, theirs, strict=False):
        layouts = given.assignment.layouts
        expected, found = _promised_shape(given, given.trace.values[mine.target]), values[its.target].shape
        if mine.target in layouts and mine.path == its.path and expected != found:
            reason = f"`{'.'.join(map(str, mine.path)) or 'the result'}` has another shape"
            return Mismatch(whole, None, position, expected, found, reason)
    return None


def _compare_operation(
    given: CheckInput, whole: Frame, position: int, ours: Operation, theirs: Operation, values: Sequence[Value]
) -> Mismatch | None:
    splits = ours.name in SPLITS and theirs.name in SPLITS  # of an empty dim, `chunk` takes the other one
    if ours.target is not theirs.target and not splits:
        return Mismatch(whole, ours, position, None, None, f"runs {theirs.name} where {ours.name} should come")
    found = _compare_shapes(given, whole, position, ours, theirs, values)
    if found is not None:
        return found
    for mine, its in zip(ours.inputs, theirs.inputs, strict=False):
        if not _same_numbers(_numbers_on_rank(given, ours, mine), values[its].numbers):
            return Mismatch(whole, ours, position, None, None, f"{ours.name} reads a constant that has other numbers")
    if not _same_scalars(given, ours, theirs):
        mine, its = (tuple(n for n in _scalars(held) if type(n) is int) for held in (ours, theirs))
        reason = f"{ours.name} is called with {_shown(theirs)} instead of {_shown(ours)}"
        return Mismatch(whole, ours, position, mine, its, reason)
    return None


def _compare_shapes(
    given: CheckInput, whole: Frame, position: int, ours: Operation, theirs: Operation, values: Sequence[Value]
) -> Mismatch | None:
    layouts = given.assignment.layouts
    reason = f"{ours.name} makes another shape"
    if len(ours.outputs) != len(theirs.outputs):
        reason = f"{ours.name} makes {len(theirs.outputs)} parts instead of {len(ours.outputs)}"
    for mine, its in zip(ours.outputs, theirs.outputs, strict=False):
        if mine is None or its is None or mine not in layouts:
            continue
        expected = _promised_shape(given, given.trace.values[mine])
        if expected != values[its].shape:
            return Mismatch(whole, ours, position, expected, values[its].shape, reason)
    if len(ours.outputs) != len(theirs.outputs):
        return Mismatch(whole, ours, position, None, None, reason)
    return None


def _same_numbers(ours: Tensor | None, theirs: Tensor | None) -> bool:
    return ours is None or theirs is None or torch.equal(ours, theirs)


def _numbers_on_rank(given: CheckInput, operation: Operation, value: int) -> Tensor | None:
    """The numbers of a constant; where they pick stretches of a packed dim, as they have to be on a rank."""
    numbers = given.trace.values[value].numbers
    picks = picks_of(numbers)
    layout = given.assignment.layouts.get(operation.inputs[0], REPLICATED)
    if picks is None or layout.dim is None or not layout.packs or operation.name not in PICKS:
        return numbers
    shape = given.trace.values[operation.inputs[0]].shape
    made = next(o for o in operation.outputs if o is not None)
    if picked_dim(operation.name, operation.arguments) != layout.dim:
        return numbers
    first = _start_on_rank(given, layout, shape[layout.dim], picks[0])
    return torch.arange(first, first + _promised_shape(given, given.trace.values[made])[layout.dim])


def _failed_at(given: CheckInput, whole: Frame, local: Frame, values: Sequence[Value], failure: str) -> Mismatch:
    """For a body that raised: the first view or copy whose shape already was another, or the one that raised."""
    ours = [(i, n) for i, n in enumerate(whole.body) if isinstance(n, Operation)]
    theirs = [n for n in local.body if isinstance(n, Operation)]
    for (position, mine), its in zip(ours, theirs, strict=False):
        if mine.target is not its.target:
            return Mismatch(whole, mine, position, None, None, failure)
        found = _compare_operation(given, whole, position, mine, its, values)
        if found is not None:
            return found
    if len(theirs) >= len(ours):
        return Mismatch(whole, None, len(whole.body), None, None, failure)
    position, mine = ours[len(theirs)]
    made = next((o for o in mine.outputs if o is not None), None)
    expected = None if made is None else _promised_shape(given, given.trace.values[made])
    return Mismatch(whole, mine, position, expected, None, failure)


def _same_scalars(given: CheckInput, ours: Operation, theirs: Operation) -> bool:
    if ours.name == "aten.slice.Tensor":
        return _local_start(given, ours) == theirs.arguments[1:3] and ours.arguments[4:] == theirs.arguments[4:]
    if ours.name in SPLITS:
        return ours.arguments[2:] == theirs.arguments[2:]  # the results' shapes show the sizes
    if ours.name == CONVOLUTION:
        mine, its = ours.arguments, theirs.arguments
        return mine[3:GROUPS] == its[3:GROUPS] and _local_groups(given, ours) == its[GROUPS]
    return _scalars(ours) == _scalars(theirs)


def _local_start(given: CheckInput, operation: Operation) -> tuple[Any, ...]:
    """The dim and the start of a slice, the start counted on one rank where the dim is sharded."""
    held: tuple[Any, ...] = operation.arguments[1:3]
    layout = given.assignment.layouts.get(operation.inputs[0], REPLICATED)
    shape = given.trace.values[operation.inputs[0]].shape
    if len(held) < 2 or not held[1] or layout.dim is None or held[0] % len(shape) != layout.dim:
        return held
    if not layout.packs:
        return held  # of a dim that is one stretch, a slice of every so many entries begins alike on each rank
    return (held[0], _start_on_rank(given, layout, shape[layout.dim], held[1]))


def _start_on_rank(given: CheckInput, layout: Layout, count: int, start: int) -> int:
    """Where a stretch begins on a rank, counted from the same end."""
    local = layout.local_start(start, count, given.size, given.rank)
    return local - layout.local_size(count, given.size, given.rank) if start < 0 else local


def _local_groups(given: CheckInput, operation: Operation) -> int:
    x = operation.inputs[0]
    layout, channels = given.assignment.layouts.get(x, REPLICATED), given.trace.values[x].shape[1]
    return local_groups(operation.arguments[GROUPS], layout, channels, given.size, given.rank)


def _shown(operation: Operation) -> str:
    return ", ".join(str(n) for n in _scalars(operation) if isinstance(n, (int, float)) and not isinstance(n, bool))


def _scalars(operation: Operation) -> list[object]:
    """The arguments that aren't tensors. Sizes are left out where they show in the results' shapes."""
    held = (*operation.arguments, *operation.keywords.values())
    sized = operation.name.startswith(_SIZED)
    return [a for a in held if not (isinstance(a, Reference) or (isinstance(a, tuple) and (sized or _has_tensors(a))))]  # pyright: ignore


def _has_tensors(items: Any) -> bool:
    return any(isinstance(item, Reference) for item in items)


__all__ = ["CheckInput", "Mismatch", "check"]
