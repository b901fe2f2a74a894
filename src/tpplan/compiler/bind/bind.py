"""Bind: what the plan says of each module or bare parameter, and what follows for the parameters.

in:  a plan and the model's modules and parameters
out: `Binding`: a style and a rule for modules, a layout for every parameter; and diagnostics

    model.layers.*.mlp.down_proj: rowwise   ->   layers.0.mlp.down_proj: rowwise, its weight S(1), its bias R
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from torch import Tensor, nn

from tpplan.compat.modules import named_modules, parametrized_tensors
from tpplan.compiler.bind.linear import Addend, LinearForm, Product, linear_form
from tpplan.compiler.bind.misfits import may_compute, may_wrap, misfit
from tpplan.compiler.bind.recurrent_layers import recurrence
from tpplan.compiler.ir.layout import PARTIAL, REPLICATED, Layout, Pack, packed, sharded
from tpplan.compiler.ir.replaced_bodies import Recurrence, SharedExperts
from tpplan.plan import Diagnostic, Pin, Plan, Rule, Style
from tpplan.plan.match import of_a_part
from tpplan.plan.shipped import naming_shipped

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Bound:
    """A module, or a parameter that a body reads by itself, with a rule.

    Attributes:
        name, style, rule: the name, and what the plan says of it.
        form: what linear layer it is, or what is done with the parameter, for `colwise` and `rowwise`.
        packs: the stretches of the split features, if they are several or have several holders.
        is_parameter: whether it is a parameter or a buffer.
        walked: whether its own code runs on shards, although its style has a body of the runtime's: the two aren't the
            same by the trace.
        wrapper: the module whose rule this is, if that holds this one and others; see `wrappers`.
        experts: whose experts, or which, if each rank holds whole ones; see `experts`.
        whole: how a parameter of such experts lies.
        recurrent: what recurrent layer it is, if its hidden state is split; see `recurrent`.
        group: of a layer in an expert that some of the ranks share: so many, and from which one on; see
            `expert_groups`.
    """

    name: str
    style: Style
    rule: Rule
    form: LinearForm | Product | Addend | None = None
    packs: tuple[Pack, ...] = ()
    is_parameter: bool = False
    walked: bool = False
    wrapper: str = ""
    experts: SharedExperts | None = None
    whole: Layout | None = None
    recurrent: Recurrence | None = None
    group: tuple[int, int] = (0, 0)

    @property
    def input(self) -> Pin | None:
        """What the rule demands of the input of this module."""
        return None if self.wrapper else self.rule.input

    @property
    def output(self) -> Pin | None:
        """What the rule demands of the result of this module."""
        return None if self.wrapper else self.rule.output

    def layout_of(self, leaf: str) -> Layout | None:
        """What the style makes of a parameter of the module, or of the bare one; None if it leaves it whole."""
        if self.style is Style.VOCAB:
            return sharded(0) if leaf == "weight" or self.is_parameter else None
        if self.whole is not None:
            return self.whole
        if self.recurrent is not None:
            return packed(0, (Pack(self.recurrent.features),) * self.recurrent.gates)
        if self.form is None or self.style not in (Style.COLWISE, Style.ROWWISE):
            return None
        columns = self.style is Style.COLWISE
        if isinstance(self.form, Addend):
            # What is added to a partial product is added on one rank.
            return packed(self.form.output_dim, self.packs) if columns else PARTIAL
        if leaf == "bias":
            # Its own code adds a row's bias to a partial product: that is added on one rank.
            return packed(0, self.packs) if columns else PARTIAL if self.walked else None
        return packed(self.form.output_dim if columns else self.form.input_dim, self.packs)


@dataclass(frozen=True, slots=True)
class Binding:
    """What the plan says.

    Attributes:
        modules: by qualified name, of modules and of parameters; without a rule, or with style `none`, they're absent.
        parameters: the layout of every parameter and buffer, by each of its names.
        owners: the rule that sharded one of these, by each of its names.
        wrappers: modules with a rule for layers that are none, but may wrap one; with what is wrong unless they do.
    """

    modules: dict[str, Bound]
    parameters: dict[str, Layout]
    owners: dict[str, Bound]
    wrappers: dict[str, Diagnostic] = field(default_factory=dict[str, Diagnostic])

    def first_inside(self, module: str) -> Bound | None:
        """The first rule on `module` or on a module in it."""
        return next(
            (b for name, b in self.modules.items() if name == module or not module or name.startswith(f"{module}.")),
            None,
        )


def bind(model: nn.Module, plan: Plan, size: int) -> tuple[Binding, list[Diagnostic]]:
    """Match the plan's rules to `model` for an axis of `size` ranks; what is no layer counts as a mistake."""
    binding, findings = bind_rules(model, plan)
    return binding, once([*findings, *binding.wrappers.values()])


def bind_rules(model: nn.Module, plan: Plan) -> tuple[Binding, list[Diagnostic]]:
    """Match the plan's rules to `model`; the trace will tell whether modules that are no layers wrap one."""
    modules = dict(named_modules(model, remove_duplicate=False))
    parameters = [name for name, _ in stored_tensors(model)]
    matched = plan.match((name for name in modules if name), parameters)
    architecture = getattr(getattr(model, "config", None), "model_type", None)
    diagnostics = naming_shipped(of_a_part(matched), type(model).__name__, architecture, plan.name)
    bound: dict[str, Bound] = {}
    wrappers: dict[str, Diagnostic] = {}
    for name, rule in matched.rules.items():
        if rule.style is Style.NONE:
            continue
        if name not in modules:
            if rule.style in (Style.COLWISE, Style.ROWWISE, Style.VOCAB, Style.REPLICATE):
                bound[name] = Bound(name, rule.style, rule, is_parameter=True)
            else:
                diagnostics.append(_not_for_parameters(name, rule))
            continue
        problem = misfit(modules[name], name, rule, modules.get(name.rpartition(".")[0]))
        if problem is None:
            recurrent = recurrence(modules[name]) if rule.style is Style.COLWISE else None
            form = None if parametrized_tensors(modules[name]) else linear_form(modules[name])
            bound[name] = Bound(name, rule.style, rule, form, recurrent=recurrent)
        elif problem.code == "TP101" and rule.style is not Style.EXPERTS and _may_hold_a_layer(modules[name]):
            bound[name], wrappers[name] = Bound(name, rule.style, rule), problem
        else:
            diagnostics.append(problem)
    diagnostics += _of_one_module(modules, bound, wrappers)
    binding, conflicts = bind_parameters(model, bound)
    return replace(binding, wrappers=_under_first_names(model, wrappers)), once(diagnostics + conflicts)


def unlike_layers(model: nn.Module, binding: Binding) -> list[Diagnostic]:
    """What is wrong with modules that wrap no layer; of those that may compute a weight, the trace will tell."""
    modules = dict(named_modules(model, remove_duplicate=False))
    return [problem for name, problem in binding.wrappers.items() if not _has_own_forward(modules[name])]


def _has_own_forward(module: nn.Module) -> bool:
    return may_compute(module) and type(module).forward.__module__.partition(".")[0] != "torch"


def _may_hold_a_layer(module: nn.Module) -> bool:
    return may_wrap(module) or may_compute(module)


def stored_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """The parameters and then the buffers of a model, by each of their names."""
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def bind_parameters(model: nn.Module, bound: dict[str, Bound]) -> tuple[Binding, list[Diagnostic]]:
    """The binding for these modules, by any of their names."""
    parameters, owners, conflicts = _parameter_layouts(model, bound)
    bare = {name: held for name, held in bound.items() if held.is_parameter}
    return Binding(bare | _under_first_names(model, bound), parameters, owners), conflicts


def _under_first_names(model: nn.Module, bound: Mapping[str, _T]) -> dict[str, _T]:
    """What is said of modules: one reachable by several names is traced under its first."""
    first: dict[int, str] = {}
    named: dict[str, _T] = {}
    for name, module in named_modules(model, remove_duplicate=False):
        first.setdefault(id(module), name)
        if name in bound:
            named.setdefault(first[id(module)], bound[name])
    return named


def _not_for_parameters(name: str, rule: Rule) -> Diagnostic:
    return Diagnostic(
        code="TP101",
        message=f"`{rule.style}` is for modules, but `{name}` is a parameter",
        span=rule.style_span,
        label=f"`{name}` is a parameter",
        help="a parameter can be `colwise`, `rowwise`, `vocab` or `replicate`",
        subject=name,
    )


def _parameter_layouts(
    model: nn.Module, bound: dict[str, Bound]
) -> tuple[dict[str, Layout], dict[str, Bound], list[Diagnostic]]:
    names_of: dict[int, list[str]] = {}
    for name, parameter in stored_tensors(model):
        names_of.setdefault(id(parameter), []).append(name)
    layouts: dict[str, Layout] = {}
    owners: dict[str, Bound] = {}
    diagnostics: list[Diagnostic] = []
    for names in names_of.values():
        wanted: dict[str, tuple[Layout, Bound]] = {}
        for name in names:
            module, _, leaf = name.rpartition(".")
            holder = bound.get(name) or bound.get(module)
            layout = holder.layout_of(leaf) if holder is not None else None
            if holder is not None and layout is not None:
                wanted[name] = (layout, holder)
        choices = {layout for layout, _ in wanted.values()}
        if len(choices) > 1:
            (first, (_, one)), (second, (_, other)), *_ = wanted.items()
            diagnostics.append(_conflict(f"`{first}` and `{second}` are one parameter", one, other))
        layout, owner = next(iter(wanted.values()), (REPLICATED, None))
        for name in names:
            layouts[name] = layout
            if owner is not None:
                owners[name] = owner
    return layouts, owners, diagnostics


def _of_one_module(
    modules: Mapping[str, nn.Module], bound: Mapping[str, Bound], wrappers: Collection[str]
) -> list[Diagnostic]:
    """TP109 for a module of several names with several styles, of which no parameter is known yet that tells."""
    first: dict[int, Bound] = {}
    pairs = [(first.setdefault(id(modules[name]), bound[name]), bound[name]) for name in wrappers]
    return [_conflict(f"`{a.name}` and `{b.name}` are one module", a, b) for a, b in pairs if a.style is not b.style]


def _conflict(which: str, one: Bound, other: Bound) -> Diagnostic:
    return Diagnostic(
        code="TP109",
        message=f"{which}, but `{one.style}` and `{other.style}` split it differently",
        span=other.rule.style_span,
        help=f"give both modules styles that split the same dim (`vocab` and `colwise` agree); "
        f"the other rule is at {one.rule.origin}",
        subject=other.name,
    )


def once(diagnostics: list[Diagnostic]) -> list[Diagnostic]:
    """Of diagnostics that a pattern causes on many modules alike, the first, with the number of the others."""
    grouped: dict[tuple[object, ...], list[Diagnostic]] = {}
    for diagnostic in diagnostics:
        place = diagnostic.span if diagnostic.span is not None else diagnostic.message
        grouped.setdefault((diagnostic.code, place), []).append(diagnostic)
    merged: list[Diagnostic] = []
    for first, *rest in grouped.values():
        merged.append(_with_note(first, rest))
    return merged


def _with_note(first: Diagnostic, rest: list[Diagnostic]) -> Diagnostic:
    return replace(first, notes=(*first.notes, f"the same holds for {len(rest)} more")) if rest else first
