"""What a module of a sharded model needs at run time: its reshards, how it reads parameters, its body.

`bodies.py` makes one for each module and program; the classes that modules are swapped for go by it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from tpplan.compat.dynamo import is_traced
from tpplan.compiler.ir.pytree import replaced_at
from tpplan.compiler.trace.preconditions import MARK
from tpplan.runtime.around.results import Results
from tpplan.runtime.around.watched import WatchedCall
from tpplan.runtime.bodies.kernel_bodies import Body, Fused
from tpplan.runtime.bodies.layer_bodies import Layer
from tpplan.runtime.classes.class_scope import ClassBody
from tpplan.runtime.overlap.joint import Joint
from tpplan.runtime.overlap.scattered import Scattered
from tpplan.runtime.parameters.handed_out import HandedOut
from tpplan.runtime.random.mixed_draws import Randomness
from tpplan.runtime.ranks.communicator import Communicator
from tpplan.runtime.ranks.profiled import telling
from tpplan.runtime.ranks.reshard import CallContext, Move, moves_values

Reader = Callable[[Tensor], Tensor]
RUNTIME = MARK


class DirectForwards(Protocol):
    """Forwards that are in place only during a call; see `runtime.direct`."""

    in_place: bool

    def put(self) -> None:
        """Put them in place."""
        ...

    def take(self) -> None:
        """Leave the modules as they were."""
        ...


@dataclass(frozen=True, slots=True)
class EntryStep:
    """A reshard of one argument: by name, by position if passed so, and by the path inside it; and where, in words.

    `joint` makes it together with the products of the layers that read the argument.
    """

    name: str
    position: int | None
    inner: tuple[str | int, ...]
    step: Move
    place: str = ""
    joint: Joint | None = None
    move: Move = field(init=False)

    def __post_init__(self) -> None:
        """Take the step itself, or by way of the products."""
        joint = self.joint
        object.__setattr__(self, "move", self.step if joint is None else functools.partial(joint, step=self.step))


@dataclass(frozen=True, slots=True)
class ExitStep:
    """A reshard of one result, by its path in the results; and where, in words."""

    path: tuple[str | int, ...]
    step: Move
    place: str = ""

    @property
    def move(self) -> Move:
        """The step."""
        return self.step


@dataclass(slots=True)
class ModuleRuntime:
    """What a swapped module needs at run time.

    Attributes:
        label: what `print` adds to the stock representation.
        handed_out: the tensors to read in the root's forward, while that is under way.
        entries, exits: reshards at the boundary.
        reads: for each parameter read in the body: the module that owns it, its name there, and how to read it.
        parts: the same of split buffers.
        kept: those of these that the body writes to: the module, the name, and what makes the part whole again.
        borrowed: those of both that a body around this one reads as well.
        axis: the ranks.
        classes: a context for a body that calls functions over split classes, or is called by such a body.
        random: a context for a body that draws random numbers: different on each rank, alike, or some so and some so.
        opened: for the root: the summed parameters, which are handed out at its start, in order.
        guard: for the root: called with the mode and the arguments of each call, to raise if it isn't proved, and to
            put the program in place that the call runs by; returns a watch over the call, if it has to be watched.
        results: for the root: where its calls return tensors; None if nobody knows.
        context: for the root, where a reshard needs the batch size: where to note it.
        direct: for the root: forwards for plain calls that record no gradient.
        transposed: whether it is a linear layer whose weight is (inputs, outputs).
        layer: the written body of a single layer; None for a module that runs `body` or its own.
        body: what runs in place of the stock forward; None for that.
        replays: whether that is the record of the stock forward, which calls the modules inside.
        dispatches: whether it exchanges as many rows as the call's numbers say, which no graph can hold.
        weight, bias: how to read these parameters of the module itself; None for one that its body doesn't read.
        table: of an embedding table split by rows, the first that this rank holds, and the number of all.
        shared: whether one tensor sits in several places of the arguments or results, to be resharded once for all.
        split_classes: of results that are split along their last dim, its size as a whole.
        alone: what happens at its boundary as well if it is called by itself; None if nothing does.
        infers: for the root: whether torch has kernels for inference for modules in it, which take whole weights.
        fused: of a norm, one operation that computes it where no gradient is recorded.
        joint: of a linear layer, what makes its product beside a collective.
        scattered: the same, of one whose result is summed.
        moving: the entries that do anything where no gradient is recorded.
    """

    label: str
    axis: Communicator
    handed_out: HandedOut
    entries: tuple[EntryStep, ...] = ()
    exits: tuple[ExitStep, ...] = ()
    reads: tuple[tuple[nn.Module, str, Reader], ...] = ()
    parts: tuple[tuple[nn.Module, str, Reader], ...] = ()
    kept: tuple[tuple[nn.Module, str, Move], ...] = ()
    borrowed: tuple[tuple[nn.Module, str], ...] = ()
    classes: ClassBody | None = None
    random: Randomness | None = None
    opened: tuple[tuple[nn.Module, str], ...] = ()
    guard: Callable[[bool, tuple[Any, ...], dict[str, Any]], WatchedCall | None] | None = None
    results: Results | None = None
    context: CallContext | None = None
    direct: DirectForwards | None = None
    transposed: bool = False
    layer: Layer | None = None
    shared: bool = False
    alone: ModuleRuntime | None = None
    split_classes: tuple[int, ...] = ()
    body: Body | None = None
    replays: bool = False
    dispatches: bool = False
    weight: Reader | None = None
    bias: Reader | None = None
    table: tuple[int, int] = (0, 0)
    fused: Fused | None = None
    infers: bool = False
    joint: Joint | None = None
    scattered: Scattered | None = None
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
                moved[entry.position] = replaced_at(moved[entry.position], entry.inner, self._told(entry))
            elif entry.name in kwargs:
                if not copied:
                    kwargs, copied = dict(kwargs), True
                kwargs[entry.name] = replaced_at(kwargs[entry.name], entry.inner, self._told(entry))
        return (args if moved is None else tuple(moved)), kwargs

    def run_layer(
        self, module: nn.Module, inputs: tuple[Tensor, ...], weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        """Run the written body of a layer.

        Args:
            module: the layer.
            inputs: its only argument, whatever its name is.
            weight, bias: this rank's parts; None for one that its body doesn't read.
        """
        (input,) = inputs
        assert self.layer is not None and weight is not None
        if self.entries:
            input = self._told(self.entries[0])(input)
        if self.joint is not None and not is_traced():
            made = self.joint.product_of(module, input, weight)
            if made is not None:
                return made
        return self.layer(module, self, input, weight, bias, self._told(self.exits[0]) if self.exits else None)

    def keep(self) -> None:
        """Put what the body wrote to parts of buffers into the whole ones."""
        for owner, name, gather in self.kept:
            whole: Tensor = owner._buffers[name]  # pyright: ignore
            whole.copy_(gather(owner.__dict__[name]))

    def leave(self, result: Any) -> Any:
        """Reshard the results of a call."""
        for exit_step in self.exits if not self.shared else _once_each(self.exits):
            result = replaced_at(result, exit_step.path, self._told(exit_step))
        return result

    def _told(self, step: EntryStep | ExitStep) -> Move:
        if is_traced():
            return step.step
        return telling(step.move, step.place) if self.handed_out.profiled else step.move


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


__all__ = ["RUNTIME", "EntryStep", "ExitStep", "ModuleRuntime", "Reader"]
