"""The tensors in nested results: tuples, lists, mappings (transformers' ModelOutput is one) and dataclasses.

Other objects, such as key-value caches, are opaque: their contents are local, and nobody but the model reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, cast

from torch import Tensor, nn

from tpplan.compat import is_registered_container, rebuild_container

Path = tuple[str | int, ...]


def tensors_in(held: object, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Every tensor inside `held` with its path, in order."""
    if isinstance(held, Tensor):
        yield path, held
    elif isinstance(held, Mapping):
        for key, item in cast("Mapping[object, object]", held).items():
            yield from tensors_in(item, (*path, str(key)))
    elif isinstance(held, (list, tuple)):
        for index, item in enumerate(cast("list[object]", held)):
            yield from tensors_in(item, (*path, index))
    elif is_dataclass(held) and not isinstance(held, type):
        for field in fields(held):
            yield from tensors_in(getattr(held, field.name), (*path, field.name))


def path_name(path: Path) -> str:
    """A path for people: `hidden_states.0`; a bare tensor is called `output`."""
    return ".".join(str(part) for part in path) or "output"


def map_tensors(held: Any, transform: Callable[[str, Tensor], Tensor], name: str = "") -> Any:
    """The arguments `held` with each tensor replaced; `transform` gets the name of the innermost key as well."""
    if isinstance(held, Tensor):
        return transform(name, held)
    if isinstance(held, tuple):
        items = [map_tensors(item, transform, name) for item in cast("tuple[Any, ...]", held)]
        kind: Any = type(cast("object", held))
        return kind(*items) if hasattr(kind, "_fields") else tuple(items)
    if isinstance(held, list):
        return [map_tensors(item, transform, name) for item in cast("list[Any]", held)]
    if isinstance(held, dict) and is_registered_container(cast("object", held)):
        keys = iter(cast("dict[Any, Any]", held))
        return rebuild_container(held, lambda item: map_tensors(item, transform, str(next(keys))))
    if isinstance(held, dict):
        return {key: map_tensors(item, transform, str(key)) for key, item in cast("dict[Any, Any]", held).items()}
    return held


def modules_in(model: nn.Module) -> dict[str, nn.Module]:
    """Every distinct module under its first qualified name."""
    return dict(cast("Iterator[tuple[str, nn.Module]]", model.named_modules()))
