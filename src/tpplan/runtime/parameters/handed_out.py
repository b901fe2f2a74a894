"""Parameters in the body: DTensors to everyone outside, plain local shards to the user's code.

The local shard of a parameter is read through autograd, so that its gradient arrives on the DTensor. Nodes written in
Python are what this costs, so the parameters of a block share one: whichever is read first reads them all. A replicated
parameter that is used on sharded activations gets a partial gradient; those are summed over the axis together, once a
backward, by a single node that hands out all their local tensors at the start of the root's forward. Under a schedule
that computes gradients of parameters apart from those of inputs, each parameter has a node, and a sum, of its own:
torch follows it from there to where it meets the inputs, and would run what lies between shared ones more than once.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tpplan.compat.autograd import native_apply, running_backward
from tpplan.compat.dtensors import local_of, local_of_one_axis, make_gradient
from tpplan.compat.modules import own_parameters
from tpplan.compat.pipelines import splits_backward
from tpplan.compiler.ir.layout import Layout
from tpplan.runtime.around.recent import Ran, RecentCalls
from tpplan.runtime.data_parallel.averaging import DataParallelError
from tpplan.runtime.modules.writes import WRITES, Writes
from tpplan.runtime.parameters.packed_tensors import PackedTensor
from tpplan.runtime.parameters.sharded_tensors import forwards
from tpplan.runtime.ranks.communicator import Communicator, of_sums
from tpplan.runtime.ranks.reshard import CallContext, SecondDerivativeError
from tpplan.runtime.ranks.segments import taken


class _LocalShards(torch.autograd.Function):
    """The local tensors of DTensor parameters; backward wraps the local gradients."""

    @staticmethod
    def forward(ctx: Any, *parameters: DTensor) -> tuple[Tensor, ...]:
        ctx.parameters = parameters
        ctx.set_materialize_grads(False)
        # Each a tensor of its own: autograd would write to the parameter's.
        return tuple([local_of(parameter).detach() for parameter in parameters])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise SecondDerivativeError
        return tuple(
            [
                None if gradient is None else make_gradient(_dense(gradient), parameter)
                for gradient, parameter in zip(gradients, ctx.parameters, strict=True)
            ]
        )


class _SummedShards(torch.autograd.Function):
    """The local tensors of several replicated parameters; backward sums their gradients over the axis, coalesced."""

    @staticmethod
    def forward(ctx: Any, axis: Communicator, *parameters: DTensor) -> tuple[Tensor, ...]:
        ctx.axis = axis
        ctx.parameters = parameters
        ctx.set_materialize_grads(False)
        return tuple(local_of(parameter).detach() for parameter in parameters)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise SecondDerivativeError
        dense = [None if gradient is None else _dense(gradient) for gradient in gradients]
        summed = sum_coalesced(dense, ctx.parameters, ctx.axis)
        wrapped = [
            None if gradient is None else make_gradient(gradient, parameter)
            for gradient, parameter in zip(summed, ctx.parameters, strict=True)
        ]
        return (None, *wrapped)


_apply_local_shards = native_apply(_LocalShards)
_apply_summed_shards = native_apply(_SummedShards)


def _dense(gradient: Tensor) -> Tensor:
    """A gradient with all entries; of a table with `sparse=True` torch makes those of some rows, as no DTensor can."""
    if gradient.layout is torch.strided:
        return gradient
    if gradient.is_meta:  # where torch makes none dense
        return torch.empty(gradient.shape, dtype=gradient.dtype, device=gradient.device)
    return gradient.to_dense()


def sum_coalesced(
    gradients: Sequence[Tensor | None], parameters: Sequence[Tensor], axis: Communicator
) -> list[Tensor | None]:
    """Sum gradients over the axis with one all-reduce for each dtype.

    A gradient that is missing here may exist on another rank; its place is filled with zeros, and stays None if no
    gradient of this call exists at all.
    """
    if all(gradient is None for gradient in gradients):
        return list(gradients)
    by_dtype: dict[torch.dtype, list[int]] = {}
    for index, parameter in enumerate(parameters):
        by_dtype.setdefault(parameter.dtype, []).append(index)
    summed: list[Tensor | None] = [None] * len(gradients)
    for indices in by_dtype.values():
        parts: list[Tensor] = []
        for i in indices:
            part = gradients[i]
            if part is None:
                part = torch.zeros_like(local_of(parameters[i]))
            parts.append(_sent(part, parameters[i], axis))
        flat = axis.all_reduce(torch.cat([part.reshape(-1) for part in parts]))
        sizes = [part.numel() for part in parts]
        for i, part, piece in zip(indices, parts, flat.split(sizes), strict=True):  # pyright: ignore
            gradient = gradients[i]
            if gradient is not None:
                summed[i] = _received(gradient, piece.view_as(part), parameters[i], axis)
    return summed


def _sent(gradient: Tensor, parameter: Tensor, axis: Communicator) -> Tensor:
    """What is summed of a gradient: of a part that other ranks hold as well, the packs that are shared, else zeros."""
    if not isinstance(parameter, PackedTensor):
        return gradient
    dim, length, shared = _shared(parameter.packing.layout, axis.size, axis.rank)
    sent = gradient.new_zeros((*gradient.shape[:dim], length, *gradient.shape[dim + 1 :]))
    for place, start, count in shared:
        sent.narrow(dim, start, count).copy_(gradient.narrow(dim, place, count))
    return sent


def _received(gradient: Tensor, summed: Tensor, parameter: Tensor, axis: Communicator) -> Tensor:
    """The gradient, with the sums of what was sent of it."""
    if not isinstance(parameter, PackedTensor):
        return summed.clone()  # torch can't copy a DTensor that begins amid its memory
    dim, _, shared = _shared(parameter.packing.layout, axis.size, axis.rank)
    gradient = gradient.clone()
    for place, start, count in shared:
        gradient.narrow(dim, place, count).copy_(summed.narrow(dim, start, count))
    return gradient


@functools.cache
def _shared(layout: Layout, size: int, rank: int) -> tuple[int, int, tuple[tuple[int, int, int], ...]]:
    """The dim and the length of the packs that several ranks share; a rank's stretches of them.

    Each stretch with its place in the rank's part, its start in these packs, and its length.
    """
    found: list[tuple[int, int, int]] = []
    place = edge = 0
    for pack in layout.packs:
        start, length = pack.part(size, rank)
        if pack.is_shared:
            found.append((place, edge + start, length))
            edge += pack.size
        place += length
    return layout.dim or 0, edge, tuple(found)


_Outer = tuple[dict[int, Tensor] | None, int | None, tuple[int, int]]

Place = tuple[nn.Module, str]
"""Where a parameter is: its module, and its name there."""

Wanted = tuple[dict[str, Any], str, Callable[[Tensor], Tensor], dict[str, Any]]
"""Where a compiled region wants a tensor: an instance's `__dict__`, the name, how to read it, the table that has it."""


class HandedOut:
    """The local tensors that were handed out in the forward under way, by identity of their parameter.

    Attributes:
        axis: the ranks.
        summing: the same, for gradients.
        context: what reshards know of the call under way.
        shards: the tensors; None while no forward of the root is under way.
        runs_in: the thread of that forward, and the number of the backward that recomputes it, or -1.
        made: products of linear layers that were made before the layers are called: of which input and parameter, each
            with how often it had been written to.
        context: what reshards know of the call under way.
        calls: the calls that ended, of which activation checkpoints may recompute a part.
        alone: called before a module runs by itself, outside of any forward of the root.
        again: called before a module runs once more in a backward, with the call's entry in `calls`.
        state: tells what state the model is in, of what its code reads.
        asks_flags: tells whether bodies ask parameters if they require grad.
        flagged: whether what they read says so in the forward under way, also where no gradient is recorded.
        ended: called when a forward of the root has ended, where the ranks compare what they do.
        within: whether a call of either kind is under way.
        lends: whether local tensors are in place for as long as the call takes.
        watched: whether the path of the forward under way is held against the proved one.
        placed: whether the tensors of a compiled region are in place.
        apart: whether that is of a module without a program, outside of any forward of the root.
        entered: the outermost module of the innermost region.
        regions: what regions read, by their outermost module, once that is worked out.
        compiler: what compiles the modules that a body calls which isn't compiled itself.
        compiled_by: the same, of the call under way or ended last.
        compiles: whether a compiler was ever seen at one of the modules.
        uncompiled: whether a region was to be compiled in a forward that is watched, and wasn't.
        recalled: the call of which a part was recomputed last.
        profiled: whether a profiler looks at the forward under way.
        singly: whether each parameter that is handed out in it has a node of its own.
    """

    def __init__(self, axis: Communicator, context: CallContext | None = None) -> None:
        """Serve the ranks of `axis`; `context` is what reshards know of the call under way."""
        self.axis = axis
        self.summing = of_sums(axis)
        self.context = CallContext() if context is None else context
        self.shards: dict[int, Tensor] | None = None
        self.runs_in = (0, -1)
        self.made: dict[nn.Module, tuple[Tensor, int, object, int, Tensor]] = {}
        self.calls = RecentCalls()
        self.alone: Callable[[], None] | None = None
        self.again: Callable[[Ran, bool], None] | None = None
        self.state: Callable[[], int] | None = None
        self.asks_flags: Callable[[], bool] | None = None
        self.flagged = False
        self.ended: Callable[[], None] | None = None
        self.within = False
        self.lends = False
        self.watched = False
        self.profiled = False
        self.singly = False
        self.placed = False
        self.compiles = False
        self.uncompiled = False
        self.recalled: Ran | None = None
        self.compiler: object = None
        self.compiled_by: object = None
        self.apart = False
        self.entered: nn.Module | None = None
        self.regions: dict[nn.Module, tuple[Wanted, ...]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """What a copy of the model has of it: nothing was compiled for that, nor called."""
        return self.__dict__ | {"regions": {}, "made": {}, "compiler": None, "compiled_by": None, "recalled": None}

    def open(self, summed: Sequence[Tensor]) -> None:
        """Begin a forward: hand out the parameters whose gradients are summed, tied together by one backward node."""
        self.shards = {}
        self.runs_in = _here()
        self.begin()
        self.singly = torch.is_grad_enabled() and splits_backward()
        wanted = [p for p in summed if p.requires_grad] if torch.is_grad_enabled() else []
        if wanted:
            self.add(wanted, functools.partial(_apply_summed_shards, self.summing))
        forwards.summed = (*forwards.summed, frozenset(map(id, wanted)))
        forwards.opened += 1
        forwards.count += 1  # once nothing can raise: who opens a forward closes it

    def begin(self) -> None:
        """Begin a call, of which nothing has been compiled yet."""
        self.flagged = self.asks_flags is not None and self.asks_flags()
        self.uncompiled, self.compiler, self.compiled_by = False, None, None

    def told(self, local: Tensor, parameter: Tensor) -> Tensor:
        """What was read of a parameter, which says whether that requires grad, if bodies ask."""
        if not self.flagged or torch.is_grad_enabled() or local.requires_grad or not parameter.requires_grad:
            return local
        return local.detach().requires_grad_()

    def add(self, parameters: Sequence[Tensor], read: Callable[..., tuple[Tensor, ...]]) -> None:
        """Hand out `parameters`, read by one node, or each by its own."""
        assert self.shards is not None
        for held in zip(parameters) if self.singly else filter(None, (parameters,)):
            self.shards.update(zip(map(id, held), read(*held), strict=True))

    def calls_itself(self) -> bool:
        """Whether a call of the root that begins here is made by the forward under way."""
        return self.shards is not None and self.runs_in == _here()

    def under_way(self) -> _Outer:
        """What the forward under way was handed out, its batch, and where it runs."""
        return self.shards, self.context.batch, self.runs_in

    def close(self, outer: _Outer) -> None:
        """End a forward, and go on with the one around it; the autograd graph keeps what it needs."""
        forwards.count -= 1
        forwards.summed = forwards.summed[:-1]
        self.shards = None
        self.made.clear()
        self.note(False)
        self.shards, batch, self.runs_in = outer
        self.context.batch = self.context.batch if self.shards is None else batch
        if self.ended is not None and sys.exc_info()[0] is None:
            self.ended()

    def note(self, alone: bool) -> None:
        """Remember how a call ran that has ended, of which a part may be recomputed."""
        if self.calls.has_grown() and not torch.compiler.is_compiling():
            state = 0 if self.state is None else self.state()
            self.calls.note(Ran(self, self.context.batch, alone, self.uncompiled, self.compiled_by, state))

    def recall(self, whole: bool = False) -> bool:
        """Put in place what the call ran by of which a part is recomputed; whether that was a module by itself.

        Args:
            whole: whether all of it is recomputed, which is held against proofs as any other call.

        Raises:
            RecomputeError: it isn't known, or the model was changed since.
        """
        ran = self.calls.running()
        if ran is None:  # the call under way, or one inside of what is recomputed
            return False
        if self.again is not None:
            self.again(ran, whole)
        ran.handed_out.context.batch = ran.batch
        ran.handed_out.recalled = ran
        return ran.alone


def _here() -> tuple[int, int]:
    return threading.get_ident(), running_backward()


def _uncut(parameter: Tensor) -> Tensor:
    """The parameter, which FSDP has put together over its own axis.

    Raises:
        DataParallelError: it hasn't; a body would compute with a part of this rank's part.
    """
    if isinstance(parameter, DTensor) and len(parameter.placements) > 1:
        raise DataParallelError.of(
            "TP171",
            f"a module was called whose parameter of shape {list(parameter.shape)} `fully_shard` holds cut over the "
            "data-parallel ranks",
            help="call the module that was given to `fully_shard`; where one of its methods runs modules, "
            "`register_fsdp_forward_method(module, name)` first, or `unshard()` it",
        )
    return parameter


class SummedReader:
    """Reads a parameter whose gradient is summed.

    The root hands out all of them together, except those that FSDP cuts: it reduces the gradients of a unit in the
    backward of that unit. These are read, and so summed, together with those of their unit.
    """

    def __init__(self, handed_out: HandedOut, place: Place, summed: frozenset[Place]) -> None:
        """Read the parameter at `place`, a module and a name; `summed` are the places of all such parameters."""
        self._handed_out = handed_out
        self._place = place
        self._summed = summed

    def __call__(self, parameter: Tensor) -> Tensor:
        """The local tensor of `parameter`. Outside of the root's forward it gets a node, and a sum, of its own."""
        if not (torch.is_grad_enabled() and parameter.requires_grad):
            local = local_of_one_axis(parameter)
            return local_of(_uncut(parameter)) if local is None else local
        shards = self._handed_out.shards
        found = None if shards is None else shards.get(id(parameter))
        if found is not None or not isinstance(parameter, DTensor):  # a functional call has its own in its place
            return parameter if found is None else found
        read = functools.partial(_apply_summed_shards, self._handed_out.summing)
        if shards is None:
            return read(_uncut(parameter))[0]
        self._handed_out.add(_readable(_uncut(parameter), filter(self._summed.__contains__, self._unit())), read)
        return shards[id(parameter)]

    def _unit(self) -> list[Place]:
        writes: Writes | None = self._place[0].__dict__.get(WRITES)
        return [] if writes is None else writes.cut.get(self._place, [])


class PartReader:
    """Reads the features of a whole parameter that this rank works on.

    The gradient of a part is padded with zeros, so that the sum over the ranks is the whole parameter's gradient.
    """

    def __init__(
        self, summed: Callable[[Tensor], Tensor], layout: Layout, shape: tuple[int, ...], axis: Communicator
    ) -> None:
        """Read the part of a parameter of `shape` that `layout` gives to this rank of `axis`."""
        assert layout.dim is not None
        self._summed = summed
        self._dim = layout.dim
        self._intervals = layout.intervals(shape[layout.dim], axis.size, axis.rank)

    def __call__(self, parameter: Tensor) -> Tensor:
        """The part of `parameter`."""
        if not isinstance(parameter, DTensor):
            return parameter
        return taken(self._summed(parameter), self._dim, self._intervals)


def buffer_reader(layout: Layout, shape: tuple[int, ...], axis: Communicator) -> Callable[[Tensor], Tensor]:
    """Reads the part of a buffer of `shape` that `layout` gives to this rank of `axis`; the buffer is stored whole."""
    assert layout.dim is not None
    return functools.partial(taken, dim=layout.dim, intervals=layout.intervals(shape[layout.dim], axis.size, axis.rank))


def local_part(buffer: Tensor) -> Tensor:
    """What this rank stores of a buffer; a functional call has one of its own in its place."""
    return local_of(buffer) if isinstance(buffer, DTensor) else buffer


class _CountedOnce(torch.autograd.Function):
    """A tensor on rank 0, zeros elsewhere: a term of a sum over the ranks. Its gradient is whole on every rank."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, rank: int) -> Tensor:
        return tensor.view_as(tensor) if rank == 0 else torch.zeros_like(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


_apply_counted_once = native_apply(_CountedOnce)


class OnceReader:
    """Reads a parameter that is added to partial values, so that their sum over the ranks has it once."""

    def __init__(self, read: Callable[[Tensor], Tensor], axis: Communicator) -> None:
        """Read with `read` what is counted on rank 0 of `axis`."""
        self._read = read
        self._rank = axis.rank

    def __call__(self, parameter: Tensor) -> Tensor:
        """The parameter on rank 0, zeros elsewhere."""
        if not isinstance(parameter, DTensor):
            return parameter
        return _apply_counted_once(self._read(parameter), self._rank)


class ZerosReader:
    """Reads a bias of stacked experts that one of the ranks with an expert has; the others read zeros."""

    def __init__(self, read: Callable[[Tensor], Tensor], features: int) -> None:
        """Read with `read` a tensor whose last dim has so many entries, or none."""
        self._read = read
        self._features = features

    def __call__(self, parameter: Tensor) -> Tensor:
        """The local tensor, or zeros in its place."""
        held = self._read(parameter)
        missing = self._features - held.shape[-1]
        return torch.nn.functional.pad(held, (0, missing)) if missing else held


class BlockReader:
    """Reads parameters of one block whose gradients need no sum."""

    def __init__(self, handed_out: HandedOut, members: Sequence[Place]) -> None:
        """Read together `members`: the owners of the parameters and their names there."""
        self._handed_out = handed_out
        self._members = members

    def __call__(self, parameter: Tensor) -> Tensor:
        """The local tensor of `parameter`. Outside of the root's forward it gets a node of its own."""
        if not (torch.is_grad_enabled() and parameter.requires_grad):
            local = local_of_one_axis(parameter)
            return local_of(_uncut(parameter)) if local is None else local
        shards = self._handed_out.shards
        found = None if shards is None else shards.get(id(parameter))
        if found is None and not isinstance(parameter, DTensor):  # a functional call has its own in its place
            return parameter
        if found is None:
            _uncut(parameter)
        if shards is None:
            return _apply_local_shards(parameter)[0]
        if found is None:
            self._handed_out.add(_readable(parameter, self._members), _apply_local_shards)
            found = shards[id(parameter)]
        return found


def _readable(wanted: Tensor, members: Iterable[Place]) -> list[Tensor]:
    """The parameters of `members` as they are now, `wanted` first, without those that FSDP still holds sharded."""
    readable = [wanted]
    for owner, name in members:
        parameter = own_parameters(owner)[name]
        if parameter is wanted or not isinstance(parameter, DTensor) or not parameter.requires_grad:
            continue
        if len(parameter.placements) == 1:
            readable.append(parameter)
    return readable
