"""Queries: what the compiler answers to a search for plans, which uses nothing else of it but programs and plain data.

in:  a model and an example call
out: `Study`: one run of it, what its parameters are used for, and what trial rules make of it; the rules of operations
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from tpplan.compiler.bind.bind import Binding, Bound, bind, bind_rules, stored_tensors
from tpplan.compiler.bind.computed_weights import Computed, layer_of
from tpplan.compiler.bind.in_bodies import computed_by_layers, members_of
from tpplan.compiler.bind.linear import Addend, LinearForm, Product, linear_form
from tpplan.compiler.bind.lookers import BareTable, bare_tables
from tpplan.compiler.bind.packing import pack, taken_apart
from tpplan.compiler.bind.products import contracting, derived, find_buffer_use, find_use
from tpplan.compiler.bind.readers import Readers, Taken
from tpplan.compiler.bind.regions import build_regions
from tpplan.compiler.bind.wrappers import unwrap
from tpplan.compiler.explain.failed_captures import of_capture
from tpplan.compiler.ir.dataflow import DataFlow
from tpplan.compiler.ir.layout import Features, Layout, Pack
from tpplan.compiler.ir.observations import CaptureSettings
from tpplan.compiler.ir.region import Instance, OperationNode, Region
from tpplan.compiler.ir.trace import Trace
from tpplan.compiler.rewrite.recognise import Norm, recognise, recognise_gated
from tpplan.compiler.rules.convolution import GROUPS, weight_layout
from tpplan.compiler.rules.propagate import Outcome, Refusal
from tpplan.compiler.rules.propagate import Propagator as Rules
from tpplan.compiler.trace.branches import Captures
from tpplan.compiler.trace.device import device_of
from tpplan.compiler.trace.preconditions import unfit_findings
from tpplan.compiler.trace.surroundings import same_files
from tpplan.compiler.trace.unread import with_unread
from tpplan.ops.registry import is_entrywise
from tpplan.plan import CompileError, Diagnostic, Plan, Rule, Severity, Style
from tpplan.plan.pattern import Pattern
from tpplan.plan.rules import NamedPack as NamedPack


@dataclass(frozen=True, slots=True)
class ColumnSplits:
    """What `colwise` rules make of modules, each by itself.

    Attributes:
        packs: the packs of each result; none for one plain stretch.
        whole: modules that stay whole on every rank, as they make a single head.
        refused: why others can't be split.
        heads: the numbers of heads into which the results are viewed, as packs.
    """

    packs: dict[str, tuple[Pack, ...]]
    whole: frozenset[str]
    refused: dict[str, str]
    heads: Features


@dataclass(frozen=True, slots=True)
class ComputedWeight:
    """A weight that is computed in each call.

    Attributes:
        made: its value.
        use: what is done with it.
        members: the parameters and buffers that a rule on its layer is for.
        in_body: whether the layer's own forward computes it.
    """

    made: int
    use: Product | Addend
    members: frozenset[str]
    in_body: bool = False


class Study:
    """One run of a model, and what the compiler says of it.

    Attributes:
        model, size: the model and the number of ranks.
        trace: the run, with the layers of which nobody reads what they compute.
        root: its calls, over shared regions.
        captures: that run, and others of it.
        keeps: whether the model is in evaluation, and keeps tensors there that it doesn't keep in training.
    """

    def __init__(self, model: nn.Module, size: int, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> None:
        """Capture `model` on an example call.

        Raises:
            CompileError: the model can't be captured.
        """
        unfit = unfit_findings(model)
        if unfit:
            raise CompileError(unfit)
        self.model = model
        self.size = size
        self.captures = Captures()
        self.trace = with_unread(self._captured(arguments, keywords))
        self.keeps = self.trace.settings.training and not model.training and self._keeps_more(arguments, keywords)
        self.root: Instance = build_regions(self.trace, bind(model, Plan(), size)[0])
        self._flow = DataFlow(self.trace)
        self._readers = Readers(self._flow)

    def _captured(self, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Trace:
        errors: list[BaseException] = []
        for training in (True, False):
            try:
                settings = CaptureSettings(training, device=device_of(self.model))
                return self.captures.record(self.model, arguments, keywords, settings)[0]
            except Exception as error:  # whatever the model raises is the finding
                errors.append(error)
        raise CompileError([of_capture(errors[-1])])

    def _keeps_more(self, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> bool:
        try:
            settings = CaptureSettings(training=False, device=device_of(self.model))
            trace = self.captures.record(self.model, arguments, keywords, settings)[0]
        except Exception:  # whatever the model raises there, no plan changes that
            return False
        return not {*trace.effects.kept.values()} <= {*self.trace.effects.kept.values()}

    def computed_weights(self) -> dict[str, ComputedWeight]:
        """The weights that layers or torch's parametrizations compute of parameters, and what is done with each."""
        found: dict[str, ComputedWeight] = {}
        for name, tensors in computed_by_layers(self.model, self._readers).items():
            for tensor in tensors:
                if tensor.in_body:
                    continue
                if tensor.parts and (isinstance(tensor.use, Product) or not tensor.use.is_added):
                    found[name] = ComputedWeight(tensor.made, tensor.use, frozenset(tensor.parts))
            weights = [tensor for tensor in tensors if tensor.in_body]
            if weights:
                members = frozenset(members_of(self._readers, name, weights, Style.COLWISE))
                found[name] = self._in_body(weights, members)
        return found

    def _in_body(self, weights: Sequence[Computed], members: frozenset[str]) -> ComputedWeight:
        """What a layer does with the weights that it computes; beside them it may use others as they are stored."""
        parts = {name for weight in weights for name in weight.parts}
        stored = (value for value, names in self.trace.parameters.items() if names[0] in members - parts)
        uses = [(weight.made, weight.use) for weight in weights] + [(v, use) for v in stored if (use := self.use_of(v))]
        products = [(value, use) for value, use in uses if isinstance(use, Product)]
        if not products:
            return ComputedWeight(*uses[0], members, True)
        (made, first), *others = products
        return ComputedWeight(made, replace(first, alike=tuple(use for _, use in others)), members, True)

    def use_of(self, value: int) -> Product | Addend | None:
        """The product that a parameter is a factor of, or what a parameter or a buffer is added to or combined with."""
        find = find_buffer_use if value in self.trace.buffers else find_use
        return find(self._readers, value)

    def turned_products(self, layer: str, form: LinearForm) -> tuple[str, list[Product]]:
        """A layer's weight, and the products by which bodies contract with it what the layer makes."""
        weight = f"{layer}.weight"
        value = self._readers.named.get(weight)
        return weight, [] if value is None else contracting(self._readers, value, int(form.transposed))

    def derived_from(self, value: int) -> Iterator[tuple[int, tuple[int | None, ...]]]:
        """What is made of a parameter or buffer and of no data, with the dims that its own went into."""
        yield from derived(self._readers, value)

    def taken_apart(self, value: int, dim: int = -1) -> Taken | None:
        """How the features of a value are taken apart further on."""
        return self._readers.taken_apart(value, dim)

    def product_taken_apart(self, product: Product) -> Taken | None:
        """How the features of a product in a body are taken apart further on."""
        return taken_apart(product.parts, self._readers)

    def bare_tables(self, called: Collection[str]) -> dict[str, BareTable]:
        """The parameters in which bodies look up rows by themselves, other than those of the tables `called`."""
        found = bare_tables(self.trace)
        return {n: t for n, t in found.items() if not any(other.rpartition(".")[0] in called for other in t.names)}

    def split_columns(self, packs: Mapping[str, tuple[NamedPack, ...] | None]) -> ColumnSplits:
        """What `colwise` rules with these packs make of modules, each by itself."""
        rules = [Rule(Pattern.parse(name), Style.COLWISE, packed=named) for name, named in packs.items()]
        binding, findings = bind_rules(self.model, Plan(rules=tuple(rules)))
        binding, unwrapped, _ = unwrap(self.model, self._flow, binding)
        findings = [*findings, *unwrapped]
        split = pack(self.model, self._flow, _without_conflicts(binding, findings), self.size)
        problems = _problems([*findings, *split.findings])
        modules = split.binding.modules
        inside = {_layer_of(held): held for held in modules.values()}  # of computed weights
        inside |= {_layer_of(held): held for held in modules.values() if held.style is Style.COLWISE}
        own = {name: held for name, held in modules.items() if held.style is not Style.NONE}
        bound = {name: own.get(name) or inside.get(name) for name in packs}
        made = {name: held for name, held in bound.items() if held is not None and name not in problems}
        return ColumnSplits(
            {name: held.packs for name, held in made.items() if held.style is Style.COLWISE},
            frozenset(name for name, held in made.items() if held.style is not Style.COLWISE),
            {name: problems.get(name, "it can't be split") for name in packs if name not in made},
            split.heads,
        )

    def refused(self, rules: Sequence[Rule]) -> dict[str, str]:
        """The modules to which rules can't be applied, with the reason."""
        return _problems(bind(self.model, Plan(rules=tuple(rules)), self.size)[1])


def _layer_of(bound: Bound) -> str:
    """The layer for whose rule a part of its weight is bound."""
    return layer_of(bound.name) or bound.wrapper or (bound.name.rpartition(".")[0] if bound.is_parameter else "")


def stored_names(model: nn.Module) -> list[str]:
    """The names of all parameters and buffers."""
    return [name for name, _ in stored_tensors(model)]


def is_norm(region: Region) -> bool:
    """Whether a body is a norm of its first input, which a second one may gate."""
    recognised = recognise(region) if len(region.entries) == 1 else recognise_gated(region)
    return isinstance(recognised, Norm)


def is_grouped_convolution(node: OperationNode) -> bool:
    """Whether an operation is a convolution of each channel, or of groups of them."""
    return node.is_a("convolution") and node.arguments[GROUPS] > 1


def keeps_channels(node: OperationNode) -> bool:
    """Whether an operation makes each channel of that of its operands: one entry by entry, or a norm of channels."""
    return node.is_a("group norm", "batch norm") or is_entrywise(node.name)


def channel_norm_weight(node: OperationNode, channels: Layout) -> Layout | None:
    """The layout of what norms each channel or group of them, for channels that lie so; None for other operations."""
    return replace(channels, dim=0) if node.is_a("group norm", "batch norm") and channels.dim == 1 else None


def convolution_weight(node: OperationNode, region: Region, channels: Layout, size: int) -> Layout | None:
    """The layout of a convolution's weight that goes with that of its channels; None if there is none."""
    layout = weight_layout(node.arguments, region.values, channels, size)
    return layout if isinstance(layout, Layout) else None


def _without_conflicts(binding: Binding, findings: Sequence[Diagnostic]) -> Binding:
    bad = _problems(findings)
    return replace(binding, modules={name: bound for name, bound in binding.modules.items() if name not in bad})


def _problems(findings: Sequence[Diagnostic]) -> dict[str, str]:
    return {d.subject or "": d.message for d in findings if d.severity is Severity.ERROR}


__all__ = [
    "Addend", "BareTable",
    "ColumnSplits", "ComputedWeight", "LinearForm", "Outcome", "Product", "Refusal", "Rules", "Study", "Taken",
    "channel_norm_weight", "convolution_weight", "is_grouped_convolution", "is_norm",
    "keeps_channels", "layer_of", "linear_form", "same_files", "stored_names",
]  # fmt: skip
