"""Follow: adapt modules of accelerate and transformers, those that are imported now and those that will be.

A loop that others wrote asks nobody before it hands out batches, averages gradients, or saves on one rank alone. So a
few of its methods are wrapped, each by a function that does something else for sharded models, and calls the stock one.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

ADAPTERS = {
    "accelerate.accelerator": "tpplan.training.accelerator",
    "transformers.trainer": "tpplan.training.trainer",
}
"""What adapts which module, by its function `adapt`."""

_WRAPPED = "_tpplan_wrapped"


class _Finder(MetaPathFinder):
    """Finds the modules to adapt as everybody would, and adapts them once they are loaded."""

    def __init__(self) -> None:
        self._asking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in ADAPTERS or self._asking:
            return None
        self._asking = True
        try:
            spec = find_spec(fullname)
        finally:
            self._asking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    """Loads a module as its own loader does, and adapts it."""

    def __init__(self, stock: Loader) -> None:
        self._stock = stock

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._stock.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._stock
        self._stock.exec_module(module)
        _adapt(module)


def follow() -> None:
    """From now on, let accelerate's and transformers' training loops know sharded models; done once."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    for name in ADAPTERS:
        if name in sys.modules:
            _adapt(sys.modules[name])


def _adapt(module: ModuleType) -> None:
    import_module(ADAPTERS[module.__name__]).adapt(module)


def wrap(owner: type, name: str, around: Callable[..., Any]) -> None:
    """Let `around(stock, self, …)` run in place of a method `stock(self, …)`; a method is wrapped once.

    A method that a version of the library doesn't have is left out.
    """
    stock = vars(owner).get(name)
    if stock is None or hasattr(stock, _WRAPPED):
        return

    @functools.wraps(stock)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(stock, self, *args, **kwargs)

    setattr(wrapped, _WRAPPED, True)
    setattr(owner, name, wrapped)


__all__ = ["ADAPTERS", "follow", "wrap"]
