"""Asked: the plan that a caller means, wherever one is taken.

in:  a Plan, what `load_plan` takes, "auto", or a dict of styles as `parallelize_module` takes it; a model, a call
out: a Plan, and notes on what of theirs is left to the compiler
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from tpplan.inputs import with_labels
from tpplan.plan import ArgumentError, Diagnostic, Plan, PlanSource, load_plan
from tpplan.plan.taken import refusal
from tpplan.plan.vocabulary import AUTO, DEFAULT_AXIS
from tpplan.served import served
from tpplan.suggest import search, write_plan
from tpplan.suggest.import_styles import import_styles, is_style
from tpplan.taken_models import PLAN

AskedPlan = Plan | PlanSource | ParallelStyle | Mapping[str, ParallelStyle]


def known_plan(
    plan: AskedPlan, model: nn.Module | None, axis: str = DEFAULT_AXIS
) -> tuple[Plan | None, tuple[Diagnostic, ...]]:
    """The plan, or None if it is to be found; with notes.

    Args:
        plan: a plan, what `load_plan` takes, "auto", or styles of torch by pattern.
        model: the stock model, which says what the styles are of; None where there is none yet, for None.
        axis: which axis styles are over, as they don't name one.

    Raises:
        ArgumentError: it is none of these.
        PlanError: it has mistakes, or a style that no rule says.
    """
    if isinstance(plan, str) and plan == AUTO:
        return None, ()
    if isinstance(plan, Plan):
        return plan, ()
    styles: Any = {"": plan} if isinstance(plan, ParallelStyle) else plan
    entries = cast("Mapping[Any, Any]", styles if isinstance(styles, Mapping) else {})
    if any(map(is_style, entries.values())):
        if model is None:
            return None, ()
        imported, notes = import_styles(model, entries)
        return replace(imported, axis=axis), notes
    if not PLAN.fits(plan):
        raise ArgumentError(refusal("plan", PLAN, plan))
    return load_plan(cast("PlanSource", plan)), ()


def plan_of(
    plan: AskedPlan, model: nn.Module, tp: int, inputs: object, axis: str = DEFAULT_AXIS
) -> tuple[Plan, tuple[Diagnostic, ...]]:
    """As `known_plan`; for "auto", the plan that is found for `tp` ranks, over `axis`."""
    known, notes = known_plan(plan, model, axis)
    return (found_plan(model, tp, inputs, axis=axis) if known is None else known), notes


def found_plan(
    model: nn.Module, tp: int, inputs: object, sequence_parallel: bool = False, axis: str = DEFAULT_AXIS
) -> Plan:
    """The plan that `suggest_plan` finds, over `axis`."""
    return replace(load_plan(suggest_text(model, tp, sequence_parallel, inputs)), axis=axis)


def suggest_text(
    model: nn.Module, tp: int, sequence_parallel: bool = False, inputs: object = None, *, training: bool = False
) -> str:
    """As `suggest_plan`, of a model in which nothing is compiled, as the text of a plan file with comments."""
    inner = served(model, None, tp, inputs)
    arguments, keywords = inner.call
    if training and inputs is None:
        keywords = with_labels(inner.model, keywords)
    return write_plan(search(inner.model, tp, arguments, keywords, sequence_parallel), plan_name(inner.model))


def plan_name(model: nn.Module) -> str:
    """A plan's name for a model: `llama-for-causal-lm` for `LlamaForCausalLM`."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+|[A-Z]", type(model).__name__)
    return "-".join(word.lower() for word in words) or "plan"


__all__ = ["AskedPlan", "found_plan", "known_plan", "plan_name", "plan_of", "suggest_text"]
