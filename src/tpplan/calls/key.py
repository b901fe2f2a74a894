"""Key: what of a call could steer a model's Python, as a hashable value.

in:  a call of the root, and the state of torch around it
out: `CallKey`: its *kind*, all but the sizes, and the *sizes* of its tensors

    model(ids, mask=m, wide=True)   ->   kind: int64 of 2 dims, bool of 2 dims, wide is bool True; in training, …
                                         sizes: (3, 16), (3, 16)

Two calls of one kind take the same path through the model unless it asks for sizes or for numbers. Of the kind a part
is `traced`: a capture sees it. The rest (`ambient`) is the machine's: devices, whether gradients are recorded.

A positional argument has its name in the key, so that it doesn't matter how it is spelled. A flag counts by its type
and value (`True` is neither 1 nor 1.0), an object by its type and its attributes, or by its identity if it hides these.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from itertools import groupby
from types import CellType, FunctionType, MethodType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from tpplan.compiler.cover import LEAST_LENGTH
from tpplan.compiler.ir.objects import PLAIN, is_opaque
from tpplan.compiler.ir.pytree import children, is_record, shows_its_state
from tpplan.compiler.trace.capture import argument_names

Part = tuple[object, ...]
_DEPTH = 7
_READ_OTHERWISE = frozenset((float, complex, slice))


class Kind(NamedTuple):
    """All of a call but its sizes.

    Attributes:
        ambient: what a capture doesn't see: devices, whether gradients are recorded, how exact operators must be.
        traced: what it does see.
    """

    ambient: Part
    traced: Part


class CallKey(NamedTuple):
    """What is held against the calls that were proved.

    Attributes:
        kind: all but the sizes.
        sizes: of all tensors, in the order of the call, then the lengths that objects note, such as caches; each with
            how often it comes in a row.
    """

    kind: Kind
    sizes: tuple[object, ...]


class Identity:
    """An object that counts by its identity; it is held, so that no other object can be given the same one."""

    __slots__ = ("held",)

    def __init__(self, held: object) -> None:
        """Stand for `held`."""
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and other.held is self.held

    def __hash__(self) -> int:
        return id(self.held)

    def __deepcopy__(self, memo: object) -> Identity:
        return self

    def __repr__(self) -> str:
        return f"<{type(self.held).__name__}>"


_forms: dict[object, Identity] = {}
"""What was read of objects: equal forms are one object, which is cheaper to compare and to hash than what it holds."""


class KeyReader:
    """Reads the keys of the calls of one model."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        """Read calls of `forward`, the stock one."""
        self.names = argument_names(forward)
        self._left_out = _none_by_default(forward)
        accelerator = torch.accelerator.current_accelerator()
        self.devices = ("cpu",) if accelerator is None else ("cpu", accelerator.type)

    def __call__(
        self, training: bool, arguments: Sequence[Any], keywords: Mapping[str, Any], more: Part = ()
    ) -> CallKey:
        """The key of a call.

        Args:
            training: the root's mode.
            arguments, keywords: the call.
            more: what else of it a capture sees, beyond its arguments.
        """
        seen = _Seen(torch.is_grad_enabled())
        found: list[object] = [training, *more, torch.get_default_dtype(), *map(_autocast, self.devices)]
        found += self._read(arguments, keywords, seen)
        found.append(seen.aliases())
        return CallKey(Kind((*_ambient(), *seen.devices), tuple(found)), seen.all_sizes())

    def sizes(self, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> list[Any]:
        """All sizes of a call, in the order of its key: numbers, or symbols."""
        seen = _Seen(False)
        self._read(arguments, keywords, seen)
        return seen.every_size()

    def _read(self, arguments: Sequence[Any], keywords: Mapping[str, Any], seen: _Seen) -> list[object]:
        read, left_out, names = seen.read, self._left_out, self.names
        found: list[object] = []
        for position, held in enumerate(arguments):
            name = names[position] if position < len(names) else f"*{position}"
            if held is not None or name not in left_out:
                found.append((name, read(held)))
        for name, held in keywords.items():
            if held is not None or name not in left_out:
                found.append((name, read(held)))
        return found


class _Seen:
    """What a call's arguments show while they are read."""

    __slots__ = ("_lengths", "_recorded", "devices", "sizes", "tensors")

    def __init__(self, recorded: bool) -> None:
        self._recorded = recorded
        self.devices: list[str] = []
        self.sizes: list[torch.Size] = []
        self.tensors: list[int] = []
        self._lengths: list[int] = []

    def all_sizes(self) -> tuple[object, ...]:
        """The sizes of all tensors, then the lengths that objects note, each with how often it comes in a row."""
        return tuple((size, len([*alike])) for size, alike in groupby((*self.sizes, *self._lengths)))

    def every_size(self) -> list[Any]:
        """As `all_sizes`, dim by dim."""
        return [*(size for shape in self.sizes for size in shape), *self._lengths]

    def aliases(self) -> Part:
        """Which tensors are one, if any sits in several places."""
        tensors = self.tensors
        return tuple(map(tensors.index, tensors)) if len(set(tensors)) < len(tensors) else ()

    def read(self, held: Any, depth: int = _DEPTH) -> object:
        """What counts of one argument."""
        if isinstance(held, Tensor):
            self.devices.append(held.device.type)
            self.sizes.append(held.shape)
            self.tensors.append(id(held))
            found: Part = (held.dtype, held.dim(), self._recorded and held.requires_grad)
            if held.__dict__:  # what its owner has noted on it
                found = (*found, self.read(held.__dict__, depth))
            return found if type(held) is Tensor else (type(held), *found)
        kind: type[Any] = type(held)  # pyright: ignore[reportUnknownVariableType]
        if kind is float or kind is complex:
            return kind, repr(held)  # tells 0.0 from -0.0, and finds nan again
        if kind is slice:
            return kind, held.start, held.stop, held.step
        if kind in PLAIN:
            return kind, held
        return self._read_further(kind, held, depth - 1) if depth else Identity(held)

    def _read_further(self, kind: type[Any], held: Any, depth: int) -> object:
        if isinstance(held, (tuple, list)):
            return kind, *[self.read(item, depth) for item in held]  # pyright: ignore
        if isinstance(held, dict):
            return kind, *[(self.read(key), self.read(item, depth)) for key, item in held.items()]  # pyright: ignore
        if isinstance(held, (set, frozenset)):
            return kind, frozenset(self.read(item, depth) for item in held)  # pyright: ignore
        if isinstance(held, Enum):
            return kind, held.name
        if is_record(held):
            return kind, *[(name, self.read(item, depth)) for name, item in children(held) or ()]
        if shows_its_state(kind):
            return kind, self._read_state(cast("dict[str, Any]", vars(held)), depth)
        if is_opaque(held):
            return (kind, Identity(held)) if isinstance(held, nn.Module) else kind
        return self._read_object(kind, held, depth)

    def _read_state(self, state: dict[str, Any], depth: int) -> object:
        """What counts of an object; whole numbers beside tensors, if not small, are lengths: they count as sizes."""
        found: list[object] = []
        lengths: list[tuple[str, int]] = []
        tensors = len(self.tensors)
        for name, item in state.items():
            kind = cast("type[Any]", type(item))
            if kind is int and item >= LEAST_LENGTH:
                lengths.append((name, item))
            elif kind in PLAIN and kind not in _READ_OTHERWISE:
                found.append((name, kind, item))
            elif kind is torch.SymInt:
                lengths.append((name, item))
            else:
                found.append((name, self.read(item, depth)))
        if len(self.tensors) == tensors:
            found += lengths
        else:
            found += [name for name, _ in lengths]
            self._lengths += [length for _, length in lengths]
        form = tuple(found)
        return _forms.setdefault(form, Identity(form))

    def _read_object(self, kind: type[Any], held: Any, depth: int) -> object:
        if isinstance(held, FunctionType):
            cells: tuple[CellType, ...] = held.__closure__ or ()
            closure = [self.read(_content(cell), depth) for cell in cells]
            defaults = self.read((held.__defaults__, held.__kwdefaults__), depth)
            return kind, Identity(held.__code__), Identity(held.__globals__), defaults, *closure
        if isinstance(held, MethodType):
            return kind, Identity(held.__func__), self.read(held.__self__, depth)
        if isinstance(held, functools.partial):
            return kind, *[self.read(part, depth) for part in (held.func, held.args, held.keywords)]  # pyright: ignore
        if isinstance(held, (torch.Stream, torch.Event)):
            return kind  # a cache may have one of its own
        return kind, Identity(held)


def _ambient() -> Part:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.are_deterministic_algorithms_enabled(),
    )


def ambient_state(devices: Sequence[str]) -> Part:
    """What of torch's state is in the key of a call, for these types of devices."""
    return (*_ambient(), torch.get_default_dtype(), *map(_autocast, devices))


def _autocast(device: str) -> object:
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # the variable isn't set yet
        return None


def _none_by_default(forward: Callable[..., Any]) -> frozenset[str]:
    """The arguments for which None says the same as leaving them out."""
    try:
        parameters = inspect.signature(forward).parameters
    except (TypeError, ValueError):
        return frozenset()
    return frozenset(name for name, parameter in parameters.items() if parameter.default is None)


__all__ = ["CallKey", "Identity", "KeyReader", "Kind", "ambient_state"]
