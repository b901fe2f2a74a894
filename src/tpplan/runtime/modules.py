"""The classes that stock modules are swapped for: same attributes and state_dict, a forward on local shards.

`isinstance(module, nn.Linear)` still holds after a swap, since each class derives from the stock one, and
`print(model)` shows what a module has become.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from types import FunctionType, MethodType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from tpplan.compat import (
    active_compiler,
    is_traced,
    own_buffers,
    own_parameters,
    runs_backward,
    set_compiler,
    skip_frame,
    without_function_modes,
)
from tpplan.compiler.ir.pytree import replaced_at
from tpplan.compiler.trace.preconditions import MARK
from tpplan.plan import InternalError
from tpplan.runtime.class_scope import ClassBody
from tpplan.runtime.communicator import Communicator, ProcessGroupCommunicator
from tpplan.runtime.compiled import (
    ENTRY,
    leave_uncompiled,
    run_compiled,
    run_inside,
    runtime_of,
    trace_call,
    trace_root,
)
from tpplan.runtime.copying import here_only
from tpplan.runtime.draws import Randomness
from tpplan.runtime.faults import leave
from tpplan.runtime.kernels import Body
from tpplan.runtime.outside import serves, serving_methods, whole_arguments
from tpplan.runtime.parameters import HandedOut
from tpplan.runtime.pretrained import saving_methods
from tpplan.runtime.reshard import CallContext, Move, moves_values
from tpplan.runtime.standalone import starts_alone
from tpplan.runtime.watched import AGAIN, WatchedCall
from tpplan.runtime.writes import WRITES, Watched, Writes, watched_class

Reader = Callable[[Tensor], Tensor]
RUNTIME = MARK
_ATTEMPTS = 8  # each by another program, as a body that is noisy may take another path each time


@dataclass(frozen=True, slots=True)
class EntryStep:
    """A reshard of one argument: by name, by position if it was passed so, and by the path inside it."""

    name: str
    position: int | None
    inner: tuple[str | int, ...]
    step: Move


@dataclass(frozen=True, slots=True)
class ExitStep:
    """A reshard of one result, by its path in the results."""

    path: tuple[str | int, ...]
    step: Move


@dataclass(slots=True)
class ModuleRuntime:
    """What a swapped module needs at run time.

    Attributes:
        label: what `print` adds to the stock representation.
        handed_out: the tensors to read in the root's forward, while that is under way.
        entries, exits: reshards at the boundary.
        reads: for each parameter read in the body: the module that owns it, its name there, and how to read it.
        parts: the same of split buffers.
        borrowed: those of both that a body around this one reads as well.
        axis: the ranks.
        classes: a context for a body that calls functions over split classes, or is called by such a body.
        random: a context for a body that draws random numbers: different on each rank, alike, or some so and some so.
        opened: for the root: the summed parameters, which are handed out at its start, in order.
        guard: for the root: called with the mode and the arguments of each call, to raise if it isn't proved, and to
            put the program in place that the call runs by; returns a watch over the call, if it has to be watched.
        context: for the root, where a reshard needs the batch size: where to note it.
        transposed: whether it is a linear layer whose weight is (inputs, outputs).
        walked: whether its own forward runs, whatever body its style has.
        body: what runs in place of the stock forward; None for that.
        replays: whether that is the record of the stock forward, which calls the modules inside.
        weight, bias: how to read these parameters of the module itself; None for one that its body doesn't read.
        table: of an embedding table split by rows, the first that this rank holds, and the number of all.
        shared: whether one tensor sits in several places of the arguments or results, to be resharded once for all.
        split_classes: of results that are split along their last dim, its size as a whole.
        alone: what happens at its boundary as well if it is called by itself; None if nothing does.
        moving: the entries that do anything where no gradient is recorded.
    """

    label: str
    axis: Communicator
    handed_out: HandedOut
    entries: tuple[EntryStep, ...] = ()
    exits: tuple[ExitStep, ...] = ()
    reads: tuple[tuple[nn.Module, str, Reader], ...] = ()
    parts: tuple[tuple[nn.Module, str, Reader], ...] = ()
    borrowed: tuple[tuple[nn.Module, str], ...] = ()
    classes: ClassBody | None = None
    random: Randomness | None = None
    opened: tuple[tuple[nn.Module, str], ...] = ()
    guard: Callable[[bool, tuple[Any, ...], dict[str, Any]], WatchedCall | None] | None = None
    context: CallContext | None = None
    transposed: bool = False
    walked: bool = False
    shared: bool = False
    alone: ModuleRuntime | None = None
    split_classes: tuple[int, ...] = ()
    body: Body | None = None
    replays: bool = False
    weight: Reader | None = None
    bias: Reader | None = None
    table: tuple[int, int] = (0, 0)
    moving: tuple[EntryStep, ...] = field(init=False)

    def __post_init__(self) -> None:
        """Find the entries that a forward without gradients can leave out."""
        self.moving = tuple(entry for entry in self.entries if moves_values(entry.step))

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Reshard the arguments of a call."""
        entries = self.entries if torch.is_grad_enabled() else self.moving
        moved: list[Any] | None = None
        copied = False
        for entry in entries if not self.shared else _once_each(entries):
            if entry.position is not None and entry.position < len(args):
                if moved is None:
                    moved = list(args)
                moved[entry.position] = replaced_at(moved[entry.position], entry.inner, entry.step)
            elif entry.name in kwargs:
                if not copied:
                    kwargs, copied = dict(kwargs), True
                kwargs[entry.name] = replaced_at(kwargs[entry.name], entry.inner, entry.step)
        return (args if moved is None else tuple(moved)), kwargs

    def leave(self, result: Any) -> Any:
        """Reshard the results of a call."""
        for exit_step in self.exits if not self.shared else _once_each(self.exits):
            result = replaced_at(result, exit_step.path, exit_step.step)
        return result


Step = TypeVar("Step", EntryStep, ExitStep)


def _once_each(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """The steps of one call, such that those which share a reshard move the same tensor once."""
    moved: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def once(step: Move) -> Move:
        def move(tensor: Tensor) -> Tensor:
            key = (id(step), id(tensor))
            if key not in moved:
                moved[key] = (tensor, step(tensor))
            return moved[key][1]

        return move

    return tuple(replace(step, step=once(step.step)) for step in steps)


def call_alone(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], compiler: object = None) -> Any:
    """A module that is called outside of the root's forward: by itself, or once more by an activation checkpoint."""
    alone = _is_alone(module)
    runtime: ModuleRuntime = module.__dict__[RUNTIME]
    runtime.handed_out.within = True
    try:
        if alone:
            args, kwargs = whole_arguments(args, kwargs)
        adapted = runtime.alone if alone else None
        if adapted is not None:
            args, kwargs = adapted.enter(args, kwargs)
        if compiler is None:
            result = _forward_of(module)(module, *args, **kwargs)
        else:
            result = run_compiled(module, compiler, args, kwargs)
        return result if adapted is None else adapted.leave(result)
    finally:
        runtime.handed_out.within = False
        runtime.handed_out.note(alone)


def _is_alone(module: nn.Module) -> bool:
    """Whether a call outside of the root's forward is one by itself; puts in place what it has to run by."""
    handed_out = runtime_of(module).handed_out
    if runs_backward():
        return handed_out.recall()
    if handed_out.alone is not None:
        handed_out.alone()
    return True


def _call_around(module: nn.Module, compiler: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As `call_alone`, of a module that has sharded ones inside and isn't one itself."""
    alone = _is_alone(module)
    handed_out = runtime_of(module).handed_out
    handed_out.apart, handed_out.within = alone, not alone  # apart: the modules inside are called by themselves, each
    try:
        if alone:
            args, kwargs = whole_arguments(args, kwargs)
        return run_compiled(module, compiler, args, kwargs)
    finally:
        handed_out.apart = handed_out.within = False
        handed_out.note(alone)


def is_compiled_inside(runtime: ModuleRuntime) -> bool:
    """Whether a module begins a region, since a body calls it that isn't compiled itself."""
    if runtime.handed_out.compiler is None or runtime.classes is None:
        return False
    return not runtime.classes.makes_calls and not runtime.replays


def call_compiled(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call that begins a compiled region."""
    compiler = set_compiler(None)
    try:
        if isinstance(module, ShardedRoot):
            return module.call_guarded(args, kwargs, compiler)
        handed_out = runtime_of(module).handed_out
        if handed_out.shards is not None or not starts_alone(handed_out):
            return run_compiled(module, compiler, args, kwargs)
        if RUNTIME in module.__dict__:
            return call_alone(module, args, kwargs, compiler)
        return _call_around(module, compiler, args, kwargs)
    finally:
        set_compiler(compiler)


@functools.cache
def carrying_class(stock: type[nn.Module]) -> type[nn.Module]:
    """A class like `stock`, for modules with sharded ones inside, which may be compiled with these."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not is_traced() and active_compiler() is not None:
            return call_compiled(self, args, kwargs)
        return stock.forward(self, *args, **kwargs)

    def on_shards(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return stock.forward(self, *args, **kwargs)

    skip_frame(forward)
    members = {"forward": _as_called(forward, stock.forward), "_on_shards": on_shards}
    return _with_entry(watched_class(stock, members), forward)


class ShardedModule(Watched):
    """The part that all swapped classes share: reshard arguments, show the body local parameters, reshard results."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the stock forward on local tensors."""
        if is_traced():
            return trace_call(self, args, kwargs)
        if active_compiler() is not None:
            return call_compiled(self, args, kwargs)
        runtime: ModuleRuntime = self.__dict__[RUNTIME]
        if runtime.classes is not None and is_compiled_inside(runtime):
            return run_inside(self, args, kwargs)
        if runtime.handed_out.shards is None and starts_alone(runtime.handed_out):
            return call_alone(self, args, kwargs)
        if runtime.moving or (runtime.entries and torch.is_grad_enabled()):
            args, kwargs = runtime.enter(args, kwargs)
        lent = [(o, n, o.__dict__[n]) for o, n in runtime.borrowed if n in o.__dict__] if runtime.borrowed else ()
        for owner, name, read in runtime.reads:
            # An instance attribute comes before nn.Module's own look-up of parameters.
            owner.__dict__[name] = read(owner._parameters[name])  # pyright: ignore
        for owner, name, read in runtime.parts:
            owner.__dict__[name] = read(owner._buffers[name])  # pyright: ignore
        try:
            if runtime.classes is not None:
                with runtime.classes, runtime.random if runtime.random and self.training else nullcontext():
                    result = self._body(runtime, args, kwargs)
            elif runtime.random is None or not self.training:
                replaced = runtime.body is not None
                result = self._body(runtime, args, kwargs) if replaced else super().forward(*args, **kwargs)
            else:
                with runtime.random:
                    result = self._body(runtime, args, kwargs)
        finally:
            for owner, name, _ in (*runtime.reads, *runtime.parts) if runtime.parts else runtime.reads:
                owner.__dict__.pop(name, None)
            for owner, name, held in lent:
                owner.__dict__[name] = held
        return runtime.leave(result) if runtime.exits else result

    def _on_shards(self, *args: Any, **kwargs: Any) -> Any:
        """As `forward`, where the tensors to read are in place: in a compiled region."""
        runtime: ModuleRuntime = self.__dict__[RUNTIME]
        if runtime.entries:
            args, kwargs = runtime.enter(args, kwargs)
        if runtime.body is None:
            result = super().forward(*args, **kwargs)
        else:
            result = runtime.body(super().forward, args, kwargs)
        return runtime.leave(result) if runtime.exits else result

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Convert the parameters, as `to` does; a conversion that changes nothing leaves them in place.

        torch would swap even equal DTensors, and a model that calls `to` in its forward (routers in float32) then has
        no gradients.
        """
        held = (*self._parameters.values(), *self._buffers.values())
        if all(tensor is None or fn(tensor) is tensor for tensor in held):
            for child in self.children() if recurse else ():
                child._apply(fn)
            return self
        return super()._apply(fn, recurse)  # pyright: ignore[reportUnknownMemberType]

    def _body(self, runtime: ModuleRuntime, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if runtime.body is not None:
            if runtime.replays or not runtime.handed_out.watched:
                return runtime.body(super().forward, args, kwargs)
            with without_function_modes():  # what is proved of it, is proved of the stock body
                return runtime.body(super().forward, args, kwargs)
        return super().forward(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return here_only(super().__reduce_ex__(protocol), stock_class(self).__name__)

    def extra_repr(self) -> str:
        """The stock representation, and what the module has become."""
        stock = super().extra_repr()
        label = self.__dict__[RUNTIME].label
        return f"{stock}, {label}" if stock and label else stock or label


class ShardedRoot(ShardedModule):
    """The model itself: hands out summed parameters before the body runs, and checks the call."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on local tensors."""
        if is_traced():
            trace_root()
        if active_compiler() is not None:
            return call_compiled(self, args, kwargs)
        return self.call_guarded(args, kwargs, None)

    def call_guarded(self, args: tuple[Any, ...], kwargs: dict[str, Any], compiler: object) -> Any:
        """A call that is held against what was proved; its body by `compiler` if there is one."""
        try:
            return self._call_guarded(args, kwargs, compiler)
        except Exception as error:
            axis = self.__dict__[RUNTIME].axis
            if isinstance(axis, ProcessGroupCommunicator):
                leave(axis.group, error)
            raise

    def _call_guarded(self, args: tuple[Any, ...], kwargs: dict[str, Any], compiler: object) -> Any:
        args, kwargs = whole_arguments(args, kwargs)
        for _ in range(_ATTEMPTS):
            runtime: ModuleRuntime = self.__dict__[RUNTIME]
            watch = None if runtime.guard is None else runtime.guard(self.training, args, kwargs)
            if watch is None:
                return self._run(args, kwargs, compiler)
            handed_out: HandedOut = self.__dict__[RUNTIME].handed_out
            handed_out.watched, handed_out.uncompiled = True, False
            try:
                result = watch.run(lambda: self._run(args, kwargs, compiler))
            finally:
                handed_out.watched = False
            if result is not AGAIN and not (handed_out.uncompiled and watch.repeat()):
                return result
        raise InternalError(f"a call still needed another program after {_ATTEMPTS} attempts")

    def _get_name(self) -> str:
        """The stock class's name, by which transformers' Trainer tells what a model is."""
        return stock_class(self).__name__

    def __repr__(self) -> str:
        return type(self).__name__ + super().__repr__().removeprefix(self._get_name())

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], compiler: object) -> Any:
        runtime: ModuleRuntime = self.__dict__[RUNTIME]
        if runtime.context is not None:
            held = next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), None)
            runtime.context.batch = None if held is None or not held.dim() else held.shape[0]
        writes: Writes | None = self.__dict__.get(WRITES)
        cut = writes.cut if writes is not None else ()  # by FSDP, which wants a gradient in the module's own backward
        opened = [held for held in runtime.opened if held not in cut] if cut else runtime.opened
        summed = [owner._parameters[name] for owner, name in opened] if torch.is_grad_enabled() else ()  # pyright: ignore
        runtime.handed_out.open(summed)  # pyright: ignore[reportArgumentType]
        if writes is not None:
            writes.forwards += 1
        try:
            if compiler is None or leave_uncompiled(self):
                result = super().forward(*args, **kwargs)
            else:
                result = run_compiled(self, compiler, args, kwargs)
            if serves() and runtime.alone is not None and not torch.is_grad_enabled():
                result = runtime.alone.leave(result)  # `generate` and the like choose among all classes
            return result
        finally:
            if writes is not None:
                writes.forwards -= 1
            runtime.handed_out.close()


class ShardedLinear(ShardedModule):
    """A linear layer split by columns, its body written out to spare the detour over attributes."""

    def forward(self, input: Tensor) -> Tensor:
        """X (…, in) to y (…, out / size)."""
        if is_traced():
            return trace_call(self, (input,), {})
        runtime: ModuleRuntime = self.__dict__[RUNTIME]
        if runtime.walked:
            return super().forward(input)
        if active_compiler() is not None:
            return call_compiled(self, (input,), {})
        if runtime.handed_out.shards is None and starts_alone(runtime.handed_out):
            return call_alone(self, (input,), {})
        if runtime.entries:
            input = runtime.entries[0].step(input)
        own: dict[str, Any] = self._parameters
        assert runtime.weight is not None
        bias = None if runtime.bias is None else runtime.bias(own["bias"])
        result = functional.linear(input, runtime.weight(own["weight"]), bias)
        return runtime.exits[0].step(result) if runtime.exits else result


class ReducedLinear(ShardedModule):
    """A linear layer split by rows: the products are reduced, then the bias is added once."""

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """X (…, in / size) to y (…, out)."""
        if is_traced():
            return trace_call(self, args, kwargs)
        runtime: ModuleRuntime = self.__dict__[RUNTIME]
        if runtime.walked:
            return super().forward(*args, **kwargs)
        if active_compiler() is not None:
            return call_compiled(self, args, kwargs)
        (input,) = (*args, *kwargs.values())  # whatever its name is
        if runtime.handed_out.shards is None and starts_alone(runtime.handed_out):
            return call_alone(self, (input,), {})
        if runtime.entries:
            input = runtime.entries[0].step(input)
        own: dict[str, Any] = self._parameters
        assert runtime.weight is not None
        weight, bias = runtime.weight(own["weight"]), None if runtime.bias is None else runtime.bias(own["bias"])
        return self._product(runtime, input, weight, bias)

    def _on_shards(self, *args: Any, **kwargs: Any) -> Any:
        runtime: ModuleRuntime = self.__dict__[RUNTIME]
        if runtime.walked:
            return super()._on_shards(*args, **kwargs)
        (input,) = (*args, *kwargs.values())
        if runtime.entries:
            input = runtime.entries[0].step(input)
        bias = None if runtime.bias is None else self.__dict__["bias"]
        return self._product(runtime, input, self.__dict__["weight"], bias)

    def _product(self, runtime: ModuleRuntime, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        result = input @ weight if runtime.transposed else functional.linear(input, weight)
        if runtime.exits:
            result = runtime.exits[0].step(result)
        return result if bias is None else result + bias.to(result.dtype)  # autocast makes products of another dtype


class VocabularyEmbedding(ShardedModule):
    """An embedding table split by rows: ids that another rank holds give zero rows, and the ranks' rows are summed."""

    def forward(self, input: Tensor) -> Tensor:
        """Ids (…) to rows (…, hidden)."""
        if is_traced():
            return trace_call(self, (input,), {})
        runtime: ModuleRuntime = self.__dict__[RUNTIME]
        if runtime.walked:
            return super().forward(input)
        if active_compiler() is not None:
            return call_compiled(self, (input,), {})
        if runtime.handed_out.shards is None and starts_alone(runtime.handed_out):
            return call_alone(self, (input,), {})
        assert runtime.weight is not None
        return self._looked_up(runtime, input, runtime.weight(self._parameters["weight"]))  # pyright: ignore

    def _on_shards(self, *args: Any, **kwargs: Any) -> Any:
        runtime: ModuleRuntime = self.__dict__[RUNTIME]
        if runtime.walked:
            return super()._on_shards(*args, **kwargs)
        (input,) = (*args, *kwargs.values())
        return self._looked_up(runtime, input, self.__dict__["weight"])

    def _looked_up(self, runtime: ModuleRuntime, input: Tensor, table: Tensor) -> Tensor:
        rows, (first_row, all_rows) = table.shape[0], runtime.table
        local = input - first_row
        index = local.clamp(0, max(rows - 1, 0))
        foreign = index != local
        # An id that no rank holds stays out of every rank's range, so that all of them raise as the stock table does.
        index = index.masked_fill(input.clamp(0, all_rows - 1) != input, -1)
        padding: int | None = self.__dict__["padding_idx"]
        if padding is not None:
            padding -= first_row
            padding = padding if 0 <= padding < rows else None
        if rows:
            result = self._rows(runtime, index, table, padding)
        else:  # a sum of no rows, whose gradient is an empty table's
            result = self._rows(runtime, index, table.new_zeros(1, table.shape[1]), None) + table.sum(0)
        result = result.masked_fill(foreign.unsqueeze(-1), 0)
        return runtime.exits[0].step(result) if runtime.exits else result

    def _rows(self, runtime: ModuleRuntime, index: Tensor, table: Tensor, padding: int | None) -> Tensor:
        """Rows of this rank's table, scaled as the stock class does."""
        stock = stock_class(self)
        if stock.forward is nn.Embedding.forward:
            return functional.embedding(index, table, padding)
        own = self.__dict__
        before, own["padding_idx"], own["weight"] = own["padding_idx"], padding, table
        try:
            with without_function_modes() if runtime.handed_out.watched else nullcontext():
                return stock.forward(self, index)
        finally:
            own["padding_idx"] = before
            del own["weight"]


_BASES = (ShardedRoot, ShardedLinear, ReducedLinear, VocabularyEmbedding, ShardedModule)


def _forward_of(module: nn.Module) -> Callable[..., Any]:
    """The forward of ours that is under way, without what is wrapped around it, as transformers' checkpoints are."""
    return next(kind for kind in type(module).__mro__ if kind in _BASES).forward


def replaces_body(module: nn.Module) -> bool:
    """Whether a module runs a body of tpplan's in place of its own, and of all inside."""
    runtime: ModuleRuntime | None = module.__dict__.get(RUNTIME)
    if runtime is None or runtime.walked or runtime.replays:
        return False
    return runtime.body is not None or isinstance(module, (ShardedLinear, ReducedLinear, VocabularyEmbedding))


def stock_class(module: nn.Module) -> type[nn.Module]:
    """The class that the user wrote, of a module that was swapped or wasn't."""
    kinds = (kind for kind in type(module).__mro__ if issubclass(kind, nn.Module))
    return next(kind for kind in kinds if not issubclass(kind, Watched))


_PREFIX: dict[str | None, str] = {
    "colwise": "Colwise",
    "rowwise": "Rowwise",
    "vocab": "Vocabulary",
    "sequence": "Sequence",
    "replicate": "Replicated",
    None: "Sharded",
}


class _OwnTensor:
    """A tensor of a module, as it is to everyone outside of the module's forward.

    An activation checkpoint of a part of a body reads it in a backward, where the local one isn't in the instance's
    `__dict__`, which comes first.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, module: nn.Module | None, kind: type[nn.Module]) -> Any:
        tables: tuple[dict[str, Any], ...] = ()
        if module is not None:
            tables = (own_parameters(module), own_buffers(module))
        table: dict[str, Any] | None = next((held for held in tables if self._name in held), None)
        if module is None or table is None:
            raise AttributeError(f"'{kind.__name__}' object has no attribute '{self._name}'")
        runtime: ModuleRuntime | None = module.__dict__.get(RUNTIME)
        if runtime is not None and runs_backward() and torch.is_grad_enabled() and runtime.handed_out.shards is None:
            runtime.handed_out.recall()
            latest: ModuleRuntime = module.__dict__[RUNTIME]
            for owner, name, read in (*latest.reads, *latest.parts):
                if owner is module and name == self._name:
                    return read(table[name])
        return table[self._name]


@functools.cache
def swapped_class(
    stock: type[nn.Module], style: str | None, root: bool, tensors: tuple[str, ...] = ()
) -> type[nn.Module]:
    """The class to swap `stock` for, such as `ColwiseLinear` for `Linear`; one class for each combination.

    Args:
        stock: the class that the user wrote.
        style: the plan's style of the module.
        root: whether the module is the model itself.
        tensors: the module's own, which its body reads.
    """
    base: type[ShardedModule] = ShardedModule
    if root:
        base = ShardedRoot
    elif style == "colwise" and stock.forward is nn.Linear.forward:
        base = ShardedLinear
    elif style == "rowwise":
        base = ReducedLinear
    elif style == "vocab":
        base = VocabularyEmbedding
    name = f"{_PREFIX[style]}{stock.__name__}"
    methods = serving_methods(stock, _is_outside) | saving_methods(stock) if root else {}
    own = {"forward": _as_called(base.forward, stock.forward), "__module__": stock.__module__, "__doc__": stock.__doc__}
    read = {held: _OwnTensor(held) for held in tensors if not hasattr(stock, held)}
    return _with_entry(type(name, (base, stock), methods | own | read), base.forward)


def _with_entry(kind: type[nn.Module], forward: Callable[..., Any]) -> type[nn.Module]:
    """`kind`, with an entry for torch.compile if a base class has wrapped its `forward`, as transformers' layers do."""
    made: Any = kind.forward
    if made.__code__ is not cast("Any", forward).__code__:
        setattr(kind, ENTRY, _as_called(_enter, made))
    return kind


def _enter(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if not is_traced() and active_compiler() is not None:
        return call_compiled(self, args, kwargs)
    runtime: ModuleRuntime | None = self.__dict__.get(RUNTIME)
    if not is_traced() and runtime is not None and is_compiled_inside(runtime):
        return run_inside(self, args, kwargs)
    return type(self).forward(self, *args, **kwargs)


def become(module: nn.Module, kind: type[nn.Module]) -> None:
    """Make `module` one of class `kind`.

    What compiles a module has to come before all that is wrapped around a class's `forward`, which may look for itself
    in the class: so it is an attribute of the module.
    """
    own: Any = module.__dict__.get("forward")
    if getattr(own, "__func__", None) is getattr(type(module), ENTRY, own):
        module.__dict__.pop("forward", None)
    module.__class__ = kind
    entry = getattr(kind, ENTRY, None)
    if entry is not None and "forward" not in module.__dict__:
        module.__dict__["forward"] = MethodType(entry, module)


def _as_called(forward: Callable[..., Any], stock: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` with the signature of the stock one, by which callers tell what it takes."""
    assert isinstance(forward, FunctionType)
    shown = FunctionType(forward.__code__, forward.__globals__, stock.__name__, None, forward.__closure__)
    shown.__signature__ = inspect.signature(stock)  # pyright: ignore[reportFunctionMemberAccess]
    shown.__doc__ = stock.__doc__
    return shown


def _is_outside(module: nn.Module) -> bool:
    """Whether no forward of this root is under way."""
    runtime: ModuleRuntime | None = module.__dict__.get(RUNTIME)
    return runtime is not None and runtime.handed_out.shards is None


for _function in (call_compiled, _enter, ShardedModule.forward, ShardedRoot.forward):
    skip_frame(_function)
for _function in (ShardedLinear.forward, ReducedLinear.forward, VocabularyEmbedding.forward):
    skip_frame(_function)
