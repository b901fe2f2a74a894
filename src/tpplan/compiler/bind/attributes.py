"""Attributes: the numbers in a module that its forward may count by, its own and those of its settings.

    num_heads            an integer attribute of the module
    config.n_head        an integer attribute of a plain object that the module holds

A number in a settings object, which many modules share, is changed for one module alone by giving it a copy of the
object.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

_NOT_SETTINGS = (nn.Module, Tensor, type, types.FunctionType, types.MethodType, types.ModuleType, str, bytes)


def integer_attributes(module: nn.Module) -> list[tuple[str, int]]:
    """The counts that a module's forward may use: its own integers first, then those of the objects it holds."""
    own = [(key, held) for key, held in vars(module).items() if _is_count(key, held)]
    return own + [(f"{holder}.{key}", held) for holder, key, held in _settings(module)]


def _settings(module: nn.Module) -> Iterator[tuple[str, str, int]]:
    attributes: dict[str, object] = vars(module)
    for holder, held in attributes.items():
        if holder.startswith("_") or isinstance(held, _NOT_SETTINGS):
            continue
        numbers: dict[str, Any] = getattr(held, "__dict__", {})
        for key, value in numbers.items():
            if _is_count(key, value):
                yield holder, key, value


def _is_count(key: str, held: object) -> bool:
    return type(held) is int and not key.startswith("_")


def replaced_attribute(module: nn.Module, name: str, value: int) -> tuple[str, Any]:
    """What to set on `module`, under which name, so that it reads `value` for `name`."""
    holder, _, key = name.rpartition(".")
    if not holder:
        return name, value
    settings = copy.copy(vars(module)[holder])
    vars(settings)[key] = value
    return holder, settings


__all__ = ["integer_attributes", "replaced_attribute"]
