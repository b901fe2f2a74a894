"""Expert groups: experts that are shared out over groups of ranks, and split inside over the ranks of their group.

in:  a binding with `experts` rules for modules, and rules for layers inside of these
out: the binding with its packs, of which those inside are for the ranks of an expert's group

    2 experts on 4 ranks, `up: colwise` inside   ->   experts.1.up: in two parts, on the ranks 2 and 3
    3 experts on 4 ranks                         ->   one group: every expert in four parts
    4 experts on 2 ranks                         ->   a rank to each group: nothing to split, and a note (TP148)

So a rule inside has packs as on an axis of the group's size, which the ranks of the group alone share. All else follows
as for any layer: the other ranks have no features, and their products are zeros.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import nn

from tpplan.compat.modules import named_modules, own_parameters
from tpplan.compiler.bind.bind import Binding, Bound, bind_parameters, once
from tpplan.compiler.bind.linear import Addend
from tpplan.compiler.bind.packing import Packed, pack
from tpplan.compiler.ir.dataflow import DataFlow
from tpplan.compiler.ir.layout import Layout, Pack
from tpplan.compiler.ir.program import LocalAttribute
from tpplan.plan import Diagnostic, Exchange, Style

_SPLITS = (Style.COLWISE, Style.ROWWISE)


@dataclass(frozen=True, slots=True)
class ExpertGroup:
    """The ranks that hold some of the experts of module `experts`: so many from `first` on; of a stack, the first."""

    experts: str
    first: int
    ranks: int
    is_stacked: bool = False

    @classmethod
    def of(cls, experts: str, place: int, count: int, size: int) -> ExpertGroup:
        """Of one of `count` experts on an axis of `size` ranks: as many groups as divide both."""
        groups = math.gcd(count, size)
        return cls(experts, place * groups // count * (size // groups), size // groups)


@dataclass(frozen=True, slots=True)
class SplitInside:
    """How a stack of experts is split over the ranks of a group, as if these had all of the experts.

    Attributes:
        ranks: how many.
        layouts: of its tensors by name, on an axis of that size.
        attributes: the counts to make local, likewise.
    """

    ranks: int
    layouts: Mapping[str, Layout]
    attributes: tuple[LocalAttribute, ...]

    @property
    def key(self) -> object:
        """What equal ones have in common."""
        return (self.ranks, tuple(self.layouts.items()), self.attributes)

    def shapes(self, module: nn.Module, place: int) -> dict[str, tuple[int, ...]]:
        """What the body reads of each stack on one rank of a group."""
        found = (
            (leaf, held.shape, self.layouts[leaf]) for leaf, held in own_parameters(module).items() if held is not None
        )
        return {leaf: layout.local_shape(tuple(shape), self.ranks, place) for leaf, shape, layout in found}


def pack_in_groups(model: nn.Module, flow: DataFlow, binding: Binding, size: int, partly: bool = False) -> Packed:
    """As `pack`; layers inside of experts with the rule `experts` are packed for the ranks of their expert's group."""
    groups = _groups_inside(model, binding, size)
    if not groups:
        return pack(model, flow, binding, size, partly)
    # Where all ranks share each expert of a stack, its own rule says nothing.
    everywhere = {g.experts for g in groups.values() if g.is_stacked and 1 < g.ranks == size}
    rest = {name: bound for name, bound in binding.modules.items() if name not in groups and name not in everywhere}
    found = pack(model, flow, replace(binding, modules=rest), size, partly)
    modules, findings, notes = dict(found.binding.modules), [*found.findings], [*found.notes]
    findings += [finding for name in sorted(everywhere) for finding in dispatched(binding.modules[name], size)]
    for ranks in sorted({group.ranks for group in groups.values()}):
        held = {name: binding.modules[name] for name, group in groups.items() if group.ranks == ranks}
        if ranks == 1:
            first = {groups[name].experts: bound for name, bound in reversed(held.items())}
            told = [_nothing_to_split(experts, bound, size) for experts, bound in reversed(first.items())]
            notes += once(told) if size > 1 else []
            continue
        stacked = {name: bound for name, bound in held.items() if groups[name].is_stacked and ranks < size}
        modules |= {name: replace(b, group=(groups[name].first, ranks)) for name, b in stacked.items()}  # see `inside`
        held = {name: bound for name, bound in held.items() if name not in stacked}
        inside = pack(model, flow, replace(binding, modules=held), ranks, partly)
        findings, notes = [*findings, *inside.findings], [*notes, *inside.notes]
        for name, bound in inside.binding.modules.items():
            group = groups.get(name) or groups[name.rpartition(".")[0]]
            modules[name] = _among(bound, group, size, model)
    made, _ = bind_parameters(model, modules)
    return replace(found, binding=made, findings=once(findings), notes=notes)


def _groups_inside(model: nn.Module, binding: Binding, size: int) -> dict[str, ExpertGroup]:
    """By name, the groups of the layers and stacked tensors with a rule inside of experts."""
    modules = dict(named_modules(model, remove_duplicate=False))
    found: dict[str, ExpertGroup] = {}
    for bound in binding.modules.values():
        module = None if bound.style is not Style.EXPERTS else modules.get(bound.name)
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            keys = [key for key, _ in module.named_children()]
            for place, key in enumerate(keys):
                group = ExpertGroup.of(bound.name, place, len(keys), size)
                found |= dict.fromkeys(_split_inside(binding.modules, f"{bound.name}.{key}"), group)
        elif module is not None:
            count = stacked_count(module)
            own = [name for name in _split_inside(binding.modules, bound.name) if binding.modules[name].is_parameter]
            found |= dict.fromkeys(
                own if count else (), replace(ExpertGroup.of(bound.name, 0, count, size), is_stacked=True)
            )
    return found


def stacked_count(module: nn.Module) -> int:
    """How many experts are stacked in a module's own tensors; 0 if these disagree."""
    counts = {held.shape[0] for held in own_parameters(module).values() if held is not None and held.dim() >= 3}
    return counts.pop() if len(counts) == 1 else 0


def holds_stacks(module: nn.Module) -> bool:
    """Whether a module has stacked experts of its own."""
    return not isinstance(module, (nn.ModuleList, nn.ModuleDict)) and stacked_count(module) > 0


def _split_inside(modules: Mapping[str, Bound], expert: str) -> list[str]:
    inside = [name for name in modules if name == expert or name.startswith(f"{expert}.")]
    return [name for name in inside if modules[name].style in _SPLITS and modules[name].recurrent is None]


def dispatched(bound: Bound, ranks: int = 0) -> list[Diagnostic]:
    """Refuse to send tokens to experts that some ranks share, or of a list, whose caller finds each one's tokens."""
    if bound.rule.exchange is not Exchange.ALL_TO_ALL:
        return []
    message = f"`{bound.name}` is a list of experts, and tokens go all-to-all to stacked experts only"
    if ranks:
        message = f"{ranks} ranks share each expert of `{bound.name}`, and tokens go all-to-all to whole experts only"
    return [
        Diagnostic(
            code="TP146",
            message=message,
            span=bound.rule.span_of("exchange"),
            help="remove `exchange`: each rank then gets all tokens, and the ranks' results are summed",
            subject=bound.name,
        )
    ]


def _among(bound: Bound, group: ExpertGroup, size: int, model: nn.Module) -> Bound:
    """A rule whose packs are those of an axis of the group's size."""
    bound = replace(bound, group=(group.first, group.ranks))
    if group.ranks == size or bound.style not in _SPLITS or bound.form is None:
        return bound
    packs = bound.packs
    if not packs and not (isinstance(bound.form, Addend) and bound.style is Style.ROWWISE):
        packs = (Pack(_features(bound, model)),)
    return replace(bound, packs=tuple(_of_group(held, group, size) for held in packs))


def _features(bound: Bound, model: nn.Module) -> int:
    form = bound.form
    assert form is not None
    columns = bound.style is Style.COLWISE
    if bound.is_parameter:
        owner, _, leaf = bound.name.rpartition(".")
        shape = getattr(model.get_submodule(owner), leaf).shape
        return shape[form.output_dim if columns or isinstance(form, Addend) else form.input_dim]
    assert not isinstance(form, Addend)
    return form.outputs if columns else form.inputs


def _of_group(held: Pack, group: ExpertGroup, size: int) -> Pack:
    if not held.parts:
        return held._replace(first=group.first + held.first, among=held.among or group.ranks)
    after = size - group.first - group.ranks
    return held._replace(parts=((0, 0),) * group.first + held.parts + ((held.size, 0),) * after)


def _nothing_to_split(experts: str, inside: Bound, size: int) -> Diagnostic:
    return Diagnostic(
        code="TP148",
        message=f"the rules inside of `{experts}` have nothing to split: each of its experts is whole on one of {size} "
        "ranks",
        span=inside.rule.style_span,
        label=f"nothing to split on {size} ranks",
        help="nothing is wrong: they are for more ranks, of which several share an expert",
        subject=experts,
    )


__all__ = ["ExpertGroup", "SplitInside", "dispatched", "holds_stacks", "pack_in_groups", "stacked_count"]
