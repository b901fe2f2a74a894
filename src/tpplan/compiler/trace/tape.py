"""The tape: the frames, operations and values of one run, and who is told of them.

in:  tensors, and operations on them, in order of execution
out: a value for every tensor seen, operations in the frame that is open

    y = x + x   ->   value_of(x) is 3, value_of(y) is 4, and frames[-1].body ends with add(3, 3)→4

What else is wanted of a run is for an `Observer`, which keeps what it notes to itself until the run is over.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tpplan.compat.autograd import PythonNode
from tpplan.compat.modes import RecordingMode
from tpplan.compiler.ir.steps import Heard, Step
from tpplan.compiler.ir.trace import Cut, Frame, Geometry, Operation, Reference, Value


@dataclass(slots=True)
class OpenFrame:
    """A frame that is being recorded; `differentiates` tells whether gradients were on when it was opened."""

    module: str
    call: int
    body: list[Operation | Frame]
    steps: list[Step | Heard] = field(default_factory=list[Step | Heard])
    differentiates: bool = field(default_factory=torch.is_grad_enabled)
    cuts: list[Cut] = field(default_factory=list[Cut])

    @property
    def key(self) -> tuple[str, int]:
        """The call, as (module, call)."""
        return self.module, self.call


@dataclass(slots=True)
class Aside:
    """What is recorded beside the run: operations, how often modules are called, whether it branches on data."""

    body: list[Operation | Frame] = field(default_factory=list["Operation | Frame"])
    calls: int = 0
    branches: bool = False


class Observer:
    """Is told of a run as it is recorded, of what it has a method for."""

    def unmade(self, tensor: Tensor) -> None:
        """A tensor was met that no operation made; it has no value yet."""

    def met(self, tensor: Tensor, value: int) -> None:
        """A tensor was met again that has a gradient of no operation's, or of a function's own."""

    def shown(self, value: int, numbers: Tensor) -> None:
        """A value is a constant with these numbers."""

    def crossed(self, outside: int, inside: int) -> None:
        """A value passed a module's boundary, and is another one there."""

    def added(self, operation: Operation, called: bool) -> None:
        """An operation was added to the frame that is open; `called`: torch has made its results."""


class RunTape(RecordingMode):
    """What is recorded of a run so far; see the module's docstring.

    Attributes:
        frames: the calls under way, the innermost last.
        values: all values, by identifier.
        beside: what is recorded aside at the moment, if anything is.
        observers: who is told.
        alive: the tensors that something is noted of by their ids, which are only unique while their objects live.
    """

    def __init__(self) -> None:
        """An empty one."""
        super().__init__()
        self.frames: list[OpenFrame] = []
        self.values: list[Value] = []
        self.beside: Aside | None = None
        self._identity: dict[int, int] = {}
        self.alive: list[Tensor] = []
        self._storage: list[int] = []
        self._members: dict[int, list[int]] = {}
        self.observers: tuple[Observer, ...] = ()

    # -- values ---------------------------------------------------------------------------------------------------
    def value_of(self, tensor: Tensor) -> int:
        """The value that `tensor` stands for; a tensor never seen before becomes a constant."""
        found = self._identity.get(id(tensor))
        if found is None:
            for observer in self.observers:
                observer.unmade(tensor)
            return self.new_value(tensor, tensor.requires_grad)
        self.meet_again(tensor, found)
        return found

    def meet_again(self, tensor: Tensor, value: int) -> None:
        """Tell of the gradient of a tensor, which stands for `value`, where that is news."""
        if tensor.requires_grad and (not self.values[value].differentiable or isinstance(tensor.grad_fn, PythonNode)):
            for observer in self.observers:
                observer.met(tensor, value)

    def held_value(self, tensor: Tensor) -> int | None:
        """The value that `tensor` stands for, if the run has made it."""
        return self._identity.get(id(tensor))

    def tensors(self) -> Iterator[tuple[Tensor, int]]:
        """Every tensor that the run has made or read, with the value that it stands for at last."""
        return ((t, value) for t in self.alive if (value := self._identity.get(id(t))) is not None)

    def new_value(
        self, tensor: Tensor, differentiable: bool, storage_of: int | None = None, numbers: Tensor | None = None
    ) -> int:
        """Give `tensor` a fresh value, also if it had one before.

        Args:
            tensor: what the value is of.
            differentiable: whether a gradient flows to it.
            storage_of: a value that lies in the same memory.
            numbers: those of a constant.
        """
        return self._new_value(tensor, geometry_of(tensor), differentiable, storage_of, numbers)

    def _new_value(
        self,
        tensor: Tensor,
        geometry: Geometry,
        differentiable: bool,
        storage_of: int | None,
        numbers: Tensor | None = None,
    ) -> int:
        identifier = len(self.values)
        self.values.append(Value(identifier, *geometry, differentiable, numbers))
        if storage_of is None:
            self._storage.append(identifier)
            self._members[identifier] = [identifier]
        else:
            storage = self._storage[storage_of]
            self._storage.append(storage)
            self._members[storage].append(identifier)
        self._identity[id(tensor)] = identifier
        self.alive.append(tensor)
        if numbers is not None:
            for observer in self.observers:
                observer.shown(identifier, numbers)
        return identifier

    def storage_of(self, value: int) -> int:
        """The first value that lies in the same memory."""
        return self._storage[value]

    def in_memory_of(self, value: int) -> list[int]:
        """All values that lie in the same memory."""
        return self._members[self._storage[value]]

    # -- operations -----------------------------------------------------------------------------------------------
    def add(self, operation: Operation, called: bool = False) -> None:
        """Add an operation to the body that runs; `called`: torch has made its results."""
        self.frames[-1].body.append(operation)
        for observer in self.observers:
            observer.added(operation, called)

    def refer(self, argument: Any) -> Any:
        """An argument as an operation has it, tensors replaced by references to their values."""
        if isinstance(argument, Tensor):
            known = self._identity.get(id(argument))
            return Reference(self.value_of(argument) if known is None else known)
        if isinstance(argument, (list, tuple)):
            return tuple(self.refer(item) for item in argument)  # pyright: ignore[reportUnknownVariableType]
        return argument


def geometry_of(tensor: Tensor) -> Geometry:
    """Shape, stride and dtype of a tensor."""
    return tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype


__all__ = ["Aside", "Observer", "OpenFrame", "RunTape", "geometry_of"]
