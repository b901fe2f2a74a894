"""Export: a plan as the tensor-parallel plan that transformers reads, and vLLM's transformers backend.

in:  a program, what its plan says, and the stock model that it's for
out: `Exported`: styles by pattern; or a `CompileError` with what transformers has no style for

    model.layers.0.mlp.up_proj.weight    S(0)                     ->   layers.*.mlp.up_proj: colwise
    model.layers.0.mlp.down_proj.weight  S(1), its result P → R   ->   layers.*.mlp.down_proj: rowwise
    lm_head.weight                       S(0), its result S → R   ->   lm_head: colwise_rep

The program is what is exported, not the rules: each sharded parameter must be stored as a style of transformers stores
it, and all that tpplan does around it (reshards, local attributes, bodies of its own) must be what that style does.
Of several names for a style that is written which all readers know.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from tpplan.compat.modules import named_modules
from tpplan.compiler.ir.layout import Collective, Layout
from tpplan.compiler.ir.program import ModuleProgram, ParameterPlacement, Program, Reshard
from tpplan.plan import CompileError, Diagnostic, Plan, Style
from tpplan.plan.plan import Rule
from tpplan.plan.wording import with_article

_GATHERED, _SLICED = "colwise_rep", "rowwise_rep"
_OF_VLLM = frozenset({"colwise", _GATHERED, "rowwise", _SLICED, "replicate", "embedding_rowwise"})
_WAY_OUT = "leave the rule out of what is exported, or run the model by tpplan"


@dataclass(frozen=True, slots=True)
class Exported:
    """A plan in transformers' words.

    Attributes:
        base: styles by pattern, of the base model: `base_model_tp_plan` of a config.
        whole: those of the whole model, its head too, in full names: `DistributedConfig(tp_plan=…)`.
        notes: what is left out or told otherwise.
    """

    base: Mapping[str, str]
    whole: Mapping[str, str]
    notes: tuple[Diagnostic, ...] = ()

    def to_json(self) -> str:
        """Both as a file's text."""
        return json.dumps({"base_model_tp_plan": dict(self.base), "tp_plan": dict(self.whole)}, indent=2) + "\n"


def export_program(program: Program, plan: Plan, model: nn.Module) -> Exported:
    """What transformers is to do, so that it computes what `program` computes.

    Args:
        program: of `plan.with_whole_sequences()`.
        plan: the plan as it was read.
        model: the stock model.

    Raises:
        CompileError: TP210 and TP211, with all that transformers can't be told.
    """
    work = _Export(program, plan, model)
    styles = work.styles()
    generic = work.by_pattern(styles)
    if work.errors:
        raise CompileError(work.errors)
    generic |= {name: "replicate" for name in _brought(model) if name not in generic and name in work.names}
    prefix = _prefix(model)
    base = {name.removeprefix(prefix): style for name, style in generic.items() if name.startswith(prefix)}
    return Exported(base, generic, (*left_out(plan), *work.for_readers(styles)))


def generic_name(name: str) -> str:
    """The name as transformers' plans have it: a `*` for the number of a layer."""
    return re.sub(r"\.\d+(\.|$)", r".*\1", name)


def left_out(plan: Plan) -> Iterator[Diagnostic]:
    """TP212 for each rule that transformers needn't, or can't, be told, and that changes no number."""
    whole = plan.with_whole_sequences().rules
    for rule, without in zip(plan.rules, whole, strict=True):
        if rule.settings != without.settings:
            yield Diagnostic(
                "TP212",
                f"`{rule.pattern}` splits along the sequence, which no style of transformers does; whole sequences are "
                "exported",
                span=rule.style_span,
                label="left out",
                subject=rule.pattern.text,
            )
    for kernel in plan.kernels:
        yield Diagnostic("TP212", f"the choice of a kernel for {kernel.kind.value} is left out", subject="kernels")


class _Export:
    """What becomes of one program."""

    def __init__(self, program: Program, plan: Plan, model: nn.Module) -> None:
        self.errors: list[Diagnostic] = []
        self._program = program
        self._modules = dict(named_modules(model, remove_duplicate=False))
        self._parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        self._of_module = {module.name: module for module in program.modules}
        self.names = {generic_name(name) for name in (*self._modules, *self._parameters)}
        self._rules = plan.match([*self._modules], self._parameters).rules

    def styles(self) -> dict[str, str]:
        """The style of each module and parameter that needs one."""
        found: dict[str, str] = {}
        for placement in (*self._program.parameters, *self._program.buffers):
            if placement.name not in self._parameters:
                self._refuse(placement.name, "it is a buffer, which transformers leaves whole")
            elif placement.layout.is_sharded:
                for name in placement.names:
                    found |= self._of_parameter(name, placement)
            elif not isinstance(self._modules[placement.name.rpartition(".")[0]], (nn.Linear, nn.Embedding)):
                self._once(placement)
        found |= self._summed(found)
        for module in self._program.modules:
            self._account(module, found)
        return found

    def by_pattern(self, styles: Mapping[str, str]) -> dict[str, str]:
        """The styles by transformers' patterns, which all layers share."""
        alike: dict[str, dict[str | None, str]] = {}
        for name in [*self._modules, *self._parameters]:
            alike.setdefault(generic_name(name), {}).setdefault(styles.get(name), name)
        for pattern, kinds in alike.items():
            if len(kinds) > 1:
                shown = " and ".join(f"`{name}` {style or 'whole'}" for style, name in kinds.items())
                message = f"transformers knows one style for `{pattern}`, and here is {shown}"
                self.errors.append(Diagnostic("TP211", message, help="give all layers the same rules", subject=pattern))
        return {generic_name(name): style for name, style in styles.items()}

    def _of_parameter(self, name: str, placement: ParameterPlacement) -> dict[str, str]:
        """What to write for one that is sharded: the style of its layer, or its own and its module's."""
        owner, _, own = name.rpartition(".")
        module, layout = self._modules[owner], placement.layout
        packed = _is_packed(layout)
        if layout.packs and (not packed or not all(p.is_even(self._program.size) for p in layout.packs)):
            return self._refuse(name, f"it lies as {layout}, and transformers knows two equal packs")
        if isinstance(module, nn.Embedding) and not packed and layout.dim == 0:
            return {owner: "embedding_rowwise"}
        if isinstance(module, nn.Linear):
            if packed and (layout.dim != 0 or len(list(module.parameters())) > 1):
                return self._refuse(name, "transformers packs the rows of linear layers without a bias alone")
            return {owner: "packed_colwise" if packed else self._of_linear(owner, module)}
        if own in ("weight", "bias"):
            kind = with_article(type(module).__name__)
            return self._refuse(name, f"it is of {kind}, and transformers shards torch's linear layers and embeddings")
        style = _stored(layout, len(placement.shape), packed)
        if style is None:
            return self._refuse(name, f"it lies as {layout}")
        return {name: style, owner: "moe_tp_experts" if self._is_partial(owner) else "local_params"}

    def _once(self, placement: ParameterPlacement) -> None:
        """Refuse a whole parameter that is added to a partial sum: each rank of transformers would add it."""
        rule = self._rules.get(placement.name)
        if rule is not None and rule.style is Style.ROWWISE:
            self._refuse(placement.name, "it is added once to what the ranks sum, and transformers adds it on each")

    def _of_linear(self, name: str, module: nn.Linear) -> str:
        (weight,) = (p for p in self._program.parameters if f"{name}.weight" in p.names)
        own = self._of_module.get(name)
        if weight.layout.dim == 0:
            gathered = own is not None and any(_is_gather(reshard) for reshard in own.exits)
            return _GATHERED if gathered else "colwise"
        sliced = own is not None and any(reshard.forward is Collective.SLICE for reshard in own.entries)
        return _SLICED if sliced else "rowwise"

    def _summed(self, styles: Mapping[str, str]) -> dict[str, str]:
        """Modules whose whole parameters meet split values alone, as norms of heads do: their gradients are summed."""
        owners = [p.name.rpartition(".")[0] for p in self._program.parameters if p.summed]
        around = self._program.boundaries
        return {
            owner: "replicated_with_grad_allreduce"
            for owner in owners
            if owner not in styles and any(b.layout.is_sharded for b in around.get(owner, ()))
        }

    def for_readers(self, styles: Mapping[str, str]) -> Iterator[Diagnostic]:
        """TP214 for each style of linear layers that vLLM doesn't know."""
        others: dict[str, list[str]] = {}
        for name, style in styles.items():
            if style not in _OF_VLLM and isinstance(self._modules.get(name), nn.Linear):
                others.setdefault(style, []).append(name)
        for style, names in others.items():
            message = (
                f"vLLM's transformers backend doesn't read `{style}` ({_some(names)}), and leaves such layers whole"
            )
            yield Diagnostic("TP214", message, subject=style)

    def _is_partial(self, name: str) -> bool:
        exits = (reshard.source for reshard in self._of_module[name].exits)
        outside = (b.layout for b in self._program.boundaries.get(name, ()) if not b.inward)
        return any(layout.forward == "P" for layout in (*exits, *outside))

    def _account(self, module: ModuleProgram, styles: Mapping[str, str]) -> None:
        """Refuse what the program does at a module, and no style does."""
        for attribute in module.local_attributes:
            why = f"it reads `{attribute.name}`, {attribute.whole} of all ranks, which transformers doesn't divide"
            self._refuse(module.name, why)
        if module.experts is not None:
            self._refuse(module.name, "each rank holds whole experts, which transformers has another plan for")
        elif module.body is not None:
            self._refuse(module.name, "its body is replaced by one for shards")
        style = styles.get(module.name, "")
        for reshard in (*module.entries, *module.exits):
            done = (style == _GATHERED and _is_gather(reshard)) or (
                style == _SLICED and reshard.forward is Collective.SLICE
            )
            if not done and reshard.source.forward != "P" and reshard.forward is not Collective.NONE:
                self._refuse(module.name, f"{_placed(reshard)} goes from {reshard.source} to {reshard.target}")

    def _refuse(self, name: str, why: str) -> dict[str, str]:
        rule = self._rule_of(name)
        message = f"`{name}` has no style of transformers: {why}"
        known = [error for error in self.errors if generic_name(error.subject or "") == generic_name(name)]
        if not any(error.message.partition(": ")[2] == why for error in known):
            span = None if rule is None else rule.style_span
            self.errors.append(Diagnostic("TP210", message, span=span, help=_WAY_OUT, subject=name))
        return {}

    def _rule_of(self, name: str) -> Rule | None:
        return self._rules.get(name) or self._rules.get(name.rpartition(".")[0])


def _is_packed(layout: Layout) -> bool:
    packs = layout.packs
    plain = all(pack.replicas == 1 and not (pack.among or pack.parts) for pack in packs) and not layout.within
    return len(packs) == 2 and packs[0].size == packs[1].size and plain


def _stored(layout: Layout, dims: int, packed: bool) -> str | None:
    """The style that stores a parameter of `dims` dims as `layout`: by its last dim but one, or by its last."""
    if packed:
        return None if dims == 1 else {dims - 2: "packed_colwise", dims - 1: "packed_rowwise"}.get(layout.dim or 0)
    if dims == 1:
        return "colwise"
    return {dims - 2: "colwise", dims - 1: "rowwise"}.get(layout.dim or 0)


def _is_gather(reshard: Reshard) -> bool:
    return reshard.source.is_sharded and reshard.target.is_replicated


def _placed(reshard: Reshard) -> str:
    return ("`" + ".".join(map(str, reshard.path)) + "`") if reshard.path else "its result"


def _prefix(model: nn.Module) -> str:
    """What names of the base model begin with; "" if `model` is one itself."""
    prefix: str = getattr(model, "base_model_prefix", "")
    return f"{prefix}." if prefix and isinstance(getattr(model, prefix, None), nn.Module) else ""


def _brought(model: nn.Module) -> list[str]:
    """Names that the model's own plan has, whose styles would stand where nothing else is said."""
    plan: Any = getattr(model, "tp_plan", None) or {}
    return [str(name) for name in plan]


def _some(names: Iterable[str]) -> str:
    first, *others = names
    return f"`{first}`" + (f" and {len(others)} more" if others else "")


__all__ = ["Exported", "export_program", "left_out"]
