"""Results: the places at which a call of the root returns tensors, held against those of its proofs.

in:  what a call returned, and the paths of tensors in what proofs returned
out: nothing, or an error: nobody knows whether a tensor at another place is whole

    {"logits": …, "hidden": …}   where the proof returned {"logits": …}   ->   TP131
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, cast

from torch import Tensor

from tpplan.compiler.ir.pytree import children, tensors_in
from tpplan.compiler.ir.trace import Path
from tpplan.plan import Diagnostic, TpplanError

_ITEMS: tuple[Any, ...] = (vars(dict)["items"], vars(OrderedDict)["items"])
_MOST = 64


class UnlikeResultsError(TpplanError):
    """A call returned tensors at other places than its proof."""

    def __init__(self, what: str) -> None:
        """Say how its results differ."""
        way_out = (
            "pass `inputs=` like this call to `parallelize`; what steers the model must be visible in its arguments or "
            "its modules' attributes"
        )
        super().__init__([Diagnostic("TP131", f"the call returned {what}", help=way_out)])


class Results(set[Path]):
    """The places of tensors in what proofs returned.

    The forms of flat results that were looked at are remembered, as a token takes little longer than such a look.
    """

    def __init__(self, paths: Iterable[Path] = ()) -> None:
        """Start with these."""
        super().__init__(paths)
        self._forms: set[tuple[object, ...]] = set()

    def refuse_others(self, result: Any) -> None:
        """Raise if a result has a tensor at a place where no proof has one.

        Raises:
            UnlikeResultsError: TP131.
        """
        form = _form(result)
        if form in self._forms:
            return
        for path, _ in tensors_in(result):
            if path not in self:
                where = "as its whole result" if not path else f"at `{'.'.join(map(str, path))}` of its results"
                raise UnlikeResultsError(f"a tensor {where}, where its proof has none")
        flat = all(children(item) is None for _, item in children(result) or ())
        if form and flat and len(self._forms) < _MOST:
            self._forms.add(form)


def _form(result: Any) -> tuple[object, ...]:
    """The class of a flat result, its names, and the classes of what they stand for; () of what has another form."""
    kind = cast("type[Any]", type(result))
    if kind is Tensor:
        return (kind,)
    if not issubclass(kind, dict) or kind.items not in _ITEMS:
        return ()
    own: dict[str, Any] = getattr(result, "__dict__", {})
    return kind, *result, *map(type, result.values()), *own, *map(type, own.values())  # pyright: ignore


__all__ = ["Results", "UnlikeResultsError"]
