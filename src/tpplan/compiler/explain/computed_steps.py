"""Explain where the steps of a computed weight can't work on parts of what it is computed of.

in:  a finding on a body
out: TP112 for the layer whose weight that body computes; the finding itself where it computes none
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from tpplan.compat.modules import named_modules
from tpplan.compiler.bind.bind import Binding
from tpplan.compiler.bind.computed_weights import layer_of
from tpplan.compiler.bind.misfits import not_followed
from tpplan.plan import Diagnostic


def of_computed(finding: Diagnostic, module: str, model: nn.Module, binding: Binding) -> Diagnostic:
    """The finding that a body of `module` leads to."""
    layer = layer_of(module)
    bound = next((held for name, held in binding.modules.items() if layer_of(name) == layer), None) if layer else None
    if bound is None:
        return finding
    told = not_followed(dict(named_modules(model))[layer], layer, bound.rule)
    return replace(told, notes=(finding.message, *finding.notes))


__all__ = ["of_computed"]
