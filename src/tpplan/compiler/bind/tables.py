"""Tables: whether a module looks rows up in its table, and does no more to them than scale them all alike.

in:  a module
out: whether its table can be split by rows; whether each call does just that is for the trace to say (`rewrite/lemmas`)

    nn.Embedding                                     ->  yes
    super().forward(ids) * self.embed_scale          ->  yes
    super().forward(ids + 2), … + self.positions     ->  no
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tpplan.compat.modes import RecordingMode
from tpplan.compat.schemas import OpOverload
from tpplan.compiler.trace.skeleton import make_skeleton
from tpplan.ops.registry import has_role


class _Operations(RecordingMode):
    """The names of operations, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def is_table(module: nn.Module) -> bool:
    """Whether `module` looks rows up in its table, and may scale them."""
    if not isinstance(module, nn.Embedding):
        return False
    if type(module).forward is nn.Embedding.forward:
        return True
    copied, mode = make_skeleton(module).model, _Operations()
    ids = torch.zeros(2, 3, dtype=torch.int64, device="meta")
    try:
        with torch.no_grad(), mode:
            made = copied(ids)
    except Exception:  # whatever it raises: not a table of this kind
        return False
    right = isinstance(made, Tensor) and tuple(made.shape) == (2, 3, module.embedding_dim)
    rows = sum(has_role(name, "row look-up") for name in mode.names)
    return right and rows == 1 and all(has_role(n, "row look-up", "scaling", "cast", "alias") for n in mode.names)


__all__ = ["is_table"]
