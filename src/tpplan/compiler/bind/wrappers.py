"""Wrappers: modules that do the work of one layer, together with smaller ones beside it, such as adapters.

in:  rules on modules that aren't layers themselves, and a trace
out: the same rules on the layers and parameters inside, which the flow of the data finds; TP101 where there is none

    q_proj: colwise   base_layer(x) + lora_B(lora_A(x)) * s   ->   base_layer, lora_B: colwise   (they make its result)
    o_proj: rowwise   base_layer(x) + lora_B(lora_A(x)) * s   ->   base_layer, lora_A: rowwise   (they read its input)
    fc1: colwise      base_layer(x) * ia3                     ->   base_layer, ia3: colwise

A module wraps a layer if exactly one reads the module's input and makes its result, with nothing in between but what is
done entry by entry. Layers that the call leaves out (adapters that aren't active, the original of a saved copy) are
placed like those beside them that it calls, so that every call finds all of them where it needs them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from torch import nn

from tpplan.compat.modules import named_modules
from tpplan.compiler.bind.bind import Binding, Bound, bind_parameters, once
from tpplan.compiler.bind.in_bodies import computed_in_bodies, members_of, why_no_layer
from tpplan.compiler.bind.linear import linear_form
from tpplan.compiler.bind.misfits import may_wrap
from tpplan.compiler.bind.readers import Readers
from tpplan.compiler.ir.dataflow import DataFlow
from tpplan.compiler.ir.trace import Frame, Operation, quoted
from tpplan.plan import Diagnostic, Style

_SAME = ("cast", "alias", "copy", "detach", "arithmetic", "dropout", "reshape", "choice of two")

_DEEPEST = 6  # operations between a parameter and its product
Members = Mapping[str, Style]
"""Of the layers and parameters that wrappers hold, what becomes of each."""


@dataclass(frozen=True, slots=True)
class _Subject:
    """The traced model.

    Attributes:
        flow: the data flow of its trace.
        modules: by all of their names.
        frames: the first call of each module that is called.
        names: of the values of parameters and buffers, their first names.
        stored: these values by that name.
    """

    flow: DataFlow
    modules: Mapping[str, nn.Module]
    frames: Mapping[str, Frame]
    names: Mapping[int, str]
    stored: Mapping[str, int]

    @classmethod
    def of(cls, model: nn.Module, flow: DataFlow) -> _Subject:
        """The subject of a model and its trace's data flow."""
        frames: dict[str, Frame] = {}
        for frame in flow.trace.root.walk():
            frames.setdefault(frame.module, frame)
        names = {value: every[0] for value, every in flow.trace.stored.items()}
        modules = dict(named_modules(model, remove_duplicate=False))
        return cls(flow, modules, frames, names, {name: value for value, name in names.items()})


@dataclass(slots=True)
class _Side:
    """What stands at one side of a wrapper, which has `width` features there: layers, and bare parameters."""

    width: int
    layers: list[str] = field(default_factory=list[str])
    parameters: list[str] = field(default_factory=list[str])


def unwrap(
    model: nn.Module, flow: DataFlow, binding: Binding, known: Members | None = None
) -> tuple[Binding, list[Diagnostic], Members]:
    """Apply the rules on wrappers to what is in them.

    Args:
        model, flow, binding: the model, its trace's data flow, and the bound plan.
        known: what an earlier call has made of them, which holds for all later ones.
    """
    if not binding.wrappers:
        return binding, [], {}
    subject = _Subject.of(model, flow)
    bound, findings, members = dict(binding.modules), list[Diagnostic](), dict[str, Style]()
    readers = Readers(flow)
    computed = computed_in_bodies(model, readers)
    for wrapper, problem in binding.wrappers.items():
        rule_on = replace(bound.pop(wrapper), name=wrapper)  # the plan may say another of its names
        if known is not None:
            styles = {name: style for name, style in known.items() if name.startswith(f"{wrapper}.")}
        else:
            styles = _styles(subject, rule_on) if may_wrap(subject.modules[wrapper]) else {}
        is_layer = wrapper in computed and subject.modules.keys().isdisjoint(styles)  # and wraps none
        if known is None and is_layer and rule_on.style is not Style.VOCAB:
            styles = members_of(readers, wrapper, computed[wrapper], rule_on.style)
        if not styles:
            inside = any(linear_form(inner) is not None for inner in subject.modules[wrapper].modules())
            findings.append(problem if inside else _with_reason(problem, readers, subject.frames.get(wrapper)))
            continue
        bound[wrapper] = replace(rule_on, style=Style.NONE, walked=True)
        for name, style in styles.items():
            if name not in bound:
                bound[name] = _member(name, style, rule_on, subject.modules)
                members[name] = style
    return bind_parameters(model, bound)[0], once(findings), members


def _with_reason(problem: Diagnostic, readers: Readers, frame: Frame | None) -> Diagnostic:
    """TP101 with what keeps the body from being a layer's."""
    told = None if frame is None else why_no_layer(readers, frame)
    if told is None:
        return problem
    what, way_out, line = told
    notes = (f"in {quoted(frame.module)}, at {line}",) if frame is not None and line is not None else ()
    return replace(problem, message=f"{problem.message}: {what}", help=f"{way_out}; or {problem.help}", notes=notes)


def bases_among(model: nn.Module, wrappers: Iterable[str], members: Members) -> Members:
    """The layers that wrappers wrap, without what stands beside these: the largest that each holds."""
    found: dict[str, Style] = {}
    for wrapper in wrappers:
        inside = [name for name in members if name.startswith(f"{wrapper}.")]
        if inside:
            base = max(inside, key=lambda name: _size(model, name))
            found[base] = members[base]
    return found


def _size(model: nn.Module, name: str) -> int:
    holder, _, leaf = name.rpartition(".")
    found = getattr(model.get_submodule(holder), leaf)
    return sum(p.numel() for p in found.parameters()) if isinstance(found, nn.Module) else found.numel()


def _member(name: str, style: Style, wrapper: Bound, modules: Mapping[str, nn.Module]) -> Bound:
    rule = replace(wrapper.rule, style=style, local=())
    if name not in modules:
        return Bound(name, style, rule, is_parameter=True, wrapper=wrapper.name)
    return Bound(name, style, rule, linear_form(modules[name]), wrapper=wrapper.name)


def _styles(subject: _Subject, wrapper: Bound) -> dict[str, Style]:
    """What becomes of what is in a wrapper; nothing if it isn't one."""
    frame = subject.frames.get(wrapper.name)
    if frame is None or len(frame.entries) != 1 or len(frame.exits) != 1 or frame.exits[0].path:
        return {}
    walk = _WrapperWalk(subject, frame, table=wrapper.style is Style.VOCAB)
    given, making = walk.readers(), walk.makers()
    works = [n for n in (*given.layers, *given.parameters) if n in making.layers or n in making.parameters]
    works = [name for name in works if not walk.is_vector(name)]
    if wrapper.style is Style.VOCAB:
        works = [name for name in works if name in given.layers]
    if len(works) != 1:
        return {}
    if wrapper.style is Style.VOCAB:
        return {works[0]: Style.VOCAB}
    side = making if wrapper.style is Style.COLWISE else given
    styles = dict.fromkeys(side.layers, wrapper.style)
    styles |= dict.fromkeys(_spare(subject, wrapper, works[0], styles, side.width), wrapper.style)
    for name in side.parameters:  # a vector goes with features, whoever made these
        styles[name] = Style.COLWISE if walk.is_vector(name) else wrapper.style
    return styles


def _spare(subject: _Subject, wrapper: Bound, base: str, styles: Mapping[str, Style], width: int) -> Iterator[str]:
    """Layers in a wrapper that the call leaves out, and that stand where a split one does."""
    modules, frames = subject.modules, subject.frames
    form = linear_form(modules[base]) if base in modules else None
    beside = {holder for name in styles if (holder := name.rpartition(".")[0]) != wrapper.name}
    for name in _inside(modules, wrapper.name):
        held = linear_form(modules[name]) if name not in frames else None
        if held is None or width != (held.outputs if wrapper.style is Style.COLWISE else held.inputs):
            continue
        alike = form is not None and (held.inputs, held.outputs) == (form.inputs, form.outputs)
        if name.rpartition(".")[0] in beside or alike:
            yield name


def _inside(modules: Mapping[str, nn.Module], wrapper: str) -> Iterator[str]:
    inner = modules[wrapper]
    yield from (f"{wrapper}.{name}" for name, _ in named_modules(inner) if name)


class _WrapperWalk:
    """Follows values through one wrapper."""

    def __init__(self, subject: _Subject, frame: Frame, table: bool) -> None:
        self.flow = subject.flow
        self.frame = frame
        self._stored, self._names = subject.stored, subject.names
        self._values = self.flow.trace.values
        inside = [inner for inner in frame.walk() if inner is not frame]
        layers = [inner for inner in inside if _is_layer(subject.modules[inner.module], table) and _is_plain(inner)]
        self._by_entry = {inner.entries[0].target: inner.module for inner in layers}
        self._by_exit = {inner.exits[0].target: inner.module for inner in layers}
        self._own = {c.target for inner in (frame, *inside) for c in (*inner.entries, *inner.exits)}
        self._own.update(o for inner in (frame, *inside) for o in _made(inner.body) if o is not None)

    def is_vector(self, name: str) -> bool:
        """Whether it is a bare parameter, or a buffer, with one number for each feature."""
        shape = self._values[self._stored[name]].shape if name in self._stored else ()
        return bool(shape) and math.prod(shape) == max(shape)

    def readers(self) -> _Side:
        """What reads the wrapper's input."""
        waiting, seen = [self.frame.entries[0].target], set[int]()
        side = _Side(self._width(waiting[0]))
        while waiting:
            value = waiting.pop()
            if value in seen:
                continue
            seen.add(value)
            if value in self._by_entry:
                side.layers.append(self._by_entry[value])
                continue
            waiting += [t for t in self.flow.targets.get(value, ()) if t in self._own]
            for _, node in self.flow.operations.get(value, ()):
                made = next((o for o in node.outputs if o is not None), None)
                if made not in self._own:
                    continue
                side.parameters += self._beside(node, side.width, making=False)
                if node.is_a(*_SAME) and self._width(made) == side.width:
                    waiting.append(made)
        return side

    def makers(self) -> _Side:
        """What makes the wrapper's result."""
        waiting, seen = [self.frame.exits[0].source], set[int]()
        side = _Side(self._width(waiting[0]))
        while waiting:
            value = waiting.pop()
            if value in seen or value not in self._own:
                continue
            seen.add(value)
            if value in self._by_exit:
                side.layers.append(self._by_exit[value])
            elif value in self.flow.source:
                waiting.append(self.flow.source[value])
            elif (node := self.flow.made.get(value)) is not None:
                side.parameters += self._beside(node, side.width, making=True)
                if node.is_a(*_SAME):
                    waiting += [i for i in node.inputs if self._width(i) == side.width]
        return side

    def _beside(self, node: Operation, width: int, making: bool) -> Iterator[str]:
        """The wrapper's own parameters that stand beside features of this width, or that these are multiplied by."""
        for value in node.inputs if node.is_a("product", *_SAME) else ():
            source = self._behind(value)
            name = self._names.get(source, "")
            if not name.startswith(f"{self.frame.module}."):
                continue
            product, vector = node.is_a("product"), self.is_vector(name)
            fits = self._width(value) == width if vector else source in self.flow.trace.parameters
            if fits and (product != vector or making):
                yield name

    def _behind(self, value: int) -> int:
        """The parameter that a value is, perhaps turned or cast."""
        for _ in range(_DEEPEST):
            value = self.flow.source.get(value, value)
            made = self.flow.made.get(value)
            if value in self._names or made is None or len(made.inputs) != 1:
                break
            value = made.inputs[0]
        return value

    def _width(self, value: int) -> int:
        shape = self._values[value].shape
        return shape[-1] if shape else 0


def _is_layer(module: nn.Module, table: bool) -> bool:
    return isinstance(module, nn.Embedding) if table else linear_form(module) is not None


def _is_plain(frame: Frame) -> bool:
    return len(frame.entries) == 1 and len(frame.exits) == 1


def _made(body: Iterable[Frame | Operation]) -> Iterator[int | None]:
    for node in body:
        if isinstance(node, Operation):
            yield from node.outputs


__all__ = ["Members", "unwrap"]
