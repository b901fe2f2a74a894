"""Key: what of a call could steer a model's Python, as a hashable value.

in:  a call of the root, and the state of torch around it
out: `CallKey`: its *kind*, all but the sizes, and the *sizes* of its tensors

    model(ids, mask=m, wide=True)   ->   kind: int64 of 2 dims, bool of 2 dims, wide is bool True; in training, …
                                         sizes: (3, 16), (3, 16)

Two calls of one kind take the same path through the model unless it asks for sizes or for numbers. Of the kind a part
is `traced`: a capture sees it. The rest (`ambient`) is the machine's: devices, whether gradients are recorded.

A positional argument has its name in the key, so that it doesn't matter how it is spelled. A flag counts by its type
and value (`True` is neither 1 nor 1.0), all else by its content to the bottom (`state.parts`). What can't be read, such
as a generator, is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from tpplan.compiler.cover import LEAST_LENGTH
from tpplan.compiler.ir.objects import is_opaque
from tpplan.compiler.ir.pytree import children, has_own_state, is_record, shows_its_state
from tpplan.compiler.trace.signatures import argument_names
from tpplan.compiler.trace.unfollowed import unlike_dense
from tpplan.state.content import DEEPEST, Identity, Reader, leaf, plain
from tpplan.state.parts import PLAIN, Bytes, UnseenError, class_data, parts

Part = tuple[object, ...]
_READ_OTHERWISE = frozenset((float, complex, slice))


class CallKind(NamedTuple):
    """All of a call but its sizes.

    Attributes:
        ambient: what a capture doesn't see: devices, whether gradients are recorded, how exact operators must be.
        traced: what it does see.
    """

    ambient: Part
    traced: Part


def state_of(traced: Part) -> object:
    """The state of the model in which calls of a kind were seen."""
    return traced[1]


def in_state(traced: Part, state: int) -> Part:
    """The same kind of call in another state of the model."""
    return (traced[0], state, *traced[2:])


class CallKey(NamedTuple):
    """What is held against the calls that were proved.

    Attributes:
        kind: all but the sizes.
        sizes: of all tensors, in the order of the call, then the lengths that objects note, such as caches; each with
            how often it comes in a row.
    """

    kind: CallKind
    sizes: tuple[object, ...]


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
        self, training: bool, arguments: Sequence[Any], keywords: Mapping[str, Any], more: Part = (0,)
    ) -> CallKey:
        """The key of a call.

        Args:
            training: the root's mode.
            arguments, keywords: the call.
            more: what else of it a capture sees, beyond its arguments: the state of the model first.
        """
        seen = _SeenKey(torch.is_grad_enabled())
        found: list[object] = [training, *more, torch.get_default_dtype(), *map(_autocast, self.devices)]
        found += self._read(arguments, keywords, seen)
        found.append(seen.aliases())
        return CallKey(CallKind((*_ambient(), *seen.devices), tuple(found)), seen.all_sizes())

    def sizes(self, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> list[Any]:
        """All sizes of a call, in the order of its key: numbers, or symbols."""
        seen = _SeenKey(False)
        self._read(arguments, keywords, seen)
        return seen.every_size()

    def _read(self, arguments: Sequence[Any], keywords: Mapping[str, Any], seen: _SeenKey) -> list[object]:
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


class _SeenKey:
    """What a call's arguments show while they are read."""

    __slots__ = ("_again", "_lengths", "_open", "_recorded", "devices", "sizes", "tensors")

    def __init__(self, recorded: bool) -> None:
        self._recorded = recorded
        self.devices: list[str] = []
        self.sizes: list[torch.Size] = []
        self.tensors: list[int] = []
        self._lengths: list[int] = []
        self._open: list[int] = []
        self._again: dict[int, tuple[int, object]] = {}  # by number; of containers those without tensors

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

    def read(self, held: Any) -> object:
        """What counts of one argument.

        Raises:
            UnseenError: it can be neither compared nor counted.
        """
        if isinstance(held, Tensor):
            self.devices.append(held.device.type)
            try:
                self.sizes.append(held.shape)
            except RuntimeError:
                unlike = unlike_dense(held)
                if unlike is None:
                    raise
                raise UnseenError(*unlike) from None
            self.tensors.append(id(held))
            found: Part = (held.dtype, held.layout, held.dim(), self._recorded and held.requires_grad)
            if held.__dict__:  # what its owner has noted on it
                found = (*found, self.read(held.__dict__))
            return found if type(held) is Tensor else (type(held), *found)
        kind: type[Any] = type(held)  # pyright: ignore[reportUnknownVariableType]
        if kind in PLAIN:
            return plain(held) if kind in _READ_OTHERWISE else (kind, held)
        open_ = self._open
        if id(held) in open_:
            return kind, open_.index(id(held))
        if id(held) in self._again:
            return kind, self._again[id(held)][0], "again"
        if len(open_) == DEEPEST:
            raise UnseenError(f"a `{kind.__name__}`, {DEEPEST} objects deep")
        open_.append(id(held))
        counted = len(self.tensors) + len(self._lengths)
        try:
            content = self._read_further(kind, held)
        finally:
            open_.pop()
        if kind is not tuple and (has_own_state(kind) or counted == len(self.tensors) + len(self._lengths)):
            self._again[id(held)] = len(self._again), held
        return content

    def _read_further(self, kind: type[Any], held: Any) -> object:
        if kind is tuple or kind is list:
            return kind, *[self.read(item) for item in held]
        if kind is dict:
            return kind, *[(self.read(key), self.read(item)) for key, item in held.items()]
        if is_record(held):
            found = [(name, self.read(item)) for name, item in children(held) or ()]
        elif shows_its_state(kind):
            return kind, self._read_state(held)
        elif isinstance(held, nn.Module) or is_opaque(held):  # a proof leaves it out
            return kind, Reader({}, _of_hidden)(held)
        else:
            inner = parts(held)
            if inner is None:
                return leaf(held)
            found = [(step, item if isinstance(step, Bytes) else self.read(item)) for step, item in inner]
        if isinstance(held, type):
            return leaf(held), *found
        if isinstance(held, (set, frozenset)):
            return kind, frozenset(found)
        return kind, *found, *[(name, self.read(item)) for name, item in class_data(kind)]

    def _read_state(self, held: Any) -> object:
        """What counts of an object; whole numbers beside tensors, if not small, are lengths: they count as sizes."""
        found: list[object] = [(name, self.read(item)) for name, item in class_data(cast("type[Any]", type(held)))]
        lengths: list[tuple[str, int]] = []
        tensors = len(self.tensors)
        for name, item in held.__dict__.items():
            kind = cast("type[Any]", type(item))
            if kind is int and item >= LEAST_LENGTH:
                lengths.append((name, item))
            elif kind in PLAIN and kind not in _READ_OTHERWISE:
                found.append((name, kind, item))
            elif kind is torch.SymInt:
                lengths.append((name, item))
            else:
                found.append((name, self.read(item)))
        if len(self.tensors) == tensors:
            found += lengths
        else:
            found += [name for name, _ in lengths]
            self._lengths += [length for _, length in lengths]
        form = tuple(found)
        return _forms.setdefault(form, Identity(form))


def _of_hidden(held: Tensor) -> object:
    """What counts of a tensor in an object that a proof leaves out."""
    return type(held), held.dtype, held.dim()


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


def _none_by_default(forward: Callable[..., Any]) -> frozenset[str]:
    """The arguments for which None says the same as leaving them out."""
    try:
        parameters = inspect.signature(forward).parameters
    except (TypeError, ValueError):
        return frozenset()
    return frozenset(name for name, parameter in parameters.items() if parameter.default is None)


__all__ = ["CallKey", "CallKind", "KeyReader", "ambient_state", "in_state", "state_of"]
