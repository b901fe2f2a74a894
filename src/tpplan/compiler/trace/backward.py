"""Backwards that torch didn't derive: functions with a backward of their own, custom operators, hooks.

in:  what the recorder noted during a run
out: for each call, its `ForeignBackward`s: a record of what each does to the gradients that it gets

    class Clip(Function): backward(ctx, g) = g.clamp(-1, 1)   ->   arriving (0,), body (clamp 0→1,), results (1,)

Each is run by itself, on gradients without numbers, after the forward. Values of the forward that it reads are those of
the trace, so that the trace keeps the operations that make them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from tpplan.compat.autograd import FunctionNode, backward_code, function_node, is_reentrant_checkpoint
from tpplan.compat.modes import Unwatched
from tpplan.compat.symbols import expression_of
from tpplan.compiler.ir.trace import (
    BackwardGraph,
    ForeignBackward,
    Frame,
    Operation,
    Value,
)
from tpplan.compiler.trace.gradient_flow import NotedFunction, NotedHook, UnrecordedError
from tpplan.compiler.trace.random_draws import is_draw
from tpplan.compiler.trace.recorder import Recorder
from tpplan.compiler.trace.surroundings import written_by

Call = tuple[str, int]
REENTRANT = "the backward of an activation checkpoint with `use_reentrant=True`"


def record_backwards(recorder: Recorder, roots: Sequence[Operation | Frame]) -> dict[Call, list[ForeignBackward]]:
    """Record what the run has noted, by the call that it belongs to. To be called under the recorder."""
    if not recorder.gradients.functions and not recorder.gradients.hooks:
        return {}
    writer = _Writer(recorder)
    functions, hooks = list(recorder.gradients.functions.values()), list(recorder.gradients.hooks)
    found: dict[Call, list[ForeignBackward]] = defaultdict(list)
    if functions:
        homes = dict(_homes(roots, ("", 0)))
        sources = _Sources(recorder)
        for noted in functions:
            home = next((homes[v] for v in noted.outputs.values() if v in homes), ("", 0))
            held = writer.function(noted, sources)
            if held is not None:
                found[home].append(held)
    for hook in hooks:
        found[hook.frame].append(writer.hook(hook))
    return found


def _homes(nodes: Sequence[Operation | Frame], call: Call) -> Iterator[tuple[int, Call]]:
    """The call whose body makes each value."""
    for node in nodes:
        if isinstance(node, Operation):
            yield from ((output, call) for output in node.outputs if output is not None)
        else:
            inner = (node.module, node.call)
            yield from ((crossing.target, inner) for crossing in node.entries)
            yield from _homes(node.body, inner)
            yield from ((crossing.target, call) for crossing in node.exits)


class _Sources:
    """Which value a gradient that goes to a node of autograd's is for."""

    def __init__(self, recorder: Recorder) -> None:
        self._values: dict[tuple[int, int], int] = {}
        self._alive: list[object] = []  # ids are only unique while their objects live
        with Unwatched():
            for tensor, value in recorder.tensors():
                node = tensor.grad_fn
                if node is not None:
                    self._alive.append(node)
                    self._values.setdefault((id(node), tensor.output_nr), value)
        for noted in recorder.gradients.functions.values():
            self._values.update({(id(noted.node), number): value for number, value in noted.outputs.items()})
        self._recorder = recorder

    def value(self, node: Any, number: int) -> int:
        leaf = getattr(node, "variable", None)
        found = self._recorder.held_value(leaf) if leaf is not None else self._values.get((id(node), number))
        if found is None:
            raise UnrecordedError("one of its arguments was written to later")
        return found


class _Writer:
    """Runs backwards and writes down what they do; equal records are one object."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._graphs: dict[object, BackwardGraph] = {}

    def function(self, noted: NotedFunction, sources: _Sources) -> ForeignBackward | None:
        node = function_node(noted.node)
        places = tuple(sorted(noted.outputs))
        outputs = tuple(noted.outputs[k] for k in places)
        if is_reentrant_checkpoint(noted.node):
            reason = self._hidden(noted.node)
            if not reason:
                return None  # it derives what the forward was seen to do
            failed = _failed(reason)
            return ForeignBackward(REENTRANT, noted.location, (), outputs, (), failed, sealed=True)
        name = f"the backward of `{node.name}`"
        try:
            inputs = tuple(sources.value(source, number) for _, source, number in node.inputs)
            attempts = [self._run_function(noted, node, places, fill) for fill in (True, False)]
            return self._written(name, noted, inputs, outputs, attempts)
        except UnrecordedError as error:
            return ForeignBackward(name, noted.location, (), outputs, (), _failed(str(error)), sealed=True)

    def _run_function(
        self, noted: NotedFunction, node: FunctionNode, places: tuple[int, ...], fill: bool
    ) -> Callable[..., Sequence[Any]]:
        def run(gradients: Sequence[Tensor | None]) -> Sequence[Any]:
            arriving = dict(zip(places, gradients, strict=True))
            filled = [
                arriving[k] if k in arriving else torch.zeros(shape, dtype=dtype, device="meta") if fill else None
                for k, (shape, dtype) in enumerate(node.outputs)
            ]
            made = noted.node.apply(*filled)
            returned: tuple[Any, ...] = made if isinstance(made, tuple) else (made,)  # pyright: ignore
            return [returned[place] if place < len(returned) else None for place, _, _ in node.inputs]

        return run

    def _hidden(self, node: Any) -> str:
        """Why a reentrant checkpoint isn't the derivative of its forward; empty if it is.

        Its forward runs without gradients, so that functions inside of it don't show until it runs again.
        """
        recorder = self.recorder
        known, hooks = set(recorder.gradients.functions), len(recorder.gradients.hooks)
        try:
            forward, again = (self._ran_again(node, recording) for recording in (False, True))
        except Exception as error:  # whatever it raises when it runs again
            return f"what it calls can't run again: {_first_line(error)}"
        if forward[0] != again[0] or forward[1] is not again[1]:
            return "what it calls computes something else with gradients, as the backward runs it, than without"
        inner: list[Any] = [noted.node for key, noted in recorder.gradients.functions.items() if key not in known]
        if len(recorder.gradients.hooks) > hooks or not all(map(is_reentrant_checkpoint, inner)):
            return "it hides functions or hooks that take part in the backward"
        reasons: list[str] = [self._hidden(node) for node in inner]
        return next(filter(None, reasons), "")

    def _ran_again(self, node: Any, recording: bool) -> tuple[tuple[int, ...], BackwardGraph]:
        """What a reentrant checkpoint calls, with or without gradients, as a record."""
        recorder, first = self.recorder, len(self.recorder.values)
        inputs: list[Any] = list(node.inputs)
        arriving: list[int] = []
        with Unwatched():
            for place, tensor in zip(node.tensor_indices, node.saved_tensors, strict=True):
                inputs[place] = tensor.detach().requires_grad_(tensor.requires_grad)
                arriving.append(recorder.new_value(inputs[place], tensor.requires_grad))
        with recorder.aside() as aside, torch.set_grad_enabled(recording):
            made = node.run_function(*inputs)
            returned: tuple[Any, ...] = made if isinstance(made, tuple) else (made,)  # pyright: ignore
            results = [recorder.value_of(item) if isinstance(item, Tensor) else None for item in returned]
        outside: dict[int, int] = {}
        body = list(_flattened(aside.body, outside))
        return self._graph(
            first, tuple(arriving), tuple(None if v is None else outside.get(v, v) for v in results), body
        )

    def hook(self, noted: NotedHook) -> ForeignBackward:
        outputs = tuple(value for value in noted.outputs if value is not None)
        if noted.impossible:
            return ForeignBackward(noted.name, noted.location, (), outputs, (), _failed(noted.impossible), sealed=True)

        def run(gradients: Sequence[Tensor | None]) -> Sequence[Any]:
            arriving = iter(gradients)
            made = noted.run([None if value is None else next(arriving) for value in noted.outputs])
            return [item for item, value in zip(made, noted.inputs, strict=True) if value is not None]

        inputs = tuple(value for value in noted.inputs if value is not None)
        return self._written(noted.name, noted, inputs, outputs, [run])

    def _written(
        self,
        name: str,
        noted: NotedFunction | NotedHook,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        attempts: Sequence[Callable[[Sequence[Tensor | None]], Sequence[Any]]],
    ) -> ForeignBackward:
        reason = ""
        for run in attempts:
            try:
                return self._run(name, noted, inputs, outputs, run)
            except Exception as error:  # whatever it raises without numbers is why it can't be proved
                reason = reason or _first_line(error)
        return ForeignBackward(name, noted.location, tuple(inputs), outputs, (), _failed(reason))

    def _run(
        self,
        name: str,
        noted: NotedFunction | NotedHook,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        run: Callable[[Sequence[Tensor | None]], Sequence[Any]],
    ) -> ForeignBackward:
        recorder, first = self.recorder, len(self.recorder.values)
        with recorder.aside() as aside, torch.no_grad():
            with Unwatched():
                values = [recorder.values[i] for i in outputs]
                gradients = [torch.empty_strided(v.shape, v.stride, dtype=v.dtype, device="meta") for v in values]
                arriving = tuple(recorder.new_value(gradient, False) for gradient in gradients)
            results = [_tensor_or_none(item) for item in run(gradients)]
            with Unwatched():
                made = tuple(None if item is None else recorder.value_of(item) for item in results)
        if aside.calls:
            raise UnrecordedError("it calls modules")
        if aside.branches:
            raise UnrecordedError("it branches on a tensor's values")
        body = [node for node in aside.body if isinstance(node, Operation)]
        if recorder.gradients.twice:
            raise UnrecordedError("the forward differentiates a gradient again, and this one has no derivative")
        code = backward_code(noted.node) if isinstance(noted, NotedFunction) else None
        saved, graph = self._graph(first, arriving, made, body, code is not None and bool(written_by(code)[0]))
        return ForeignBackward(name, noted.location, inputs, outputs, saved, graph)

    def _graph(
        self,
        first: int,
        arriving: tuple[int, ...],
        made: tuple[int | None, ...],
        body: list[Operation],
        writes: bool = False,
    ) -> tuple[tuple[int, ...], BackwardGraph]:
        """The values of the forward that it reads, and the record, of which equal ones are one object."""
        body, made = _distinct(body, made)
        own = {*arriving, *(value for node in body for value in node.outputs)}
        writes = writes or any(not own.issuperset(node.overwritten) for node in body)
        body = _needed(body, {value for value in made if value is not None})
        numbers: dict[int, int] = {}
        for value in arriving:
            numbers[value] = len(numbers)
        for node in body:
            for value in (*node.inputs, *node.overwritten, *node.outputs):
                if value is not None:
                    numbers.setdefault(value, len(numbers))
        for value in made:
            if value is not None:
                numbers.setdefault(value, len(numbers))
        saved = tuple(value for value in numbers if value < first)
        renumbered = tuple(node.renumbered(numbers) for node in body)
        values = tuple(replace(self.recorder.values[old], identifier=new) for old, new in numbers.items())
        results = tuple(None if value is None else numbers[value] for value in made)
        places = tuple(numbers[value] for value in saved)
        key = (
            tuple(map(_value_key, values)),
            tuple(map(_operation_key, renumbered)),
            len(arriving),
            places,
            results,
            writes,
        )
        known = self._graphs.get(key)
        if known is None:
            starts = tuple(numbers[value] for value in arriving)
            known = self._graphs[key] = BackwardGraph(values, renumbered, starts, places, results, writes=writes)
        return saved, known


def _first_line(error: Exception) -> str:
    text = str(error).splitlines()
    return text[0] if text else type(error).__name__


def _failed(reason: str) -> BackwardGraph:
    return BackwardGraph((), (), (), (), (), reason)


def _tensor_or_none(item: object) -> Tensor | None:
    if item is None or isinstance(item, Tensor):
        return item
    raise UnrecordedError(f"it returns a {type(item).__name__} for a gradient")


def _flattened(nodes: Sequence[Operation | Frame], outside: dict[int, int]) -> Iterator[Operation]:
    """The operations of a body and of modules that it calls; `outside` takes what values at their edges stand for."""
    for node in nodes:
        if isinstance(node, Operation):
            yield node.renumbered(outside)
            continue
        outside |= {crossing.target: outside.get(crossing.source, crossing.source) for crossing in node.entries}
        yield from _flattened(node.body, outside)
        outside |= {crossing.target: outside.get(crossing.source, crossing.source) for crossing in node.exits}


def _needed(body: list[Operation], live: set[int]) -> list[Operation]:
    """Without what no result depends on, such as what a hook prints."""
    kept: list[Operation] = []
    for node in reversed(body):
        overwritten = tuple(value for value in node.overwritten if value in live)
        if overwritten or any(output in live for output in node.outputs):
            live.update(node.inputs)
            kept.append(replace(node, overwritten=overwritten))
    return kept[::-1]


def _distinct(body: list[Operation], made: tuple[int | None, ...]) -> tuple[list[Operation], tuple[int | None, ...]]:
    """Without what is computed twice of the same, such as the scale of a gradient that two products round by."""
    if any(node.overwritten or is_draw(node.target, node.arguments, node.keywords) for node in body):
        return body, made
    first: dict[object, Operation] = {}
    same: dict[int, int] = {}
    kept: list[Operation] = []
    for node in body:
        node = node.renumbered(same)
        known = first.setdefault((*_operation_key(node)[:-2], len(node.outputs)), node)
        if known is node:
            kept.append(node)
        same |= {o: k for o, k in zip(node.outputs, known.outputs, strict=True) if o is not None and k is not None}
    return kept, tuple(None if value is None else same.get(value, value) for value in made)


def _value_key(value: Value) -> object:
    numbers = value.numbers
    shown = None if numbers is None else blake2b(numbers.reshape(-1).view(torch.uint8).numpy().tobytes()).digest()
    sizes = tuple(map(expression_of, value.shape)), tuple(map(expression_of, value.stride))
    return (*sizes, value.dtype, shown)


def _operation_key(node: Operation) -> tuple[object, ...]:
    def typed(argument: Any) -> object:
        # Python holds 1 == 1.0 == True; operators don't.
        if isinstance(argument, tuple):
            return tuple([typed(item) for item in argument])  # pyright: ignore
        return (type(argument), expression_of(argument))  # pyright: ignore[reportUnknownVariableType]

    named = tuple((name, typed(argument)) for name, argument in node.keywords.items())
    return (id(node.target), typed(node.arguments), named, node.inputs, node.outputs, node.overwritten)


__all__ = ["REENTRANT", "record_backwards"]
