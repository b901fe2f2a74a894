"""Name the first module where a sharded run departs from the unsharded one.

in:  what every module returned, unsharded and on each rank
out: the first call, in the order in which they returned, whose results stray beyond the tolerance

Results are comparable where each rank holds the whole, where the ranks' parts join to the whole along one dim, and
where their sum is the whole and the program takes such a sum up later. Others (heads flattened into the batch, say) are
passed over: the next comparable module shows what went wrong.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tpplan.compiler.ir.program import Program
from tpplan.parity.measure import joined, relative_error
from tpplan.parity.observed import ModuleCall
from tpplan.parity.parity_report import Divergence, TensorParity


@dataclass(frozen=True, slots=True)
class CallComparison:
    """The outcome for one module call; the error is None if nothing in it could be compared."""

    module: str
    error: float | None


def compare_calls(
    program: Program, expected: Sequence[ModuleCall], ranks: Sequence[Sequence[ModuleCall]], tolerance: float
) -> list[CallComparison]:
    """Compare each module call, in the order of the unsharded run."""
    found = [{(held.name, held.call): held for held in calls} for calls in ranks]
    layouts = _Layouts(program)
    compared: list[CallComparison] = []
    for call in expected:
        local = [calls.get((call.name, call.call)) for calls in found]
        errors = [
            _error(whole, [held.outputs.get(name) if held else None for held in local], call.name, layouts, tolerance)
            for name, whole in call.outputs.items()
        ]
        known = [error for error in errors if error is not None]
        compared.append(CallComparison(call.name, max(known, default=None)))
    return compared


def first_divergence(
    compared: Sequence[CallComparison],
    gradients: Sequence[TensorParity],
    tolerance: float,
    aliases: Mapping[str, str],
) -> Divergence | None:
    """The first module whose results stray; else, going backward, the first whose own gradients do.

    Args:
        compared: the calls, in order.
        gradients: the parameters' gradients.
        tolerance: for results.
        aliases: the module that owns each parameter, by the parameter's name.
    """
    for call in compared:
        if call.error is not None and call.error > tolerance:
            return Divergence(call.module, "output", call.error)
    worst: dict[str, float] = {}
    for gradient in gradients:
        if not gradient.ok and gradient.name in aliases:
            owner = aliases[gradient.name]
            worst[owner] = max(worst.get(owner, 0.0), gradient.error)
    for call in reversed(compared):
        if call.module in worst:
            return Divergence(call.module, "gradient", worst[call.module])
    return next((Divergence(owner, "gradient", error) for owner, error in worst.items()), None)


class _Layouts:
    """What the program tells of the layout of results."""

    def __init__(self, program: Program) -> None:
        self._leaves_partial = {m.name for m in program.modules if any(r.source.forward == "P" for r in m.exits)}
        self._enters_partial = any(r.source.forward == "P" for m in program.modules for r in m.entries)
        self._cut = {name.rpartition(".")[0] for p in program.parameters if p.layout.is_sharded for name in p.names}

    def may_be_partial(self, module: str) -> bool:
        """Whether the ranks' sum may be the result: a module around it reduces it, or one that takes it does."""
        while module:
            module = module.rpartition(".")[0]
            if module in self._leaves_partial:
                return True
        return self._enters_partial

    def holds_shards(self, module: str) -> bool:
        """Whether a sharded parameter is the module's own, so that its results are cut in a known way."""
        return module in self._cut


def _error(
    whole: Tensor, parts: Sequence[Tensor | None], module: str, layouts: _Layouts, tolerance: float
) -> float | None:
    held = [part for part in parts if part is not None]
    if len(held) != len(parts):
        return None
    if all(part.shape == whole.shape for part in held):
        error = max(relative_error(whole, part) for part in held)
        if error > tolerance and layouts.may_be_partial(module):
            error = min(error, relative_error(whole, torch.stack(held).sum(0)))
        return error
    best = math.inf
    seen = False
    for candidate in joined(held, tuple(whole.shape)):
        seen = True
        best = min(best, relative_error(whole, candidate))
        if best <= tolerance:
            return best
    # Where it isn't known how a result is cut, an error may only say that it is cut otherwise.
    return best if seen and layouts.holds_shards(module) else None
