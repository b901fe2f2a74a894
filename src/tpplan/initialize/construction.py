"""A stock model's construction: the record, and which of its memory became which parameter or buffer."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

from tpplan.compat.modules import named_modules, own_buffers, own_parameters
from tpplan.initialize.answers import Answers
from tpplan.initialize.construction_recorder import ConstructionRecorder
from tpplan.initialize.executor import mapped
from tpplan.initialize.record import InitialOperation, Storage, View


@dataclass(frozen=True, slots=True)
class ConstructionSource:
    """A generator that was drawn from.

    Attributes:
        generator: the generator.
        start: its state before the construction.
        fresh: whether the construction has brought it.
        end: where Python has put it after the last draw: a state, or that after so many draws.
    """

    generator: Generator
    start: Tensor
    fresh: bool
    end: Tensor | int | None


@dataclass(frozen=True, slots=True)
class Construction:
    """How the stock model comes to its numbers.

    Attributes:
        operations, storages, sources: what was done, to what, and what was drawn from.
        tensors: the stock model's tensors, by all of their names.
        ties: for each name the first name of the same tensor.
        registered: the names of parameters and buffers.
        written: the storages that have numbers.
    """

    operations: Sequence[InitialOperation]
    storages: Sequence[Storage]
    sources: tuple[ConstructionSource, ...]
    tensors: Mapping[str, View]
    ties: Mapping[str, str]
    registered: frozenset[str]
    written: frozenset[int]

    @property
    def seeds(self) -> str:
        """A digest of the states that the generators start from."""
        states = b"".join(_bytes(source.start) for source in self.sources if not source.fresh)
        return hashlib.sha256(states).hexdigest()

    @property
    def digest(self) -> str:
        """A digest of all that is to be done."""
        digest = hashlib.sha256()
        for operation in self.operations:
            arguments = mapped([operation.args, list(operation.kwargs.items())], _anywhere)
            digest.update(f"{operation.function} {arguments} {_shown(operation)}".encode())
        for number, storage in enumerate(self.storages):
            if storage.constant is not None:
                digest.update(f"{number}".encode() + _bytes(storage.constant))
        digest.update(f"{sorted(self.tensors.items())} {sorted(self.ties.items())}".encode())
        return digest.hexdigest()


def recorded(make: Callable[[], nn.Module], device: torch.device, dtype: torch.dtype | None) -> Construction:
    """Record how `make` makes a model, without its memory; what it leaves behind in generators is undone.

    Args:
        make: makes the stock model.
        device: where it would lie.
        dtype: torch's default while it is made; None for what that is.
    """
    before = torch.get_default_dtype()
    recorder = ConstructionRecorder(device)
    try:
        with ExitStack() as contexts:
            contexts.enter_context(device)
            contexts.enter_context(recorder)
            contexts.enter_context(Answers(recorder))
            if dtype is not None:
                torch.set_default_dtype(dtype)
            model = make()
        sources = tuple(
            ConstructionSource(clock.generator, clock.start, clock.fresh, clock.jumped()) for clock in recorder.clocks
        )
        named = list(named_tensors(model))
        tensors = {name: recorder.view(tensor.detach()) for name, tensor in named}
    finally:
        torch.set_default_dtype(before)
        recorder.restore()
    first: dict[int, str] = {}
    ties = {name: first.setdefault(id(tensor), name) for name, tensor in named}
    registered = frozenset(name for name, _ in (*model.named_parameters(), *model.named_buffers()))
    return Construction(
        recorder.operations, recorder.storages, sources, tensors, ties, registered, frozenset(recorder.written)
    )


def named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters, buffers, and tensors that are plain attributes, by every name."""
    found: list[tuple[str, Tensor]] = []
    for prefix, module in named_modules(model, remove_duplicate=False):
        for leaf, tensor in (*own_parameters(module).items(), *own_buffers(module).items(), *vars(module).items()):
            if isinstance(tensor, Tensor):
                found.append((f"{prefix}.{leaf}" if prefix else leaf, tensor))
    return found


def _bytes(held: Tensor) -> bytes:
    """What is in a tensor of bytes."""
    held = held.cpu().contiguous()
    return ctypes.string_at(held.data_ptr(), held.numel()) if held.numel() else b""


def _anywhere(item: object) -> object:
    return item.type if isinstance(item, torch.device) else item


def _shown(operation: InitialOperation) -> str:
    draw = operation.draw
    if draw is None or not isinstance(draw.jump, Tensor):
        return f"{operation.outputs} {draw}"
    return f"{operation.outputs} {draw.stream} {draw.position} {_bytes(draw.jump).hex()}"


__all__ = ["Construction", "ConstructionSource", "named_tensors", "recorded"]
