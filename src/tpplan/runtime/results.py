"""Results: the places at which a call of the root returns tensors, held against those of its proofs.

in:  what a call returned, and the paths of tensors in what proofs returned
out: nothing, or an error: nobody knows whether a tensor at another place is whole

    {"logits": …, "hidden": …}   where the proof returned {"logits": …}   ->   TP131
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from tpplan.compiler.ir.pytree import tensors_in
from tpplan.compiler.ir.trace import Path
from tpplan.plan import TpplanError


class UnlikeResultsError(TpplanError):
    """A call returned tensors at other places than its proof."""

    def __init__(self, what: str) -> None:
        """Say how its results differ."""
        super().__init__(
            f"TP131 departed-call: the call returned {what}\n  help: pass `inputs=` like this call to `parallelize`; "
            "what steers the model must be visible in its arguments or its modules' attributes"
        )


def refuse_unknown(result: Any, known: Collection[Path]) -> None:
    """Raise if a result has a tensor at a place where no proof has one.

    Raises:
        UnlikeResultsError: TP131.
    """
    for path, _ in tensors_in(result):
        if path not in known:
            where = "as its whole result" if not path else f"at `{'.'.join(map(str, path))}` of its results"
            raise UnlikeResultsError(f"a tensor {where}, where its proof has none")


__all__ = ["UnlikeResultsError", "refuse_unknown"]
