"""Tables: whether other modules or parameters stand in a model's tables than did, whoever put them there.

    layers._modules["0"] = other        `ModuleList.insert` does it so, past all methods that could tell

It is looked at before each call, so it is one comparison of identities for each entry.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from operator import is_, is_not, itemgetter
from typing import Any

from torch import nn

_KINDS = _MODULES, _PARAMETERS = ("_modules", "_parameters")
_GET_MODULES, _GET_PARAMETERS = itemgetter(_MODULES), itemgetter(_PARAMETERS)
_VALUES = dict[str, Any].values
_HOLDERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.ParameterList, nn.ParameterDict)


class Tables:
    """The tables of one model's modules, as they were."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """Remember those that hold anything, and those that are there to hold something."""
        self._held: list[tuple[nn.Module, str, dict[str, Any]]] = []
        for module in modules:
            for kind in _KINDS:
                table: dict[str, Any] = vars(module)[kind]
                if table or isinstance(module, _HOLDERS):
                    self._held.append((module, kind, dict(table)))
        # The same for functions that are written in C. A tensor's own `==` isn't asked, which computes.
        self._holders = [vars(module) for module, kind, _ in self._held if kind == _MODULES]
        self._children = [table for _, kind, table in self._held if kind == _MODULES]
        self._owners = [vars(module) for module, kind, _ in self._held if kind == _PARAMETERS]
        parameters = [table for _, kind, table in self._held if kind == _PARAMETERS]
        self._lengths = [*map(len, parameters)]
        self._parameters = [*chain.from_iterable(table.values() for table in parameters)]

    def differing(self) -> Iterable[tuple[nn.Module, str]]:
        """The modules, with the names in them under which something else stands, or nothing any more."""
        tables = [*map(_GET_PARAMETERS, self._owners)]
        if (
            [*map(_GET_MODULES, self._holders)] == self._children
            and [*map(len, tables)] == self._lengths
            and all(map(is_, chain.from_iterable(map(_VALUES, tables)), self._parameters))
        ):
            return ()
        return self._differences()

    def _differences(self) -> Iterator[tuple[nn.Module, str]]:
        for module, kind, before in self._held:
            table: dict[str, Any] = vars(module)[kind]
            if len(table) == len(before) and all(map(is_, table.values(), before.values())):
                continue
            for name in {*before, *table}:
                if is_not(before.get(name), table.get(name)):
                    yield module, name


__all__ = ["Tables"]
