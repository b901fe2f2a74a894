"""Hooks: what users register on the modules of a sharded model after `parallelize`.

in:  the hooks of the model's modules, and the stock skeleton
out: the same hooks on the skeleton, so that calls are proved with them

    model.layers[0].register_forward_hook(clamp)      each call computes it, so each proof has to

The root's hooks see whole tensors, and torch's own (of FSDP, of profilers) compute nothing of the model's: neither are
followed. Nor is a hook of all modules, unless it changes something; see `runtime/around/onlookers.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from tpplan.ambience import is_users, may_return, original
from tpplan.compat.hooks import copy_hook, hook_tables, tables_of_all
from tpplan.compiler.trace.skeleton import transplanted
from tpplan.runtime.modules.writes import Writes

Registered = tuple[tuple[str, int], ...]


class Hooks:
    """Follows the hooks of one sharded model."""

    def __init__(self, model: nn.Module, twins: Mapping[nn.Module, nn.Module], writes: Writes) -> None:
        """Remember the hooks as they are.

        Args:
            model: the sharded model.
            twins: for each of its modules that of the skeleton.
            writes: has what is known of hooks of all modules.
        """
        self._onlookers = writes.onlookers
        self._twins = twins
        self._root = model
        self._registered = {
            module: held for module in twins if (held := self._registered_on(module)) and module is not model
        }
        self._global = self._of_all()

    def look(self, modules: Iterable[nn.Module] = ()) -> bool:
        """Whether hooks were registered or removed: on these modules, on those that have hooks, or on all alike."""
        changed = [module for module in {*modules, *self._registered} if self._differs(module)]
        if changed:
            self._follow(changed)
        everywhere = self._of_all()
        if everywhere != self._global:
            self._global = everywhere
            return True
        return bool(changed)

    def look_at_all(self) -> bool:
        """As `look`, at all modules."""
        return self.look(self._twins)

    def _of_all(self) -> list[tuple[object, bool]]:
        """The user's hooks of all modules that may change something, and whether calls have shown it."""
        found = [original(hook) for table in tables_of_all().values() for hook in table.values()]
        known = self._onlookers.followed
        return [(hook, hook in known) for hook in found if hook in known or (is_users(hook) and may_return(hook))]

    def _registered_on(self, module: nn.Module) -> Registered:
        """The tables and names of a module's hooks that aren't torch's own."""
        return tuple(
            (name, key) for name, table in hook_tables(module).items() if table for key in table if is_users(table[key])
        )

    def _differs(self, module: nn.Module) -> bool:
        known = module in self._twins and module is not self._root
        return known and self._registered_on(module) != self._registered.get(module, ())

    def _follow(self, modules: Iterable[nn.Module]) -> None:
        """Let the skeleton have the hooks that there are now, all at once: they may share what they hold."""
        for module in modules:
            before, now = self._registered.pop(module, ()), self._registered_on(module)
            for name, key in set(before) - set(now):
                hook_tables(self._twins[module])[name].pop(key, None)
            if now:
                self._registered[module] = now
        places = [(module, *place) for module, held in self._registered.items() for place in held]
        made: Any = transplanted([hook_tables(module)[name][key] for module, name, key in places], self._twins)
        for (module, name, key), hook in zip(places, made, strict=True):
            copy_hook(module, self._twins[module], name, key, hook)


__all__ = ["Hooks"]
