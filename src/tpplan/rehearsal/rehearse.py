"""Rehearsal: run a program once as it will run, on shapes alone, forward and backward.

in:  a stock model, its program and the example call
out: the collectives that ran, or what the lowered model raised

The check proves what bodies compute. A rehearsal runs the runtime itself around them: parameters as they are read,
reshards, bodies that take the place of stock ones, and autograd through all of it, on `meta`, with a communicator that
changes shapes alone. Calls that are equal to one that was run are left out.
"""

from __future__ import annotations

import functools
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path as FilePath
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tpplan.ambience import ambience
from tpplan.compat.autograd import native_apply, runs_backward, without_packing
from tpplan.compat.modules import named_modules
from tpplan.compat.propagator import fake_mesh
from tpplan.compiler.ir.arrivals import call_on_rank, with_parts
from tpplan.compiler.ir.kept_tensors import is_wrapper, wrapper_on_meta
from tpplan.compiler.ir.layout import Layout, Pack, all_reduce_of
from tpplan.compiler.ir.program import ParameterPlacement, Program
from tpplan.compiler.ir.pytree import tensors_of, with_items, with_tensors
from tpplan.compiler.ir.steps import Heard, Step, Stream, renamed
from tpplan.compiler.ir.trace import Path, quoted
from tpplan.compiler.pipeline import Compiled
from tpplan.compiler.trace.capture import on_shapes, tell_inputs
from tpplan.compiler.trace.meta_results import AlignmentError
from tpplan.compiler.trace.recorder import Recorder
from tpplan.compiler.trace.signatures import argument_names
from tpplan.compiler.trace.skeleton import make_skeleton
from tpplan.compiler.trace.surroundings import Surroundings
from tpplan.compiler.trace.tape import OpenFrame
from tpplan.cost.communication import bytes_sent
from tpplan.plan import CompileError, Diagnostic, InternalError, TpplanError
from tpplan.progress import doing
from tpplan.rehearsal.same_path import is_in, refuse_other_path
from tpplan.runtime.lower import lower
from tpplan.runtime.parameters.distribute import MeshDistributor
from tpplan.runtime.parameters.sharded_operations import is_final
from tpplan.state.ambient import noting_settings

_META = torch.device("meta")
_Call = tuple[tuple[Any, ...], dict[str, Any]]
_STANDARD = str(FilePath(traceback.__file__).parent)
_LIBRARIES = (str(FilePath(torch.__file__).parent), str(FilePath(__file__).parents[1]))


class ShapeCommunicator:
    """Ranks of which only this one is there, and of whose tensors only the shapes are.

    Attributes:
        counts: how often each collective ran.
        sent: the bytes that this rank would have sent in each.
        observe: is told each collective with the bytes of the whole tensor.
    """

    def __init__(self, size: int, rank: int) -> None:
        """Be `rank` of `size`."""
        self.observe: Callable[[str, int], None] | None = None
        self.size = size
        self.rank = rank
        self.one_shot = 0
        self.counts: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """See `Communicator`."""
        self._count(all_reduce_of(tensor.nbytes, tensor.dtype, self.one_shot), tensor, 1)
        return tensor

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """See `Communicator`."""
        self._count("all-gather", tensor, self.size)
        return torch.cat([tensor] * self.size, dim)

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        """See `Communicator`."""
        self._count("reduce-scatter", tensor, 1)
        return tensor.chunk(self.size, dim)[self.rank].clone()

    def all_to_all(self, tensor: Tensor, split_dim: int, concatenate_dim: int) -> Tensor:
        """See `Communicator`."""
        self._count("all-to-all", tensor, self.size)
        return torch.cat([tensor.chunk(self.size, split_dim)[self.rank]] * self.size, concatenate_dim)

    def all_to_all_sizes(self, sizes: Tensor, most: int) -> tuple[Tensor, list[int], list[int]]:
        """See `Communicator`. As if as much went to each rank as to any other."""
        self._count("all-to-all", sizes, self.size)
        parts = [Pack(most).local(self.size, rank) for rank in range(self.size)]
        return sizes, parts, [parts[self.rank]] * self.size

    def all_to_all_rows(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """See `Communicator`."""
        self._count("all-to-all", rows, self.size)
        return rows.new_empty((sum(received), *rows.shape[1:]))

    def _count(self, name: str, tensor: Tensor, parts: int) -> None:
        whole = tensor.numel() * tensor.itemsize * parts
        self.counts[name] += 1
        self.sent[name] += bytes_sent(name, whole, self.size)
        if self.observe is not None:
            self.observe(name, whole)


class _ShapeDistributor(MeshDistributor):
    """Leaves buffers as the skeleton has them: on `meta`, but for single numbers, which bodies may read.

    On another device there are fake tensors in place of those on `meta`.
    """

    owns = False

    def place_buffer(self, buffer: Tensor) -> Tensor:
        return torch.empty_like(buffer, device=self.device) if buffer.is_meta else buffer

    def _local(self, whole: Tensor, placement: ParameterPlacement) -> Tensor:
        local = super()._local(whole, placement)
        return torch.empty_like(local, device=self.device) if local.is_meta else local


_FAILED = "_tpplan_failed"  # of an error, the module whose forward raised it


class Rehearsed(NamedTuple):
    """The collectives of one rank: those that ran, and those that the program predicts for the calls that ran."""

    ran: Counter[str]
    predicted: Counter[str]


@ambience()
@doing("rehearsing the program")
def rehearse(
    model: nn.Module,
    compiled: Compiled,
    arguments: Sequence[Any],
    keywords: Mapping[str, Any],
    parts: Mapping[Path, Layout] = MappingProxyType({}),
) -> list[Rehearsed]:
    """Run a program on shapes, once for each kind of rank.

    Args:
        model: the stock model; not changed.
        compiled: the program, and what is known of its bodies.
        arguments, keywords: the call that it was compiled for.
        parts: the tensors of the call of which a rank has its part only.

    Returns:
        For each kind of rank the collectives that ran, and those that were predicted.

    Raises:
        CompileError: the lowered model raised.
        InternalError: it has no backward, and the stock model has one.
    """
    names, example = argument_names(type(model).forward), (tuple(arguments), dict(keywords))
    program = compiled.program
    left = {path: layout for path, layout in parts.items() if path not in program.arriving}
    return [
        _rehearse(model, compiled, with_parts(left, program.size, rank, *example, names), names, rank)
        for rank in kinds_of_ranks(compiled)
    ]


def kinds_of_ranks(compiled: Compiled) -> list[int]:
    """The first rank of each kind: ranks with the same steps run the same."""
    return sorted({id(compiled.streams[rank]): rank for rank in sorted(compiled.streams, reverse=True)}.values())


def _rehearse(model: nn.Module, compiled: Compiled, example: _Call, names: Sequence[str], rank: int) -> Rehearsed:
    program = compiled.program
    skeleton, axis = lowered_on_shapes(model, program, rank)
    standing = stand_in(skeleton, compiled.streams[rank])
    around = Surroundings(skeleton)
    try:
        own = call_on_rank(program, rank, *example, names)
        compare = functools.partial(refuse_other_path, skeleton, compiled.streams[rank], rank)
        with noting_settings(set(), around.files):
            error = _differentiated(skeleton, compiled, own, names, compare)
        if isinstance(error, AlignmentError):
            raise error
        if error is not None and _differentiable(model, compiled, example, names):
            raise InternalError(f"its backward can't run as rank {rank}: {type(error).__name__}: {error}") from error
    except Exception as error:
        if is_final(error):
            raise
        raise CompileError([cannot_run(error, rank)]) from error
    finally:
        around.restore()
    return Rehearsed(axis.counts, _predicted(program, standing))


def lowered_on_shapes(
    model: nn.Module, program: Program, rank: int, device: torch.device = _META
) -> tuple[nn.Module, ShapeCommunicator]:
    """A skeleton of the stock model, in the program's mode, sharded as a rank would have it; and its communicator."""
    skeleton = _in_mode(model, program)
    axis = ShapeCommunicator(program.size, rank)
    distributor = _ShapeDistributor(fake_mesh(program.size, rank, "rehearsal"), axis, None)
    distributor.device = device
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of kernels that aren't there
        lower(skeleton, program, distributor)
    return skeleton, axis


def _in_mode(model: nn.Module, program: Program) -> nn.Module:
    """A skeleton in the program's mode: in its own, some of its modules may be in the other."""
    skeleton = make_skeleton(model).model
    return skeleton if skeleton.training == program.training else skeleton.train(program.training)


def differentiate(result: Any) -> None:
    """Run the backward of a result."""
    outputs = [t for _, t in tensors_of((result,), {}, ("result",)) if t.requires_grad]
    torch.autograd.backward(outputs, [torch.empty_like(t) for t in outputs])


def _differentiated(
    model: nn.Module,
    compiled: Compiled,
    example: _Call,
    names: Sequence[str],
    compare: Callable[[Sequence[Step | Heard], Any], None] | None = None,
) -> Exception | None:
    """Run the call and its backward on shapes; what the backward raised. `compare` is told steps and result."""
    call = with_tensors(*example, names, like_on(_META))
    settings = compiled.lowered_settings
    with on_shapes(model, settings) as recorder, _told_of_calls(model, recorder), naming_failures(model):
        tell_inputs(recorder, example, call, names)
        recorder.steps.listens = compare is not None
        with without_packing(), torch.set_grad_enabled(settings.records):
            result = model(*call[0], **call[1])
        recorder.steps.listens = False
        if compare is not None:
            compare(recorder.frames[0].steps, result)
        try:
            if settings.records:
                differentiate(result)
        except Exception as error:
            return error
    return None


def _differentiable(model: nn.Module, compiled: Compiled, example: _Call, names: Sequence[str]) -> bool:
    """Whether the stock model has a backward: a body may overwrite what that needs, and so be for evaluation alone."""
    skeleton = _in_mode(model, compiled.program)
    return _differentiated(skeleton, compiled, example, names) is None


@contextmanager
def _told_of_calls(model: nn.Module, recorder: Recorder) -> Generator[None]:
    """A block in which a recorder knows which call of which module runs, and by whose code what is called."""
    modules, calls = dict(named_modules(model)), Counter[str]()
    recorder.steps.modules = {id(module): name for name, module in modules.items()}

    def enter(name: str, *_: object) -> None:
        recorder.frames.append(OpenFrame(name, calls[name], []))
        calls[name] += 1

    def leave(*_: object) -> None:
        frame = recorder.frames.pop()
        recorder.frames[-1].steps += frame.steps

    handles: list[RemovableHandle] = []
    for name, module in modules.items():
        handles.append(module.register_forward_pre_hook(functools.partial(enter, name), prepend=True))
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def naming_failures(model: nn.Module) -> Generator[None]:
    """A block in which what a forward raises keeps the name of the innermost module, for `cannot_run`."""
    handles = [
        module.register_forward_hook(functools.partial(_note_failure, name), always_call=True)
        for name, module in named_modules(model)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _note_failure(name: str, *_: object) -> None:
    error = sys.exc_info()[1]
    if error is not None:
        vars(error).setdefault(_FAILED, name)


def cannot_run(error: Exception, rank: int) -> Diagnostic:
    """What the model's own code couldn't do with what a rank holds: TP136."""
    at, where = "", vars(error).get(_FAILED, "")
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if not file.startswith(_LIBRARIES) and (not file.startswith(_STANDARD) or "site-packages" in file):
            at = f"in {quoted(where)}, at {file}:{line}"
    if isinstance(error, TpplanError):
        first, message = error.diagnostics[0], f"the sharded model can't run as rank {rank}: "
        return replace(
            first, code="TP136", message=message + first.message, notes=(*first.notes, *((at,) if at else ()))
        )
    text = str(error).strip().splitlines()
    way_out = "leave out the rules of the module that the line belongs to, or take what it needs as an argument"
    if "view size is not compatible" in str(error):
        way_out = "write `.reshape(…)` in place of `.view(…)` there, as a rank's part may lie in memory with gaps; or "
        way_out += "leave out the rules of the module that the line belongs to"
    return Diagnostic(
        code="TP136",
        message=f"the sharded model can't run as rank {rank}: {type(error).__name__}{': ' + text[0] if text else ''}",
        help=way_out,
        notes=(at,) if at else (),
    )


def like_on(device: torch.device) -> Callable[[Path, Tensor], Tensor]:
    """Makes tensors like those of a call on a device."""

    def like(_: Path, tensor: Tensor) -> Tensor:
        if is_wrapper(tensor):
            return wrapper_on_meta(tensor)
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        if not tensor.requires_grad:
            return made
        copy = made.requires_grad_().clone()  # no leaf: bodies may write to it
        if copy.stride() == made.stride() or not made.numel():
            return copy
        most = 1 + sum(stride * (size - 1) for size, stride in zip(made.shape, made.stride(), strict=True))
        memory = torch.empty(most, dtype=tensor.dtype, device=device, requires_grad=True)
        return memory.clone().as_strided(made.shape, made.stride())

    return like


# -- equal calls ----------------------------------------------------------------------------------------------------
class _Connected(torch.autograd.Function):
    """Tensors that depend on others, of which nobody knows how."""

    @staticmethod
    def forward(ctx: Any, like: Sequence[Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.inputs = [(t.shape, t.dtype) for t in inputs]
        return tuple(torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in like)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *(torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in ctx.inputs))


_connect = native_apply(_Connected)


class CallWatch(Protocol):
    """Is told of the calls that stand for others."""

    def runs(self, key: tuple[str, int], passed: Any) -> AbstractContextManager[object]:
        """Around the call of a module, with its arguments, that others are equal to."""
        ...

    def stands_in(self, key: tuple[str, int], passed: Any) -> None:
        """A call, with these arguments, is left out, as it is equal to that one."""
        ...


def stand_in(skeleton: nn.Module, stream: Stream, watch: CallWatch | None = None) -> frozenset[str]:
    """Let calls that are equal to another return what that one did; their modules' names."""
    likes = dict(likes_of(stream.root))
    modules = dict(named_modules(skeleton))
    results: dict[tuple[str, int], Any] = {}
    calls: Counter[str] = Counter()
    needed = {module for module, _ in likes.values()}
    standing = frozenset(module for module, _ in likes)

    def wrapped(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            again = runs_backward() and calls[name] == 1  # an activation checkpoint's, which must do the same
            key = (name, 0 if again else calls[name])
            calls[name] += not again
            like = likes.get(key)
            if like is not None and like in results:
                if watch is not None:
                    watch.stands_in(like, (args, kwargs))
                return _connected(results[like], args, kwargs)
            with nullcontext() if watch is None else watch.runs(key, (args, kwargs)):
                results[key] = forward(*args, **kwargs)
            return results[key]

        return call

    for name in sorted(needed | standing):
        modules[name].__dict__["forward"] = wrapped(name, modules[name].forward)
    return standing


def likes_of(heard: Heard, of: str = "", name: str = "") -> Iterator[tuple[tuple[str, int], tuple[str, int]]]:
    """The calls that are equal to others, with these."""
    if heard.like is not None:
        yield (renamed(heard.module, of, name), heard.call), heard.like
        return
    for step in heard.steps:
        if isinstance(step, Heard):
            yield from likes_of(step, of, name)


def _connected(result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = [t for _, t in tensors_of(args, kwargs, ()) if t.requires_grad]
    wanted = [t for _, t in tensors_of((result,), {}, ("result",)) if t.requires_grad]
    made = dict(zip(map(id, wanted), _connect(wanted, *given), strict=True)) if given else {}
    return with_items(result, lambda item: made.get(id(item), item))


def _predicted(program: Program, standing: frozenset[str]) -> Counter[str]:
    """The collectives that the program predicts for the modules that ran."""
    ran = replace(program, modules=tuple(m for m in program.modules if not is_in(m.name, standing)))
    summed = any(not is_in(p.name, standing) for p in program.summed_parameters)
    return replace(ran, parameters=program.parameters if summed else ()).count_collectives()


__all__ = [
    "CallWatch",
    "Rehearsed",
    "ShapeCommunicator",
    "cannot_run",
    "differentiate",
    "kinds_of_ranks",
    "like_on",
    "likes_of",
    "lowered_on_shapes",
    "naming_failures",
    "rehearse",
    "stand_in",
]
