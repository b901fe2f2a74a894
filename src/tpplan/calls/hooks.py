"""Hooks: what users register on the modules of a sharded model after `parallelize`.

in:  the hooks of the model's modules, and the stock skeleton
out: the same hooks on the skeleton, so that calls are proved with them

    model.layers[0].register_forward_hook(clamp)      each call computes it, so each proof has to

The root's hooks see whole tensors, and torch's own (of FSDP, of profilers) compute nothing of the model's: neither are
followed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Set
from types import MethodType
from typing import Any

from torch import nn

from tpplan.compat import copy_hook, global_hooks, hook_tables
from tpplan.compiler.trace.skeleton import transplanted

_FOREIGN = ("torch.", "tpplan.")
Registered = tuple[tuple[str, int], ...]


class Hooks:
    """Follows the hooks of one sharded model."""

    def __init__(
        self, model: nn.Module, twins: Mapping[nn.Module, nn.Module], hooked: Set[tuple[nn.Module, int]]
    ) -> None:
        """Remember the hooks as they are.

        Args:
            model: the sharded model.
            twins: for each of its modules that of the skeleton.
            hooked: the hooks that forwards register, by module and number: those of proofs do so as well.
        """
        self._hooked = hooked
        self._twins = twins
        self._root = model
        self._registered = {
            module: held for module in twins if (held := self._registered_on(module)) and module is not model
        }
        self._global = _own(global_hooks())

    def look(self, modules: Iterable[nn.Module] = ()) -> bool:
        """Whether hooks were registered or removed: on these modules, on those that have hooks, or on all alike."""
        changed = [module for module in {*modules, *self._registered} if self._differs(module)]
        for module in changed:
            self._follow(module)
        everywhere = _own(global_hooks())
        if everywhere != self._global:
            self._global = everywhere
            return True
        return bool(changed)

    def look_at_all(self) -> bool:
        """As `look`, at all modules."""
        return self.look(self._twins)

    def _registered_on(self, module: nn.Module) -> Registered:
        """The tables and names of a module's hooks that aren't torch's own, nor those of forwards."""
        return tuple(
            (name, key)
            for name, table in hook_tables(module).items()
            if table
            for key in table
            if (module, key) not in self._hooked and _is_own(table[key])
        )

    def _differs(self, module: nn.Module) -> bool:
        known = module in self._twins and module is not self._root
        return known and self._registered_on(module) != self._registered.get(module, ())

    def _follow(self, module: nn.Module) -> None:
        twin, tables = self._twins[module], hook_tables(module)
        before, now = self._registered.pop(module, ()), self._registered_on(module)
        for name, key in set(before) - set(now):
            hook_tables(twin)[name].pop(key, None)
        for name, key in now:
            if (name, key) not in before:
                copy_hook(module, twin, name, key, transplanted(tables[name][key], self._twins))
        if now:
            self._registered[module] = now


def _own(hooks: Iterable[Any]) -> list[Any]:
    return [hook for hook in hooks if _is_own(hook)]


def _is_own(hook: Any) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    if isinstance(hook, MethodType):
        hook = type(hook.__self__)
    elif not hasattr(hook, "__qualname__"):
        hook = type(hook)  # pyright: ignore[reportUnknownVariableType]
    return not f"{getattr(hook, '__module__', '')}.".startswith(_FOREIGN)


__all__ = ["Hooks"]
