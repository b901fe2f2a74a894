"""The recording of a construction: every operation runs on `meta`, and is noted with the memory that it touches.

in:  aten calls of a constructor that runs as it always does, on the stock model's device
out: `InitialOperation`s in order; tensors without numbers for Python, which get real ones where Python reads them
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Generator, Tensor

from tpplan.compat.modes import RecordingMode, without_function_modes
from tpplan.compat.schemas import OpOverload, is_random, schema_argument_names, schema_mutates, takes_device
from tpplan.compat.tensors import storage_key
from tpplan.compiler.ir.locations import location_now
from tpplan.initialize.evaluate import Evaluator
from tpplan.initialize.executor import listed, mapped, over
from tpplan.initialize.findings import InitializationError, cannot
from tpplan.initialize.record import Draw, InitialOperation, RandomStream, Storage, View
from tpplan.initialize.streams import Clock, default_generator

_META, _CPU = torch.device("meta"), torch.device("cpu")
# In-place operators whose results don't depend on what was there before.
_OVERWRITING = frozenset({
    f"aten::{name}_"
    for name in ("uniform", "normal", "fill", "zero", "copy", "random", "bernoulli", "exponential", "cauchy",
                 "log_normal", "geometric")
})  # fmt: skip
_EMPTY = ("aten::empty", "aten::new_empty")
_MOVING = frozenset({"aten::set_", "aten::resize_", "aten::resize_as_"})  # they change where a tensor lies
_READING = frozenset({"aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::item"})
_INDEXING = frozenset({"aten::index", "aten::_unsafe_index"})
_SHAPES_BY_NUMBERS = frozenset({torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output})
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class ConstructionRecorder(RecordingMode):
    """Records a construction.

    Attributes:
        operations: what was done.
        storages: the memory that it was done to.
        clocks: the generators that were drawn from.
        written: the storages that something was written to.
        device: where the stock model lies.
    """

    def __init__(self, device: torch.device) -> None:
        """Record for a model on `device`. Default generators stand in for themselves until `restore`."""
        super().__init__()
        self.device = device
        self.operations: list[InitialOperation] = []
        self.storages: list[Storage] = []
        self.written: set[int] = set()
        defaults = dict.fromkeys([default_generator(_CPU), default_generator(device)])
        self.clocks = [Clock(number, generator, False) for number, generator in enumerate(defaults)]
        self._numbers: dict[int, int] = {}
        self._alive: list[Tensor] = []  # keys of storages are only unique while these live
        self._evaluator = Evaluator(self.operations, self.storages, self.clocks)

    def restore(self) -> None:
        """Put all generators back to where they were before."""
        for clock in self.clocks:
            clock.restore()

    # -- tensors --------------------------------------------------------------------------------------------------
    def view(self, tensor: Tensor) -> View:
        """A tensor as a view of a numbered storage; the first sight of a real one takes its numbers as constants."""
        offset, conjugate = int(tensor.storage_offset()), tensor.is_conj()
        return View(self._number(tensor), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), offset, conjugate)

    def device_of(self, tensor: Tensor) -> torch.device:
        """Where a tensor lies in the stock model."""
        return self.storages[self._number(tensor)].device

    def value(self, item: Any) -> Any:
        """A tensor with the real numbers that it has at this moment, not to be written to; anything else as it is."""
        if not isinstance(item, Tensor):
            return item
        if not item.is_meta and self._numbers.get(storage_key(item)) not in self.written:
            return item
        return self._evaluator.value(self.view(item))

    def _number(self, tensor: Tensor, device: torch.device | None = None) -> int:
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise _cannot("makes a sparse or quantised tensor")
        key = storage_key(tensor)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.storages)
            self._alive.append(tensor.detach())
            if tensor.is_meta:
                self.storages.append(Storage(tensor.detach(), device or self.device, None))
            else:
                self.storages.append(_constant(tensor))
                self._numbers[storage_key(self.storages[number].stand_in)] = number
        return number

    def _stand_in(self, item: Any) -> Any:
        if isinstance(item, Generator):
            return None
        if not isinstance(item, Tensor) or item.is_meta:
            return item
        view = self.view(item)
        return over(self.storages[view.storage].stand_in.untyped_storage(), view)

    def _named(self, item: Any) -> Any:
        if isinstance(item, Tensor):
            return self.view(item)
        return RandomStream(self._clock(item).number) if isinstance(item, Generator) else item

    def _clock(self, generator: Generator) -> Clock:
        found = next((clock for clock in self.clocks if clock.generator is generator), None)
        if found is None:
            found = Clock(len(self.clocks), generator, True)
            self.clocks.append(found)
        return found

    # -- operations -----------------------------------------------------------------------------------------------
    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation on `meta`, and record it."""
        with without_function_modes():
            return self._dispatched(func, args, kwargs or {})

    def _dispatched(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = listed([args, list(kwargs.values())])
        if _name(func) in _READING:
            return self._real(func, args, kwargs)
        device = self._device(func, [held for held in given if isinstance(held, Tensor)], kwargs)
        if "device" in kwargs:
            kwargs = kwargs | {"device": device}
        ours = mapped(args, self._stand_in), {name: mapped(held, self._stand_in) for name, held in kwargs.items()}
        if takes_device(func):
            ours[1]["device"] = _META
        results = self._results(func, ours, args, kwargs)
        stand_ins = listed([ours[0], [ours[1][name] for name in kwargs]])
        stood_for = {id(b): a for a, b in zip(given, stand_ins, strict=True) if isinstance(a, Tensor)}
        outputs = tuple(
            self.view(result) if self._is_new(result, device) and id(result) not in stood_for else None
            for result in listed(results)
        )
        if _name(func) not in _MOVING and not _name(func).startswith(_EMPTY):
            self._note(func, args, kwargs, outputs, device)
        return mapped(results, lambda result: stood_for.get(id(result), result))

    def _device(self, func: OpOverload, operands: list[Tensor], kwargs: Mapping[str, Any]) -> torch.device:
        """Where the stock model has the results of an operation."""
        device: torch.device | None = kwargs.get("device") if takes_device(func) else None
        if device is not None and device.type != "meta":
            return device
        # Torch's own code passes on where a tensor lies. Of several, a GPU's goes before a number of the CPU's.
        ranked = sorted(operands, key=lambda operand: operand.dim() == 0)
        return self.device_of(ranked[0]) if ranked else self.device

    def _results(self, func: OpOverload, stand_ins: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The results on `meta`; where their shapes depend on numbers, by these."""
        masks = _name(func) in _INDEXING and any(_is_mask(held) for held in listed([args, list(kwargs.values())]))
        if not masks and _SHAPES_BY_NUMBERS.isdisjoint(func.tags):
            try:
                return func(*stand_ins[0], **stand_ins[1])
            except NotImplementedError as error:
                if schema_mutates(func) or is_random(func):
                    raise _cannot(f"calls `{_name(func)}`", str(error).partition("\n")[0]) from None
            except RuntimeError:
                if schema_mutates(func) or is_random(func):
                    raise
        real = self._real(func, args, kwargs)
        return mapped(list(real) if isinstance(real, tuple) else real, _without_numbers)  # pyright: ignore

    def _real(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*mapped(args, self.value), **{name: mapped(held, self.value) for name, held in kwargs.items()})

    def _is_new(self, result: Any, device: torch.device) -> bool:
        """Whether a result has memory of its own."""
        if not isinstance(result, Tensor):
            return False
        known = len(self.storages)
        return self._number(result, device) == known

    def _note(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outputs: tuple[View | None, ...],
        device: torch.device,
    ) -> None:
        targets = [self.view(held) for held in _written(func, args, kwargs)]
        made = {view.storage for view in outputs if view is not None}
        if not targets and not made:
            return
        names, given = mapped(args, self._named), {name: mapped(held, self._named) for name, held in kwargs.items()}
        views = [held for held in _flat([names, list(given.values())]) if isinstance(held, View)]
        whole = set(made)
        if _name(func) in _OVERWRITING:
            views.remove(targets[0])
            if _covers(targets[0], self.storages[targets[0].storage].size):
                whole.add(targets[0].storage)
        reads = frozenset(view.storage for view in views)
        writes = frozenset(made.union(view.storage for view in targets))
        draw = self._draw(func, args, kwargs, device) if is_random(func) else None
        self.written |= writes
        self.operations.append(
            InitialOperation(func, names, given, outputs, reads, writes, frozenset(whole - reads), draw)
        )

    def _draw(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> Draw:
        own = next((held for held in (*args, *kwargs.values()) if isinstance(held, Generator)), None)
        return self._clock(own or default_generator(device)).draw()


def _cannot(what: str, *notes: str) -> InitializationError:
    place = location_now()
    return cannot(what if place is None else f"{what} at {place}", *notes)


def _constant(tensor: Tensor) -> Storage:
    """The memory of a real tensor, with what is in it now."""
    storage = tensor.untyped_storage()
    data = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).clone()  # pyright: ignore
    return Storage(torch.empty(storage.nbytes(), dtype=torch.uint8, device=_META), storage.device, data)


def _is_mask(held: Any) -> bool:
    return isinstance(held, Tensor) and held.dtype in (torch.bool, torch.uint8)


def _without_numbers(item: Any) -> Any:
    if not isinstance(item, Tensor):
        return item
    return torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device=_META)


def _name(func: OpOverload) -> str:
    return func.name().partition(".")[0]


def _flat(held: Any) -> list[Any]:
    """As `listed`, for arguments in which tensors are views, which are tuples."""
    if type(held) is list or type(held) is tuple:
        return [item for inner in held for item in _flat(inner)]  # pyright: ignore
    return [held]


def _written(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The operands that an operation writes to."""
    names = schema_argument_names(func)
    held = [args[place] if place < len(args) else kwargs.get(names[place]) for place in schema_mutates(func)]
    return [item for item in listed(held) if isinstance(item, Tensor)]


def _covers(view: View, size: int) -> bool:
    """Whether a view has every byte of its storage."""
    step = 1
    for stride, length in sorted(zip(view.stride, view.shape, strict=True)):
        if length != 1 and stride != step:
            return size == 0
        step *= length
    return step * view.dtype.itemsize == size


__all__ = ["ConstructionRecorder"]
