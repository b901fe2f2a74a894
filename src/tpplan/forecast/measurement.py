"""Measure: a rank's work in one forward and its backward, from a run of the lowered model on shapes.

in:  a stock model, its program and the example call
out: `Work`, at the example's size or at others

The run is that of a rehearsal: the model as rank 0 would have it, with calls left out that are equal to one that ran,
which then counts so often. Attention is one kernel. What autograd keeps is read off its graph after the forward.
Of branches on data those sides are taken that cost least, as data without padding does.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from tpplan.ambience import ambience
from tpplan.calls.storage import Forgetful
from tpplan.compat.autograd import node_number, saved_tensors_of, without_packing
from tpplan.compat.modes import Unwatched
from tpplan.compat.modules import named_modules
from tpplan.compat.tensors import storage_key
from tpplan.compiler.ir.arrivals import call_on_rank
from tpplan.compiler.ir.locations import Location
from tpplan.compiler.ir.overlaps import Overlap
from tpplan.compiler.ir.program import Program
from tpplan.compiler.ir.pytree import leaves, tensors_of, with_tensors
from tpplan.compiler.ir.steps import Heard, Stream
from tpplan.compiler.ir.trace import Path
from tpplan.compiler.pipeline import Compiled
from tpplan.compiler.trace.capture import on_shapes, tell_inputs
from tpplan.compiler.trace.signatures import argument_names
from tpplan.compiler.trace.skeleton import make_skeleton
from tpplan.compiler.trace.surroundings import Surroundings, same_files
from tpplan.cost.work import ATTENTION, Point, SavedBytes, Task, Work, joined
from tpplan.forecast.attention_kernel import KernelAttention
from tpplan.forecast.tally import Kernel, Key, Tally, TallyPlace
from tpplan.inputs import beyond_positions
from tpplan.rehearsal.rehearse import ShapeCommunicator, differentiate, like_on, likes_of, lowered_on_shapes, stand_in
from tpplan.runtime.parameters.sharded_operations import is_final

Call = tuple[tuple[Any, ...], dict[str, Any]]
_META = torch.device("meta")
_SCALES = (1, 2, 3)


@dataclass(frozen=True, slots=True)
class SizedCall:
    """A call, and which of its sizes are the batch and the sequence.

    Attributes:
        call: the call.
        names: of the positional arguments.
        batch, sequence: the sizes; a sequence of 1 where there is none.
    """

    call: Call
    names: tuple[str, ...]
    batch: int
    sequence: int

    @classmethod
    def of(cls, model: nn.Module, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> SizedCall:
        """The batch is dim 0 of the first tensor of tokens, or else of the first; the sequence is its dim 1.

        That is 1 of a tensor that holds neither tokens nor their features.
        """
        call, names = (tuple(arguments), dict(keywords)), tuple(argument_names(type(model).forward))
        held = [t for _, t in tensors_of(*call, names) if t.dim()]
        tokens = [t for t in held if t.dim() == 2 and not t.is_floating_point() and t.dtype is not torch.bool]
        first = next(iter(tokens or held), None)
        if first is None:
            return cls(call, names, 1, 1)
        return cls(call, names, first.shape[0], first.shape[1] if tokens or first.dim() == 3 else 1)

    def sized(self, batch: int, sequence: int) -> Call:
        """The call with another batch and sequence."""

        def shaped(_: Path, tensor: Tensor) -> Tensor:
            shape = list(tensor.shape)
            if shape and shape[0] == self.batch:
                shape[0] = batch
            for dim in range(1, len(shape) - (tensor.dim() == 3 and tensor.is_floating_point())):
                if self.sequence > 1 and shape[dim] == self.sequence:
                    shape[dim] = sequence
            return torch.empty(shape, dtype=tensor.dtype, device=_META, requires_grad=tensor.requires_grad)

        if (batch, sequence) == (self.batch, self.sequence):
            return self.call
        return with_tensors(*self.call, self.names, shaped)


class Measurement:
    """Measures a program when it is asked to, at any size; a copy has what is measured at some."""

    @ambience()
    def __init__(
        self, model: nn.Module, compiled: Compiled, arguments: Sequence[Any], keywords: Mapping[str, Any]
    ) -> None:
        """Of a stock model, which is not changed."""
        self._model = make_skeleton(model).model
        self._compiled = replace(compiled, subject=None)  # which holds the user's model
        self._sized = SizedCall.of(model, arguments, keywords)
        self._known: dict[tuple[Point, bool, bool], Work] = {}
        self._taken: frozenset[Location] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """What is measured at the sizes that others are made of."""
        return _Measured, (self(),)

    def __deepcopy__(self, memo: object) -> Measurement:
        """It never changes."""
        return self

    @same_files()
    def __call__(self) -> Work | None:
        """At the sizes that others are made of; at the example's alone if it runs at no other; None if at none."""
        batch, sequence = self._sized.batch, self._sized.sequence
        lengths = [sequence * n for n in _SCALES] if sequence > 1 else [1]
        least = max(batch, 2)  # a batch of 1 lies in memory as no other does
        points = [(least * n, length) for n in _SCALES[:2] for length in lengths]
        first: Work | None = None
        try:
            first = self.at(forward=True)
            shared = joined([self.at(*point, forward=True) for point in points], first.example)
            return replace(shared, own=first if batch == 1 else None)
        except Exception as error:  # whatever the model's code can't do at some size, or without numbers
            if first is None:
                return None
            lines = str(error).strip().splitlines()
            return replace(first, unsized=f"the program runs at its example's size alone: {lines[0] if lines else ''}")

    def at(
        self, batch: int | None = None, sequence: int | None = None, *, forward: bool = False, flops: bool = True
    ) -> Work:
        """At one size; the example's where none is given.

        Args:
            batch, sequence: the size.
            forward: whether to tell what a forward without gradients takes.
            flops: whether to tell those of the unsharded model.
        """
        point = (batch or self._sized.batch, sequence or self._sized.sequence)
        key = (point, forward, flops)
        if point[1] != 1 == self._sized.sequence:
            raise ValueError("its call has no sequence")
        if key not in self._known:
            self._known[key] = self._measured(*key)
        return self._known[key]

    def beyond(self, sequence: int) -> list[str]:
        """Why the model can't be called with such a sequence, although it runs on shapes."""
        return beyond_positions(self._model, sequence)

    @ambience()
    @same_files()
    def _measured(self, point: Point, forward: bool, flops: bool) -> Work:
        call = self._sized.sized(*point)
        run = functools.partial(_run, self._model, self._compiled, call, self._sized.names)
        sides = {a.location for a in self._compiled.assumptions if a.location is not None}
        as_proved = frozenset(a.location for a in self._compiled.assumptions if a.taken and a.location is not None)
        if self._taken is None:
            self._taken, own = as_proved, run(as_proved, 0)
            for taken in (frozenset(sides), frozenset[Location]()) if sides else ():
                other = None if taken == as_proved else _tried(run, taken)
                if other is not None and other.flops < own.flops:
                    self._taken, own = taken, other
        else:
            own = run(self._taken, 0)
        work = own.work(point)
        if flops:
            whole = own if self._compiled.program.size == 1 else run(self._taken, None)
            work = replace(work, model_flops=(whole.uncut,))
        if forward:
            alone = run(self._taken, 0, False)
            work = replace(work, forward_temporary=(alone.peak,), cache=(alone.cache,))
        return work


class _Measured:
    """What was measured."""

    def __init__(self, work: Work | None) -> None:
        self.work = work

    def __call__(self) -> Work | None:
        return self.work

    def beyond(self, sequence: int) -> list[str]:
        """What isn't known any more."""
        return []

    def at(self, batch: int | None = None, sequence: int | None = None, **_: bool) -> Work:
        if self.work is None:
            raise ValueError("it can't run on shapes")
        return self.work.at(batch or self.work.example[0], sequence or self.work.example[1])


def _tried(run: Callable[[frozenset[Location], int], _ShapeRun], taken: frozenset[Location]) -> _ShapeRun | None:
    """A run that takes other sides of branches on data; None if what follows can't run on shapes."""
    try:
        return run(taken, 0)
    except Exception as error:
        if is_final(error):
            raise
        return None


# -- one run --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _ShapeRun:
    """What a run left behind."""

    tally: Tally
    saved: Mapping[int, tuple[int, TallyPlace]]
    results: frozenset[int]
    lists: Mapping[str, str]
    training: bool

    def work(self, point: Point) -> Work:
        """The run as data."""
        saved: Counter[tuple[str, str, int]] = Counter()
        for number, (held, place) in self.saved.items():
            kind = self.tally.stored[number].kind if number > 0 else "input"
            saved[place.module, kind, self.tally.copies(place, number)] += held
        results = sum(self.tally.stored[n].bytes for n in self.results if n > 0 and n not in self.saved)
        return Work(
            points=(point,),
            example=point,
            tokens=(point[0] * point[1],),
            tasks=_tasks(self.tally.kernels, frozenset(self.saved) | self.results),
            saved=tuple(SavedBytes(*key, (held,)) for key, held in saved.items()),
            lists=tuple(sorted(set(self.lists.values()))),
            block_inputs=(sum(self.tally.blocks.values()),),
            results=(results,),
            temporary=(self._temporary(),),
            forward_temporary=(0,),
            cache=(0,),
            model_flops=(0,),
            training=self.training,
        )

    @property
    def flops(self) -> int:
        """Of all kernels."""
        return sum(kernel.flops * kernel.place.times for kernel in self.tally.kernels)

    @property
    def uncut(self) -> int:
        """The same, with attention in full."""
        return sum(kernel.uncut * kernel.place.times for kernel in self.tally.kernels)

    @property
    def cache(self) -> int:
        """Bytes of the keys and values of each attention's forward."""
        found = [k for k in self.tally.kernels if k.kind == ATTENTION and not k.backward]
        return sum(k.kept * k.place.times for k in found)

    @property
    def peak(self) -> int:
        """The most bytes at once."""
        changes: dict[int, int] = defaultdict(int)
        for held in self.tally.stored.values():
            changes[held.made] += held.bytes
            if held.freed is not None:
                changes[held.freed] -= held.bytes
        return max(itertools.accumulate((changes[event] for event in sorted(changes)), initial=0))

    def _temporary(self) -> int:
        """The most bytes at once of what isn't kept, less what was kept and is freed again."""
        kept = frozenset(self.saved) | self.results
        changes: dict[int, int] = defaultdict(int)
        for number, held in self.tally.stored.items():
            if number in kept:
                if held.freed is not None:
                    changes[held.freed] -= held.bytes
            elif held.freed is not None:
                changes[held.made] += held.bytes
                changes[held.freed] -= held.bytes
        return max(itertools.accumulate((changes[event] for event in sorted(changes)), initial=0))


def _run(
    model: nn.Module,
    compiled: Compiled,
    call: Call,
    names: Sequence[str],
    taken: frozenset[Location],
    rank: int | None,
    gradients: bool = True,
) -> _ShapeRun:
    """Run a call, and its backward in training, on shapes: as a rank, or unsharded.

    Args:
        model, compiled, call, names: what runs.
        taken: the branches on data that are taken.
        rank: None for the stock model.
        gradients: whether there is a backward, in training.
    """
    program = replace(compiled.program, overlaps=tuple(_recomputed(compiled.program)))
    if rank is None:
        skeleton, axis = make_skeleton(model).model.train(program.training), ShapeCommunicator(1, 0)
    else:
        skeleton, axis = lowered_on_shapes(model, program, rank)
        call = call_on_rank(program, rank, *call, names)
    stream = compiled.streams[rank or 0]
    lists = _lists(skeleton)
    tally = Tally(_times(stream), frozenset(lists))
    axis.observe = tally.collective
    stand_in(skeleton, stream, tally)
    arguments, keywords = with_tensors(*call, names, like_on(_META))
    settings = replace(compiled.lowered_settings, taken=taken)
    owned = {id(held.untyped_storage()): held for held in (*skeleton.parameters(), *skeleton.buffers())}
    held = {tally.number(tensor) for tensor in owned.values()} | {-storage_key(_plain(t)) for t in owned.values()}
    around = Surroundings(skeleton)
    try:
        with _told_modules(skeleton, tally), on_shapes(skeleton, settings, Forgetful) as recorder:
            tell_inputs(recorder, call, (arguments, keywords), names)
            with tally, KernelAttention(tally), without_packing(), torch.set_grad_enabled(gradients):
                result = skeleton(*arguments, **keywords)
                with Unwatched():
                    saved = _saved(result, tally, held)
                    results = frozenset(tally.number(t) for _, t in leaves(result) if isinstance(t, Tensor))
                    differs = any(t.requires_grad for _, t in leaves(result) if isinstance(t, Tensor))
                if program.training and differs:
                    differentiate(result)
                tally.end()
    finally:
        around.restore()
    return _ShapeRun(tally, saved, results, lists, program.training and differs)


def _recomputed(program: Program) -> Iterator[Overlap]:
    """What a program gathers again; work is that of collectives and products one after the other."""
    return (replace(overlap, units=()) for overlap in program.overlaps if program.overlapped(overlap)[1].gathered_again)


def _plain(tensor: Tensor) -> Tensor:
    """A rank's part of a tensor of which it holds one."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # pyright: ignore


@contextmanager
def _told_modules(model: nn.Module, tally: Tally) -> Generator[None]:
    handles: list[Any] = []
    for name, module in named_modules(model):
        handles.append(module.register_forward_pre_hook(functools.partial(_entered, tally, name), with_kwargs=True))
        handles.append(module.register_forward_hook(functools.partial(_left, tally), always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _left(tally: Tally, *_: Any) -> None:
    tally.leave()


def _entered(tally: Tally, name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
    tally.enter(name, (args, kwargs))


def _times(stream: Stream) -> dict[Key, int]:
    """How often a step does what each call that others are equal to does."""
    likes: dict[Key, list[Key]] = defaultdict(list)
    for call, like in likes_of(stream.root):
        likes[like].append(call)
    above: dict[Key, Key | None] = {}

    def walk(heard: Heard, within: Key | None) -> None:
        key = (heard.module, heard.call)
        above[key] = within
        for step in heard.steps:
            if isinstance(step, Heard):
                walk(step, key if key in likes else within)

    walk(stream.root, None)
    known: dict[Key, int] = {}

    def times(key: Key) -> int:
        if key not in known:
            outer = [above.get(call) for call in (key, *likes[key])]
            known[key] = sum(1 if call is None else times(call) for call in outer)
        return known[key]

    return {key: times(key) for key in [*likes]}


def _saved(result: Any, tally: Tally, without: Iterable[int]) -> dict[int, tuple[int, TallyPlace]]:
    """The storages that the graph of a result keeps: the bytes and where, for the most copies."""
    waiting = [t.grad_fn for _, t in leaves(result) if isinstance(t, Tensor) and t.grad_fn is not None]
    seen, found = set(waiting), dict[int, tuple[int, TallyPlace]]()
    leave_out = set(without)
    while waiting:
        node = waiting.pop()
        place = tally.place_of(node_number(node))
        for tensor in saved_tensors_of(node):
            number = tally.number(tensor)
            if number in leave_out:
                continue
            known = found.get(number)
            if known is None or tally.copies(known[1], number) < tally.copies(place, number):
                found[number] = tensor.untyped_storage().nbytes(), place
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return found


def _lists(model: nn.Module) -> dict[str, str]:
    """The modules in the outermost lists of a model, each with its list."""
    found: dict[str, str] = {}
    for name, module in named_modules(model):
        if isinstance(module, nn.ModuleList) and not f"{name}.".startswith(
            tuple(f"{held}." for held in found.values())
        ):
            found |= {f"{name}.{place}" if name else str(place): name for place in range(len(module))}
    return found


# -- as data --------------------------------------------------------------------------------------------------------
def _tasks(kernels: Sequence[Kernel], kept: frozenset[int]) -> tuple[Task, ...]:
    """The kernels in order; those between products that memory bounds, of one module, are one task."""
    fused = _fused(kernels, kept)
    tasks: list[Task] = []
    for kernel, joint in zip(kernels, fused, strict=True):
        made = kernel.whole or sum(kernel.written.values())
        moved = sum(kernel.read.values()) + sum(kernel.written.values())
        sizes = tuple((n,) for size in kernel.sizes for n in size)
        task = Task(
            kernel.place.module, kernel.backward, kernel.kind, kernel.name, kernel.dtype, kernel.place.times, 1,
            (kernel.flops,), (moved,), (joint,), (made,), sizes,
        )  # fmt: skip
        last = tasks[-1] if tasks else None
        if last is not None and task.kind == "other" and _alike(last, task):
            tasks[-1] = replace(
                last, name="kernels", launches=last.launches + 1, moved=(last.moved[0] + moved,),
                fused=(last.fused[0] + joint,), made=(last.made[0] + made,),
            )  # fmt: skip
        else:
            tasks.append(task)
    return tuple(tasks)


def _alike(one: Task, other: Task) -> bool:
    return (one.module, one.backward, one.kind, one.times) == (other.module, other.backward, other.kind, other.times)


def _fused(kernels: Sequence[Kernel], kept: frozenset[int]) -> list[int]:
    """The bytes that each moves where kernels between two products are one: what enters and leaves them, once."""
    groups, group = list[int](), 0
    for kernel in kernels:
        group += kernel.kind != "other"
        groups.append(group)
        group += kernel.kind != "other"
    last = {number: place for kernel, place in zip(kernels, groups, strict=True) for number in kernel.read}
    inside: dict[int, set[int]] = defaultdict(set)
    found: list[int] = []
    for kernel, place in zip(kernels, groups, strict=True):
        if kernel.kind != "other":
            found.append(sum(kernel.read.values()) + sum(kernel.written.values()))
            continue
        known = inside[place]
        moved = sum(held for number, held in kernel.read.items() if number not in known)
        moved += sum(held for number, held in kernel.written.items() if last.get(number, -1) > place or number in kept)
        known |= {*kernel.read, *kernel.written}
        found.append(moved)
    return found


__all__ = ["Call", "Measurement", "SizedCall"]
