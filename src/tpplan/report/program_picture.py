"""The picture of a program: its modules as boxes in boxes, the placements at their edges, and the collectives there.

in:  a program; the GPUs that it is to run on, if times are wanted
out: `Picture`, which the diagram, the page and the Mermaid text are written from; equal layers stand there once

Boxes stand in the order in which their modules are called, as far as the program's work or its boundaries tell it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tpplan.cost.link_times import Group, collective_seconds
from tpplan.cost.traffic import reshard_traffic
from tpplan.report.program_outline import Block, Item, Unit, collapse, joined, units, units_of
from tpplan.report.program_tables import layout_text, placement_text, sizes_text
from tpplan.report.quantities import path_text, shape_text

if TYPE_CHECKING:
    from tpplan.compiler.ir.program import ParameterPlacement, Program, Reshard
    from tpplan.cost.cluster import Cluster


@dataclass(frozen=True, slots=True)
class PassCost:
    """What a reshard does in a forward or in a backward.

    Attributes:
        name: of the collective, or of a local operation.
        bytes: that a rank sends in one step, in one of equal layers.
        seconds: that it takes; None without GPUs.
    """

    name: str
    bytes: int
    seconds: float | None


@dataclass(frozen=True, slots=True)
class DrawnReshard:
    """A reshard where it happens.

    Attributes:
        key: unique on the page.
        module: its module, `*` for the index of equal layers.
        first: the module's name in the first of equal layers.
        count: how many equal layers have it.
        way: `in`, `mid` or `out`.
        path: the tensor.
        whole: its shape and dtype in the example call.
        source, target: the placements.
        moved: the same in words, beside a split one the shape of what a rank holds.
        passes: the forward and the backward.
        origin: why it is there: the plan's line.
    """

    key: str
    module: str
    first: str
    count: int
    way: str
    path: str
    whole: str
    source: str
    target: str
    moved: str
    passes: tuple[PassCost, PassCost]
    origin: str


@dataclass(frozen=True, slots=True)
class ModuleBox:
    """A module, or equal layers.

    Attributes:
        name: relative to the box around it.
        full_name: the whole name, `*` for the index of equal layers.
        kind, style, origin: its class, the plan's style and line; empty of what isn't in the program itself.
        count: how many equal ones it stands for, the boxes around it included.
        parameters: each with its placement, in words.
        held: bytes of a rank for them, of all equal ones.
        entering, leaving: how its tensors lie outside of it.
        crossings: its reshards, in order of execution.
        inside: what it consists of.
    """

    name: str
    full_name: str
    kind: str
    style: str
    origin: str
    count: int
    parameters: tuple[tuple[str, ParameterPlacement], ...]
    entering: str
    leaving: str
    crossings: tuple[DrawnReshard, ...]
    inside: tuple[ModuleBox, ...]

    @property
    def is_block(self) -> bool:
        """Whether it is several equal layers, or one that differs from its neighbours."""
        return not self.kind and bool(self.inside)


@dataclass(frozen=True, slots=True)
class Picture:
    """The boxes of a program, and the number of ranks that it is for."""

    title: str
    size: int
    boxes: tuple[ModuleBox, ...]

    def walk(self) -> Iterator[ModuleBox]:
        """Every box, each before what is in it."""
        yield from _walk(self.boxes)

    def crossings(self) -> Iterator[DrawnReshard]:
        """Every reshard."""
        return (crossing for box in self.walk() for crossing in box.crossings)


def picture_of(program: Program, cluster: Cluster | None = None) -> Picture:
    """The picture of a program, with times where `cluster` says on what."""
    title = f"{program.model} with plan {program.plan} on {program.size} ranks"
    return Picture(title, program.size, tuple(_Artist(program, cluster).boxes(collapse(units(program)), "", "", 1)))


def parameter_text(name: str, parameter: ParameterPlacement, size: int) -> str:
    """`weight (64, 64) → (16, 64) S(0)`."""
    return f"{name} {sizes_text(parameter, size, parameter.dtype)} {placement_text(parameter)}"


def _walk(boxes: Iterable[ModuleBox]) -> Iterator[ModuleBox]:
    for box in boxes:
        yield box
        yield from _walk(box.inside)


Place = tuple[int, ...]


def _called(program: Program) -> dict[str, Place]:
    """Modules in the order of their calls.

    Of equal calls the work has one, so the other orders that a program has fill in: each name after the one that it
    follows there.
    """
    tasks = () if program.work is None else program.work.tasks
    forward = dict.fromkeys(task.module for task in tasks if not task.backward)
    backward = list(dict.fromkeys(task.module for task in tasks if task.backward))[::-1]
    places: dict[str, Place] = {name: (number,) for number, name in enumerate(forward)}
    for more in (backward, program.boundaries, [kernel.module for kernel in program.kernels]):
        before, added = (-1,), dict[str, Place]()
        for number, name in enumerate(more):
            if name in places:
                before = places[name]
            elif name not in added:
                added[name] = (*before, number)
        places |= added
    return places


class _Artist:
    """Makes the boxes."""

    def __init__(self, program: Program, cluster: Cluster | None) -> None:
        self.program, self.cluster = program, cluster
        self.made = 0
        self.called = _called(program)

    def boxes(self, items: Iterable[Item], prefix: str, shown: str, count: int) -> list[ModuleBox]:
        """Those of items side by side; a module stands inside of the one that its name begins with."""
        made: list[tuple[Place, ModuleBox]] = []
        held = list(items)
        while held:
            item = held.pop(0)
            mine = [i for i in held if isinstance(item, Unit) and item.name and i.name.startswith(f"{item.name}.")]
            held = [i for i in held if not any(i is m for m in mine)]
            if isinstance(item, Block):
                name = joined(shown, item.name)
                layer = next((i for i in item.items if isinstance(i, Unit) and not i.name), None)
                inside = self.boxes([i for i in item.items if i is not layer], "", name, count * item.count)
                full = next(unit.full_name for unit, _ in units_of([item]))
                box = ModuleBox(item.name, name, "", "", "", count * item.count, (), "", "", (), tuple(inside))
                if layer is not None:  # its reshards are the block's
                    box = replace(self._box(layer, "", name, count * item.count, inside), name=item.name, kind="")
            else:
                full = item.full_name
                box = self._box(item, prefix, shown, count, self.boxes(mine, item.name, shown, count))
            if box.inside or box.parameters or box.crossings or box.style:
                place = self._place(full)
                made.append((place if place is not None else made[-1][0] if made else (), box))
        return [box for _, box in sorted(made, key=lambda entry: entry[0])]

    def _place(self, name: str) -> Place | None:
        """When a module is called, or the first one inside of it; None where that isn't known."""
        inside = [place for other, place in self.called.items() if f"{other}.".startswith(f"{name}.")]
        return min(inside, default=None)

    def _box(self, unit: Unit, prefix: str, shown: str, count: int, inside: list[ModuleBox]) -> ModuleBox:
        module, name = unit.module, joined(shown, unit.name)
        edges = self.program.boundaries.get(unit.full_name, ())
        ways = () if module is None else (("in", module.entries), ("mid", module.inner), ("out", module.exits))
        crossings = [self._crossing(unit, name, count, way, reshard) for way, held in ways for reshard in held]
        known = bool(self.program.boundaries)

        def lying(inward: bool) -> str:
            layouts = [str(e.layout) for e in edges if e.inward is inward and e.differentiable]
            layouts += [c.source if inward else c.target for c in crossings if c.way == ("in" if inward else "out")]
            return ", ".join(dict.fromkeys(layouts)) or ("R" if known and module is not None else "")

        return ModuleBox(
            unit.name.removeprefix(f"{prefix}.") or ("the layer" if shown else "the model"), name,
            module.kind if module is not None else "parameters", (module.style or "") if module is not None else "",
            module.origin if module is not None else "", count,
            tuple((p.name.rpartition(".")[2], p) for p in unit.parameters), lying(True), lying(False),
            tuple(crossings), tuple(inside),
        )  # fmt: skip

    def _crossing(self, unit: Unit, name: str, count: int, way: str, reshard: Reshard) -> DrawnReshard:
        self.made += 1
        calls = unit.module.calls if unit.module is not None else 1
        traffic, size = reshard_traffic(reshard, self.program.size, calls), self.program.size
        back = str(reshard.backward) if reshard.differentiable else "none"
        names = (str(reshard.forward), traffic.forward), (back, traffic.backward)
        passes: list[PassCost] = []
        for collective, sent in names:
            seconds = None
            if self.cluster is not None:
                whole, group = reshard.padded_bytes(size), Group.of(self.cluster, size)
                seconds = sent.number * collective_seconds(self.cluster, collective, whole, group)
            passes.append(PassCost(collective, sent.total, seconds))
        moved = " → ".join(layout_text(held, reshard.shape, size) for held in (reshard.source, reshard.target))
        whole = f"{shape_text(reshard.shape)} {reshard.dtype}"
        return DrawnReshard(
            f"c{self.made}", name, unit.full_name, count, way, path_text(reshard.path), whole, str(reshard.source),
            str(reshard.target), moved, (passes[0], passes[1]), reshard.origin,
        )  # fmt: skip


__all__ = ["DrawnReshard", "ModuleBox", "Picture", "parameter_text", "picture_of"]
