"""Subject: the model that a plan is looked for, as the compiler sees it.

in:  a model, an example call, the number of ranks
out: `Subject`: its trace, its linear layers with what a column split makes of their results, its embedding tables

    q_proj = nn.Linear(48, 48), viewed as 8 heads   ->   Column(S(2)); rows: yes
    c_attn = Conv1D(144, 48), split in three        ->   Column(S(2, packs=48|48|48), packed: [q, k, v])
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from tpplan.compat import named_modules
from tpplan.compiler.bind.bind import Binding, bind
from tpplan.compiler.bind.linear import Addend, LinearForm, Product, linear_form
from tpplan.compiler.bind.packing import pack, taken_apart
from tpplan.compiler.bind.products import ENTRYWISE_OF_TWO, derived, find_buffer_use, find_use
from tpplan.compiler.bind.readers import Readers, Taken
from tpplan.compiler.bind.regions import build_regions
from tpplan.compiler.explain.captures import of_capture
from tpplan.compiler.ir.dataflow import DataFlow
from tpplan.compiler.ir.layout import Pack as Stretch
from tpplan.compiler.ir.region import Instance
from tpplan.compiler.ir.trace import Frame, Operation, Trace
from tpplan.compiler.rules.packed import VIEWS
from tpplan.compiler.rules.propagate import NEW
from tpplan.compiler.trace.branches import record_model
from tpplan.compiler.trace.preconditions import unfit_findings
from tpplan.plan import CompileError, Diagnostic, Plan, Rule, Severity, Style
from tpplan.plan.pattern import Pattern
from tpplan.plan.rules import Pack


@dataclass(frozen=True, slots=True)
class Column:
    """What a column split of a linear layer makes of its result.

    Attributes:
        packed: the packs that the plan has to name; None if it packs nothing.
        stretches: the packs of the sharded result; empty if it is one plain stretch.
    """

    packed: tuple[Pack, ...] | None
    stretches: tuple[Stretch, ...]

    def is_whole(self, size: int) -> bool:
        """Whether each of `size` ranks holds all of it: a single head."""
        return bool(self.stretches) and all(p.replicas == size for p in self.stretches)


@dataclass(frozen=True, slots=True)
class Subject:
    """A model to suggest a plan for.

    Attributes:
        model, size: the model and the number of ranks.
        arguments, keywords: the example call.
        trace: one run of it.
        root: its calls, over shared regions.
        linears: the linear layers that are called, by name.
        products: parameters that a body multiplies by without calling a layer for it, by name.
        addends: parameters that a body adds to a product, and these or buffers that may stand beside features, by name.
        heads: the numbers of heads into which split features are viewed.
        beside: bare parameters and buffers that may stand beside features or heads, with the dim that counts these, by
            the values that are made of them, and of no data.
        weights: the number of entries of each layer's or product's weight, by name.
        columns: the ways to split the output features of layers and products, where they can be split, the simplest
            first; and those of tables.
        unsplittable: why the others' can't.
        tables: the embedding tables that are called, by name.
    """

    model: nn.Module
    size: int
    arguments: Sequence[Any]
    keywords: Mapping[str, Any]
    trace: Trace
    root: Instance
    linears: dict[str, LinearForm]
    products: dict[str, Product]
    addends: dict[str, Addend]
    heads: frozenset[int]
    beside: dict[int, dict[str, int]]
    weights: dict[str, int]
    columns: dict[str, tuple[Column, ...]]
    unsplittable: dict[str, str]
    tables: dict[str, nn.Embedding]


def make_subject(model: nn.Module, size: int, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Subject:
    """Capture `model` on an example call and find its linear layers.

    Raises:
        CompileError: the model can't be captured or compiled at all.
    """
    unfit = unfit_findings(model)
    if unfit:
        raise CompileError(unfit)
    trace = _captured(model, arguments, keywords)
    frames: dict[str, Frame] = {}
    for frame in trace.root.walk():
        frames.setdefault(frame.module, frame)
    called = [(name, module) for name, module in named_modules(model) if name in frames]
    linears = {
        name: form for name, module in called if (form := linear_form(module)) is not None and _is_plain(frames[name])
    }
    tables = {name: module for name, module in called if isinstance(module, nn.Embedding)}
    flow = DataFlow(trace)
    readers = Readers(flow)
    products, addends = _bare_parameters(readers, {*linears, *tables})
    made = {name: (frames[name].exits[0].target, -1) for name in linears}
    counts = {name: form.outputs for name, form in linears.items()}
    counts |= {name: sum(part.outputs for part in product.parts) for name, product in products.items()}
    taken = {name: readers.taken_apart(value, dim) for name, (value, dim) in made.items()}
    taken |= {name: taken_apart(product.parts, readers) for name, product in products.items()}
    columns, unsplittable, heads = _columns(model, flow, taken, counts, size)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters(remove_duplicate=False)}
    weights = {name: form.inputs * form.outputs for name, form in linears.items()} | {n: sizes[n] for n in products}
    wide = {name for name, table in tables.items() if table.embedding_dim % size == 0}
    columns |= {name: (Column(None, ()),) for name in wide}
    root = build_regions(trace, bind(model, Plan(), size)[0])
    return Subject(
        model, size, arguments, keywords, trace, root, linears, products, addends, heads, _beside(readers, addends),
        weights, columns, unsplittable, tables,
    )  # fmt: skip


def columns_with_packs(subject: Subject, packs: Mapping[str, tuple[int, ...]]) -> dict[str, Column]:
    """What splits with packs of these sizes make of layers, where the compiler knows any."""
    named = {name: pack_names(sizes, exact=True) for name, sizes in packs.items()}
    counts = {name: sum(sizes) for name, sizes in packs.items()}
    return _split(subject.model, DataFlow(subject.trace), counts, named, subject.size)[0]


def _beside(readers: Readers, addends: Mapping[str, Addend]) -> dict[int, dict[str, int]]:
    found: dict[int, dict[str, int]] = {}
    for parameter, (name, *_) in readers.trace.stored.items():
        addend = addends.get(name)
        if addend is None or (addend.is_added and len(readers.trace.values[parameter].shape) != 1):
            continue
        for value, dims in derived(readers, parameter):
            if addend.output_dim in dims:
                found.setdefault(value, {})[name] = dims.index(addend.output_dim)
    _meet(readers.trace, found)
    return found


def _meet(trace: Trace, found: dict[int, dict[str, int]]) -> None:
    """Note where such values go on in what entrywise operations make of them and of other tensors without data."""
    dynamic = set(trace.inputs)
    dynamic.update(c.target for frame in trace.root.walk() for c in (*frame.entries, *frame.exits))
    for frame in trace.root.walk():
        for node in frame.body:
            if not isinstance(node, Operation) or node.name in NEW:
                continue
            made = [o for o in node.outputs if o is not None]
            if not dynamic.isdisjoint(node.inputs):
                dynamic.update(made)
            elif node.name in ENTRYWISE_OF_TWO and len(made) == 1:
                after = trace.values[made[0]].shape
                for value in node.inputs:
                    before = trace.values[value].shape
                    for name, dim in found.get(value, {}).items():
                        place = dim + len(after) - len(before)
                        if after[place] == before[dim]:
                            found.setdefault(made[0], {})[name] = place


def _bare_parameters(readers: Readers, called: Collection[str]) -> tuple[dict[str, Product], dict[str, Addend]]:
    """What bodies do with parameters that no called layer or table holds."""
    products: dict[str, Product] = {}
    addends: dict[str, Addend] = {}
    for value, (name, *others) in readers.trace.parameters.items():
        if any(n.rpartition(".")[0] in called for n in (name, *others)):
            continue
        use = find_use(readers, value)
        if isinstance(use, Product):
            products[name] = use
        elif isinstance(use, Addend):
            addends[name] = use
    for value, (name, *_) in readers.trace.buffers.items():
        if (use := find_buffer_use(readers, value)) is not None:
            addends[name] = use
    return products, addends


def _captured(model: nn.Module, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Trace:
    errors: list[BaseException] = []
    for training in (True, False):
        try:
            return record_model(model, arguments, keywords, training)[0]
        except Exception as error:  # whatever the model raises is the finding
            errors.append(error)
    raise CompileError([of_capture(errors[-1])])


def _is_plain(frame: Frame) -> bool:
    return len(frame.entries) == 1 and len(frame.exits) == 1


def _columns(
    model: nn.Module,
    flow: DataFlow,
    taken: Mapping[str, Taken | None],
    counts: Mapping[str, int],
    size: int,
) -> tuple[dict[str, tuple[Column, ...]], dict[str, str], frozenset[int]]:
    """Let the compiler say of every layer and product by itself what a column split makes of it.

    Args:
        model, flow, size: the model, one run of it, and the number of ranks.
        taken: by name, how its features are taken apart further on.
        counts: by name, how many features it makes.
    """
    plain: dict[str, tuple[Pack, ...] | None] = {}
    parted: dict[str, tuple[Pack, ...] | None] = {}
    finer: dict[str, tuple[Pack, ...] | None] = {}
    for name, held in taken.items():
        several = held is not None and len(held.stretches) > 1
        if held is None or not several or held.operation.name in VIEWS:
            plain[name] = None  # a view of heads may hold q, k and v of each head together
        if held is not None and several:
            parted[name] = pack_names(held.stretches)
        if held is not None and held.finer is not None:
            finer[name] = pack_names(held.finer.stretches)
    columns: dict[str, tuple[Column, ...]] = {}
    reasons: dict[str, str] = {}
    heads: frozenset[int] = frozenset()
    for packs in (plain, parted, finer):
        found, problems, viewed = _split(model, flow, counts, packs, size)
        reasons |= problems
        heads |= viewed
        for name, column in found.items():
            columns[name] = (*columns.get(name, ()), column)
    return columns, {name: reason for name, reason in reasons.items() if name not in columns}, heads


def _split(
    model: nn.Module,
    flow: DataFlow,
    counts: Mapping[str, int],
    packs: Mapping[str, tuple[Pack, ...] | None],
    size: int,
) -> tuple[dict[str, Column], dict[str, str], frozenset[int]]:
    """The columns that the compiler makes of these modules, each by itself, and what it says of the others."""
    rules = tuple(Rule(Pattern.parse(name), Style.COLWISE, packed=held) for name, held in packs.items())
    binding, found = bind(model, Plan(rules=rules), size)
    split = pack(model, flow, _without_conflicts(binding, found), size)
    problems = {d.subject or "": d.message for d in (*found, *split.findings) if d.severity is Severity.ERROR}
    columns: dict[str, Column] = {}
    reasons: dict[str, str] = {}
    for name, held in packs.items():
        bound = split.binding.modules.get(name)
        if bound is None or name in problems:
            reasons[name] = problems.get(name, "it can't be split")
        elif bound.style is Style.COLWISE:
            columns[name] = Column(held, bound.packs)
        else:  # a single head, held by every rank
            columns[name] = Column(held, (Stretch(counts[name], size),))
    return columns, reasons, split.heads


def _without_conflicts(binding: Binding, found: Sequence[Diagnostic]) -> Binding:
    bad = {d.subject for d in found if d.severity is Severity.ERROR}
    return replace(binding, modules={name: held for name, held in binding.modules.items() if name not in bad})


def pack_names(sizes: Sequence[int], exact: bool = False) -> tuple[Pack, ...]:
    """Names for the packs of one projection; with sizes where these differ, or where `exact` ones are wanted."""
    usual = {} if exact else {2: ("gate", "up"), 3: ("q", "k", "v")}
    names = usual.get(len(sizes), tuple(f"part{i}" for i in range(len(sizes))))
    even = len(set(sizes)) == 1 and not exact
    return tuple(Pack(name, None if even else count) for name, count in zip(names, sizes, strict=True))
