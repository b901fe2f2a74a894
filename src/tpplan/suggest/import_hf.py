"""Import: the tensor-parallel plan that a transformers model brings along, in tpplan's words.

in:  a model with `tp_plan`, or whose config has a `base_model_tp_plan`
out: the text of a plan file; what has no counterpart stands there as a comment, with the reason

    model.layers.*.self_attn.q_proj: colwise             ->   the same
    lm_head: colwise_gather_output                       ->   {style: colwise, output: replicate}
    model.layers.*.self_attn.q_norm: replicated_with_…   ->   a comment: the compiler finds these by itself
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, cast

from torch import nn

from tpplan.compat.modules import named_modules
from tpplan.compiler.queries import linear_form
from tpplan.plan import CompileError
from tpplan.plan.pattern import Pattern, PatternError
from tpplan.plan.wording import with_article
from tpplan.plan.written import schema_comment

_GATHERED: Final = "{style: colwise, output: replicate}"
_SLICED: Final = "{style: rowwise, input: shard}"
# Older releases of transformers wrote `_rep` and `local_`.
_STYLES: Final[Mapping[str, str]] = {
    "colwise": "colwise",
    "local_colwise": "colwise",
    "colwise_rep": _GATHERED,
    "colwise_gather_output": _GATHERED,
    "packed_colwise": "{style: colwise, packed: [gate, up]}",
    "local_packed_colwise": "{style: colwise, packed: [gate, up]}",
    "rowwise": "rowwise",
    "local_rowwise": "rowwise",
    "rowwise_rep": _SLICED,
    "rowwise_split_input": _SLICED,
    "packed_rowwise": "{style: rowwise, packed: [gate, up]}",
    "local_packed_rowwise": "{style: rowwise, packed: [gate, up]}",
    "embedding_rowwise": "vocab",
    "embedding_colwise": "colwise",
    "sequence_parallel": "sequence",
    "replicate": "replicate",
    "ep_dispatch_experts": "experts",
}
_NEEDLESS: Final = "needs no rule"
_NOTES: Final[Mapping[str, str]] = {
    "replicated_with_grad_allreduce": f"{_NEEDLESS}: which gradients are summed follows from the model",
    "moe_tp_experts": f"{_NEEDLESS}: the sums follow from how the experts' parameters are split",
    "grouped_gemm": f"{_NEEDLESS}: the module's own rule says which rank has which experts",
    "ep_router": f"{_NEEDLESS}: each rank finds the tokens of its experts by itself",
    "all_reduce": f"{_NEEDLESS}: the compiler places the collectives",
    "gather": f"{_NEEDLESS}: the compiler places the collectives",
}
_UNKNOWN: Final = "has no counterpart among the styles"
_LINEAR: Final = frozenset(style for style in _STYLES if "wise" in style and "embedding" not in style)


def import_plan(model: nn.Module, name: str, left_out: list[str] | None = None) -> str:
    """The text of a plan file with what `model`'s own plan says.

    Args:
        model: the model.
        name: the plan's.
        left_out: gets the lines that have no counterpart and aren't needless.

    Raises:
        CompileError: TP123, if the model brings no plan along, or one of which nothing has a counterpart.
    """
    brought = brought_plan(model)
    lines = list(_rules(model, brought, [] if left_out is None else left_out))
    if not any(line and not line.lstrip().startswith("#") for line in lines):
        what = "brings no tensor-parallel plan along" if not brought else "brings a plan along that has no counterpart"
        raise CompileError.of(
            "TP123",
            f"`{type(model).__name__}` {what}",
            help="leave out --from-hf: `tpplan suggest` then finds a plan from the model itself",
            notes=(line.strip().lstrip("# ") for line in lines[:8]),
            subject=type(model).__name__,
        )
    head = [f"# {type(model).__name__}: the plan that the model brings along, imported from transformers."]
    return schema_comment() + "\n".join([*head, "version: 1", f"name: {name}", "axis: tp", "modules:", *lines]) + "\n"


def brought_plan(model: nn.Module) -> dict[str, str]:
    """The model's own plan, styles by pattern, in full names."""
    held: Any = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    if held:
        return {str(pattern): str(style) for pattern, style in cast("Mapping[Any, Any]", held).items()}
    base: Any = getattr(getattr(model, "config", None), "base_model_tp_plan", None) or {}
    prefix: str = getattr(model, "base_model_prefix", "")
    front = f"{prefix}." if prefix and hasattr(model, prefix) else ""
    return {f"{front}{pattern}": str(style) for pattern, style in cast("Mapping[Any, Any]", base).items()}


def _rules(model: nn.Module, brought: Mapping[str, str], left_out: list[str]) -> Iterator[str]:
    modules = dict(named_modules(model, remove_duplicate=False))
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for text, style in brought.items():
        try:
            pattern = Pattern.parse(text)
        except PatternError as error:
            problem = error.message
        else:
            meant = [name for name in modules if pattern.matches(name)]
            if not meant and not any(map(pattern.matches, parameters)):
                yield f"  # {text}: {style}    matches no module and no parameter of this model"
                continue
            problem = _NOTES.get(style) or _problem(style, meant, modules)
        if problem is None:
            yield f"  {text}: {_STYLES[style]}"
            continue
        yield f"  # {text}: {style}    {problem}"
        if not problem.startswith(_NEEDLESS):
            left_out.append(f"{text}: {style} ({problem})")


def _problem(style: str, meant: Sequence[str], modules: Mapping[str, nn.Module]) -> str | None:
    """Why a line of the model's plan isn't one of ours; None if it is.

    Args:
        style: theirs.
        meant: the modules that its pattern matches; none where it matches parameters.
        modules: all, by name.
    """
    if style not in _STYLES:
        return _UNKNOWN
    other = next((name for name in meant if linear_form(modules[name]) is None), None)
    if style in _LINEAR and other is not None:
        return f"`{other}` is {with_article(type(modules[other]).__name__)}, no linear layer"
    return None
