"""Choices: what a capture on meta tensors makes of operations whose results' sizes depend on numbers.

in:  the boolean rows of an index, or the number of entries that `nonzero` looks through
out: the indices that torch itself would turn them into, and how many there are in the trace

    x[chosen]                    ->   x[rows], rows = chosen.nonzero()
    hit.nonzero()  (8 experts)   ->   all eight, in numbers, as the model picks its modules by them
    torch.where(mask)  (96)      ->   89 of them, without numbers: a size that no axis divides
    best.unique()  (argmax of 8) ->   all eight, in numbers, as of `nonzero`

How many entries are found differs from call to call, so that no dim of such a size may be shared out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tpplan.compat.dtensors import local_of
from tpplan.compat.modules import own_parameters
from tpplan.compat.schemas import OpOverload
from tpplan.compiler.ir.observations import FoundCount
from tpplan.compiler.ir.trace import Frame, Operation, Trace, Value
from tpplan.compiler.trace.counts import found_count
from tpplan.compiler.trace.meta_results import META
from tpplan.compiler.trace.numbers_read import NumberObserver
from tpplan.compiler.trace.real_tensors import RealTensors
from tpplan.compiler.trace.tape import RunTape
from tpplan.ops.dim_map import dims_of

_BOOLEAN = (torch.bool, torch.uint8)


class Picker:
    """Finds the places in tensors; `missed` is how many of the first of what may be picked aren't found."""

    def __init__(
        self,
        tape: RunTape,
        numbers: NumberObserver,
        real: RealTensors,
        picking: Iterable[tuple[int, int]],
        found: FoundCount | None,
    ) -> None:
        """See `CaptureSettings` for `picking` and `found`."""
        self.missed = 0
        self._tape, self._numbers, self._real, self._picking = tape, numbers, real, dict(picking)
        self._found, self._finds = found, 0
        self._alike: frozenset[int] = frozenset()  # how many alike the lists of modules hold
        self._stacked: dict[str, frozenset[int]] = {}  # how many matrices each module's own tensors stack

    def know(self, modules: Mapping[str, nn.Module]) -> None:
        """Know what the modules of a model, by name, may pick."""
        self._alike = frozenset(_alike(modules.values()))
        self._stacked = {name: sizes for name, module in modules.items() if (sizes := frozenset(_stacked(module)))}

    def know_anywhere(self, modules: Iterable[nn.Module]) -> None:
        """The same where the run doesn't tell which module is called."""
        modules = [*modules]
        self._alike = frozenset((*_alike(modules), *(size for module in modules for size in _stacked(module))))

    def _may_pick(self, count: int | None) -> bool:
        """Whether the body that runs may pick one of so many."""
        return count in self._alike or count in self._stacked.get(self._tape.frames[-1].module, ())

    def find(self, func: OpOverload, args: tuple[Any, ...], tensor: Tensor) -> Tensor:
        """Where a tensor isn't zero: all of it, in numbers, if that may pick modules; else so many places."""
        picked = self._picking.get(len(tensor)) if tensor.dim() == 1 else None
        picks = picked is not None or (tensor.dim() == 1 and self._may_pick(len(tensor)))
        count = picked or (max(1, len(tensor) - self.missed) if picks else found_count(tensor.numel()))
        if self._found is not None:
            most, none_at = self._found
            if not picks:
                some = tensor.numel() if most is None else min(count, most)
                count = 0 if none_at is not None and (self._finds + none_at) % 2 else some
            elif none_at is not None and not picked:
                count = max(1, (count - 1) * none_at)
        if not picks:
            self._finds += 1
        value = self._tape.value_of(tensor)
        found = torch.empty(count, tensor.dim(), dtype=torch.int64, device=META)
        self._numbers.record(func, args, {}, (value,), [found])
        self._numbers.choose()
        if not picks:
            return found
        first = 0 if picked is not None else len(tensor) - count
        places = torch.arange(first, first + count)[:, None]
        self._real.stand_for(places, found, only_picks=picked is not None)
        return places

    def distinct(self, args: tuple[Any, ...], tensor: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """The different numbers in a tensor that names the best of several: what isn't zero of a table of these."""
        tape = self._tape
        count = _choices_of(tape.frames[-1].body, tape.value_of(tensor), tape.values)
        if count is None or not self._may_pick(count) or any(args[2:]):
            return None
        with tape:
            ids = tensor.reshape(-1)
            places = torch.zeros(count, dtype=torch.int64, device=META).scatter(0, ids, 1).nonzero()
        return places.flatten(), torch.empty(0), torch.empty(0)


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


def has_boolean_rows(args: tuple[Any, ...]) -> bool:
    """Whether an indexing operation picks by true and false, and not by numbers."""
    return any(isinstance(row, Tensor) and row.dtype in _BOOLEAN for row in args[1])


def with_numbered_rows(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of an indexing operation, its boolean rows turned into the numbers of the entries they pick."""
    rows: list[Tensor | None] = []
    for row in args[1]:
        if isinstance(row, Tensor) and row.dtype in _BOOLEAN:
            rows += row.nonzero().unbind(1)
        else:
            rows.append(row)
    return (args[0], rows, *args[2:])


def called_with_found(trace: Trace) -> set[str]:
    """The modules that are called with what is found in a tensor, such as experts with the tokens routed to them."""
    called: set[str] = set()
    for frame in trace.root.walk():
        if (frame.module, frame.call) not in trace.numbers.chosen:
            continue
        found: set[int] = set()
        for node in frame.body:
            if isinstance(node, Frame):
                if any(crossing.source in found for crossing in node.entries):
                    called.add(node.module)
                    found.update(crossing.target for crossing in node.exits)
                continue
            # What rows are written to has the size that it had before.
            read = node.inputs[:1] if node.is_a("write") else node.inputs
            if node.is_a("places") or any(i in found for i in read):
                found.update(output for output in node.outputs if output is not None)
    return called


def _choices_of(body: Iterable[object], value: int, values: Sequence[Value]) -> int | None:
    """Of how many a tensor's numbers name the best, if that is what they do."""
    made = {o: node for node in body if isinstance(node, Operation) for o in node.outputs if o is not None}
    while (node := made.get(value)) is not None:
        shape = values[node.inputs[0]].shape if node.inputs else ()
        if node.is_a("choice"):
            dims = dims_of(node.target, node.arguments, len(shape)) if shape else ()
            return shape[dims[0]] if len(dims) == 1 else None
        if not node.is_a("reshape", "detach", "copy", "alias"):
            return None
        value = node.inputs[0]
    return None


__all__ = ["Picker", "called_with_found", "has_boolean_rows", "with_numbered_rows"]
