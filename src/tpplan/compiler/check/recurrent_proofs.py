"""Recurrent layers: the proof that what a layer does in a call is what the runtime's body does in its place.

in:  the trace, and a binding in which recurrent layers have a rule
out: findings where nothing is proved

The layer's record must be that of a layer of torch's own, made anew with the same settings and called with tensors of
the same geometry: the same operations, in the same order, of the same operands and numbers, with the parameters in
their places. So nothing stands in it that the runtime's body doesn't know, whatever the module's hooks do. That this
body computes what torch's layers do is shown by numbers, for each kind and setting (`tests/parity/test_recurrent`).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn

from tpplan.compat.modules import named_modules, own_parameters
from tpplan.compiler.bind.bind import Binding, Bound, once
from tpplan.compiler.bind.recurrent_layers import made_anew
from tpplan.compiler.ir.dataflow import DataFlow
from tpplan.compiler.ir.observations import CaptureSettings
from tpplan.compiler.ir.replaced_bodies import Recurrence
from tpplan.compiler.ir.trace import Frame, Operation, Path, Reference, Trace, filled
from tpplan.compiler.trace.capture import BodyError, Capture, record
from tpplan.compiler.trace.recorder import Recorder
from tpplan.compiler.trace.skeleton import make_skeleton
from tpplan.plan import Diagnostic

_PLACES: frozenset[Path] = frozenset((("input",), ("hx",), ("hx", 0), ("hx", 1)))


class NotRecurrentError(Exception):
    """A call of a recurrent layer isn't what torch's own does; the text says why."""


def prove_recurrent(model: nn.Module, flow: DataFlow, binding: Binding, size: int) -> list[Diagnostic]:
    """Hold each call of a recurrent layer that is split against torch's own."""
    held = {name: bound for name, bound in binding.modules.items() if bound.recurrent is not None}
    if not held:
        return []
    modules, findings = dict(named_modules(model)), list[Diagnostic]()
    prover = _RecurrentProver(flow, model.training)
    recorded = {(frame.module, frame.call): frame for frame in flow.trace.recorded.walk() if frame.module in held}
    for name, bound in held.items():
        assert bound.recurrent is not None
        if bound.recurrent.features < size:
            findings.append(_too_few(bound, bound.recurrent.features, size))
            continue
        try:
            for frame in (f for f in flow.trace.root.walk() if f.module == name):
                prover.prove(modules[name], bound.recurrent, frame, recorded[frame.module, frame.call])
        except NotRecurrentError as error:
            findings.append(_unproved(bound, error))
    return once(findings)


class _RecurrentProver:
    """Remembers the records of torch's own layers."""

    def __init__(self, flow: DataFlow, training: bool) -> None:
        self._flow, self._trace, self._training = flow, flow.trace, training
        self._known: dict[object, Trace] = {}

    def prove(self, module: nn.Module, recurrence: Recurrence, frame: Frame, recorded: Frame) -> None:
        """Raise unless a call, all of whose operations are `recorded`, is one of torch's own layer."""
        self._contained(frame, recorded)
        graded = any(self._trace.values[crossing.source].differentiable for crossing in recorded.exits)
        try:
            self._compared(module, recurrence, recorded, graded, quiet=False)
        except NotRecurrentError:
            if graded:
                raise
            self._compared(module, recurrence, recorded, graded, quiet=True)

    def _compared(self, module: nn.Module, recurrence: Recurrence, frame: Frame, graded: bool, quiet: bool) -> None:
        stock = self._stock(module, recurrence, frame, graded, quiet)
        (its,) = (inner for inner in stock.recorded.walk() if inner.module == "layer")
        _same(self._trace, frame, stock, its, f"{frame.module}.")

    def _contained(self, frame: Frame, recorded: Frame) -> None:
        """Refuse a call that does more than to make its results of its arguments and parameters."""
        trace, flow = self._trace, self._flow
        places = [path for c in recorded.entries for path in (c.path, *c.aliases)]
        if not set(places) <= _PLACES or ("input",) not in {c.path for c in recorded.entries}:
            raise NotRecurrentError("it isn't called with one tensor, and one or two for its first state")
        if trace.gradients.taken_inside:
            raise NotRecurrentError("the model takes gradients in its forward")
        if frame.backwards:
            raise NotRecurrentError("it has code in its backward that torch didn't derive")
        operations = [n for n in recorded.body if isinstance(n, Operation)]
        made = {o for n in operations for o in n.outputs if o is not None}
        known = made.union(trace.parameters, (c.target for c in recorded.entries))
        if any(value not in known for n in operations for value in n.inputs):
            raise NotRecurrentError("it reads what isn't among its arguments, such as states in a list: pass a tuple")
        exits = {c.source for c in frame.exits}
        leaving = trace.effects.leaving
        for value in made:
            elsewhere = any(reader is not frame for reader, _ in flow.operations.get(value, ()))
            crossed = value not in exits and flow.targets.get(value)
            if value in leaving or elsewhere or crossed:
                raise NotRecurrentError("what it computes is kept, or read elsewhere")
        if made & trace.gradients.gradless and any(trace.values[value].differentiable for value in exits):
            raise NotRecurrentError("a part of it runs without gradients")
        if {c.target for c in recorded.entries} & flow.written:
            raise NotRecurrentError("what it is given is written to")

    def _stock(self, module: nn.Module, recurrence: Recurrence, frame: Frame, graded: bool, quiet: bool) -> Trace:
        """The record of a layer of torch's own, made anew; `quiet`: under `no_grad`."""
        values = [(c.path, c.aliases, self._trace.values[c.target]) for c in frame.entries]
        geometry = [(path, aliases, v.shape, v.stride, v.dtype, v.differentiable) for path, aliases, v in values]
        held = {n: p for n, p in own_parameters(module).items() if p is not None}
        parameters = {n: (p.dtype, graded and p.requires_grad) for n, p in held.items()}
        inputs = cast(int, module.input_size)
        training = module.training if self._training == self._trace.settings.training else self._trace.settings.training
        key = (recurrence, inputs, training, graded, quiet, tuple(geometry), tuple(parameters.items()))
        if key not in self._known:
            made = made_anew(recurrence, inputs)
            for name, (dtype, trainable) in parameters.items():
                if own_parameters(made).get(name) is None:
                    raise NotRecurrentError(f"it has a parameter `{name}`, which torch's own hasn't")
                empty = torch.empty_like(getattr(made, name), dtype=dtype)
                setattr(made, name, nn.Parameter(empty, requires_grad=trainable))
            given: dict[Path, Tensor] = {}
            for path, aliases, value in values:
                tensor = torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device="meta")
                given |= dict.fromkeys((path, *aliases), tensor.requires_grad_(graded and value.differentiable))
            recorder = Recorder(CaptureSettings(training, device=self._trace.settings.device))
            try:
                state = Capture(recorder, leaves=False)
                self._known[key] = record(make_skeleton(_Caller(made, quiet)), _arguments(given), {}, state)
            except BodyError as error:
                raise NotRecurrentError(f"torch's own raises: {error.__cause__ or error}") from error
        return self._known[key]


class _Caller(nn.Module):
    """Calls a layer."""

    def __init__(self, layer: nn.Module, quiet: bool) -> None:
        super().__init__()
        self.layer, self.quiet = layer, quiet

    def forward(self, *arguments: Any) -> Any:
        with torch.no_grad() if self.quiet else nullcontext():
            return self.layer(*arguments)


def _arguments(given: Mapping[Path, Tensor]) -> tuple[Any, ...]:
    if ("hx",) in given:
        return given["input",], given["hx",]
    if ("hx", 0) in given:
        return given["input",], (given["hx", 0], given["hx", 1])
    return (given["input",],)


def _same(trace: Trace, frame: Frame, stock: Trace, other: Frame, prefix: str) -> None:
    """Raise unless two records are the same, up to the numbers of their values."""
    ours: dict[int, int] = {}  # by the other's numbers

    def pair(one: int, its: int) -> bool:
        a, b = trace.values[one], stock.values[its]
        return ours.setdefault(its, one) == one and (a.shape, a.dtype) == (b.shape, b.dtype)

    taken, given = ({(c.path, c.aliases): c.target for c in held.entries} for held in (frame, other))
    if taken.keys() != given.keys() or not all(pair(taken[at], given[at]) for at in taken):
        raise NotRecurrentError("it takes other arguments than torch's own")
    names = {name.removeprefix(prefix): value for value, held in trace.parameters.items() for name in held}
    for value, held in stock.parameters.items():
        leaf = held[0].removeprefix("layer.")
        if leaf not in names or not pair(names[leaf], value):
            raise NotRecurrentError(f"it has no parameter `{leaf}` like that of torch's own")
    body, its_body = _running(frame), _running(other)
    for node, its in zip(body, its_body, strict=False):
        if not (isinstance(node, Operation) and isinstance(its, Operation)):
            raise NotRecurrentError("it calls other modules")
        alike = node.target is its.target and _renamed(its, ours) == _told(node)
        if not alike or len(node.outputs) != len(its.outputs):
            raise NotRecurrentError(f"it runs `{node.name}` where torch's own runs `{its.name}`, or on other operands")
        for one, another in zip(node.outputs, its.outputs, strict=True):
            if (one is None) != (another is None) or (one is not None and not pair(one, cast(int, another))):
                raise NotRecurrentError(f"`{node.name}` makes something else than in torch's own")
    if len(body) != len(its_body):
        raise NotRecurrentError("it runs other operations than torch's own")
    left, results = ({c.path: c.source for c in held.exits} for held in (frame, other))
    if left.keys() != results.keys() or any(ours.get(results[path]) != value for path, value in left.items()):
        raise NotRecurrentError("it returns something else than torch's own")


def _running(frame: Frame) -> list[Operation | Frame]:
    """What a call runs, without what autograd detaches for itself where gradients are recorded."""
    read = {c.source for c in frame.exits}.union(*(n.inputs for n in frame.body if isinstance(n, Operation)))
    return [n for n in frame.body if isinstance(n, Frame) or not n.is_a("detach") or not read.isdisjoint(n.outputs)]


def _told(node: Operation) -> object:
    return node.arguments, node.keywords, node.overwritten


def _renamed(node: Operation, ours: Mapping[int, int]) -> object:
    def renamed(value: int) -> Reference:
        return Reference(ours.get(value, -1))

    keywords = {name: filled(held, renamed) for name, held in node.keywords.items()}
    return filled(node.arguments, renamed), keywords, tuple(ours.get(value, -1) for value in node.overwritten)


def _too_few(bound: Bound, features: int, size: int) -> Diagnostic:
    return Diagnostic(
        code="TP102",
        message=f"`{bound.name}` can't be split: its hidden state has fewer features ({features}) than there are ranks "
        f"({size})",
        span=bound.rule.style_span,
        label="fewer than the ranks",
        help=f"remove the rule, so that `{bound.name}` stays whole",
        subject=bound.name,
    )


def _unproved(bound: Bound, error: NotRecurrentError) -> Diagnostic:
    return Diagnostic(
        code="TP112",
        message=f"the hidden state of `{bound.name}` can't be split: {error}",
        span=bound.rule.style_span,
        help=f"remove the rule, so that `{bound.name}` stays whole",
        subject=bound.name,
    )


__all__ = ["prove_recurrent"]
