"""What the runtime needs of an axis: five collectives on plain tensors, over a process group.

Other implementations stand in for it elsewhere: shapes only (the compiler's check), or threads (simulated ranks).
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NoReturn, Protocol, Self, TypeGuard, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from tpplan.compat.dynamo import is_traced
from tpplan.compat.modes import is_profiled
from tpplan.compat.process_groups import (
    begun,
    collectives_without_dispatch,
    fused_gather,
    fused_scatter,
    group_all_gather,
    group_reduce_scatter,
    swapped,
    traced_all_gather,
    traced_all_reduce,
    traced_all_to_all,
    traced_reduce_scatter,
)
from tpplan.compat.tensors import as_bytes, is_batched
from tpplan.compiler.ir.layout import Collective
from tpplan.plan import TpplanError
from tpplan.runtime.ranks.faults import lost_rank
from tpplan.runtime.ranks.one_shot import SharedMemory, share_memory
from tpplan.runtime.ranks.profiled import named_range

Held = TypeVar("Held")


class Communicator(Protocol):
    """The ranks of one axis, seen from one of them.

    Attributes:
        size: number of ranks.
        rank: this one's number on the axis.
        one_shot: the largest all-reduces that are done in one step, in bytes.
    """

    size: int
    rank: int
    one_shot: int

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over ranks. May write to `tensor`, which must be the caller's own."""
        ...

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """The ranks' tensors, concatenated in rank order along `dim`."""
        ...

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's part along `dim` of the sum over ranks."""
        ...

    def all_to_all(self, tensor: Tensor, split_dim: int, concatenate_dim: int) -> Tensor:
        """Part r of `tensor` along `split_dim` goes to rank r; what arrives is concatenated along `concatenate_dim`."""
        ...

    def all_to_all_sizes(self, sizes: Tensor, most: int) -> tuple[Tensor, list[int], list[int]]:
        """Row r of `sizes` goes to rank r; what arrives, and the sums of rows that go and of those that arrive.

        All that go are no more than `most`.
        """
        ...

    def all_to_all_rows(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Of `rows` the first `sent[0]` go to rank 0, and so on; what arrives, of which rank r sends `received[r]`."""
        ...


class ProcessGroupCommunicator:
    """The ranks of a process group.

    In a graph that torch.compile makes the collectives are torch's functional ones, which its backends know.

    Attributes:
        group: the group.
        place: which module's boundary it serves, for errors.
        adjoint: whether it serves a backward.
        counted: whether a program says how often that is.
        begins: whether a collective may be begun, and waited for later.
        fuses: whether torch's operators gather, or scatter, and multiply.
        shared: where small tensors are summed in one step, if the ranks share memory.
    """

    place = ""
    adjoint = False
    counted = True
    begins = True
    fuses = False
    one_shot = 0
    shared: SharedMemory | None = None

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Take the ranks of `group`, in its order."""
        self.group = group
        self.size = group.size()
        self.rank = group.rank()
        self._name: str = group.group_name
        # The group's own methods: the public functions take longer in Python than a small collective on the wire.
        self._gather, self._scatter = group_all_gather(group), group_reduce_scatter(group)
        self._summed = dist.AllreduceOptions()
        self._summed.asyncOp = False

    def __deepcopy__(self, memo: object) -> ProcessGroupCommunicator:
        return self  # a copy of a model runs on the same ranks

    def at(self, place: str) -> Self:
        """The same ranks, for what belongs to `place`."""
        made = copy.copy(self)
        made.place = place
        return made

    def sum_in_one_step(self, largest: int, device: torch.device) -> None:
        """From now on sum tensors of up to `largest` bytes in one step; each rank calls this, which warns if none can.

        (An `all_reduce` in a graph of torch.compile is the graph's: inductor has an option for it.)
        """
        found = share_memory(self.group, largest, device)
        if isinstance(found, SharedMemory):
            self.shared = found
            return
        warnings.warn(
            f"the plan asks for one-shot all-reduces, but the process group's own are used: {found}", stacklevel=3
        )

    def fuse_products(self, device: torch.device) -> None:
        """From now on have torch's operators gather, or scatter, and multiply; each rank calls this.

        It warns if the ranks share no memory. The operators wait for other ranks on the device.
        """
        found = share_memory(self.group, 1, device)
        self.fuses = isinstance(found, SharedMemory)
        if not self.fuses:
            warnings.warn(
                f"the plan asks for torch's fused operators, but exchanges run beside products: {found}", stacklevel=3
            )

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """See `Communicator`."""
        if is_traced():
            return _like(traced_all_reduce(_real(tensor), self._name), tensor)
        tensor = tensor.contiguous()
        if self.shared is not None and self.shared.sums(tensor):
            return tensor
        try:
            with self._named("all-reduce"):
                _wait(self.group.allreduce([_real(tensor)], self._summed))
        except RuntimeError as error:
            self._raise("all-reduce", tensor, error)
        return tensor

    def direct(self) -> ProcessGroupCommunicator:
        """The same ranks where neither a compiler nor a mode looks, and no gradient is recorded."""
        if "all_reduce" in self.__dict__:
            return self  # somebody counts
        made = _Direct(self.group).at(self.place)
        made.shared = self.shared
        return made

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """See `Communicator`."""
        tensor = tensor.contiguous()
        if is_traced():
            gathered = _like(traced_all_gather(_sent(tensor), self.size, self._name), tensor)
            return gathered if dim == 0 else torch.cat(gathered.chunk(self.size), dim)
        gathered = tensor.new_empty((self.size * tensor.shape[0], *tensor.shape[1:]))
        try:
            with self._named("all-gather"):
                _wait(self._gather(_sent(gathered), _sent(tensor)))
        except RuntimeError as error:
            self._raise("all-gather", tensor, error)
        return gathered if dim == 0 else torch.cat(gathered.chunk(self.size), dim)

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        """See `Communicator`."""
        tensor = _rows_first(tensor, self.size, dim)
        if is_traced():
            return _like(traced_reduce_scatter(_real(tensor), self.size, self._name), tensor)
        scattered = tensor.new_empty((tensor.shape[0] // self.size, *tensor.shape[1:]))
        try:
            with self._named("reduce-scatter"):
                _wait(self._scatter(_real(scattered), _real(tensor)))
        except RuntimeError as error:
            self._raise("reduce-scatter", tensor, error)
        return scattered

    def all_to_all(self, tensor: Tensor, split_dim: int, concatenate_dim: int) -> Tensor:
        """See `Communicator`."""
        sent = torch.stack(tensor.chunk(self.size, split_dim))
        if is_traced():
            received = _like(traced_all_to_all(_sent(sent), self.size, self._name), sent)
            return torch.cat(received.unbind(), concatenate_dim)
        received = torch.empty_like(sent)
        try:
            with self._named("all-to-all"):
                dist.all_to_all_single(as_bytes(received), as_bytes(sent), group=self.group)
        except RuntimeError as error:
            self._raise("all-to-all", tensor, error)
        return torch.cat(received.unbind(), concatenate_dim)

    def all_to_all_sizes(self, sizes: Tensor, most: int) -> tuple[Tensor, list[int], list[int]]:
        """See `Communicator`."""
        received = sizes.clone()  # where no rank answers, as in a fake group, each sends what this one does
        try:
            with self._named("all-to-all"):
                dist.all_to_all_single(received, sizes, group=self.group)
        except RuntimeError as error:
            self._raise("all-to-all", sizes, error)
        both = torch.stack([sizes.sum(1), received.sum(1)])
        sent, arriving = cast("list[list[int]]", both.tolist())  # the one wait for the device
        return received, sent, arriving

    def all_to_all_rows(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """See `Communicator`."""
        arrived = rows.new_empty((sum(received), *rows.shape[1:]))
        try:
            with self._named("all-to-all"):
                dist.all_to_all_single(
                    as_bytes(arrived), as_bytes(rows.contiguous()), [*received], [*sent], group=self.group
                )
        except RuntimeError as error:
            self._raise("all-to-all", rows, error)
        return arrived

    # -- beside other work ----------------------------------------------------------------------------------------
    def begin_collective(self, collective: Collective, tensor: Tensor, dim: int = 0) -> Callable[[], Tensor]:
        """Begin an all-reduce, an all-gather or a reduce-scatter; what comes back waits for it.

        See `Communicator` for what each returns. Until then nobody may write to `tensor`, nor read an all-reduce's.
        """
        name = str(collective)
        tensor = _rows_first(tensor, self.size, dim) if collective is Collective.REDUCE_SCATTER else tensor.contiguous()
        try:
            with self._named(name):
                made, work = begun(self.group, name, _real(tensor), self.size)
        except RuntimeError as error:
            self._raise(name, tensor, error)

        def wait() -> Tensor:
            try:
                with self._named(f"wait for {name}"):
                    _wait(work)
            except RuntimeError as error:
                self._raise(name, tensor, error)
            if collective is Collective.ALL_REDUCE:
                return tensor
            result = _like(made, tensor)
            gathers = collective is Collective.ALL_GATHER and dim != 0
            return torch.cat(result.chunk(self.size), dim) if gathers else result

        return wait

    def gather_and_multiply(
        self, part: Tensor, dim: int, matrices: Sequence[Tensor]
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """The ranks' parts joined along `dim`, and their products, by one operator of torch's: see `fuses`."""
        try:
            with self._named("fused all-gather"):
                whole, products = fused_gather(part, dim, matrices, self._name)
        except RuntimeError as error:
            self._raise("fused all-gather", part, error)
        return whole.contiguous(), [product.contiguous() for product in products]

    def multiply_and_scatter(self, tensor: Tensor, matrix: Tensor, dim: int) -> Tensor:
        """This rank's part along `dim` of the sum of products, by one operator of torch's: see `fuses`."""
        try:
            with self._named("fused reduce-scatter"):
                return fused_scatter(tensor, matrix, dim, self._name).contiguous()
        except RuntimeError as error:
            self._raise("fused reduce-scatter", tensor, error)

    def pairwise(self, collective: Collective) -> AbstractContextManager[Callable[[Tensor, int], Callable[[], Tensor]]]:
        """A block that exchanges tensors in pairs of ranks, in place of a collective.

        What it gives sends a tensor to the rank so many places after this one, begins to receive one like it from the
        rank as many places before, and returns what waits for that.
        """
        name = f"pairwise {collective}"

        def swap(sent: Tensor, distance: int) -> Callable[[], Tensor]:
            received = torch.empty_like(sent)
            try:
                works = swapped(self.group, _real(sent), _real(received), distance)
            except RuntimeError as error:
                self._raise(name, sent, error)

            def wait() -> Tensor:
                try:
                    with self._named("wait for " + name):
                        for work in works:
                            work.wait()
                except RuntimeError as error:
                    self._raise(name, sent, error)
                return received

            return wait

        return _within(self._named(name), swap) if is_profiled() else nullcontext(swap)

    def _named(self, collective: str) -> AbstractContextManager[object]:
        return named_range(collective, self.adjoint, self.place)

    def _raise(self, name: str, tensor: Tensor, error: RuntimeError) -> NoReturn:
        if isinstance(error, torch.OutOfMemoryError):
            raise error
        if is_batched(tensor):
            raise TpplanError.of(
                "TP117",
                "the backward of a sharded model was called with a batch of gradients (`is_grads_batched=True`, or "
                "`vectorize=True`), which isn't proved",
                help="call it with one gradient after the other",
            ) from error
        raise lost_rank(described(name, tensor, self.place), error, self.group) from error


def fuses(axis: Communicator) -> TypeGuard[ProcessGroupCommunicator]:
    """Whether torch's operators gather, or scatter, and multiply."""
    return isinstance(axis, ProcessGroupCommunicator) and axis.fuses


class _Direct(ProcessGroupCommunicator):
    """The ranks of a process group, with little around the collectives of a decoded token: two in each block."""

    _device: torch.device | None = None

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """See `Communicator`."""
        if tensor.is_complex() or not tensor.is_contiguous():
            return super().all_reduce(tensor)
        if self.shared is not None and self.shared.sums(tensor):
            return tensor
        if tensor.device != self._device:
            self._meet(tensor.device)
        try:
            work = self._reduce([tensor], self._summed)
            if work is not None:
                work.wait()
        except RuntimeError as error:
            self._raise("all-reduce", tensor, error)
        return tensor

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """See `Communicator`."""
        if tensor.is_complex() or tensor.itemsize == 1 or not tensor.is_contiguous():
            return super().all_gather(tensor, dim)
        if tensor.device != self._device:
            self._meet(tensor.device)
        rows, *others = tensor.shape
        gathered = tensor.new_empty((self.size * rows, *others))
        try:
            _wait(self._gather_here(gathered, tensor))
        except RuntimeError as error:
            self._raise("all-gather", tensor, error)
        return gathered if dim == 0 else torch.cat(gathered.chunk(self.size), dim)

    def _meet(self, device: torch.device) -> None:
        self._reduce, self._gather_here = collectives_without_dispatch(self.group, device)
        self._device = device


@contextmanager
def _within(around: AbstractContextManager[object], held: Held) -> Generator[Held]:
    with around:
        yield held


def described(name: str, tensor: Tensor, place: str, any_rows: bool = False) -> str:
    """A collective in words; of as many rows as there are on a rank."""
    shape = f"(any, {', '.join(map(str, tensor.shape[1:]))})" if any_rows else str(tuple(tensor.shape))
    text = f"the {name} of a {str(tensor.dtype).removeprefix('torch.')} tensor of shape {shape}"
    return f"{text} at {place}" if place else text


def of_backward(axis: Communicator) -> Communicator:
    """`axis`, for the backward of what belongs to its place."""
    if not isinstance(axis, ProcessGroupCommunicator):
        return axis
    made = axis.at(axis.place)
    made.adjoint = True
    return made


def of_sums(axis: Communicator) -> Communicator:
    """`axis`, for the sums of replicated parameters' gradients: one for all of them, or one for each unit of FSDP."""
    made = of_backward(placed(axis, "the gradients of replicated parameters"))
    if isinstance(made, ProcessGroupCommunicator):
        made.counted = False
    return made


def placed(axis: Communicator, place: str) -> Communicator:
    """`axis`, for what belongs to `place`, if it is one of real ranks."""
    return axis.at(place) if isinstance(axis, ProcessGroupCommunicator) else axis


def _rows_first(tensor: Tensor, size: int, dim: int) -> Tensor:
    """The ranks' parts along `dim`, one after the other along the first dim."""
    return (torch.cat(tensor.chunk(size, dim)) if dim != 0 else tensor).contiguous()


def _real(tensor: Tensor) -> Tensor:
    """The numbers of a complex tensor, which not every backend knows, as pairs of real ones."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _sent(tensor: Tensor) -> Tensor:
    """What is sent of a tensor that isn't summed: pairs of real numbers, or bytes."""
    return as_bytes(_real(tensor))


def _like(numbers: Tensor, sent: Tensor) -> Tensor:
    """What came of what was sent of a tensor, of its dtype."""
    if sent.itemsize == 1:
        return numbers.view(sent.dtype)
    return torch.view_as_complex(numbers) if sent.is_complex() else numbers


def _wait(work: dist.Work | None) -> None:
    if work is not None:  # of backends that wait themselves
        work.wait()
