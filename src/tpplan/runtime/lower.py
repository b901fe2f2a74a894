"""Lower: rewrite the user's model as the program says. The only place that mutates it.

in:  a stock model and its program
out: the same model object: DTensor parameters, swapped classes, reshards at the boundaries

Everything that can fail is prepared first; the changes are then made in one go and undone if one of them fails.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tpplan.compat import named_modules, own_buffers, own_parameters
from tpplan.compiler.attributes import replaced_attribute
from tpplan.compiler.capture import argument_names
from tpplan.compiler.layout import Layout
from tpplan.compiler.program import KernelUse, LocalAttribute, ModuleProgram, ParameterPlacement, Program, Reshard
from tpplan.runtime.communicator import Communicator
from tpplan.runtime.kernels import active_uses, body_of, without_bias
from tpplan.runtime.modules import RUNTIME, EntryStep, ExitStep, ModuleRuntime, swapped_class
from tpplan.runtime.parameters import BlockReader, HandedOut, PartReader, SummedReader
from tpplan.runtime.randomness import ReplicatedRandomness, SplitRandomness
from tpplan.runtime.reshard import CallContext, Move, make_reshard
from tpplan.runtime.state import from_stock_order, to_stock_order


class Distributor(Protocol):
    """Makes a rank's part of a tensor, and the parameter that holds it."""

    axis: Communicator
    device: torch.device

    def distribute(self, parameter: Tensor, placement: ParameterPlacement) -> nn.Parameter:
        """The parameter that takes the stock one's place."""
        ...

    def place_buffer(self, buffer: Tensor) -> Tensor:
        """The buffer that takes the stock one's place."""
        ...


@dataclass(frozen=True, slots=True)
class _Change:
    apply: Callable[[], None]
    undo: Callable[[], None]


def lower(
    model: nn.Module, program: Program, distributor: Distributor, guard: Callable[..., None] | None = None
) -> nn.Module:
    """Rewrite `model` in place and return it; on any error it is left as it was.

    Args:
        model: the stock model that `program` was compiled for.
        program: what to do.
        distributor: makes the local parts, and knows the axis.
        guard: called with the arguments of each call of the root, to raise for calls that weren't proved.
    """
    modules = dict(named_modules(model))
    changes = [*_parameter_changes(model, program, distributor), *_buffer_changes(modules, distributor)]
    changes += _module_changes(modules, program, distributor, guard)
    done: list[_Change] = []
    try:
        for change in changes:
            done.append(change)
            change.apply()
    except BaseException:
        for change in reversed(done):
            change.undo()
        raise
    return model


def _parameter_changes(model: nn.Module, program: Program, distributor: Distributor) -> list[_Change]:
    changes: list[_Change] = []
    modules = dict(named_modules(model, remove_duplicate=False))
    for placement in program.parameters:
        owner, _, leaf = placement.name.rpartition(".")
        stock = own_parameters(modules[owner])[leaf]
        assert stock is not None, placement.name
        replacement = distributor.distribute(stock, placement)
        for name in placement.names:
            owner, _, leaf = name.rpartition(".")
            changes.append(_swap_entry(own_parameters(modules[owner]), leaf, replacement))
    return changes


def _buffer_changes(modules: dict[str, nn.Module], distributor: Distributor) -> list[_Change]:
    placed: dict[int, Tensor] = {}
    changes: list[_Change] = []
    for module in modules.values():
        for leaf, buffer in own_buffers(module).items():
            if buffer is None:
                continue
            if id(buffer) not in placed:
                placed[id(buffer)] = distributor.place_buffer(buffer)
            if placed[id(buffer)] is not buffer:
                changes.append(_swap_entry(own_buffers(module), leaf, placed[id(buffer)]))
    return changes


def _swap_entry(table: dict[str, Any], key: str, replacement: Any) -> _Change:
    stock = table[key]
    return _Change(lambda: table.__setitem__(key, replacement), lambda: table.__setitem__(key, stock))


def _module_changes(
    modules: dict[str, nn.Module], program: Program, distributor: Distributor, guard: Callable[..., None] | None
) -> list[_Change]:
    placements = {name: placement for placement in program.parameters for name in placement.names}
    handed_out = HandedOut(distributor.axis)
    readers = _readers(modules, program, handed_out)
    context = CallContext()
    opened = tuple(_owner(modules, placement.name) for placement in program.summed_parameters)
    random = _randomness(program, distributor)
    uses = active_uses(program, distributor.device)
    changes: list[_Change] = []
    for spec in _with_kernels(program, uses, modules):
        module = modules[spec.name]
        is_root = spec.name == ""
        use = uses.get(spec.name)
        left = spec.name in {u.parts[0] for u in uses.values() if u.kind == "bias_gelu"}
        body = without_bias(spec.transposed, module) if left else None
        runtime = ModuleRuntime(
            label=_label(spec, placements, use),
            axis=distributor.axis,
            entries=tuple(s for r in spec.entries for s in _entries(module, r, distributor.axis, context)),
            exits=tuple(s for r in spec.exits for s in _exits(spec, r, distributor.axis, context)),
            reads=tuple((*_owner(modules, name), readers[name]) for name in spec.reads),
            random=random.get(spec.random),
            handed_out=handed_out if is_root else None,
            opened=opened if is_root else (),
            guard=guard if is_root else None,
            context=context if is_root and program.flattens_batch else None,
            transposed=spec.transposed,
            shared=any(r.aliases for r in (*spec.entries, *spec.exits)),
            body=body if use is None else body_of(use, module, modules),
            bias_elsewhere=left,
            first_row=_first_row(spec, placements, distributor.axis),
            packs=_packs(module, spec.name, placements),
        )
        changes.append(_swap_class(module, swapped_class(type(module), spec.style, is_root), runtime))
        if any(layout.is_in_rank_order(distributor.axis.size) for layout in runtime.packs.values()):
            changes.append(_keep_stock_order(module, runtime.packs, distributor.axis))
        if spec.local_attributes:
            changes.append(_swap_attributes(module, spec.local_attributes, distributor.axis.rank))
    return changes


def _with_kernels(program: Program, uses: dict[str, KernelUse], modules: dict[str, nn.Module]) -> list[ModuleProgram]:
    """The modules to swap: those of the program, and those whose body alone is replaced."""
    known = {spec.name: spec for spec in program.modules}
    found = list(program.modules)
    for name, use in uses.items():
        if name not in known:
            found.append(ModuleProgram(name, type(modules[name]).__name__, None, "inferred", calls=1))
        if use.kind == "bias_gelu":
            place = next(i for i, spec in enumerate(found) if spec.name == name)
            found[place] = replace(found[place], reads=(*found[place].reads, f"{use.parts[0]}.bias"))
    return found


def _randomness(program: Program, distributor: Distributor) -> dict[str | None, SplitRandomness | ReplicatedRandomness]:
    """The contexts that modules draw random numbers in, by kind; none are needed where nothing is split."""
    if all(spec.random != "split" for spec in program.modules):
        return {}
    split = SplitRandomness(distributor.axis, distributor.device)
    return {"split": split, "same": split.replicated()}


def _swap_class(module: nn.Module, replacement: type[nn.Module], runtime: ModuleRuntime) -> _Change:
    stock = type(module)

    def apply() -> None:
        module.__dict__[RUNTIME] = runtime
        module.__class__ = replacement

    def undo() -> None:
        module.__class__ = stock
        module.__dict__.pop(RUNTIME, None)

    return _Change(apply, undo)


def _packs(module: nn.Module, name: str, placements: dict[str, ParameterPlacement]) -> dict[str, Layout]:
    prefix = f"{name}." if name else ""
    held = {leaf: placements.get(f"{prefix}{leaf}") for leaf in own_parameters(module)}
    return {leaf: found.layout for leaf, found in held.items() if found is not None and found.layout.packs}


def _first_row(spec: ModuleProgram, placements: dict[str, ParameterPlacement], axis: Communicator) -> int:
    """Of a table split by rows, the first that this rank holds; 0 for other modules."""
    if spec.style != "vocab":
        return 0
    table = placements[spec.reads[0]]
    ((start, _),) = table.layout.intervals(table.shape[0], axis.size, axis.rank)
    return start


def _keep_stock_order(module: nn.Module, packs: Mapping[str, Layout], axis: Communicator) -> _Change:
    """Let the state_dict hold whole tensors in the stock order, where DTensor can't tell how they are split."""
    handles: list[Any] = []

    def apply() -> None:
        handles.append(module.register_state_dict_post_hook(functools.partial(to_stock_order, packs, axis)))
        hook = functools.partial(from_stock_order, packs, axis)
        handles.append(module.register_load_state_dict_pre_hook(hook))

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return _Change(apply, undo)


def _swap_attributes(module: nn.Module, attributes: Sequence[LocalAttribute], rank: int) -> _Change:
    stock: dict[str, Any] = {}

    def apply() -> None:
        for attribute in attributes:
            name, held = replaced_attribute(module, attribute.name, attribute.on(rank))
            stock.setdefault(name, getattr(module, name))
            setattr(module, name, held)

    def undo() -> None:
        for name, held in stock.items():
            setattr(module, name, held)

    return _Change(apply, undo)


def _owner(modules: dict[str, nn.Module], name: str) -> tuple[nn.Module, str]:
    owner, _, leaf = name.rpartition(".")
    return modules[owner], leaf


def _readers(
    modules: dict[str, nn.Module], program: Program, handed_out: HandedOut
) -> dict[str, Callable[[Tensor], Tensor]]:
    """How to read each parameter, by each of its names."""
    summed = SummedReader(handed_out)
    members: dict[str, list[tuple[nn.Module, str]]] = {}
    for placement in program.parameters:
        if not placement.summed:
            members.setdefault(_block(modules, placement.name), []).append(_owner(modules, placement.name))
    blocks = {block: BlockReader(handed_out, held) for block, held in members.items()}
    found: dict[str, Callable[[Tensor], Tensor]] = {}
    for placement in program.parameters:
        read = summed if placement.summed else blocks[_block(modules, placement.name)]
        if placement.layout.has_replicas:
            read = PartReader(summed, placement.layout, placement.shape, handed_out.axis)
        found |= dict.fromkeys(placement.names, read)
    return found


def _block(modules: dict[str, nn.Module], name: str) -> str:
    """The outermost element of a list of modules that holds a parameter; its own module where there is none."""
    *path, _ = name.split(".")
    for depth in range(1, len(path)):
        if isinstance(modules[".".join(path[:depth])], (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            return ".".join(path[: depth + 1])
    return ".".join(path)


def _entries(module: nn.Module, reshard: Reshard, axis: Communicator, context: CallContext) -> list[EntryStep]:
    names = argument_names(type(module).forward)
    step = _step(reshard, axis, False, context)
    steps: list[EntryStep] = []
    for name, *inner in (reshard.path, *reshard.aliases):
        text = str(name)
        if text.startswith("*"):
            position: int | None = int(text[1:])
        else:
            position = names.index(text) if text in names else None
        steps.append(EntryStep(text, position, tuple(inner), step))
    return steps


def _exits(spec: ModuleProgram, reshard: Reshard, axis: Communicator, context: CallContext) -> list[ExitStep]:
    fresh = spec.style in ("rowwise", "vocab")
    step = _step(reshard, axis, fresh, context)
    return [ExitStep(path, step) for path in (reshard.path, *reshard.aliases)]


def _step(reshard: Reshard, axis: Communicator, fresh: bool, context: CallContext) -> Move:
    ways = (reshard.forward, reshard.backward)
    return make_reshard(reshard.source, reshard.target, *ways, axis, fresh, context, reshard.shape)


def _label(spec: ModuleProgram, placements: dict[str, ParameterPlacement], use: KernelUse | None) -> str:
    parts = [f"kernel={use.kind}"] if use is not None else []
    for name in spec.reads:
        layout: Layout = placements[name].layout
        if layout.is_sharded:
            parts.append(f"{name.rpartition('.')[2]}={layout}")
    parts += [f"{_shown(r)}: {r.source} -> {r.target}" for r in spec.entries]
    parts += [f"result: {r.source} -> {r.target}" for r in spec.exits]
    return ", ".join(parts)


def _shown(reshard: Reshard) -> str:
    return ".".join(str(part) for part in reshard.path)


__all__ = ["Distributor", "Sequence", "lower"]
