"""The tensors in nested results and arguments, named for people; see `compiler/ir/pytree.py`.

Other objects, such as key-value caches, are opaque: their contents are local, and nobody but the model reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

from torch import Tensor, nn

from tpplan.compiler.ir import pytree

Path = tuple[str | int, ...]


def tensors_in(held: object, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Every tensor inside `held` with its path, in order; keys of mappings as text."""
    named: Iterator[tuple[Path, Tensor]] = pytree.tensors_in(held, path)
    return ((tuple(k if isinstance(k, int) else str(k) for k in at), tensor) for at, tensor in named)


def path_name(path: Path) -> str:
    """A path for people: `hidden_states.0`; a bare tensor is called `output`."""
    return ".".join(str(part) for part in path) or "output"


def map_tensors(held: Any, transform: Callable[[str, Tensor], Tensor], name: str = "") -> Any:
    """A copy of `held` with each tensor replaced; `transform` gets the innermost key that is a name as well."""

    def change(path: Path, item: Any) -> Any:
        if not isinstance(item, Tensor):
            return item
        return transform(next((str(key) for key in reversed(path) if not isinstance(key, int)), name), item)

    return pytree.Walk(change, once=True)(held)


def modules_in(model: nn.Module) -> dict[str, nn.Module]:
    """Every distinct module under its first qualified name."""
    return dict(cast("Iterator[tuple[str, nn.Module]]", model.named_modules()))
