"""Same path: whether the bodies of a lowered model do what those of the stock one did when they were checked.

in:  the steps of the check, on a rank's shapes, and those of the rehearsal, on the same shapes, with what is returned
out: nothing, or a TP139 at the first that differs, or that passes or returns another number

    h * (2 if type(self.up) is nn.Linear else 3)   ->   TP139: `mul` is called with 3, and with 2 where it was checked

The check runs stock modules. A body that asks for a module's class or its text, or looks into it, gets another answer
from a rewritten one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import cast

from torch import nn

from tpplan.compat.modules import named_modules
from tpplan.compiler.ir.steps import Heard, Step, Stream, passed_numbers
from tpplan.plan import CompileError, Diagnostic
from tpplan.runtime.modules.swapped import replaces_body

_WAY_OUT = (
    "ask `isinstance(module, torch.nn.Linear)` instead of `type(module) is torch.nn.Linear`, and keep what the forward "
    "must know of a module as an attribute that `__init__` sets"
)


def refuse_other_path(
    model: nn.Module, checked: Stream, rank: int, ran: Sequence[Step | Heard], result: object
) -> None:
    """Compare the steps of a rehearsal with those of the check.

    Args:
        model: the lowered model.
        checked: the steps of the check.
        rank: whose shapes both ran on.
        ran, result: the steps of the rehearsal, and what the model returned.

    Raises:
        CompileError: TP139, if they aren't the same.
    """
    varying = checked.varying_code()
    replaced = frozenset(name for name, module in named_modules(model) if replaces_body(module))
    ours = [step for step in checked.run(replaced) if step.code not in varying]
    theirs = [
        step._replace(module="")
        for step in ran
        if isinstance(step, Step) and step.code not in varying and not is_in(step.module, replaced)
    ]
    returned = passed_numbers(result)
    if ours == theirs and returned == checked.returned:
        return
    what = (
        _told_of_steps(*next(pair for pair in zip_longest(ours, theirs) if pair[0] != pair[1]))
        if ours != theirs
        else "it returns {}, where the stock model returns {}".format(*_first_differing(returned, checked.returned))
    )
    message = f"the model can tell, as rank {rank}, that it was rewritten, and does something else: {what}"
    raise CompileError([Diagnostic("TP139", message, help=_WAY_OUT)])


def is_in(name: str, modules: frozenset[str]) -> bool:
    """Whether a module or a parameter is one of `modules`, or inside of one."""
    while name not in modules:
        if not name:
            return False
        name = name.rpartition(".")[0]
    return True


def _told_of_steps(proved: Step | None, real: Step | None) -> str:
    """Where the two part, in words."""
    if proved is not None and real is not None and proved[:3] == real[:3]:
        now, then = _first_differing(real.passed, proved.passed)
        return f"at {real.location.short} `{real.name}` is called with {now}, where the stock model passes {then}"
    does = "it ends" if real is None else f"at {real.location.short} it calls `{real.name}`"
    did = "ends" if proved is None else f"calls `{proved.name}` at {proved.location.short}"
    return f"{does} where the stock model {did}"


def _first_differing(one: object, other: object) -> tuple[object, object]:
    """The first leaf that differs of two nests of numbers."""
    ours, theirs = (cast("Sequence[object]", held) if isinstance(held, tuple) else () for held in (one, other))
    if len(ours) == len(theirs):
        for mine, its in zip(ours, theirs, strict=True):
            if mine != its:
                return _first_differing(mine, its)
    return one, other


__all__ = ["is_in", "refuse_other_path"]
