"""Direct: forwards that ask nothing, for the modules of a call that records no gradient.

A sharded module asks in each call whether a compiler reads it, whether it is called by itself, whether a gradient is
recorded. For a plain call of the root the answers are the same in all modules. While such a call is under way, each
module has a forward of its own that does only what is left: its product and its reshards. Where there are no hooks,
torch calls it as it calls what `Module.compile` sets, without looking for any. A decoded token takes little more than
its operations, so that the questions would be a tenth of it.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from tpplan.compat import COMPILED_CALL, global_hooks, local_of, own_parameters
from tpplan.runtime.compiled import ENTRY
from tpplan.runtime.kernels import Body, Fused
from tpplan.runtime.layers import ReducedLinear, ShardedLinear, VocabularyEmbedding
from tpplan.runtime.module_runtime import ModuleRuntime, Reader
from tpplan.runtime.modules import ShardedModule
from tpplan.runtime.parameters import BlockReader, SummedReader
from tpplan.runtime.reshard import Move, without_gradient
from tpplan.runtime.writes import stock_class

Forward = Callable[..., Any]
_FORWARD = "forward"


class Direct:
    """The forwards of one program's modules, which are in place only during a call.

    Attributes:
        in_place: whether they are.
    """

    def __init__(self, modules: Iterable[tuple[nn.Module, ModuleRuntime | None]]) -> None:
        """Serve these modules, the root apart; with None those that only contain sharded ones."""
        self._modules = tuple(modules)
        self._made = False
        self._forwards: list[tuple[dict[str, Any], Forward, object, bool]] = []
        self._tensors: list[tuple[dict[str, Any], str, dict[str, Any], Reader]] = []
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
        hooked = bool(global_hooks())
        for own, forward, entry, seen in self._forwards:
            if own.get(_FORWARD) is entry and own.get(COMPILED_CALL) is None:
                if hooked or own["_forward_hooks"] or own["_forward_pre_hooks"]:
                    own[_FORWARD] = forward
                else:
                    own[COMPILED_CALL] = forward
                    if seen:
                        own[_FORWARD] = forward
        for own, name, parameters, read in self._tensors:
            own[name] = read(parameters[name])

    def take(self) -> None:
        """Leave the modules as they were."""
        self.in_place = False
        for own, forward, entry, _ in self._forwards:
            if own.get(COMPILED_CALL) is forward:
                own[COMPILED_CALL] = None
            if own.get(_FORWARD) is not forward:
                continue
            if entry is None:
                del own[_FORWARD]
            else:
                own[_FORWARD] = entry
        for own, name, _, _ in self._tensors:
            own.pop(name, None)

    def _make(self) -> None:
        self._made = True
        sharded = [(module, runtime) for module, runtime in self._modules if runtime is not None]
        for module, runtime in self._modules:
            if runtime is None and (_only_carries(module) or _has_only_carried(module)):
                self._add(module, _stock(module), False)
        for module, runtime in _without_conflicts([held for held in sharded if _can_serve(*held)], sharded):
            written_out = _written_out(module, runtime)
            forward = self._general(module, runtime) if written_out is None else written_out
            if forward.__name__ == _FORWARD and not hasattr(forward, "__self__"):
                functools.update_wrapper(forward, type(module).forward)
            self._add(module, forward, written_out is None and bool(runtime.reads))

    def _add(self, module: nn.Module, forward: Forward, seen: bool) -> None:
        """Add a forward; `seen`: it is to be found as the module's `forward`, too."""
        own = module.__dict__
        # With a key of its own for good, as Python looks attributes up anew in an object that gets or loses one.
        own.setdefault(COMPILED_CALL, None)
        self._forwards.append((own, forward, own.get(_FORWARD), seen))

    def _general(self, module: nn.Module, runtime: ModuleRuntime) -> Forward:
        """What runs the stock forward, on the local tensors that are put in place for it."""
        stock = _stock(module)
        for owner, name, read in runtime.reads:
            self._tensors.append((owner.__dict__, name, own_parameters(owner), _reader(read)))
        body, moves, exits = runtime.body, bool(runtime.moving), bool(runtime.exits)
        if body is not None:
            stock = _replaced(body, stock)
        if not (runtime.entries or exits or runtime.reads or runtime.random):
            return stock

        def forward(*args: Any, **kwargs: Any) -> Any:
            if moves:
                args, kwargs = runtime.enter(args, kwargs)
            result = stock(*args, **kwargs)
            return runtime.leave(result) if exits else result

        return _or_slow(module, runtime, forward if moves or exits else stock)


def _written_out(module: nn.Module, runtime: ModuleRuntime) -> Forward | None:
    """The forward of a module whose operations are known; None for another."""
    kind = type(module)
    if runtime.random is not None:
        return None
    if runtime.fused is not None and runtime.body is None and len(runtime.entries) < 2 and len(runtime.exits) < 2:
        return _norm(module, runtime, runtime.fused)
    if runtime.walked:
        return None
    if issubclass(kind, ShardedLinear):
        return _column(module, runtime)
    if issubclass(kind, ReducedLinear):
        return _row(module, runtime)
    return _table(module, runtime) if issubclass(kind, VocabularyEmbedding) else None


def _or_slow(module: nn.Module, runtime: ModuleRuntime, direct: Forward) -> Forward:
    """`direct`, unless the body that calls the module records gradients itself, or random numbers are drawn."""
    slow, draws, recorded = _slow(module, runtime), runtime.random is not None, torch.is_grad_enabled

    def forward(*args: Any, **kwargs: Any) -> Any:
        if recorded() or (draws and module.training):
            return slow(*args, **kwargs)
        return direct(*args, **kwargs)

    return forward


def _slow(module: nn.Module, runtime: ModuleRuntime) -> Forward:
    """The module's forward that asks all."""
    slow = type(module).forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        places = [(owner.__dict__, name) for owner, name, _ in runtime.reads]
        kept = [(own, name, own[name]) for own, name in places if name in own]
        result = slow(module, *args, **kwargs)
        for own, name, tensor in kept:  # it took away what it had put in place for itself
            own[name] = tensor
        return result

    return forward


def _replaced(body: Body, stock: Forward) -> Forward:
    """What runs in place of the stock forward, which it may call."""
    return lambda *args, **kwargs: body(stock, args, kwargs)


def _stock(module: nn.Module) -> Forward:
    """The stock forward of a module, with what other classes have wrapped around it."""
    return cast("Any", stock_class(module)).forward.__get__(module)


def _has_own_forward(module: nn.Module) -> bool:
    """Whether nobody has put another forward in the place of its class's."""
    own = module.__dict__.get(_FORWARD)
    return own is None or getattr(own, "__func__", None) is getattr(type(module), ENTRY, own)


def _only_carries(module: nn.Module) -> bool:
    """Whether its class has a forward of ours only since sharded modules are inside."""
    ours = type(module).forward is not stock_class(module).forward
    return ours and not isinstance(module, ShardedModule) and _has_own_forward(module)


def _has_only_carried(module: nn.Module) -> bool:
    """Whether its class is ours for the sake of another program; in this one it has its stock body."""
    written_out = isinstance(module, (ShardedLinear, ReducedLinear, VocabularyEmbedding))
    return isinstance(module, ShardedModule) and not written_out and _has_own_forward(module)


def _can_serve(module: nn.Module, runtime: ModuleRuntime) -> bool:
    """Whether nothing but the questions would be left out."""
    if not isinstance(module, ShardedModule) or not _has_own_forward(module):
        return False
    written_out = isinstance(module, (ShardedLinear, ReducedLinear, VocabularyEmbedding)) and not runtime.walked
    if written_out and runtime.weight is None:  # the program doesn't call it
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


def _column(module: nn.Module, runtime: ModuleRuntime) -> Forward:
    """As `ShardedLinear.forward`."""
    parameters, linear, enter, leave = own_parameters(module), functional.linear, *_moves(runtime)
    slow, recorded = _slow(module, runtime), torch.is_grad_enabled
    assert runtime.weight is not None
    weight, bias = _reader(runtime.weight), None if runtime.bias is None else _reader(runtime.bias)

    def forward(input: Tensor) -> Tensor:
        if recorded():
            return slow(input)
        if enter is not None:
            input = enter(input)
        result = linear(input, weight(parameters["weight"]), None if bias is None else bias(parameters["bias"]))  # pyright: ignore
        return result if leave is None else leave(result)

    return forward


def _row(module: nn.Module, runtime: ModuleRuntime) -> Forward:
    """As `ReducedLinear.forward`."""
    parameters, linear, enter, leave = own_parameters(module), functional.linear, *_moves(runtime)
    slow, recorded, transposed = _slow(module, runtime), torch.is_grad_enabled, runtime.transposed
    assert runtime.weight is not None
    weight, bias = _reader(runtime.weight), None if runtime.bias is None else _reader(runtime.bias)

    def forward(*args: Tensor, **kwargs: Tensor) -> Tensor:
        if recorded():
            return slow(*args, **kwargs)
        (input,) = args or kwargs.values()
        if enter is not None:
            input = enter(input)
        held = weight(parameters["weight"])  # pyright: ignore
        result = input @ held if transposed else linear(input, held)
        if leave is not None:
            result = leave(result)
        return result if bias is None else result + bias(parameters["bias"]).to(result.dtype)  # pyright: ignore

    return forward


def _table(module: nn.Module, runtime: ModuleRuntime) -> Forward:
    """As `VocabularyEmbedding.forward`.

    Which ids other ranks hold is looked up in a table of all ids. An id that no rank holds raises there, on all ranks.
    """
    parameters, embedding, _, leave = own_parameters(module), torch.embedding, *_moves(runtime)
    slow, recorded = _slow(module, runtime), torch.is_grad_enabled
    assert runtime.weight is not None
    weight, (first_row, all_rows) = _reader(runtime.weight), runtime.table
    plain = stock_class(module).forward is nn.Embedding.forward
    foreign = places = None

    def forward(input: Tensor) -> Tensor:
        nonlocal foreign, places
        if recorded():
            return slow(input)
        table = weight(parameters["weight"])  # pyright: ignore
        rows = table.shape[0]
        if not plain or not rows:
            return module._looked_up(runtime, input, table)  # pyright: ignore
        if foreign is None or places is None or foreign.device != table.device:
            rows_here = torch.arange(-first_row, all_rows - first_row, device=table.device)
            places = rows_here.clamp(0, rows - 1)
            foreign = (places != rows_here).unsqueeze(-1)
        outside = embedding(foreign, input)  # raises for ids below zero, too, which `take` counts from the end
        here = places.take(input if input.dtype is torch.long else input.long())
        result = embedding(table, here).masked_fill_(outside, 0)
        return result if leave is None else leave(result)

    return forward


def _norm(module: nn.Module, runtime: ModuleRuntime, fused: Fused) -> Forward:
    """A norm as one operation of torch, where it is called as in the proof."""
    parameters, (enter, leave) = own_parameters(module), _moves(runtime)
    slow, recorded, (name, dtype, offset, eps) = _slow(module, runtime), torch.is_grad_enabled, fused
    read = _reader(next(read for owner, leaf, read in runtime.reads if owner is module and leaf == name))
    norm = torch.rms_norm

    def forward(*args: Any, **kwargs: Any) -> Any:
        if recorded() or kwargs or len(args) != 1:
            return slow(*args, **kwargs)
        (input,), weight = args, read(parameters[name])  # pyright: ignore
        if not (isinstance(input, Tensor) and input.dtype is weight.dtype is dtype):
            return slow(*args)
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
