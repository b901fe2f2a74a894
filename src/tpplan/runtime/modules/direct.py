"""Direct: forwards that ask nothing, for the modules of a call that records no gradient.

A sharded module asks in each call whether a compiler reads it, whether it is called by itself, whether a gradient is
recorded. For a plain call of the root the answers are the same in all modules. While such a call is under way, torch
calls in each module, as it calls what `Module.compile` sets, a function that does only what is left: its product and
its reshards. A decoded token takes little more than its operations, so that the questions would be a tenth of it.

`_where_plain` is the one place that decides whether a module's call is that of its class's forward on its own
parameters, and nothing else: no hooks, no `forward` on the instance, no other parameters in the tables. It looks in
each call, as a forward may do such things while it runs; what isn't plain is called as ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from tpplan.compat.dtensors import local_of
from tpplan.compat.dynamo import COMPILED_CALL
from tpplan.compat.hooks import FORWARD_HOOKS, global_hook_tables, is_called_as_usual, ordinary_call
from tpplan.compat.modules import own_parameters
from tpplan.runtime.bodies.kernel_bodies import Body, Fused
from tpplan.runtime.bodies.layer_bodies import Layer, without_gradients
from tpplan.runtime.compiled.compiled_calls import ENTRY
from tpplan.runtime.modules.module_runtime import ModuleRuntime, Reader
from tpplan.runtime.modules.sharded_modules import ShardedModule
from tpplan.runtime.modules.writes import stock_class
from tpplan.runtime.parameters.handed_out import BlockReader, SummedReader
from tpplan.runtime.ranks.reshard import Move, without_gradient

Forward = Callable[..., Any]
_FORWARD, _recorded = "forward", torch.is_grad_enabled


@dataclass(slots=True)
class _Source:
    """Where a tensor that is in place during a call comes from.

    Attributes:
        table, name: its owner's table of parameters, and its name there.
        taken: the parameter that it was read from; None where no call is under way.
    """

    table: dict[str, nn.Parameter | None]
    name: str
    taken: nn.Parameter | None = None

    def take(self) -> Tensor:
        """The parameter, as a call begins."""
        self.taken = self.table[self.name]
        return self.taken  # pyright: ignore[reportReturnType]


class Direct:
    """The forwards of one program's modules, which are in place only during a call.

    Attributes:
        in_place: whether they are.
    """

    def __init__(self, modules: Iterable[tuple[nn.Module, ModuleRuntime | None]]) -> None:
        """Serve these modules, the root apart; with None those that only contain sharded ones."""
        self._modules = tuple(modules)
        self._made = False
        self._calls: list[tuple[dict[str, Any], Forward]] = []
        self._tensors: list[tuple[dict[str, Any], str, _Source, Reader]] = []
        self.in_place = False

    def __getstate__(self) -> dict[str, Any]:
        """What a copy of the model has of it: forwards are made for the copy's own modules."""
        return {"_modules": self._modules}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["_modules"])

    def put(self) -> None:
        """Put the forwards in place, and the local tensors that stock ones read."""
        if not self._made:
            self._make()
        self.in_place = True
        for own, call in self._calls:
            if own.get(COMPILED_CALL) is None:
                own[COMPILED_CALL] = call
        for own, name, source, read in self._tensors:
            own[name] = read(source.take())

    def take(self) -> None:
        """Leave the modules as they were."""
        self.in_place = False
        for own, call in self._calls:
            if own.get(COMPILED_CALL) is call:
                own[COMPILED_CALL] = None
        for own, name, source, _ in self._tensors:
            own.pop(name, None)
            source.taken = None

    def _make(self) -> None:
        self._made = True
        sharded = [(module, runtime) for module, runtime in self._modules if runtime is not None]
        for module, runtime in self._modules:
            if runtime is None and (_only_carries(module) or _has_only_carried(module)):
                self._add(module, _stock(module))
        for module, runtime in _without_conflicts([held for held in sharded if _can_serve(*held)], sharded):
            forward = _written_out(module, runtime)
            draws = runtime.random is not None
            if forward is not None:
                self._add(module, forward)
            else:
                self._add(module, _general(module, runtime), self._put_in_place(runtime), draws)

    def _add(self, module: nn.Module, forward: Forward, sources: Sequence[_Source] = (), draws: bool = False) -> None:
        # With a key of its own for good, as Python looks attributes up anew in an object that gets or loses one.
        module.__dict__.setdefault(COMPILED_CALL, None)
        self._calls.append((module.__dict__, _where_plain(module, forward, sources, draws)))

    def _put_in_place(self, runtime: ModuleRuntime) -> list[_Source]:
        """Have the local tensors in place that a stock forward reads."""
        sources = [_Source(own_parameters(owner), name) for owner, name, _ in runtime.reads]
        for source, (owner, name, read) in zip(sources, runtime.reads, strict=True):
            self._tensors.append((owner.__dict__, name, source, _reader(read)))
        return sources


def _general(module: nn.Module, runtime: ModuleRuntime) -> Forward:
    """What runs the stock forward, on the local tensors that are put in place for it."""
    stock = _stock(module)
    body, moves, exits = runtime.body, bool(runtime.moving), bool(runtime.exits)
    if body is not None:
        stock = _replaced(body, stock)
    if not (moves or exits):
        return stock

    def forward(*args: Any, **kwargs: Any) -> Any:
        if moves:
            args, kwargs = runtime.enter(args, kwargs)
        result = stock(*args, **kwargs)
        return runtime.leave(result) if exits else result

    return forward


def _written_out(module: nn.Module, runtime: ModuleRuntime) -> Forward | None:
    """The forward of a module whose operations are known; None for another."""
    if runtime.random is not None:
        return None
    if runtime.fused is not None and runtime.body is None and len(runtime.entries) < 2 and len(runtime.exits) < 2:
        return _norm(module, runtime, runtime.fused)
    return None if runtime.layer is None else _layer(module, runtime, runtime.layer)


def _where_plain(module: nn.Module, direct: Forward, sources: Sequence[_Source], draws: bool) -> Forward:
    """`direct`, where the module's call is its class's forward on its own parameters, and nothing else.

    Args:
        module: the module.
        direct: what may be called in its place.
        sources: where the tensors come from that are in place for the stock forward.
        draws: whether it draws random numbers in training.
    """
    own, entry, ordinary, recorded = module.__dict__, module.__dict__.get(_FORWARD), ordinary_call(module), _recorded
    (before, after), (every_before, every_after) = FORWARD_HOOKS, global_hook_tables()

    def call(*args: Any, **kwargs: Any) -> Any:
        if own[before] or own[after] or every_before or every_after or recorded() or own.get(_FORWARD) is not entry:
            return ordinary(*args, **kwargs)
        for source in sources:
            if source.table.get(source.name) is not source.taken:
                return ordinary(*args, **kwargs)
        if draws and module.training:
            return ordinary(*args, **kwargs)
        return direct(*args, **kwargs)

    return call


def _replaced(body: Body, stock: Forward) -> Forward:
    """What runs in place of the stock forward, which it may call."""
    return lambda *args, **kwargs: body(stock, args, kwargs)


def _stock(module: nn.Module) -> Forward:
    """The stock forward of a module, with what other classes have wrapped around it."""
    return cast("Any", stock_class(module)).forward.__get__(module)


def _has_own_forward(module: nn.Module) -> bool:
    """Whether a call is one of its class's forward, which nobody has put another in the place of."""
    own = module.__dict__.get(_FORWARD)
    if not is_called_as_usual(module):
        return False
    return own is None or getattr(own, "__func__", None) is getattr(type(module), ENTRY, own)


def _only_carries(module: nn.Module) -> bool:
    """Whether its class has a forward of ours only since sharded modules are inside."""
    ours = type(module).forward is not stock_class(module).forward
    return ours and not isinstance(module, ShardedModule) and _has_own_forward(module)


def _has_only_carried(module: nn.Module) -> bool:
    """Whether its class is ours for the sake of another program; in this one it has its stock body."""
    return isinstance(module, ShardedModule) and _has_own_forward(module)


def _can_serve(module: nn.Module, runtime: ModuleRuntime) -> bool:
    """Whether nothing but the questions would be left out."""
    if not isinstance(module, ShardedModule) or not _has_own_forward(module):
        return False
    if runtime.layer is not None and runtime.weight is None:  # the program doesn't call it
        return False
    return runtime.classes is None and not runtime.parts


def _without_conflicts(
    served: list[tuple[nn.Module, ModuleRuntime]], every: Iterable[tuple[nn.Module, ModuleRuntime]]
) -> list[tuple[nn.Module, ModuleRuntime]]:
    """Those whose tensors no other body puts in place for itself, nor reads in another way."""
    chosen = {module for module, _ in served}
    readers = Counter[tuple[int, str]]()
    alike = Counter[tuple[int, str, int]]()
    for module, runtime in every:
        for owner, name, read in runtime.reads:
            readers[id(owner), name] += 1
            alike[id(owner), name, id(read)] += module in chosen
    return [
        (module, runtime)
        for module, runtime in served
        if all(readers[id(owner), name] == alike[id(owner), name, id(read)] for owner, name, read in runtime.reads)
    ]


def _reader(read: Reader) -> Reader:
    """How to read a parameter where no gradient is recorded, and nobody cuts it further."""
    return local_of if isinstance(read, (BlockReader, SummedReader)) else read


def _layer(module: nn.Module, runtime: ModuleRuntime, layer: Layer) -> Forward:
    """A written body, as `ModuleRuntime.run_layer` runs it."""
    parameters, compute, (enter, leave) = own_parameters(module), without_gradients(layer, module), _moves(runtime)
    assert runtime.weight is not None
    weight, bias = _reader(runtime.weight), None if runtime.bias is None else _reader(runtime.bias)

    def forward(*args: Tensor, **kwargs: Tensor) -> Tensor:
        (input,) = args or kwargs.values()
        if enter is not None:
            input = enter(input)
        held = None if bias is None else bias(parameters["bias"])  # pyright: ignore
        return compute(module, runtime, input, weight(parameters["weight"]), held, leave)  # pyright: ignore

    gathers, sums = runtime.joint is not None and runtime.joint.dim is not None, runtime.scattered
    if not gathers and sums is None:
        return forward

    def overlapped(*args: Tensor, **kwargs: Tensor) -> Tensor:
        (input,) = args or kwargs.values()
        if not gathers and sums is not None and input.numel() < sums.least * input.shape[-1]:
            return forward(input)
        held = None if bias is None else bias(parameters["bias"])  # pyright: ignore
        return runtime.run_layer(module, (input,), weight(parameters["weight"]), held)  # pyright: ignore

    return overlapped


def _norm(module: nn.Module, runtime: ModuleRuntime, fused: Fused) -> Forward:
    """A norm as one operation of torch, where it is called as in the proof."""
    parameters, (enter, leave) = own_parameters(module), _moves(runtime)
    ordinary, (name, dtype, offset, eps) = ordinary_call(module), fused
    read = _reader(next(read for owner, leaf, read in runtime.reads if owner is module and leaf == name))
    norm = torch.rms_norm

    def forward(*args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 1:
            return ordinary(*args, **kwargs)
        (input,), weight = args, read(parameters[name])  # pyright: ignore
        if not (isinstance(input, Tensor) and input.dtype is weight.dtype is dtype):
            return ordinary(*args)
        if enter is not None:
            input = enter(input)
        result = norm(input, weight.shape, weight + offset if offset else weight, eps)
        return result if leave is None else leave(result)

    return forward


def _moves(runtime: ModuleRuntime) -> tuple[Move | None, Move | None]:
    """What happens to a layer's input and to its result."""
    entries, exits = runtime.moving, runtime.exits
    enter = without_gradient(entries[0].step) if entries else None
    return enter, without_gradient(exits[0].step) if exits else None


__all__ = ["Direct"]
