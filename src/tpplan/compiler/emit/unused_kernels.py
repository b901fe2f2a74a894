"""Unused kernels: what the plan says of kernels and nothing comes of.

in:  the plan's choices, and every candidate with what became of it
out: TP150 for a choice that changes nothing

    residual_norm: triton   ->   no norm reads a sum that the body around it makes
    layer_norm: triton      ->   no module that it holds for computes a LayerNorm; or: no GPU, so torch's operations run

`auto` asks for nothing, and is never reported.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from tpplan import kernels
from tpplan.compiler.ir.program import KernelUse
from tpplan.kernels.kinds import KINDS
from tpplan.plan import Diagnostic, KernelChoice, KernelRule, Plan

SAID = "the plan says `torch`"
"""Why a candidate isn't replaced whose rule says so."""


def unused_kernels(plan: Plan, uses: Sequence[KernelUse], device: torch.device | None) -> Iterator[Diagnostic]:
    """The findings; `device` is where the model will run, None for where this process would run it."""
    where = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for rule in plan.kernels:
        reason = "" if rule.choice is KernelChoice.AUTO else _reason(plan, rule, uses, where)
        if reason:
            yield Diagnostic(
                code="TP150",
                message=f"`{rule.kind}: {rule.choice}` has no effect: {reason}",
                span=rule.choice_span,
                label="no effect",
                help="remove it"
                if KINDS[rule.kind].asked
                else "remove it, or write `auto`, which takes a kernel wherever one fits",
                subject=None if rule.pattern is None else rule.pattern.text,
            )


def _reason(plan: Plan, rule: KernelRule, uses: Sequence[KernelUse], device: torch.device) -> str:
    """Why a rule changes nothing; empty if it does."""
    ruled = [use for use in uses if plan.kernel_rule(rule.kind, use.module) is rule]
    held = [use for use in ruled if use.kind == rule.kind]
    unfused = [use.note for use in ruled if KINDS[rule.kind].joins and use.note]
    if rule.choice is KernelChoice.TORCH and KINDS[rule.kind].asked:
        return "the kernel is taken only where the plan says `triton`"
    if rule.choice is KernelChoice.TORCH:
        heeded = any(use.refused == SAID for use in held) or any(note.endswith(SAID) for note in unfused)
        return "" if heeded else _nowhere(rule, [use.refused for use in held] + unfused)
    if not any(not use.refused for use in held):
        return _nowhere(rule, [use.refused for use in held] + unfused)
    if device.type == "cuda" and not torch.cuda.is_available():
        return ""  # it is for a GPU that isn't here
    there = kernels.available(device)
    return "" if there.name == "triton" else f"the model's own operations run, as there is no kernel: {there.reason}"


def _nowhere(rule: KernelRule, reasons: Sequence[str]) -> str:
    where = "the model" if rule.pattern is None else f"what `{rule.pattern}` matches"
    what = KINDS[rule.kind].replaces
    return next(iter(reasons), f"no body in {where}, of those that this holds for, computes {what}")


__all__ = ["SAID", "unused_kernels"]
