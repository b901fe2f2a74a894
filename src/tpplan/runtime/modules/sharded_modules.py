"""The class that stock modules are swapped for: same attributes and state_dict, a forward on local shards.

`isinstance(module, nn.Linear)` still holds after a swap, since each class derives from the stock one, and
`print(model)` shows what a module has become. `swapped.py` makes a class for each stock one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from tpplan.ambience import as_called, behind_a_call
from tpplan.compat.autograd import runs_backward
from tpplan.compat.dynamo import active_compiler, is_traced, skip_frame
from tpplan.compat.modes import (
    has_dispatch_modes,
    is_jit_traced,
    is_profiled,
    without_function_modes,
    without_inference_kernels,
)
from tpplan.compiler.ir.pytree import NothingThereError
from tpplan.plan import InternalError
from tpplan.runtime.around.outside_calls import call_alone
from tpplan.runtime.around.outside_forwards import serves, whole_arguments
from tpplan.runtime.around.results import UnlikeResultsError
from tpplan.runtime.around.standalone import starts_alone
from tpplan.runtime.around.watched import AGAIN
from tpplan.runtime.compiled.compiled_calls import run_compiled, run_inside, runtime_of, trace_call, trace_root
from tpplan.runtime.compiled.compiled_entry import call_compiled, is_compiled_inside
from tpplan.runtime.modules.module_runtime import RUNTIME, ModuleRuntime
from tpplan.runtime.modules.writes import WRITES, Watched, Writes, stock_class
from tpplan.runtime.parameters.copying import here_only
from tpplan.runtime.parameters.handed_out import HandedOut
from tpplan.runtime.parameters.taken_apart import refuse_conversion
from tpplan.runtime.ranks.communicator import ProcessGroupCommunicator
from tpplan.runtime.ranks.faults import LostRankError, leave, name_forward

SHOWN = "_tpplan_shown"  # of a class, the name by which its modules are printed
_ATTEMPTS = 8  # each by another program, as a body that is noisy may take another path each time


class ShardedModule(Watched):
    """The part that all swapped classes share: reshard arguments, show the body local parameters, reshard results."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the stock forward on local tensors."""
        if is_traced():
            return trace_call(self, args, kwargs)
        if active_compiler() is not None:
            return call_compiled(self, args, kwargs)
        runtime: ModuleRuntime = self.__dict__[RUNTIME]
        if runtime.classes is not None and runtime.layer is None and is_compiled_inside(runtime):
            return run_inside(self, args, kwargs)
        if runtime.handed_out.shards is None and starts_alone(runtime.handed_out):
            return call_alone(self, ShardedModule.forward, args, kwargs, super().forward)
        if runtime.layer is not None:
            own: dict[str, Any] = self._parameters
            weight = None if runtime.weight is None else runtime.weight(own["weight"])
            bias = None if runtime.bias is None else runtime.bias(own["bias"])
            return runtime.run_layer(self, (*args, *kwargs.values()), weight, bias)
        if runtime.moving or (runtime.entries and torch.is_grad_enabled()):
            args, kwargs = runtime.enter(args, kwargs)
        around = runtime.reads if runtime.handed_out.lends else runtime.borrowed
        lent = [(o, n, o.__dict__[n]) for o, n, *_ in around if n in o.__dict__] if around else ()
        for owner, name, read in runtime.reads:
            # An instance attribute comes before nn.Module's own look-up of parameters.
            parameter: Any = owner._parameters[name]
            local = read(parameter)
            owner.__dict__[name] = runtime.handed_out.told(local, parameter) if runtime.handed_out.flagged else local
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
            if runtime.kept:
                runtime.keep()
        except LostRankError as error:
            writes: Writes | None = self.__dict__.get(WRITES)
            if writes is not None and writes.outside is not None:
                name_forward(error, writes.outside(self).name)
            raise
        finally:
            for owner, name, _ in (*runtime.reads, *runtime.parts) if runtime.parts else runtime.reads:
                owner.__dict__.pop(name, None)
            for owner, name, held in lent:
                owner.__dict__[name] = held
        return runtime.leave(result) if runtime.exits else result

    def _on_shards(self, *args: Any, **kwargs: Any) -> Any:
        """As `forward`, where the tensors to read are in place: in a compiled region."""
        runtime: ModuleRuntime = self.__dict__[RUNTIME]
        if runtime.layer is not None:
            own = self.__dict__
            bias = None if runtime.bias is None else own["bias"]
            return runtime.run_layer(self, (*args, *kwargs.values()), own["weight"], bias)
        if runtime.entries:
            args, kwargs = runtime.enter(args, kwargs)
        if runtime.body is None:
            result = super().forward(*args, **kwargs)
        else:
            result = runtime.body(super().forward, args, kwargs)
        if runtime.kept:
            runtime.keep()
        return runtime.leave(result) if runtime.exits else result

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Convert the parameters, as `to` does; a conversion that changes nothing leaves them in place.

        torch would swap even equal DTensors, and a model that calls `to` in its forward (routers in float32) then has
        no gradients.
        """
        refuse_conversion(self.modules(), fn)
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

    def _get_name(self) -> str:
        """What `print` calls it."""
        return getattr(type(self), SHOWN)

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
        if self.__dict__[RUNTIME].handed_out.calls_itself():
            return super().forward(*args, **kwargs)  # a part of what is proved
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
        if runs_backward():
            runtime_of(self).handed_out.recall(whole=True)
        try:
            with behind_a_call():
                return self._held_against_proofs(args, kwargs, compiler)
        except NothingThereError as error:
            raise UnlikeResultsError(f"no tensor where its proof has one: {error}") from error

    def _held_against_proofs(self, args: tuple[Any, ...], kwargs: dict[str, Any], compiler: object) -> Any:
        for _ in range(_ATTEMPTS):
            runtime: ModuleRuntime = self.__dict__[RUNTIME]
            watch = None if runtime.guard is None else runtime.guard(self.training, args, kwargs)
            if watch is None:
                return self._as_proved(self._run(args, kwargs, compiler))
            handed_out: HandedOut = self.__dict__[RUNTIME].handed_out
            handed_out.watched, handed_out.uncompiled = True, False
            try:
                result = watch.run(lambda: self._run(args, kwargs, compiler))
            finally:
                handed_out.watched = False
            if result is not AGAIN and not (handed_out.uncompiled and watch.repeat()):
                return self._as_proved(result)
        raise InternalError(f"a call still needed another program after {_ATTEMPTS} attempts")

    def _as_proved(self, result: Any) -> Any:
        known = self.__dict__[RUNTIME].results
        if known is not None:
            known.refuse_others(result)
        return result

    def _get_name(self) -> str:
        """The stock class's name, by which transformers' Trainer tells what a model is."""
        return stock_class(self).__name__

    def __repr__(self) -> str:
        return super()._get_name() + super().__repr__().removeprefix(self._get_name())

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], compiler: object) -> Any:
        with as_called():
            writes: Writes | None = self.__dict__.get(WRITES)
            if writes is None or compiler is not None or not writes.onlookers.are_there():
                return self._run_as_proved(args, kwargs, compiler)
            with writes.onlookers.around():
                return self._run_as_proved(args, kwargs, compiler)

    def _run_as_proved(self, args: tuple[Any, ...], kwargs: dict[str, Any], compiler: object) -> Any:
        runtime: ModuleRuntime = self.__dict__[RUNTIME]
        if runtime.infers:
            with without_inference_kernels():
                return self._run_body(runtime, args, kwargs, compiler)
        return self._run_body(runtime, args, kwargs, compiler)

    def _run_body(self, runtime: ModuleRuntime, args: tuple[Any, ...], kwargs: dict[str, Any], compiler: object) -> Any:
        outer = runtime.handed_out.under_way()  # of which this call is a part, as of a gradient that it takes
        if runtime.context is not None:
            held = next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), None)
            runtime.context.batch = None if held is None or not held.dim() else held.shape[0]
        writes: Writes | None = self.__dict__.get(WRITES)
        cut = writes.cut if writes is not None else ()  # by FSDP, which wants a gradient in the module's own backward
        opened = [held for held in runtime.opened if held not in cut] if cut else runtime.opened
        summed = [owner._parameters[name] for owner, name in opened] if torch.is_grad_enabled() else ()  # pyright: ignore
        runtime.handed_out.profiled = profiled = is_profiled()
        runtime.handed_out.open(summed)  # pyright: ignore[reportArgumentType]
        if writes is not None:
            writes.forwards += 1
        direct = runtime.direct if compiler is None and not profiled and _is_plain(runtime, writes) else None
        try:
            if direct is not None:
                runtime.handed_out.lends = True
                direct.put()
            if compiler is None:
                result = super().forward(*args, **kwargs)
            else:
                result = run_compiled(self, compiler, args, kwargs, super().forward)
            if serves() and runtime.alone is not None and not torch.is_grad_enabled():
                result = runtime.alone.leave(result)  # `generate` and the like choose among all classes
            return result
        finally:
            if direct is not None:
                runtime.handed_out.lends = False
                direct.take()
            if writes is not None:
                writes.forwards -= 1
                if writes.settle is not None and not writes.forwards:
                    writes.settle()
            runtime.handed_out.close(outer)


def _is_plain(runtime: ModuleRuntime, writes: Writes | None) -> bool:
    """Whether a call records nothing, and nobody looks at what it does."""
    if torch.is_grad_enabled() or runtime.handed_out.watched or runtime.handed_out.compiles:
        return False
    if writes is not None and (writes.cut or writes.compiled):
        return False
    if runtime.direct is None or runtime.direct.in_place or runtime.handed_out.flagged or has_dispatch_modes():
        return False
    return not (runs_backward() or is_jit_traced())


for _function in (ShardedModule.forward, ShardedRoot.forward):
    skip_frame(_function)

__all__ = ["SHOWN", "ShardedModule", "ShardedRoot"]
