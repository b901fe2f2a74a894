"""Copies of sharded modules, which `copy` makes and `pickle` doesn't.

Both ask an object how to make another one like it. What a process knows of its place among the ranks can be copied
within it, but not sent elsewhere.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from tpplan.runtime.parameters.sharded_tensors import StateError


class HereOnly:
    """How to make an object, in this process."""

    def __init__(self, make: Callable[..., Any], arguments: tuple[Any, ...], name: str) -> None:
        """Make it by `make(*arguments)`; `name` is its class, for messages."""
        self.make, self.arguments, self.name = make, arguments, name

    def __deepcopy__(self, memo: dict[int, Any]) -> HereOnly:
        return HereOnly(self.make, copy.deepcopy(self.arguments, memo), self.name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StateError.of(
            "TP142",
            f"a sharded module, `{self.name}`, can't be pickled",
            help="save its state: torch.save(model.state_dict(), …) on every rank, or tpplan.save_weights(model, "
            "folder), and load that into a model that is parallelized there",
        )


def here_only(reduced: Any, name: str) -> Any:
    """What `__reduce_ex__` has returned, such that only `copy` can make use of it."""
    if not isinstance(reduced, tuple):
        return reduced
    make, arguments, *rest = reduced  # pyright: ignore[reportUnknownVariableType]
    return (_made, (HereOnly(make, arguments, name),), *rest)  # pyright: ignore[reportUnknownArgumentType]


def _made(recipe: HereOnly) -> Any:
    return recipe.make(*recipe.arguments)


__all__ = ["here_only"]
