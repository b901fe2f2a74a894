"""Assign: read the chosen way back out of the placement, module call by module call.

in:  instances and the root's solution
out: `Assignment`: the layout of every value of the trace, the reshards of every call, the parameters' gradients
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from tpplan.compiler.layout import PARTIAL, REPLICATED, Layout
from tpplan.compiler.region import CallNode, Instance
from tpplan.compiler.solution import Called, Entered, Left, Ran, Solution
from tpplan.compiler.trace import Frame, Path
from tpplan.plan import Style


@dataclass(frozen=True, slots=True)
class PlacedReshard:
    """A change of layout at one boundary of one call.

    Attributes:
        path: where the tensor sits in the arguments or results.
        aliases: further places where the very same tensor sits.
        source, target: the layouts before and after.
        value: the value of the trace on the inside for an entry, on the outside for an exit.
    """

    path: Path
    aliases: tuple[Path, ...]
    source: Layout
    target: Layout
    value: int


@dataclass(slots=True)
class FrameAssignment:
    """What was decided for one call."""

    frame: Frame
    entries: list[PlacedReshard] = field(default_factory=list[PlacedReshard])
    exits: list[PlacedReshard] = field(default_factory=list[PlacedReshard])


@dataclass(slots=True)
class Assignment:
    """Everything decided.

    Attributes:
        layouts: by value of the trace.
        frames: by module and call, in order of execution.
        partial: names of replicated parameters that get a partial gradient, with the modules whose bodies cause it.
        whole: names of replicated parameters that get a whole gradient, likewise.
    """

    layouts: dict[int, Layout] = field(default_factory=dict[int, Layout])
    frames: list[FrameAssignment] = field(default_factory=list[FrameAssignment])
    partial: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    whole: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))


def assign(root: Instance, solution: Solution, parameters: dict[int, tuple[str, ...]]) -> Assignment:
    """Read `solution` of the root region back onto the trace.

    Args:
        root: the instance tree.
        solution: of `root.region`, with its inputs replicated.
        parameters: names by value, from the trace.
    """
    assignment = Assignment()
    _read(root, solution, tuple(REPLICATED for _ in root.region.inputs), parameters, assignment)
    return assignment


def _read(
    instance: Instance,
    solution: Solution,
    inputs: tuple[Layout, ...],
    parameters: dict[int, tuple[str, ...]],
    assignment: Assignment,
) -> None:
    region, values = instance.region, instance.values
    held = assignment.layouts
    for number, layout in zip(region.inputs, inputs, strict=True):
        held.setdefault(values[number], layout)
    for number, value in enumerate(region.values):
        if value.parameter is not None or value.constant:
            held.setdefault(values[number], value.parameter or REPLICATED)
    decided = FrameAssignment(instance.frame)
    assignment.frames.append(decided)
    children = _children_by_node(instance)
    assert solution.steps is not None
    for choice in solution.steps.in_order():
        if isinstance(choice, Entered):
            for boundary, layout in zip(region.entries, choice.layouts, strict=True):
                held[values[boundary.target]] = layout
                source = held.get(values[boundary.source], REPLICATED)
                if source != layout:
                    decided.entries.append(
                        PlacedReshard(boundary.path, boundary.aliases, source, layout, values[boundary.target])
                    )
        elif isinstance(choice, Ran):
            node = region.nodes[choice.node]
            for output, layout in zip(node.outputs, choice.outcome.outputs, strict=True):
                if output is not None:
                    held[values[output]] = layout
            if choice.outcome.partial_parameters:
                _note(choice.outcome.partial_parameters, assignment.partial, instance, parameters)
            if choice.outcome.replicated_parameters:
                _note(choice.outcome.replicated_parameters, assignment.whole, instance, parameters)
        elif isinstance(choice, Called):
            _read(children[choice.node], choice.solution, choice.inputs, parameters, assignment)
            node = region.nodes[choice.node]
            for output, layout in zip(node.outputs, choice.solution.outputs, strict=True):
                if output is not None:
                    held[values[output]] = layout
        else:
            _leave(instance, choice, assignment, decided)
            _note(choice.partial_parameters, assignment.partial, instance, parameters)
            _note(choice.replicated_parameters, assignment.whole, instance, parameters)


def _leave(instance: Instance, choice: Left, assignment: Assignment, decided: FrameAssignment) -> None:
    region, values, held = instance.region, instance.values, assignment.layouts
    if region.style in (Style.ROWWISE, Style.VOCAB):
        held[values[region.exits[0].source]] = PARTIAL
    for boundary, layout in zip(region.exits, choice.layouts, strict=True):
        source = held.get(values[boundary.source], REPLICATED)
        held[values[boundary.target]] = layout
        if source != layout:
            decided.exits.append(
                PlacedReshard(boundary.path, boundary.aliases, source, layout, values[boundary.target])
            )


def _children_by_node(instance: Instance) -> dict[int, Instance]:
    children: Iterator[Instance] = iter(instance.children)
    return {i: next(children) for i, node in enumerate(instance.region.nodes) if isinstance(node, CallNode)}


def _note(
    numbers: frozenset[int], into: dict[str, list[str]], instance: Instance, parameters: dict[int, tuple[str, ...]]
) -> None:
    for number in sorted(numbers):
        into[parameters[instance.values[number]][0]].append(instance.frame.module)
