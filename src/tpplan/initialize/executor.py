"""Runs operations of a record on real memory. A storage is allocated when it is first used."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Generator, Tensor

from tpplan.initialize.findings import cannot
from tpplan.initialize.record import Draw, InitialOperation, RandomStream, Storage, View


def mapped(held: Any, change: Callable[[Any], Any]) -> Any:
    """An operator's arguments with each item changed, those of lists and tuples one by one."""
    if type(held) is list or type(held) is tuple:
        return type(held)([mapped(item, change) for item in held])  # pyright: ignore
    return change(held)


def over(storage: torch.UntypedStorage, view: View) -> Tensor:
    """The tensor that a view is of some memory."""
    empty = torch.empty(0, dtype=view.dtype, device=storage.device)
    tensor = empty.set_(storage, view.offset, view.shape, view.stride)  # pyright: ignore
    return tensor.conj() if view.conjugate else tensor


class Tape:
    """Puts one generator where it was in the stock model's construction.

    Attributes:
        generator: the generator.
        position: how many draws it has made.
        marks: its states after some numbers of draws.
    """

    def __init__(self, generator: Generator, marks: Mapping[int, Tensor], position: int, keep: Collection[int]) -> None:
        """Start at a position with a mark, or at a draw that jumps; note the states at the positions in `keep`."""
        self.generator = generator
        self.position = position
        self.marks = dict(marks)
        self._keep = keep
        if position in self.marks:
            generator.set_state(self.marks[position])

    def go(self, draw: Draw) -> None:
        """Prepare for a draw."""
        self.jump(draw.jump)
        self.position = draw.position

    def jump(self, jump: Tensor | int | None) -> None:
        """Go where Python has put the generator."""
        if jump is not None:
            self.generator.set_state(self.marks[jump] if isinstance(jump, int) else jump)

    def drawn(self) -> None:
        """Count a draw."""
        self.position += 1
        if self.position in self._keep:
            self.mark()

    def mark(self) -> None:
        """Note the state."""
        self.marks[self.position] = self.generator.get_state()


class Executor:
    """Real memory for the storages of a record."""

    def __init__(self, storages: Sequence[Storage], tapes: Mapping[int, Tape]) -> None:
        """Start without any; draw from `tapes`, by the number of their stream."""
        self.held: dict[int, torch.UntypedStorage] = {}
        self._storages = storages
        self._tapes = tapes

    def tensor(self, view: View) -> Tensor:
        """The real tensor; zeros, if nothing was ever written there."""
        if view.storage not in self.held:
            self._allocate(view.storage, zeros=True)
        return over(self.held[view.storage], view)

    def run(self, operation: InitialOperation) -> None:
        """Run one operation."""
        for storage in operation.whole:
            if storage not in self.held and not _is_new(operation, storage):
                self._allocate(storage, zeros=False)
        tape = None
        if operation.draw is not None:
            tape = self._tapes[operation.draw.stream]
            tape.go(operation.draw)
        args, kwargs = (
            mapped(operation.args, self._real),
            {n: mapped(h, self._real) for n, h in operation.kwargs.items()},
        )
        results = operation.function(*args, **kwargs)
        if tape is not None:
            tape.drawn()
        for view, result in zip(operation.outputs, listed(results), strict=True):
            if view is not None:
                self._keep(view, result)

    def free(self, storage: int) -> None:
        """Give memory back."""
        self.held.pop(storage, None)

    def _real(self, item: Any) -> Any:
        if isinstance(item, View):
            return self.tensor(item)
        return self._tapes[item.number].generator if isinstance(item, RandomStream) else item

    def _keep(self, view: View, result: Tensor) -> None:
        """Take a new result for its storage; one that lies otherwise than it did on `meta` is copied."""
        if result.layout is not torch.strided:
            raise cannot("makes a sparse tensor")
        storage = result.untyped_storage()
        alike = tuple(result.stride()) == view.stride and result.storage_offset() == view.offset
        if alike and storage.nbytes() >= self._storages[view.storage].size:
            self.held[view.storage] = storage
        else:
            self._allocate(view.storage, zeros=True, device=result.device)
            self.tensor(view).copy_(result)

    def _allocate(self, number: int, zeros: bool, device: torch.device | None = None) -> None:
        storage = self._storages[number]
        device = device or storage.device
        if storage.constant is not None:
            made = storage.constant.to(device, copy=True)
        else:
            made = (torch.zeros if zeros else torch.empty)(storage.size, dtype=torch.uint8, device=device)
        self.held[number] = made.untyped_storage()


def listed(results: Any) -> list[Any]:
    """An operator's results in a row, those of lists one by one."""
    if isinstance(results, (list, tuple)):
        return [item for result in results for item in listed(result)]  # pyright: ignore
    return [results]


def _is_new(operation: InitialOperation, storage: int) -> bool:
    return any(view is not None and view.storage == storage for view in operation.outputs)


__all__ = ["Executor", "Tape", "listed", "mapped", "over"]
