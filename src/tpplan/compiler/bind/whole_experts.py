"""Experts: which rank holds which whole experts.

in:  a binding in which the plan's `experts` rules stand for modules: lists of experts, or stacks of their matrices
out: a binding in which each parameter of theirs has its layout; findings where they can't be shared out

    experts.gate_up_proj (8, 96, 32) on 2 ranks   ->   S(0): four experts on each
    experts.5.up.weight, of a list of 8           ->   all of it on rank 1, none on rank 0
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from torch import nn

from tpplan.compat.modules import named_modules, own_parameters
from tpplan.compiler.bind.bind import Binding, Bound, bind_parameters, once
from tpplan.compiler.bind.expert_groups import SplitInside, dispatched, stacked_count
from tpplan.compiler.ir.layout import PARTIAL, Layout, Pack, packed, sharded
from tpplan.compiler.ir.replaced_bodies import SharedExperts
from tpplan.plan import Diagnostic, Style

INSIDE = "split each expert inside instead: `colwise` and `rowwise` on its matrices"
ALSO_INSIDE = "split each expert inside as well: `colwise` and `rowwise` on its {}, beside this rule"


def share_out(
    model: nn.Module, binding: Binding, size: int, inside: Mapping[str, SplitInside | None]
) -> tuple[Binding, list[Diagnostic]]:
    """Give each parameter of experts its layout on `size` ranks.

    `inside` has the stacks that are split inside, and None for one that the call leaves out.
    """
    ruled = [b for b in binding.modules.values() if b.style is Style.EXPERTS and not b.is_parameter]
    if not ruled:
        return binding, []
    modules = dict(named_modules(model, remove_duplicate=False))
    found = dict(binding.modules)
    findings: list[Diagnostic] = []
    for bound in ruled:
        module, ruled_inside = modules[bound.name], _ruled_inside(binding, bound)
        unfit = [_two_rules(bound, other) for other in ruled_inside if not other.group[1]]
        findings += unfit
        if bound.name in inside and inside[bound.name] is None:
            del found[bound.name]
            continue
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            experts = {f"{bound.name}.{key}": expert for key, expert in module.named_children()}
            split = {name for name in experts if any(f"{other.name}.".startswith(f"{name}.") for other in ruled_inside)}
            findings += [*_too_few(bound, len(experts), size, bool(split)), *dispatched(bound)]
            found |= _listed(bound, experts, size, split)
        else:
            count, split = stacked_count(module), inside.get(bound.name)
            if split is not None:
                findings += dispatched(bound, split.ranks)
            elif not unfit:
                findings += _uneven(bound, count, size)
            found |= (
                _stacked(bound, module, count) if split is None else _split_stack(found, bound, module, count, split)
            )
    shared, conflicts = bind_parameters(model, found)
    return replace(shared, wrappers=binding.wrappers), once([*findings, *conflicts])


def _stacked(bound: Bound, module: nn.Module, count: int) -> dict[str, Bound]:
    held = {
        f"{bound.name}.{leaf}": sharded(0)
        for leaf, parameter in own_parameters(module).items()
        if parameter is not None and parameter.dim() and parameter.shape[0] == count
    }
    return {
        bound.name: replace(bound, experts=SharedExperts(count=count, exchange=bound.rule.exchange))
    } | _of_parameters(bound, held)


def _split_stack(
    found: Mapping[str, Bound], bound: Bound, module: nn.Module, count: int, inside: SplitInside
) -> dict[str, Bound]:
    """A stack of which each part is on several ranks, and is split over these."""
    held = {
        f"{bound.name}.{leaf}": _on_a_group(inside.layouts[leaf], tuple(parameter.shape), inside.ranks)
        for leaf, parameter in own_parameters(module).items()
        if parameter is not None and parameter.dim() and parameter.shape[0] == count
    }
    experts = SharedExperts(count=count, ranks=inside.ranks)
    made = _of_parameters(bound, held)
    ruled = {name: replace(made[name], rule=found[name].rule) for name in made if name in found}
    return {bound.name: replace(bound, experts=experts)} | made | ruled


def _on_a_group(layout: Layout, shape: tuple[int, ...], ranks: int) -> Layout:
    """How a stacked tensor lies, of what it is on the ranks of a group."""
    experts = Pack(shape[0], ranks)
    if layout == PARTIAL:  # read on one rank, which alone has it
        return Layout("S", "S", 0, packs=(experts,), within=(Pack(shape[-1], 1, 0, 1),), inner_dim=len(shape) - 1)
    if layout.dim is None:
        return packed(0, (experts,))
    within = layout.stretches(shape[layout.dim])
    return Layout("S", "S", 0, packs=(experts,), within=within, inner_dim=layout.dim)


def _listed(bound: Bound, experts: Mapping[str, nn.Module], size: int, split: Collection[str]) -> dict[str, Bound]:
    """The experts of a list but those that are split inside: each lies on one rank."""
    found: dict[str, Bound] = {}
    for place, (name, expert) in enumerate(experts.items()):
        owner = place * size // len(experts)
        parameters = list(expert.named_parameters(remove_duplicate=False))
        if not parameters or name in split:
            continue  # with nothing to hold, every rank runs it
        found[name] = replace(bound, name=name, experts=SharedExperts(owner))
        held = {
            f"{name}.{leaf}": packed(0, (Pack(parameter.shape[0], first=owner, among=1),))
            for leaf, parameter in parameters
            if parameter.dim()
        }
        found |= _of_parameters(bound, held)
    return found


def _of_parameters(bound: Bound, held: Mapping[str, Layout]) -> dict[str, Bound]:
    return {
        name: Bound(name, bound.style, bound.rule, is_parameter=True, whole=layout) for name, layout in held.items()
    }


def _ruled_inside(binding: Binding, bound: Bound) -> list[Bound]:
    return [other for name, other in binding.modules.items() if name.startswith(f"{bound.name}.")]


def _two_rules(bound: Bound, other: Bound) -> Diagnostic:
    return Diagnostic(
        code="TP146",
        message=f"`{other.name}` has a rule of its own, and is part of experts that each rank holds whole",
        span=other.rule.style_span,
        help=f"remove this rule, or the one for `{bound.name}` ({bound.rule.origin})",
        subject=other.name,
    )


def _too_few(bound: Bound, count: int, size: int, split: bool) -> list[Diagnostic]:
    if count >= size or split:
        return []
    way_out = f"use at most {count} ranks, or {ALSO_INSIDE.format('layers')}"
    return [_not_shareable(bound, f"`{bound.name}` has {count} experts, fewer than the {size} ranks", way_out)]


def _uneven(bound: Bound, count: int, size: int) -> list[Diagnostic]:
    if count and count % size == 0:
        return []
    if not count:
        message = f"the tensors of `{bound.name}` are stacked along dims of different sizes"
        return [_not_shareable(bound, message, INSIDE)]
    message = f"the {count} experts of `{bound.name}` can't be shared out evenly over {size} ranks"
    way_out = f"use a number of ranks that divides the experts, or {ALSO_INSIDE.format('matrices')}"
    return [_not_shareable(bound, message, way_out)]


def _not_shareable(bound: Bound, message: str, way_out: str) -> Diagnostic:
    return Diagnostic(
        code="TP102",
        message=message,
        span=bound.rule.style_span,
        help=way_out,
        subject=bound.name,
    )


__all__ = ["INSIDE", "share_out"]
