"""Settings: the objects with flags that modules hold, such as a config, and that are written to behind their backs.

model.config.use_cache = False         the skeleton's config gets the flag, and calls are proved anew
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from torch import nn

from tpplan.compiler.ir.objects import PLAIN, fresh_object, is_opaque
from tpplan.runtime.contents import MISSING, is_same

_CONTAINERS = (tuple, list, dict, set, frozenset, type)


@dataclass(slots=True)
class _Watched:
    """An object, what it held when it was looked at last, and the skeleton's copy."""

    held: Any
    before: dict[str, Any]
    copied: Any

    @property
    def now(self) -> dict[str, Any]:
        """What it holds."""
        return cast("dict[str, Any]", vars(self.held))

    def changed(self) -> list[str]:
        """The names of what was set since."""
        now = self.now
        try:
            if now == self.before:
                return []
        except Exception:  # arrays compare entry by entry
            pass
        names = {*self.before, *now}
        return [name for name in names if not is_same(self.before.get(name, MISSING), now.get(name, MISSING))]

    def follow(self, names: Iterable[str]) -> None:
        """Set the same in the skeleton's copy."""
        for name in names:
            vars(self.copied).pop(name, None)
            if name in self.now:
                vars(self.copied)[name] = fresh_object(self.now[name])
        self.before = dict(self.now)


class Settings:
    """The settings of one model."""

    def __init__(self, held: Mapping[nn.Module, Mapping[str, Any]], stock: Mapping[nn.Module, nn.Module]) -> None:
        """Watch the settings among the attributes `held` by modules, of which `stock` has the skeleton's."""
        self._watched = list(_settings(held, stock))

    def changed(self) -> list[tuple[type, str]]:
        """What was set since it was followed last, by the class of the settings."""
        return [(type(one.held), name) for one in self._watched for name in sorted(one.changed())]

    def follow(self) -> None:
        """Set the same in the skeleton."""
        for one in self._watched:
            one.follow(one.changed())


def _settings(held: Mapping[nn.Module, Mapping[str, Any]], stock: Mapping[nn.Module, nn.Module]) -> Iterator[_Watched]:
    seen: set[int] = set()
    for module, attributes in held.items():
        for name, item in attributes.items():
            if id(item) in seen or not _has_flags(item):
                continue
            seen.add(id(item))
            copied = vars(stock[module]).get(name)
            if type(copied) is type(item) and copied is not item:
                yield _Watched(item, dict(cast("dict[str, Any]", vars(item))), copied)


def _has_flags(held: object) -> bool:
    if type(held) in PLAIN or isinstance(held, _CONTAINERS) or callable(held):
        return False
    return bool(getattr(held, "__dict__", None)) and not is_opaque(held)


__all__ = ["Settings"]
