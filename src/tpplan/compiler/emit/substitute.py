"""Substitute: which bodies a kernel can take the place of, and why others not.

in:  the trace's instances, the chosen layouts, the plan's choices
out: a `KernelUse` for every candidate

    model.layers.0.input_layernorm     rms_norm, eps 1e-6
    model.layers.0.mlp                 swiglu of gate_proj and up_proj, then down_proj
    encoder.layer.0.intermediate.act   bias_gelu, with the bias of dense

A candidate is seen by what its body computes (`recognise`), never by the class's name. The use is part of the program;
whether there is a GPU to run it on shows only where the program is carried out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from tpplan.compat.hooks import has_hooks
from tpplan.compiler.bind.bind import Binding
from tpplan.compiler.emit.class_calls import counted_among, losses
from tpplan.compiler.emit.sums import sum_before
from tpplan.compiler.emit.unused_kernels import SAID
from tpplan.compiler.ir.dataflow import DataFlow
from tpplan.compiler.ir.layout import REPLICATED
from tpplan.compiler.ir.program import KernelUse, dtype_name
from tpplan.compiler.ir.region import CallNode, Instance, Region
from tpplan.compiler.place.assign import Assignment
from tpplan.compiler.rewrite.gated import Gated, gated_body
from tpplan.compiler.rewrite.lemmas import exact_product, may_write
from tpplan.compiler.rewrite.recognise import Activation, Norm, recognise
from tpplan.plan import KernelChoice, KernelKind, Plan, Style


@dataclass(frozen=True, slots=True)
class _Given:
    """What the pass knows."""

    modules: dict[str, nn.Module]
    flow: DataFlow
    plan: Plan
    binding: Binding
    assignment: Assignment
    calls: Counter[str]
    entered: frozenset[str]
    left: frozenset[str]
    recorded: frozenset[str]
    recognised: dict[int, Norm | Activation | None] = field(default_factory=dict[int, "Norm | Activation | None"])
    summed: dict[tuple[str, int], str] = field(default_factory=dict[tuple[str, int], str])

    def body_of(self, region: Region) -> Norm | Activation | None:
        """What a region computes; equal layers share it."""
        if id(region) not in self.recognised:
            self.recognised[id(region)] = recognise(region)
        return self.recognised[id(region)]


def substitute(
    modules: dict[str, nn.Module],
    plan: Plan,
    flow: DataFlow,
    binding: Binding,
    assignment: Assignment,
    root: Instance,
    recorded: frozenset[str] = frozenset(),
) -> tuple[KernelUse, ...]:
    """Every candidate of the model, in order of execution; `recorded` are the modules whose bodies run from records."""
    calls = Counter(frame.module for frame in flow.trace.root.walk())
    entered = frozenset(held.frame.module for held in assignment.frames if held.entries)
    left = frozenset(held.frame.module for held in assignment.frames if held.exits)
    given = _Given(modules, flow, plan, binding, assignment, calls, entered, left, recorded)
    uses: dict[str, KernelUse] = {}
    for use in _uses(root, given):
        known = uses.setdefault(use.module, use)
        if replace(known, refused="") != replace(use, refused=""):
            uses[use.module] = replace(known, refused="its calls compute different things")
        elif calls[use.module] > 1 and use.parts and not use.refused:
            uses[use.module] = replace(known, refused="it is called several times")
    for use in _losses(given):
        known = uses.setdefault(use.module, use)
        if known.refused and not use.refused:
            uses[use.module] = use
    return tuple(uses.values())


def _losses(given: _Given) -> Iterator[KernelUse]:
    """Cross entropies over split classes, by the module whose body computes them."""
    for module, node, split in losses(given.flow.trace, given.assignment):
        choice = given.plan.kernel_choice(KernelKind.CROSS_ENTROPY, module)
        refused = "" if split else "its classes aren't split (`output: shard` for the rule of the head splits them)"
        refused = refused if node.arguments[2] is None else "its classes have weights"
        dtype = dtype_name(given.flow.trace.values[node.inputs[0]].dtype)
        refused = SAID if choice is KernelChoice.TORCH else refused
        yield KernelUse(module, str(KernelKind.CROSS_ENTROPY), str(choice), dtype, refused)


def _uses(instance: Instance, given: _Given) -> Iterator[KernelUse]:
    if any(held.region.has_own_backward for held in (instance, *instance.children)):
        yield from (use for child in instance.children for use in _uses(child, given))
        return  # a kernel has the derivative of what the body computes
    found = given.body_of(instance.region)
    if isinstance(found, Norm):
        yield _norm(instance, found, given)
        return
    if isinstance(found, Activation):
        if found.kind != "silu":
            yield _use(instance, given, KernelKind.GELU, approximate=found.kind)
        return
    gated = gated_body(instance, given.body_of)
    if gated is not None:
        yield _gated(instance, gated, given)
        inner: Sequence[Instance] = [c for c in instance.children if given.body_of(c.region) is None]
    else:
        fused = dict(_biased(instance, given))
        yield from (use for child in instance.children if (use := fused.get(child.frame.module)) is not None)
        inner = [c for c in instance.children if c.frame.module not in fused]
    for child in inner:
        norm = given.body_of(child.region)
        for use in _uses(child, given):
            yield _after_sum(use, norm, instance, child, given) if isinstance(norm, Norm) else use


def _after_sum(use: KernelUse, norm: Norm, instance: Instance, child: Instance, given: _Given) -> KernelUse:
    """A norm's use, together with the sum before it where the plan asks for that and it is one."""
    if given.plan.kernel_choice(KernelKind.RESIDUAL_NORM, use.module) is not KernelChoice.TRITON:
        return use
    found: int | str = use.refused
    if not found and use.module in given.entered:
        found = "its input is resharded"
    if not found and given.calls[use.module] > 1:
        found = "it is called several times"
    if not found:
        found = sum_before(instance, child, given.flow.trace, given.recorded)
    if isinstance(found, int) and given.summed.setdefault((instance.frame.module, found), use.module) != use.module:
        found = f"`{given.summed[instance.frame.module, found]}` reads the same sum"
    if isinstance(found, str):
        return replace(use, note=f"not fused with the sum before it: {found}")
    parts = (instance.frame.module, *sorted(counted_among(given.flow.trace, instance.frame.module)))
    kind, choice = str(KernelKind.RESIDUAL_NORM), str(KernelChoice.TRITON)
    return replace(use, kind=kind, choice=choice, parts=parts, centred=norm.centred, sum=found)


def _use(
    instance: Instance,
    given: _Given,
    kind: KernelKind,
    refused: str = "",
    parts: tuple[str, ...] = (),
    **details: object,
) -> KernelUse:
    name, region = instance.frame.module, instance.region
    choice = given.plan.kernel_choice(kind, name)
    dtype = dtype_name(region.values[region.entries[0].target].dtype)
    trace = given.flow.trace
    if trace.effects.written and any(may_write(trace, module) for module in _replaced(name, parts, given)):
        refused = "its own code may count its calls: the model changes attributes or globals"
    if choice is KernelChoice.TORCH:
        refused = SAID
    return KernelUse(name, str(kind), str(choice), dtype, refused, parts, **details)  # pyright: ignore[reportArgumentType]


def _replaced(name: str, parts: tuple[str, ...], given: _Given) -> Iterator[nn.Module]:
    """The modules whose code a kernel takes the place of."""
    for held, module in given.modules.items():
        if held == name or held in parts or held.startswith(f"{name}."):
            yield module


def _norm(instance: Instance, norm: Norm, given: _Given) -> KernelUse:
    region, name = instance.region, instance.frame.module
    entry = region.entries[0].target
    leaves: list[str | None] = []
    refused = ""
    for number in (norm.weight, norm.bias):
        names = () if number is None else given.flow.trace.parameters[instance.values[number]]
        own = next((n for n in names if n.rpartition(".")[0] == name), None)
        if names and own is None:
            refused = f"`{names[0]}` is another module's"
        leaves.append(None if own is None else own.rpartition(".")[2])
    layout = given.assignment.layouts.get(instance.values[entry], REPLICATED)
    if layout.dim is not None and layout.dim >= len(region.values[entry].shape) - norm.dims:
        refused = "it normalizes over the sharded dim"
    cast = "after" if norm.narrows else norm.cast  # a kernel never rounds within float64
    kind = KernelKind.LAYER_NORM if norm.centred else KernelKind.RMS_NORM
    return _use(
        instance, given, kind, refused, eps=norm.eps, offset=norm.offset, cast=cast, dims=norm.dims,
        weight=leaves[0], bias=leaves[1],
    )  # fmt: skip


def _gated(instance: Instance, gated: Gated, given: _Given) -> KernelUse:
    kind = KernelKind.SWIGLU if gated.kind == "silu" else KernelKind.GEGLU
    approximate = None if gated.kind == "silu" else gated.kind
    silent = [c.frame.module for c in instance.children if given.body_of(c.region) is not None]
    hooked = next((name for name in silent if has_hooks(given.modules[name])), None)
    refused = f"`{hooked}` has hooks, which would not be called" if hooked is not None else ""
    return _use(instance, given, kind, refused, gated.parts, approximate=approximate, halves=gated.halves)


def _biased(instance: Instance, given: _Given) -> Iterator[tuple[str, KernelUse]]:
    """The GeLUs in a body whose only operand is the result of a linear layer with a bias."""
    if not any(isinstance(given.body_of(child.region), Activation) for child in instance.children):
        return
    region = instance.region
    calls = [node for node in region.nodes if isinstance(node, CallNode)]
    read = Counter(i for node in region.nodes for i in node.inputs) + Counter(b.source for b in region.exits)
    made = {node.outputs[0]: child for node, child in zip(calls, instance.children, strict=True) if node.outputs}
    for node, child in zip(calls, instance.children, strict=True):
        found = given.body_of(child.region)
        linear = made.get(node.inputs[0]) if node.inputs else None
        if not isinstance(found, Activation) or found.kind == "silu" or linear is None or read[node.inputs[0]] != 1:
            continue
        refused = _without_bias(linear, child, given)
        if refused is None:
            parts = (linear.frame.module,)
            yield child.frame.module, _use(child, given, KernelKind.BIAS_GELU, parts=parts, approximate=found.kind)
        elif refused:
            use = _use(child, given, KernelKind.GELU, approximate=found.kind)
            note = f"not fused with the bias of `{linear.frame.module.rpartition('.')[2]}`: {refused}"
            yield child.frame.module, replace(use, note=note)


def _without_bias(linear: Instance, activation: Instance, given: _Given) -> str | None:
    """None if the linear layer can leave its bias to the kernel; why not; or "" if it has none."""
    name = linear.frame.module
    product = exact_product(given.flow, linear.frame, given.modules[name])
    if product is None or not product.bias:
        return ""
    bound = given.binding.modules.get(name)
    if bound is not None and bound.style is Style.ROWWISE:
        return "it is added after the ranks' sum"
    if max(given.calls[name], given.calls[activation.frame.module]) > 1:
        return "one of the two modules is called several times"
    if has_hooks(given.modules[name]):
        return "it has hooks, which would see no bias"
    if name in given.left or activation.frame.module in given.entered | given.left:
        return "the result is resharded on its way"
    if given.plan.kernel_choice(KernelKind.BIAS_GELU, activation.frame.module) is KernelChoice.TORCH:
        return SAID
    return None


__all__ = ["substitute"]
