"""Tally: what runs, forward and backward, while a model runs on shapes; and what memory that takes.

A storage counts from the operation that makes it until Python frees the last tensor of it. Operations of the backward
belong to the module in whose forward their node of the graph was made: nodes are numbered in order.
"""

from __future__ import annotations

import math
import weakref
from bisect import bisect_right
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from tpplan.compat.autograd import next_node_number, running_node_number
from tpplan.compat.modes import TorchDispatchMode, Unwatched
from tpplan.compat.schemas import schema_mutates
from tpplan.compat.tensors import storage_key
from tpplan.compiler.ir.program import dtype_name
from tpplan.compiler.ir.pytree import leaves
from tpplan.cost.work import ATTENTION, COLLECTIVE, PRODUCTS
from tpplan.ops.flops import ProductSizes, attention_flops, flops_of, product_sizes, runs_no_kernel
from tpplan.ops.registry import lookup

Key = tuple[str, int]


class TallyPlace(NamedTuple):
    """Where something runs: the module, how often a step runs it, and the calls around it that others are equal to."""

    module: str
    times: int
    within: tuple[Key, ...] = ()


@dataclass(slots=True)
class Kernel:
    """One kernel, or collective, that ran."""

    place: TallyPlace
    backward: bool
    kind: str
    name: str
    dtype: str
    flops: int
    read: Mapping[int, int]
    written: Mapping[int, int]
    sizes: tuple[ProductSizes, ...] = ()
    whole: int = 0
    uncut: int = 0
    kept: int = 0


@dataclass(slots=True)
class TallyStorage:
    """A storage: its bytes, what made it, and when it was made and freed, counted in events."""

    bytes: int
    kind: str
    made: int
    freed: int | None = None
    holders: int = 1


class Tally(TorchDispatchMode):
    """Counts what runs while this mode is on.

    Attributes:
        kernels: in order.
        stored: storages by number; those that were there before aren't among them.
        events: how many storages were made or freed.
        shared: for each call that stands for others, the storages that it was passed, and the others too.
        blocks: the bytes of storages that were passed to blocks and want a gradient, by number.
    """

    def __init__(self, times: Mapping[Key, int], blocks: frozenset[str]) -> None:
        """Count each call that others are equal to so often; blocks are given by name."""
        super().__init__()
        self.blocks: dict[int, int] = {}
        self._blocks = blocks
        self.kernels: list[Kernel] = []
        self.stored: dict[int, TallyStorage] = {}
        self.events = 0
        self.shared: dict[Key, set[int]] = {}
        self._times = times
        self._places = [TallyPlace("", 1)]
        self._numbers: list[int] = [0]
        self._marked: list[TallyPlace] = [self._places[0]]
        self._alive: dict[int, int] = {}
        self._passed: dict[Key, set[int]] = {}
        self._ended = False

    # -- where ------------------------------------------------------------------------------------------------------
    def enter(self, module: str, passed: Any) -> None:
        """The forward of a module begins, with these arguments."""
        if module in self._blocks:
            with Unwatched():
                self.blocks |= {
                    self.number(t): t.untyped_storage().nbytes() for t in _tensors(passed) if t.requires_grad
                }
        self._push(self._places[-1]._replace(module=module))

    def leave(self) -> None:
        """It ends."""
        self._places.pop()
        self._mark()

    @contextmanager
    def runs(self, key: Key, passed: Any) -> Generator[None]:
        """See `CallWatch`."""
        self._passed[key] = {self.number(t) for t in _tensors(passed)}
        place = self._places[-1]._replace(module=key[0])
        if key in self._times:
            place = TallyPlace(key[0], self._times[key], (*place.within, key))
        self._push(place)
        try:
            yield
        finally:
            self.leave()

    def stands_in(self, key: Key, passed: Any) -> None:
        """See `CallWatch`."""
        also = {self.number(t) for t in _tensors(passed)} & self._passed.get(key, set())
        self.shared[key] = self.shared[key] & also if key in self.shared else also

    def _push(self, place: TallyPlace) -> None:
        self._places.append(place)
        self._mark()

    def _mark(self) -> None:
        self._numbers.append(next_node_number())
        self._marked.append(self._places[-1])

    def place_of(self, number: int) -> TallyPlace:
        """Where the node of that number was made."""
        return self._marked[bisect_right(self._numbers, number) - 1]

    def copies(self, place: TallyPlace, storage: int) -> int:
        """How many storages like one that is kept at a place there are, in all equal calls."""
        times, within = place.times, place.within
        while within and storage in self.shared.get(within[-1], ()):
            within = within[:-1]
            times = self._times[within[-1]] if within else 1
        return times

    # -- storages ---------------------------------------------------------------------------------------------------
    def number(self, tensor: Tensor) -> int:
        """What tells a storage from any other, alive or freed."""
        return self._alive.get(storage_key(tensor), -storage_key(tensor))

    def _add(self, tensor: Tensor, kind: str, viewed: Tensor | None = None) -> None:
        """Count a storage; that of a view, which shapes alone don't tell from another, is the viewed one's."""
        key, storage = storage_key(tensor), tensor.untyped_storage()
        if key in self._alive:
            return
        self.events += 1
        number = len(self.stored) + 1 if viewed is None else self.number(viewed)
        if viewed is None:
            self.stored[number] = TallyStorage(storage.nbytes(), kind, self.events)
        elif number > 0:
            self.stored[number].holders += 1
        self._alive[key] = number
        weakref.finalize(storage, self._free, key, number)

    def end(self) -> None:
        """The step is over: what Python frees from here on, it frees when it likes."""
        self._ended = True

    def _free(self, key: int, number: int) -> None:
        if self._ended:
            return
        del self._alive[key]
        self.events += 1
        if number > 0:
            held = self.stored[number]
            held.holders -= 1
            held.freed = None if held.holders else self.events

    # -- kernels ----------------------------------------------------------------------------------------------------
    def collective(self, name: str, whole: int) -> None:
        """A collective ran, of a tensor of so many bytes on all ranks."""
        place, backward = self._now()
        self.kernels.append(Kernel(place, backward, COLLECTIVE, str(name), "", 0, {}, {}, whole=whole))

    def attention(self, shapes: tuple[Tensor, ...], causal: bool, backward: bool) -> None:
        """See `AttentionObserver`."""
        query, key, value = shapes
        read = self._bytes(shapes)
        result = math.prod(query.shape[:-1]) * value.shape[-1] * query.itemsize
        counted = [attention_flops(query.shape, key.shape, value.shape, c, backward) for c in (causal, False)]
        if backward:  # each of dq, dk and dv beside what is read
            counted[1] = 2 * attention_flops(query.shape, key.shape, value.shape, False)
        written = {0: sum(read.values()) if backward else result}
        place, _ = self._now()
        self.kernels.append(
            Kernel(
                place, backward, ATTENTION, "attention", dtype_name(query.dtype), counted[0], read, written,
                uncut=counted[1], kept=key.numel() * key.itemsize + value.numel() * value.itemsize,
            )
        )  # fmt: skip

    def _now(self) -> tuple[TallyPlace, bool]:
        number = running_node_number()
        return (self._places[-1], False) if number is None else (self.place_of(number), True)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        result = func(*args, **keywords)
        operands, results = [*_tensors((args, keywords))], [*_tensors(result)]
        name = str(func)
        known = {storage_key(tensor) for tensor in operands}
        made = [tensor for tensor in results if storage_key(tensor) not in known]
        shapes = [tensor.shape for tensor in operands]
        wanted = sum(tensor.dim() > 1 for tensor in results)
        sizes = product_sizes(name, shapes, results[0].shape, wanted) if results else ()
        kind, operator = PRODUCTS if sizes else "other", lookup(name)
        viewed = operands[0] if operator is not None and operator.kind == "view" and operands else None
        for tensor in made:
            self._add(tensor, kind, viewed)
        if viewed is not None or runs_no_kernel(name) or not (made or schema_mutates(func)):
            return result
        written = self._bytes(made or results)
        read = self._bytes(operands)
        if operator is not None and operator.kind == "picking":
            read = {number: min(held, sum(written.values())) for number, held in read.items()}
        place, backward = self._now()
        dtype = next((t.dtype for t in operands if t.is_floating_point()), (operands or results)[0].dtype)
        flops = sum(map(flops_of, sizes))
        self.kernels.append(
            Kernel(place, backward, kind, name, dtype_name(dtype), flops, read, written, sizes=sizes, uncut=flops)
        )
        return result

    def _bytes(self, tensors: Iterable[Tensor]) -> dict[int, int]:
        found: dict[int, int] = {}
        for tensor in tensors:
            number, held = self.number(tensor), tensor.numel() * tensor.itemsize
            found[number] = min(max(found.get(number, 0), held), tensor.untyped_storage().nbytes())
        return found


def _tensors(held: Any) -> Iterator[Tensor]:
    return (item for _, item in leaves(held) if isinstance(item, Tensor))


__all__ = ["Kernel", "Tally", "TallyPlace", "TallyStorage"]
