"""The recording of one run: a dispatch mode that turns aten calls on meta tensors into trace operations.

in:  aten calls, as torch issues them below autograd
out: `Operation`s appended to the frame that is open, and a value for every tensor seen

    x.mul(2)   ->   Operation(aten.mul.Tensor, (Reference(3), 2), outputs=(4,))

What else is seen of the run, its observers note; those that tell a body something are asked by the mode.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tpplan.compat.autograd import packs_saved_tensors
from tpplan.compat.dynamo import run_as_written, runs_as_written
from tpplan.compat.modes import Unwatched, without_function_modes
from tpplan.compat.modules import BATCH_NORM_FORWARD
from tpplan.compat.schemas import (
    OpOverload,
    schema_argument_names,
    schema_mutates,
    schema_returns_view,
    written_tensors,
    written_values,
)
from tpplan.compiler.ir.kept_tensors import is_wrapper
from tpplan.compiler.ir.locations import PACKAGE, location_now
from tpplan.compiler.ir.objects import note_alike
from tpplan.compiler.ir.observations import CaptureSettings
from tpplan.compiler.ir.trace import Operation, operator_name
from tpplan.compiler.trace.body_calls import AskedObserver, StepObserver
from tpplan.compiler.trace.chance import DrawObserver
from tpplan.compiler.trace.choices import Picker, has_boolean_rows, with_numbered_rows
from tpplan.compiler.trace.decomposed import statistic_of
from tpplan.compiler.trace.effects import EffectObserver, OriginObserver
from tpplan.compiler.trace.gradient_flow import GradientObserver
from tpplan.compiler.trace.meta_results import META, Made, run_on_meta
from tpplan.compiler.trace.numbers_read import NumberObserver
from tpplan.compiler.trace.random_draws import is_draw
from tpplan.compiler.trace.real_tensors import RealTensors, tensors_among
from tpplan.compiler.trace.sides import SideObserver
from tpplan.compiler.trace.tape import Aside, OpenFrame, RunTape, geometry_of
from tpplan.compiler.trace.unfollowed import UnfollowedError
from tpplan.ops.issued import ALIAS, BAG, FROZEN_BAG, NONZERO, NUMBER, TO_COPY, UNIQUE
from tpplan.ops.registry import WITHOUT_GRADIENT, has_role, lookup

REFUSED = "_tpplan_refused"
"""The attribute of what an operation raises that has the operation, its arguments and its keywords."""


class Recorder(RunTape):
    """Records operations and values; see the module's docstring.

    Attributes:
        settings: how bodies are answered.
        indexing: of which class the index is, while torch indexes a tensor.
        effects, numbers, draws, sides, gradients, origins, steps, asked: what else is noted of the run.
        real: the constants among its tensors.
        picker: what is told of the places found in tensors.
    """

    def __init__(self, settings: CaptureSettings) -> None:
        """Start a record; without `settings.taken`, branches on data go to their false side."""
        super().__init__()
        self.settings = settings
        self.indexing: type | None = None
        self.effects = EffectObserver(self)
        self.numbers = NumberObserver(self, self.effects, settings)
        self.draws = DrawObserver()
        self.sides = SideObserver(self, settings, self.numbers, self.draws)
        self.gradients = GradientObserver(self)
        self.origins = OriginObserver(self)
        self.steps = StepObserver(self)
        self.asked = AskedObserver(self)
        self.real = RealTensors(self, self.numbers)
        self.picker = Picker(self, self.numbers, self.real, settings.picking, settings.found)
        self.observers = (self.numbers, self.draws, self.gradients, self.origins)
        self._packing = packs_saved_tensors()

    @contextmanager
    def aside(self) -> Generator[Aside]:
        """Record what is no part of the run."""
        before, outer, aside = self.frames, self.beside, Aside()
        self.frames, self.beside = [OpenFrame("", 0, [])], aside
        try:
            with self.sides.forgotten(aside):
                yield aside
        finally:
            aside.body = self.frames[-1].body
            self.frames, self.beside = before, outer

    def cross(self, tensor: Tensor) -> tuple[Tensor, int, int]:
        """An alias of `tensor` with a value of its own: (alias, value outside, value inside)."""
        if type(tensor) is not Tensor and is_wrapper(tensor):
            raise UnfollowedError(
                f"a module is passed, or returns, a `{type(tensor).__name__}` that keeps its tensors",
                "pass plain tensors between modules",
            )
        with without_function_modes():  # what is asked here is no step of a body's
            tensor = self.real.copy(tensor) if self.real.is_redrawn(tensor) else tensor
        with Unwatched():
            outside = self.value_of(tensor)
            alias = ALIAS(tensor)
            if tensor.__dict__:
                note_alike(alias, tensor)
            inside = self.new_value(alias, self.values[outside].differentiable, outside)
            for observer in self.observers:
                observer.crossed(outside, inside)
            return alias, outside, inside

    def replace(self, tensor: Tensor, other: Tensor) -> tuple[int, int]:
        """Let a tensor be another one beyond a boundary: (value outside, value inside)."""
        source = self.value_of(tensor)
        target = self.new_value(other, self.values[source].differentiable)
        self.origins.crossed(source, target)
        return source, target

    # -- what other recorders answer otherwise -----------------------------------------------------------------------
    def indexed(self, tensor: Tensor, result: Any) -> Any:
        """What a body is handed of an indexed tensor."""
        return result

    def meet(self) -> None:
        """Hear of a function of torch that a body calls, before it runs."""

    def count_of_calls(self) -> int:
        """What a batch norm of torch is told of how often it was called, which each call changes.

        It is one part of so many in an average that each rank makes of its own channels, and steers nothing.
        """
        return 1

    def _run(self, func: OpOverload, args: tuple[Any, ...], keywords: dict[str, Any], memoise: bool) -> Made:
        return run_on_meta(func, args, keywords, memoise)

    # -- operations -----------------------------------------------------------------------------------------------
    def __torch_dispatch__(
        self, func: OpOverload, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        if not self.frames:
            return func(*args, **keywords)
        if func is NUMBER and _weighs_an_average():
            return self.count_of_calls()
        if func is FROZEN_BAG:
            func = BAG
        if func is TO_COPY and packs_saved_tensors(True) is not None:
            keywords = {**keywords, "device": None}  # `save_on_cpu`, of what has no numbers to save
        operands = tensors_among((*args, *keywords.values()))
        if any([type(operand) is not Tensor and is_wrapper(operand) for operand in operands]):
            return NotImplemented  # its class says what it does, in operations on what it keeps
        if _is_written_out(func):
            with self:
                return run_as_written(func, args, keywords)
        on_meta = [operand.is_meta or self.real.is_redrawn(operand) for operand in operands]
        if not any(on_meta):
            if is_draw(func, args, keywords) and not (operands and keywords.get("generator") is not None):
                # A number that each run draws anew is no constant.
                if operands:
                    args, keywords, operands = self.real.drawing(func, args, keywords, operands)
                else:
                    keywords = {**keywords, "device": META}
            elif operands or not _is_meta_device(keywords.get("device")):
                if not operands or not _is_meta_device(keywords.get("device")):
                    if self.real.large:
                        self.real.refuse_writing(_written_by(func, args, keywords))
                    result = func(*args, **keywords)  # real constants stay real: the model may read their values
                    if self.real.changing or self.real.picked:
                        self.real.follow(func, operands, result, self.indexing is not None)
                    return result
                if func is TO_COPY:
                    result = func(*args, **keywords)
                    self.new_value(result, False, numbers=operands[0].to(result.dtype))
                    return result
                args, keywords, operands = self.real.on_meta(args, keywords)
        elif not all([operand.is_meta for operand in operands]):
            for target in _written_by(func, args, keywords):
                self.real.redraw(target)
            args, keywords, operands = self.real.on_meta(args, keywords)
        if func is NUMBER:
            return self.sides.told(operands[0])
        if (found := self.numbers.sized(func, args, keywords, operands)) is not None:
            return found
        if func is NONZERO:
            return self.picker.find(func, args, operands[0])
        if func is UNIQUE and (distinct := self.picker.distinct(args, operands[0])) is not None:
            return distinct
        if has_role(operator_name(func), "indexing") and has_boolean_rows(args):
            with self:
                return func(*with_numbered_rows(args), **keywords)
        if (steps := statistic_of(func, args, keywords)) is not None and not any(map(self.origins.is_given, operands)):
            with self:
                return steps()
        return self._record(func, args, keywords, operands)

    def _record(self, func: OpOverload, args: tuple[Any, ...], keywords: dict[str, Any], operands: list[Tensor]) -> Any:
        packing = packs_saved_tensors()
        if packing is not None and packing is not self._packing:
            raise UnfollowedError(
                "it runs under `saved_tensors_hooks`, which may change what the backward reads",
                "put the hooks around the call of the model, where they see what a rank saves",
            )
        inputs = tuple([self.value_of(operand) for operand in operands])
        arguments = tuple([self.refer(argument) for argument in args])
        named = {name: self.refer(argument) for name, argument in keywords.items() if name != "device"}
        written, view, detached, kept = _traits(func)
        try:
            result, made = self._run(func, args, keywords, memoise=not written and not view)
        except Exception as error:
            vars(error).setdefault(REFUSED, (func, args, keywords))
            raise
        known, numbers = self.numbers.known, None
        if known is not None and not kept:
            held = dict(zip(map(id, operands), inputs, strict=True))
            numbers = known.computed(func, args, keywords, held, [g for _, g in made], bool(written))
        differentiable = (
            not detached
            and torch.is_grad_enabled()
            and any([self.values[identifier].differentiable for identifier in inputs])
        )
        targets = _written_by(func, args, keywords) if written else []
        base = inputs[0] if (view or written) and inputs else None
        bases = [base if len(kept) < len(written) or not kept else None for _ in made]
        if kept:  # what it writes to and doesn't return is another value from there on, of the same memory
            beside = written_values(func, args, keywords)
            bases += [self.value_of(held) if isinstance(held, Tensor) else None for held in beside]
            made = [*made, *((held, geometry_of(held) if isinstance(held, Tensor) else None) for held in beside)]
        overwritten = self._aliases_of(targets)
        outputs: list[int | None] = []
        for (item, geometry), base in zip(made, bases, strict=True):
            if geometry is None:
                outputs.append(None)
                continue
            dtype = geometry[2]
            grad = differentiable and (dtype.is_floating_point or dtype.is_complex)
            outputs.append(self._new_value(item, geometry, grad, base))
        if known is not None:
            if numbers is not None:
                known.note(inputs, outputs, numbers)
            elif written:
                known.forget([v for t in targets for v in self.in_memory_of(self.value_of(t))])
            known.follow_absent(inputs, outputs)
        if targets:
            self.effects.wrote(targets, outputs)
        self.add(Operation(func, arguments, named, inputs, tuple(outputs), overwritten, location_now()), called=True)
        return result  # pyright: ignore[reportUnknownVariableType]

    def is_within(self, modules: Collection[str]) -> bool:
        """Whether the body that runs is of one of these modules."""
        return bool(modules) and bool(self.frames) and self.frames[-1].module in modules

    def record_whole(self, target: OpOverload, arguments: tuple[Any, ...], run: Callable[[], Any]) -> Any:
        """Record a call of torch as one operation, `target`, whatever it consists of."""
        operands = tensors_among(arguments)
        if self.beside is not None or not self.frames or not any(operand.is_meta for operand in operands):
            return run()
        with self.aside():
            result = run()
        with Unwatched():
            arguments, _, operands = self.real.on_meta(arguments, {})
            inputs = tuple(map(self.value_of, operands))
            differentiable = torch.is_grad_enabled() and any(self.values[value].differentiable for value in inputs)
            made = tuple(self.new_value(t, differentiable and t.is_floating_point()) for t in tensors_among((result,)))
            references = tuple(map(self.refer, arguments))
        self.add(Operation(target, references, {}, inputs, made, (), location_now()), called=True)
        return result

    def _aliases_of(self, targets: Sequence[Tensor]) -> tuple[int, ...]:
        found: list[int] = []
        for own in map(self.value_of, targets):
            found.extend(other for other in self.in_memory_of(own) if other != own)
        return tuple(found)


def _weighs_an_average() -> bool:
    """Whether the forward of torch's batch norms asks for a number: that of its calls, for the weight of this one."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    return frame is not None and frame.f_code is BATCH_NORM_FORWARD


def _written_by(func: OpOverload, args: tuple[Any, ...], keywords: dict[str, Any]) -> list[Tensor]:
    """The tensors that an operation writes to."""
    names, written = schema_argument_names(func), _traits(func)[0]
    placed = tensors_among(args[position] for position in written if position < len(args))
    return [*placed, *tensors_among(keywords[names[n]] for n in written if names[n] in keywords)]


def _traits(func: OpOverload) -> tuple[tuple[int, ...], bool, bool, tuple[int, ...]]:
    """What it writes to; whether it returns a view, or cuts the gradient off; the tensors that it writes and keeps."""
    # An operator lives as long as the process, and its own hash is computed in Python.
    found = _known_traits.get(id(func))
    if found is None:
        detached = func.name() in WITHOUT_GRADIENT
        found = (schema_mutates(func), schema_returns_view(func), detached, written_tensors(func))
        _known_traits[id(func)] = found
    return found


_known_traits: dict[int, tuple[tuple[int, ...], bool, bool, tuple[int, ...]]] = {}


def _is_written_out(func: OpOverload) -> bool:
    """Whether an operator that no rule is for is recorded as what it calls."""
    found = _written_out.get(id(func))
    if found is None:
        found = _written_out[id(func)] = lookup(operator_name(func)) is None and runs_as_written(func)
    return found


_written_out: dict[int, bool] = {}


def _is_meta_device(device: object) -> bool:
    return device is not None and torch.device(device).type == "meta"  # pyright: ignore[reportArgumentType]


__all__ = ["REFUSED", "Recorder"]
