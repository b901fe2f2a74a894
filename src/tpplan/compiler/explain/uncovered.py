"""Uncovered: parameters that stay whole on every rank since no rule of the plan speaks of them.

in:  the model and the bound plan
out: TP120, one note for all of them, if they are a share of the model that a plan's author should know of

    a plan that forgets `lm_head`   ->   note TP120: no rule covers `lm_head`: 25% of the parameters stay whole
"""

from __future__ import annotations

import re
from collections import defaultdict

from torch import nn

from tpplan.compat.modules import named_modules
from tpplan.compiler.bind.bind import Binding
from tpplan.plan import Diagnostic

# Position tables, poolers and classifiers are a few hundredths of a model: those need no word.
_SHARE = 0.15
_LISTED = 5


def uncovered_finding(model: nn.Module, binding: Binding) -> list[Diagnostic]:
    """Report parameters without a rule, if the matrices among them are more than a seventh of all."""
    covered: dict[int, bool] = {}
    sizes: dict[int, int] = {}
    names: dict[int, str] = {}
    matrices: set[int] = set()
    for prefix, module in named_modules(model):
        named = _is_named(prefix, binding)
        for leaf, parameter in module.named_parameters(recurse=False):
            key = id(parameter)
            sizes[key] = parameter.numel()
            if parameter.dim() > 1:
                matrices.add(key)
            names.setdefault(key, f"{prefix}.{leaf}" if prefix else leaf)
            covered[key] = (
                covered.get(key, False) or named or names[key] in binding.owners or names[key] in binding.modules
            )
    total = sum(sizes.values())
    bare = {names[key]: size for key, size in sizes.items() if not covered[key] and key in matrices}
    if not bare or sum(bare.values()) < _SHARE * total:
        return []
    share = f"{100 * sum(bare.values()) / total:.0f}%"
    return [
        Diagnostic(
            code="TP120",
            message=f"{share} of the parameters stay whole on every rank, since no rule covers them",
            help="shard these modules, or make it explicit by a `replicate` rule on them",
            notes=tuple(_largest(bare, total)),
        )
    ]


def _is_named(module: str, binding: Binding) -> bool:
    """Whether a rule speaks of the module or of one that holds it."""
    segments = module.split(".")
    return any(".".join(segments[:end]) in binding.modules for end in range(1, len(segments) + 1))


def _largest(bare: dict[str, int], total: int) -> list[str]:
    """The largest of them as patterns over equal layers, the largest first."""
    grouped: defaultdict[str, int] = defaultdict(int)
    for name, size in bare.items():
        grouped[re.sub(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", "*", name.rpartition(".")[0] or name)] += size
    ranked = sorted(grouped.items(), key=lambda item: (-item[1], item[0]))
    listed = [(pattern, size) for pattern, size in ranked[:_LISTED] if size >= 0.01 * total] or ranked[:1]
    return [f"`{pattern}`: {size:,} parameters, {100 * size / total:.0f}%" for pattern, size in listed]
