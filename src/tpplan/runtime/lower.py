"""Lower: rewrite the user's model as the program says. The only place that mutates it, but for weights taken apart.

in:  a stock model and its program
out: the same model object: DTensor parameters, swapped classes, reshards at the boundaries

Everything that can fail is prepared first; the changes are then made in one go and undone if one of them fails. Last,
parameters are replaced one after the other, each of which is freed before the next: the whole model and all its shards
needn't fit into memory at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tpplan.compat.modules import WEIGHTS_LISTED, named_modules, own_buffers, own_table, own_tensors, weights_to_list
from tpplan.compiler.bind.attributes import replaced_attribute
from tpplan.compiler.ir.program import ParameterPlacement, Program
from tpplan.compiler.trace.skeleton import make_skeleton
from tpplan.plan import CompileError, Diagnostic
from tpplan.runtime.around.recent import Ran, RecentCalls, unknown
from tpplan.runtime.around.results import Results
from tpplan.runtime.around.watched import WatchedCall
from tpplan.runtime.bodies.bodies import Prepared, prepare
from tpplan.runtime.compiled.compiled_entry import become, carrying_class
from tpplan.runtime.modules.direct import Direct
from tpplan.runtime.modules.module_runtime import RUNTIME, ModuleRuntime
from tpplan.runtime.modules.sharded_modules import ShardedModule
from tpplan.runtime.modules.swapped import replaces_body, swapped_class
from tpplan.runtime.modules.writes import WRITES, Outside, Watched, Writes, stock_class, watched_class
from tpplan.runtime.parameters.handed_out import HandedOut
from tpplan.runtime.parameters.holders import (
    Replaced,
    inherit,
    is_held,
    pass_on,
    refuse_aliases,
    refuse_gradients,
    refuse_views,
)
from tpplan.runtime.parameters.saved_models import wrapper_class
from tpplan.runtime.parameters.whole_states import take_parts
from tpplan.runtime.ranks.communicator import Communicator
from tpplan.runtime.ranks.lockstep import LockstepCommunicator
from tpplan.runtime.ranks.watched_boundaries import check_modules, follow


class Guard(Protocol):
    """Tells which program a call runs by; raises for calls that weren't proved."""

    def __call__(
        self, training: bool, arguments: tuple[Any, ...], keywords: dict[str, Any], /
    ) -> tuple[Program, Callable[[frozenset[str]], WatchedCall] | None]:
        """The program for a call of the root, by the mode and the arguments, and a watch over the call.

        The watch is made with the names of modules whose bodies are replaced; None if the call needn't be watched.
        """
        ...

    def alone(self) -> Program | None:
        """The program for a module that is called by itself; None for the one that is in place."""
        ...

    @property
    def state(self) -> int:
        """What of the model's state proofs are kept apart by."""
        ...

    def asks_flags(self) -> bool:
        """Whether bodies ask parameters if they require grad."""
        ...

    def look(self) -> int | None:
        """The state now, as it was changed since the last call; None if all is to be proved anew."""
        ...

    def watch(self, model: nn.Module) -> None:
        """Follow the changes of a sharded model, from its state now."""
        ...

    def results_of(self, program: Program) -> Results | None:
        """The places at which the calls that were proved to run by a program return tensors, also of later proofs."""
        ...

    def require_alike_prompt(self, arguments: tuple[Any, ...], keywords: dict[str, Any], draws: bool) -> None:
        """Raise if ranks were asked to generate from different prompts, or from other seeds, if they draw."""
        ...


class Distributor(Protocol):
    """Makes a rank's part of a tensor, and the parameter that holds it."""

    axis: Communicator
    device: torch.device
    owns: bool
    """Whether the model's parameters are its alone, so that what else holds them is given the sharded ones."""

    def distribute(self, parameter: Tensor, placement: ParameterPlacement) -> Tensor:
        """The parameter, or the buffer, that takes the stock one's place."""
        ...

    def place_buffer(self, buffer: Tensor) -> Tensor:
        """The buffer that takes the stock one's place."""
        ...


@dataclass(frozen=True, slots=True)
class _Change:
    apply: Callable[[], None]
    undo: Callable[[], None]


def lower(model: nn.Module, program: Program, distributor: Distributor, guard: Guard | None = None) -> nn.Module:
    """Rewrite `model` in place and return it; on any error it is left as it was.

    Args:
        model: the stock model that `program` was compiled for.
        program: what to do.
        distributor: makes the local parts, and knows the axis.
        guard: asked for each call of the root, to raise for calls that weren't proved, and to tell which program the
            call runs by: `program`, or another that places all parameters alike.
    """
    modules = dict(named_modules(model))
    distributor.axis.one_shot = program.one_shot
    held = _held_parameters(model, program)
    if distributor.owns:
        refuse_views(_stock(holders[0], placement) for placement, holders in held)
        refuse_aliases(model, (_stock(holders[0], placement) for placement, holders in held))
    # On `meta` they take no memory; what is wrong with one shows there, too.
    empty = [distributor.distribute(_without_numbers(holders[0]), placement) for placement, holders in held]
    cut = {id(table[leaf]) for _, holders in held for table, leaf in holders}
    changes = [*_buffer_changes(modules, distributor, cut), *_module_changes(modules, program, distributor, guard)]
    listing = [module for module in modules.values() if isinstance(module, nn.RNNBase)]
    changes += [_swap_entry(module.__dict__, WEIGHTS_LISTED, []) for module in listing]
    done: list[_Change] = []
    kept: list[Replaced] = []
    replaced = 0
    try:
        for change in changes:
            done.append(change)
            change.apply()
        for (placement, holders), without_numbers in zip(held, empty, strict=True):
            kept += _replace(holders, placement, without_numbers, distributor)
            replaced += 1
        for module in listing:
            module.__dict__[WEIGHTS_LISTED] = weights_to_list(module)
        pass_on(kept)
        if guard is not None:
            guard.watch(model)
    except BaseException as error:
        for change in reversed(done):
            change.undo()
        if replaced:
            error.add_note(
                f"{replaced} of the model's {len(held)} parameters are sharded already; build the model anew"
            )
        raise
    return model


_Holder = tuple[dict[str, Tensor | None], str]
"""A module's table of parameters or buffers, and the name of one."""


def _held_parameters(model: nn.Module, program: Program) -> list[tuple[ParameterPlacement, list[_Holder]]]:
    """Every parameter's placement, and who has it."""
    modules = dict(named_modules(model, remove_duplicate=False))
    names = [(placement, [name.rpartition(".") for name in placement.names]) for placement in program.parameters]
    return [(placement, [(own_table(modules[o], leaf), leaf) for o, _, leaf in every]) for placement, every in names]


def _without_numbers(holder: _Holder) -> Tensor:
    table, leaf = holder
    stock = table[leaf]
    assert stock is not None, leaf
    empty = torch.empty_like(stock, device="meta")
    return nn.Parameter(empty, stock.requires_grad) if isinstance(stock, nn.Parameter) else empty


def _stock(holder: _Holder, placement: ParameterPlacement) -> tuple[Tensor, str]:
    table, leaf = holder
    stock = table[leaf]
    assert stock is not None, placement.name
    return stock, placement.name


def _replace(
    holders: list[_Holder], placement: ParameterPlacement, empty: Tensor, distributor: Distributor
) -> list[Replaced]:
    """Make a parameter, and free the one whose place it takes; returns that if anybody else holds it."""
    stock, name = _stock(holders[0], placement)
    replacement = empty if stock.is_meta else distributor.distribute(stock, placement)
    for table, leaf in holders:
        table[leaf] = replacement
    if not distributor.owns:
        return []
    inherit(stock, replacement)
    kept = refuse_gradients(stock, name)
    if not is_held(stock):
        return []
    if type(stock) is nn.Parameter and not stock.is_meta and not kept:
        stock.data = stock.data.new_empty(0)  # whoever holds it is given the other, or can't use it any more
    return [(stock, replacement, name)]


def _buffer_changes(modules: dict[str, nn.Module], distributor: Distributor, cut: set[int]) -> list[_Change]:
    placed: dict[int, Tensor] = {}
    changes: list[_Change] = []
    for module in modules.values():
        for leaf, buffer in own_buffers(module).items():
            if buffer is None or id(buffer) in cut:
                continue
            if id(buffer) not in placed:
                placed[id(buffer)] = distributor.place_buffer(buffer)
            agreed = placed[id(buffer)]
            if agreed is buffer:
                continue
            stays = agreed.device == buffer.device and buffer.layout is torch.strided and not buffer.is_inference()
            changes.append(_put_numbers(buffer, agreed) if stays else _swap_entry(own_buffers(module), leaf, agreed))
    return changes


def _put_numbers(buffer: Tensor, agreed: Tensor) -> _Change:
    """The change that gives a buffer the agreed numbers in place: a view or an array may hold its memory, too."""
    # What is expanded lies there once.
    once = tuple(slice(0, 1) if step == 0 else slice(None) for step in buffer.stride())
    before = buffer[once].clone()

    def put(numbers: Tensor) -> None:
        with torch.no_grad():
            buffer[once].copy_(numbers)

    return _Change(lambda: put(agreed[once]), lambda: put(before))


def _swap_entry(table: dict[str, Any], key: str, replacement: Any) -> _Change:
    stock = table[key]
    return _Change(lambda: table.__setitem__(key, replacement), lambda: table.__setitem__(key, stock))


def _module_changes(
    modules: dict[str, nn.Module], program: Program, distributor: Distributor, guard: Guard | None
) -> list[_Change]:
    axis = distributor.axis
    # Bodies that run from their records are recorded on the stock model, also by a program of which a call asks later.
    keeps_stock = program.replays or program.shares_experts or guard is not None
    stock = dict(named_modules(make_skeleton(modules[""]).model)) if keeps_stock else {}
    prepared = prepare(modules, program, axis, distributor.device, stock)
    changes: list[_Change] = []
    for held in prepared:
        changes.append(_swap_class(held, held.module is modules[""]))
    writes = Writes()
    writes.onlookers.expected = guard is not None
    variants = Variants(modules, stock, axis, distributor.device, guard, program, prepared, writes)
    changes.append(_Change(lambda: variants.put_in(prepared), variants.take_out))
    swapped = {held.module for held in prepared}
    changes += [_watch(module, writes, not swapped.isdisjoint(module.modules())) for module in modules.values()]
    if isinstance(axis, LockstepCommunicator):
        changes.append(_Change(functools.partial(check_modules, modules, axis, stock_class), _nothing))
        changes.append(_Change(variants.follow, _nothing))
    return changes + [_take_whole_states(module) for module in modules.values() if own_tensors(module)]


def _nothing() -> None:
    """A change that is undone with the modules' classes."""


def wrap_around(model: nn.Module, name: str) -> None:
    """Let the modules around a sharded one save whole tensors, where they can save themselves.

    Args:
        model: what wraps the sharded model, perhaps by way of others.
        name: the sharded model's name in it.
    """
    path, inner = name.split("."), stock_class(model.get_submodule(name))
    for depth in range(len(path)):
        holder = model.get_submodule(".".join(path[:depth]))
        holder.__class__ = wrapper_class(type(holder), tuple(path[depth:]), inner)


def _watch(module: nn.Module, writes: Writes, carries: bool) -> _Change:
    """Let a module tell what is written to it; one whose class can't be derived from is left alone.

    Args:
        module: the module.
        writes: what to tell.
        carries: whether sharded modules are inside.
    """
    swapped: list[type[nn.Module]] = []

    def apply() -> None:
        stock = type(module)
        if not issubclass(stock, Watched):
            try:
                become(module, carrying_class(stock) if carries else watched_class(stock))
            except TypeError:
                return
            swapped.append(stock)
        module.__dict__[WRITES] = writes

    def undo() -> None:
        module.__dict__.pop(WRITES, None)
        if swapped:
            become(module, swapped[0])

    return _Change(apply, undo)


def _swap_class(held: Prepared, root: bool) -> _Change:
    module, stock = held.module, type(held.module)

    def apply() -> None:
        try:
            become(module, swapped_class(stock, held.style, root, held.tensors))
        except Exception as error:  # whatever the class says of being derived from
            kind = f"{stock.__module__}.{stock.__qualname__}"
            finding = Diagnostic(
                code="TP112",
                message=f"no class of tpplan's can be derived from `{kind}`, or take its place: {error}",
                help=f"let `{stock.__name__}` be derived from as any `nn.Module` (see its `__init_subclass__`, its "
                "metaclass and its `__slots__`), or leave out the rules for modules of it and in it",
            )
            raise CompileError([finding]) from error

    def undo() -> None:
        become(module, stock)
        module.__dict__.pop(RUNTIME, None)

    return _Change(apply, undo)


class Variants:
    """The programs that a lowered model can run by; one is in place at a time, and stays until a call needs another.

    They share parameters and classes. What differs is how modules reshard, which gradients are summed, and what local
    attributes count.
    """

    def __init__(
        self,
        modules: dict[str, nn.Module],
        stock: Mapping[str, nn.Module],
        axis: Communicator,
        device: torch.device,
        guard: Guard | None,
        program: Program,
        prepared: tuple[Prepared, ...],
        writes: Writes,
    ) -> None:
        """Start with one program; see `lower` for `guard`, `prepare` for the others; `writes` is what users write."""
        self._writes = writes
        self._modules = modules
        self._skeletons = stock
        self._axis = axis
        self._device = device
        self._guard = guard
        self._current = program
        self._held = [(program, prepared)]
        self._stock: list[tuple[nn.Module, str, Any]] = []
        self._calls = RecentCalls()
        self._replaced: frozenset[str] | None = None
        self._writes.outside = self.outside

    def __call__(self, training: bool, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> WatchedCall | None:
        """Put the program in place that a call of the root runs by, and watch the call if it has to be.

        Raises:
            UnprovedCallError: there is no program.
        """
        assert self._guard is not None
        program, watch = self._guard(training, arguments, keywords)
        if program is not self._current:
            self._change_to(program)
        return None if watch is None else watch(self._replaced_bodies())

    @property
    def program(self) -> Program:
        """The program in place, by which the last call ran."""
        return self._current

    def require_alike_prompt(self, arguments: tuple[Any, ...], keywords: dict[str, Any], draws: bool) -> None:
        """See `CallGuard`."""
        if self._guard is not None:
            self._guard.require_alike_prompt(arguments, keywords, draws)

    def _replaced_bodies(self) -> frozenset[str]:
        """The modules whose bodies the program in place replaces."""
        if self._replaced is None:
            self._replaced = frozenset(name for name, module in self._modules.items() if replaces_body(module))
        return self._replaced

    def alone(self) -> None:
        """Put the program in place that modules run by which are called by themselves."""
        program = None if self._guard is None else self._guard.alone()
        if program is not None and program is not self._current:
            self._change_to(program)

    def outside(self, module: nn.Module) -> Outside:
        """How values lie around a module, in the call that is under way or differentiated."""
        name = next(name for name, held in self._modules.items() if held is module)
        in_place = next(held[0].runtime.handed_out for known, held in self._held if known is self._current)
        ran = self._calls.running()
        handed_out = in_place if ran is None else ran.handed_out
        program = next(known for known, held in self._held if held[0].runtime.handed_out is handed_out)
        return Outside(name, program, handed_out)

    def state(self) -> int:
        """See `Guard`."""
        return 0 if self._guard is None else self._guard.state

    def again(self, ran: Ran, whole: bool) -> None:
        """Put the program in place that a call ran by, of which a part, or the whole, is recomputed in a backward."""
        if not whole and self._guard is not None and self._guard.look() != ran.state:
            raise unknown(
                "what the model's code reads, or a hook, was changed since the call",
                "change settings and hooks after the backward of what was called with them",
            )
        for program, prepared in self._held:
            if prepared and prepared[0].runtime.handed_out is ran.handed_out and program is not self._current:
                self._change_to(program)
                return

    def _change_to(self, program: Program) -> None:
        found = next((prepared for known, prepared in self._held if known is program), None)
        if found is None:
            found = prepare(self._modules, program, self._axis, self._device, self._skeletons)
            self._held.append((program, found))
        self.take_out()
        # Modules that this program doesn't call know whether a forward is under way, and may be called by themselves.
        idle = ModuleRuntime("", self._axis, found[0].runtime.handed_out if found else HandedOut(self._axis))
        for _, prepared in self._held:  # what other programs before the last have left idle, too
            for held in prepared:
                held.module.__dict__[RUNTIME] = idle
        for held in found:
            if not isinstance(held.module, ShardedModule):
                become(held.module, swapped_class(type(held.module), held.style, False, held.tensors))
        self.put_in(found)
        self._current = program
        self.follow()

    def follow(self) -> None:
        """Where the ranks compare what they do: compare by the program in place."""
        if not isinstance(self._axis, LockstepCommunicator):
            return
        program = self._current
        handed_out = next(prepared[0].runtime.handed_out for known, prepared in self._held if known is program)
        handed_out.ended = functools.partial(self._axis.end, program)
        follow(self._modules, program, lambda: handed_out.shards is not None)

    def put_in(self, prepared: tuple[Prepared, ...]) -> None:
        """Give modules what they need at run time, and set their attributes."""
        self._replaced = None
        program = next(known for known, held in self._held if held is prepared)
        for held in prepared:
            if held.module is self._modules[""]:
                held.runtime.guard = None if self._guard is None else self
                held.runtime.results = None if self._guard is None else self._guard.results_of(program)
                if held.runtime.direct is None:
                    known = {other.module: other.runtime for other in prepared}
                    others = [module for module in self._modules.values() if module is not held.module]
                    held.runtime.direct = Direct((module, known.get(module)) for module in others)
                held.runtime.handed_out.alone = None if self._guard is None else self.alone
                held.runtime.handed_out.again = self.again
                held.runtime.handed_out.state = self.state
                held.runtime.handed_out.asks_flags = None if self._guard is None else self._guard.asks_flags
                held.runtime.handed_out.calls = self._calls
            held.module.__dict__[RUNTIME] = held.runtime
            for attribute, value in held.attributes:
                name, local = replaced_attribute(held.module, attribute, value)
                self._stock.append((held.module, name, getattr(held.module, name)))
                self._writes.local[held.module, name] = local
                with self._writes.paused():
                    setattr(held.module, name, local)

    def take_out(self) -> None:
        """Set the attributes back to what they were in the stock model."""
        while self._stock:
            module, name, held = self._stock.pop()
            self._writes.local.pop((module, name), None)
            with self._writes.paused():
                setattr(module, name, held)


def _take_whole_states(module: nn.Module) -> _Change:
    """Let `load_state_dict` take whole tensors, too."""
    handles: list[Any] = []

    def apply() -> None:
        handles.append(module.register_load_state_dict_pre_hook(take_parts))

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return _Change(apply, undo)


__all__ = ["Distributor", "Guard", "lower", "wrap_around"]
