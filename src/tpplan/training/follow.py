"""Follow: adapt modules of accelerate and transformers, those that are imported now and those that will be.

A loop that others wrote asks nobody before it hands out batches, averages gradients, or saves on one rank alone. So a
few of its methods are wrapped, each by a function that does something else for sharded models, and calls the stock one.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

ADAPTERS = {
    "accelerate.accelerator": "tpplan.training.accelerator",
    "transformers.trainer": "tpplan.training.trainer",
}
"""What adapts which module, by its function `adapt`."""

_WRAPPED = "_tpplan_wrapped"
_wrapped: list[tuple[type, str, Callable[..., Any]]] = []


class _Finder(MetaPathFinder):
    """Finds the modules to adapt as everybody would, and has them adapted once they are loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in ADAPTERS:
            return None
        others = (finder.find_spec(fullname, path, target) for finder in [*sys.meta_path] if finder is not self)
        spec = next(filter(None, others), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _AdaptingLoader(spec.loader)
        return spec


class _AdaptingLoader(Loader):
    """Loads a module as its own loader does, which may be that of others as well, and adapts it."""

    def __init__(self, stock: Loader) -> None:
        self._stock = stock

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._stock.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._stock
        self._stock.exec_module(module)
        _adapt(module)


def follow() -> Callable[[], None]:
    """From now on, let accelerate's and transformers' training loops know sharded models; returns what ends that."""
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    for name in ADAPTERS:
        if name in sys.modules:
            _adapt(sys.modules[name])

    def undo() -> None:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)
        while _wrapped:
            owner, name, stock = _wrapped.pop()
            setattr(owner, name, stock)

    return undo


def _adapt(module: ModuleType) -> None:
    """Adapt a module; other models are to be trained by it all the same if that fails."""
    try:
        import_module(ADAPTERS[module.__name__]).adapt(module)
    except Exception as error:
        warnings.warn(
            f"tpplan doesn't know this version of `{module.__name__}`, and can't let it train sharded models: "
            f"{type(error).__name__}: {error}",
            stacklevel=2,
        )


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
    _wrapped.append((owner, name, stock))


__all__ = ["ADAPTERS", "follow", "wrap"]
