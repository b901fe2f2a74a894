"""The outline of a program: its modules in order, with equal layers shown once.

in:  a program
out: units (a module with its parameters) and blocks (what stands in each of several equal layers)

    model.layers.0.mlp, model.layers.1.mlp  ->  Block("model.layers.*", 2, (Unit("mlp"),))
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tpplan.compiler.ir.program import ModuleProgram, ParameterPlacement, Program, Reshard

_INDEXED = re.compile(r"(?:(?P<container>.*?)\.)?(?P<index>\d+)(?:\.(?P<rest>.*))?")


@dataclass(frozen=True, slots=True)
class Unit:
    """A module.

    Attributes:
        name: relative to the block that it stands in.
        full_name: its qualified name in the first of the block's layers.
        module: what becomes of it; None if only its parameters are in the program.
        parameters: those whose canonical name is in it.
        tied: names of its own that stand for another module's parameter, with that one's canonical name.
    """

    name: str
    full_name: str
    module: ModuleProgram | None
    parameters: tuple[ParameterPlacement, ...]
    tied: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Block:
    """Layers that are equal, shown once.

    Attributes:
        name: relative to the block around it, `*` or the indices where the layer's index stands.
        count: how many layers there are.
        items: what each consists of.
    """

    name: str
    count: int
    items: tuple[Item, ...]


Item = Unit | Block


def units(program: Program) -> tuple[Unit, ...]:
    """Every module of the program and every owner of a parameter, in the model's order."""
    modules = {module.name: module for module in program.modules}
    parameters: dict[str, list[ParameterPlacement]] = {}
    tied: dict[str, list[tuple[str, str]]] = {}
    for parameter in program.parameters:
        parameters.setdefault(_owner(parameter.name), []).append(parameter)
        for name in parameter.names[1:]:
            tied.setdefault(_owner(name), []).append((name.rpartition(".")[2], parameter.name))
    names = dict.fromkeys((*modules, *parameters, *tied))
    return tuple(
        Unit(name, name, modules.get(name), tuple(parameters.get(name, ())), tuple(tied.get(name, ())))
        for name in names
    )


def without_boundaries(items: Iterable[Unit]) -> Iterator[Unit]:
    """`items` without their reshards; those of which nothing is left to say are left out."""
    for unit in items:
        module = unit.module
        if module is not None:
            module = replace(module, entries=(), exits=())
            if module.style is None and not module.draws_by_rank and not module.local_attributes:
                module = None
        if module is not None or unit.parameters or unit.tied:
            yield replace(unit, module=module)


def collapse(items: Iterable[Unit]) -> tuple[Item, ...]:
    """`items` with equal layers shown once. Layers differ if their plan lines do."""
    layers: dict[str, dict[int, list[Unit]]] = {}
    order: list[Unit | str] = []
    for unit in items:
        found = _INDEXED.fullmatch(unit.name)
        if found is None:
            order.append(unit)
            continue
        container = found["container"] or ""
        if container not in layers:
            layers[container] = {}
            order.append(container)
        layers[container].setdefault(int(found["index"]), []).append(replace(unit, name=found["rest"] or ""))
    collapsed: list[Item] = []
    for held in order:
        collapsed.extend(_blocks(held, layers[held]) if isinstance(held, str) else [held])
    return tuple(collapsed)


def units_of(items: Iterable[Item], count: int = 1) -> Iterator[tuple[Unit, int]]:
    """Every unit, with how often it stands in the model."""
    for item in items:
        if isinstance(item, Block):
            yield from units_of(item.items, count * item.count)
        else:
            yield item, count


def joined(*parts: str) -> str:
    """Parts of a qualified name, joined; empty ones are left out."""
    return ".".join(part for part in parts if part)


def _owner(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _blocks(container: str, layers: dict[int, list[Unit]]) -> Iterator[Item]:
    equal: dict[object, list[int]] = {}
    for index, held in layers.items():
        equal.setdefault(tuple(_key(unit) for unit in held), []).append(index)
    for indices in equal.values():
        held = layers[indices[0]]
        name = joined(container, "*" if len(indices) == len(layers) > 1 else shown_indices(indices))
        if len(indices) == 1 and len(held) == 1:
            yield replace(held[0], name=joined(name, held[0].name))
        else:
            yield Block(name, len(indices), collapse(held))


def _key(unit: Unit) -> object:
    """What must be equal in equal layers: everything but the layer's name and the reasons for reshards."""
    prefix = unit.full_name.removesuffix(unit.name)

    def relative(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(name.removeprefix(prefix) for name in names)

    module = unit.module
    if module is not None:
        module = replace(
            module,
            name=unit.name,
            reads=relative(module.reads),
            entries=_without_origin(module.entries),
            inner=_without_origin(module.inner),
            exits=_without_origin(module.exits),
        )
    parameters = tuple(replace(parameter, names=relative(parameter.names)) for parameter in unit.parameters)
    return unit.name, module, parameters, tuple((leaf, *relative([name])) for leaf, name in unit.tied)


def _without_origin(reshards: Iterable[Reshard]) -> tuple[Reshard, ...]:
    return tuple(replace(reshard, origin="") for reshard in reshards)


def shown_indices(indices: Sequence[int]) -> str:
    """`3`, `1-5`, `0,2,…,30`, or `0-3,7`."""
    step = indices[1] - indices[0] if len(indices) > 1 else 1
    if len(indices) > 3 and step > 1 and list(indices) == list(range(indices[0], indices[-1] + 1, step)):
        return f"{indices[0]},{indices[1]},…,{indices[-1]}"
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
