"""Tables: whether other modules or parameters stand in a model's tables than did, whoever put them there.

    layers._modules["0"] = other        `ModuleList.insert` does it so, past all methods that could tell

It is looked at before each call, so it is one comparison of identities for each module that has anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import is_, is_not
from typing import Any

from torch import nn

_KINDS = ("_modules", "_parameters")
_HOLDERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.ParameterList, nn.ParameterDict)


class Tables:
    """The tables of one model's modules, as they were."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """Remember those that hold anything, and those that are there to hold something."""
        self._held: list[tuple[nn.Module, dict[str, Any], str, tuple[str, ...], tuple[Any, ...]]] = []
        for module in modules:
            for kind in _KINDS:
                table: dict[str, Any] = vars(module)[kind]
                if table or isinstance(module, _HOLDERS):
                    self._held.append((module, vars(module), kind, tuple(table), tuple(table.values())))

    def differing(self) -> Iterator[tuple[nn.Module, str]]:
        """The modules, with the names in them under which something else stands, or nothing any more."""
        for module, state, kind, names, values in self._held:
            table: dict[str, Any] = state[kind]
            if len(table) == len(values) and all(map(is_, table.values(), values)):
                continue
            before = dict(zip(names, values, strict=True))
            for name in {*before, *table}:
                if is_not(before.get(name), table.get(name)):
                    yield module, name


__all__ = ["Tables"]
