"""Subject: the model that a plan is looked for, as the compiler sees it.

in:  a model, an example call, the number of ranks
out: `SuggestSubject`: its trace, its linear layers with what a column split makes of results, its embedding tables

    q_proj = nn.Linear(48, 48), viewed as 8 heads   ->   Column(S(2)); rows: yes
    c_attn = Conv1D(144, 48), split in three        ->   Column(S(2, packs=48|48|48), packed: [q, k, v])
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from tpplan.compat.modules import named_modules, parametrized_tensors
from tpplan.compiler.ir.layout import Features
from tpplan.compiler.ir.layout import Pack as Stretch
from tpplan.compiler.ir.region import Instance
from tpplan.compiler.ir.trace import Frame, Operation, Trace
from tpplan.compiler.queries import (
    Addend,
    BareTable,
    ComputedWeight,
    LinearForm,
    Product,
    Study,
    Taken,
    layer_of,
    linear_form,
)
from tpplan.ops.registry import is_entrywise
from tpplan.plan.rules import NamedPack


@dataclass(frozen=True, slots=True)
class Column:
    """What a column split of a linear layer makes of its result.

    Attributes:
        packed: the packs that the plan has to name; None if it packs nothing.
        stretches: the packs of the sharded result; empty if it is one plain stretch.
    """

    packed: tuple[NamedPack, ...] | None
    stretches: tuple[Stretch, ...]

    def is_whole(self, size: int) -> bool:
        """Whether each of `size` ranks holds all of it: a single head."""
        return bool(self.stretches) and all(p.replicas == size for p in self.stretches)


@dataclass(frozen=True, slots=True)
class SuggestSubject:
    """A model to suggest a plan for.

    Attributes:
        study: what the compiler says of the model.
        arguments, keywords: the example call.
        linears: the linear layers that are called, by name.
        products: parameters that a body multiplies by without calling a layer for it, by name.
        turned: products by which a body contracts what a layer makes, with that layer's own weight, by its name.
        addends: parameters that a body adds to a product, and these or buffers that may stand beside features, by name.
        heads: the numbers of heads into which split features are viewed, as packs.
        beside: bare parameters and buffers that may stand beside features or heads, with the dim that counts these, by
            the values that are made of them, and of no data.
        weights: the number of entries of each layer's or product's weight, by name.
        columns: the ways to split the output features of layers and products, where they can be split, the simplest
            first; and those of tables.
        unsplittable: why the others' can't.
        tables: the embedding tables that are called, by name.
        bags: those that reduce the rows they read.
        bare: parameters in which bodies look up rows themselves, by name.
        rehearsed: whether a trial is rehearsed as well: the plan that was found without couldn't run.
    """

    study: Study
    arguments: Sequence[Any]
    keywords: Mapping[str, Any]
    linears: dict[str, LinearForm]
    products: dict[str, Product]
    turned: dict[str, list[Product]]
    addends: dict[str, Addend]
    heads: Features
    beside: dict[int, dict[str, int]]
    weights: dict[str, int]
    columns: dict[str, tuple[Column, ...]]
    unsplittable: dict[str, str]
    tables: dict[str, nn.Embedding]
    bags: dict[str, nn.EmbeddingBag]
    bare: dict[str, BareTable]
    rehearsed: bool = False

    @property
    def model(self) -> nn.Module:
        """The model."""
        return self.study.model

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.study.size

    @property
    def layers(self) -> dict[str, LinearForm | Product]:
        """The linear layers that are called, and those that compute their weight in their own forward."""
        called = {frame.module for frame in self.trace.root.walk()}
        products = ((name, form) for name, form in self.products.items() if name in called)
        return self.linears | {name: form for name, form in products if form.given_dim is None}

    @property
    def trace(self) -> Trace:
        """One run of the model."""
        return self.study.trace

    @property
    def root(self) -> Instance:
        """Its calls, over shared regions."""
        return self.study.root


def make_subject(model: nn.Module, size: int, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> SuggestSubject:
    """Capture `model` on an example call and find its linear layers.

    Raises:
        CompileError: the model can't be captured or compiled at all.
    """
    study = Study(model, size, arguments, keywords)
    trace = study.trace
    frames: dict[str, Frame] = {}
    for frame in trace.root.walk():
        if frame.module not in frames or not frames[frame.module].exits:  # whose result nobody reads
            frames[frame.module] = frame
    called = [(name, module) for name, module in named_modules(model) if name in frames]
    computed = study.computed_weights()
    forms = ((name, _linear(module, computed.get(name))) for name, module in called if _is_plain(frames[name]))
    linears = {name: form for name, form in forms if form is not None}
    tables = {name: module for name, module in called if isinstance(module, nn.Embedding)}
    bags = {name: module for name, module in called if isinstance(module, nn.EmbeddingBag)}
    products, addends = _bare_parameters(study, {*linears, *tables, *bags}, computed)
    counts = {name: form.outputs for name, form in linears.items()}
    counts |= {name: sum(part.outputs for part in product.parts) for name, product in products.items()}
    taken = {name: study.taken_apart(frames[name].exits[0].target) for name in linears}
    taken |= {name: study.product_taken_apart(product) for name, product in products.items()}
    parts = {n: tuple(part.outputs for part in product.parts) for n, product in products.items() if product.following}
    columns, unsplittable, heads = _columns(study, taken, counts, parts)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters(remove_duplicate=False)}
    weights = {name: form.inputs * form.outputs for name, form in linears.items()}
    weights |= {n: _computed_size(n, computed[n], sizes) if n in computed else sizes[n] for n in products}
    wide = {name for name, table in tables.items() if table.embedding_dim % size == 0}
    columns |= {name: (Column(None, ()),) for name in wide}
    beside = _beside(study, addends, computed)
    turned = dict(study.turned_products(name, form) for name, form in linears.items())
    return SuggestSubject(
        study, arguments, keywords, linears, products, turned, addends, heads, beside, weights, columns, unsplittable,
        tables, bags, study.bare_tables({*tables, *bags}),
    )  # fmt: skip


def columns_with_packs(subject: SuggestSubject, packs: Mapping[str, tuple[int, ...]]) -> dict[str, Column]:
    """What splits with packs of these sizes make of layers, where the compiler knows any."""
    named = {name: pack_names(sizes, exact=True) for name, sizes in packs.items()}
    counts = {name: sum(sizes) for name, sizes in packs.items()}
    return _split(subject.study, counts, named)[0]


def _beside(
    study: Study, addends: Mapping[str, Addend], computed: Mapping[str, ComputedWeight]
) -> dict[int, dict[str, int]]:
    beside: dict[int, dict[str, int]] = {}
    held = [(parameter, names[0]) for parameter, names in study.trace.stored.items()]
    for parameter, name in [*held, *((weight.made, name) for name, weight in computed.items())]:
        addend = addends.get(name)
        if addend is None or (addend.is_added and len(study.trace.values[parameter].shape) != 1):
            continue
        for value, dims in study.derived_from(parameter):
            if addend.output_dim in dims:
                beside.setdefault(value, {})[name] = dims.index(addend.output_dim)
    _carry_on(study.trace, beside)
    return beside


def _carry_on(trace: Trace, beside: dict[int, dict[str, int]]) -> None:
    """Note where such values go on: in what operations on each entry make of them and of other tensors without data.

    And where those that were joined are taken apart again.
    """
    joined: dict[int, list[int]] = {}
    dynamic = set(trace.inputs)
    dynamic.update(c.target for frame in trace.root.walk() for c in (*frame.entries, *frame.exits))
    for frame in trace.root.walk():
        for node in frame.body:
            if not isinstance(node, Operation) or node.is_a("new"):
                continue
            made = [o for o in node.outputs if o is not None]
            if node.is_a("join") and all(len(trace.values[value].shape) == 1 for value in node.inputs):
                joined[made[0]] = [*node.inputs]
            elif node.is_a("split") and node.inputs[0] in joined:
                before = joined[node.inputs[0]]
                if [trace.values[o].shape for o in made] == [trace.values[value].shape for value in before]:
                    for value, part in zip(before, made, strict=True):
                        beside.setdefault(part, {}).update(beside.get(value, {}))
            if not dynamic.isdisjoint(node.inputs):
                dynamic.update(made)
            elif is_entrywise(node.name) and len(made) == 1:
                after = trace.values[made[0]].shape
                for value in node.inputs:
                    before = trace.values[value].shape
                    for name, dim in beside.get(value, {}).items():
                        place = dim + len(after) - len(before)
                        if after[place] == before[dim]:
                            beside.setdefault(made[0], {})[name] = place


def _linear(module: nn.Module, computed: ComputedWeight | None) -> LinearForm | None:
    """What linear layer a module is; also one of torch's own whose weight is computed."""
    if not parametrized_tensors(module):
        return linear_form(module)
    use = None if computed is None else computed.use
    stock = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    return LinearForm(use.inputs, use.outputs, False) if stock and isinstance(use, Product) else None


def _computed_size(layer: str, weight: ComputedWeight, sizes: Mapping[str, int]) -> int:
    """The number of entries of all that a layer's weight is computed of."""
    return sum(count for name, count in sizes.items() if layer_of(name) == layer or name in weight.members)


def _bare_parameters(
    study: Study, called: Collection[str], computed: Mapping[str, ComputedWeight]
) -> tuple[dict[str, Product], dict[str, Addend]]:
    """What bodies do with parameters and buffers that no called layer or table has; computed weights go by layers."""
    uses = {name: weight.use for name, weight in computed.items() if name not in called}
    members = frozenset(name for weight in computed.values() if weight.in_body for name in weight.members)
    products = {name: use for name, use in uses.items() if isinstance(use, Product)}
    addends = {name: use for name, use in uses.items() if isinstance(use, Addend)}
    for value, names in study.trace.stored.items():
        if value in study.trace.parameters and any(n.rpartition(".")[0] in called for n in names):
            continue
        use = None if any(map(layer_of, names)) else study.use_of(value)
        if isinstance(use, Product) and members.isdisjoint(names):
            products[names[0]] = use
        elif isinstance(use, Addend):
            addends[names[0]] = use
    return products, addends


def _is_plain(frame: Frame) -> bool:
    return len(frame.entries) == 1 and len(frame.exits) == 1


def _columns(
    study: Study, taken: Mapping[str, Taken | None], counts: Mapping[str, int], parts: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, tuple[Column, ...]], dict[str, str], Features]:
    """Let the compiler say of every layer and product by itself what a column split makes of it.

    Args:
        study: the model.
        taken: by name, how its features are taken apart further on.
        counts: by name, how many features it makes.
        parts: the features of those that a body takes apart before it multiplies by them.
    """
    plain: dict[str, tuple[NamedPack, ...] | None] = {}
    parted: dict[str, tuple[NamedPack, ...] | None] = {}
    finer: dict[str, tuple[NamedPack, ...] | None] = {}
    for name, held in taken.items():
        several = held is not None and len(held.stretches) > 1
        if held is None and name in parts:
            parted[name] = pack_names(parts[name])
        elif held is None or not several or held.operation.is_a("reshape"):
            plain[name] = None  # a view of heads may hold q, k and v of each head together
        if held is not None and several:
            parted[name] = pack_names(held.stretches)
        if held is not None and held.finer is not None:
            finer[name] = pack_names(held.finer.stretches)
    columns: dict[str, tuple[Column, ...]] = {}
    reasons: dict[str, str] = {}
    heads: Features = frozenset()
    for packs in (plain, parted, finer):
        split, problems, viewed = _split(study, counts, packs)
        reasons |= problems
        heads |= viewed
        for name, column in split.items():
            columns[name] = (*columns.get(name, ()), column)
    return columns, {name: reason for name, reason in reasons.items() if name not in columns}, heads


def _split(
    study: Study, counts: Mapping[str, int], packs: Mapping[str, tuple[NamedPack, ...] | None]
) -> tuple[dict[str, Column], dict[str, str], Features]:
    """The columns that the compiler makes of these modules, each by itself, and what it says of the others."""
    split = study.split_columns(packs)
    columns = {name: Column(packs[name], stretches) for name, stretches in split.packs.items()}
    columns |= {name: Column(packs[name], (Stretch(counts[name], study.size),)) for name in split.whole}
    return columns, split.refused, split.heads


def pack_names(sizes: Sequence[int], exact: bool = False) -> tuple[NamedPack, ...]:
    """Names for the packs of one projection; with sizes where these differ, or where `exact` ones are wanted."""
    usual = {} if exact else {2: ("gate", "up"), 3: ("q", "k", "v")}
    names = usual.get(len(sizes), tuple(f"part{i}" for i in range(len(sizes))))
    even = len(set(sizes)) == 1 and not exact
    return tuple(NamedPack(name, None if even else count) for name, count in zip(names, sizes, strict=True))
