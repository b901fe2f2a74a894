"""Own attributes: what code of the model's is shown that asks for a module's `__dict__`.

    vars(self)["cache"] = x                    as ever
    len(vars(self)), for name in vars(self)    ->   UnfollowedError
    "weight" in vars(self.up)                  ->   UnfollowedError

The `__dict__` of a rewritten module has more entries than the stock one's, and while bodies run the local tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, MutableMapping
from typing import Any, NoReturn

from torch import nn

from tpplan.compat.dynamo import COMPILED_CALL
from tpplan.compat.modules import own_tensors
from tpplan.compiler.trace.unfollowed import UnfollowedError

_OURS = ("_tpplan", "forward", COMPILED_CALL)
_LOOKS_UP = frozenset(("__getattr__", "__getattribute__", "__setattr__", "__delattr__"))


class OwnAttributes(MutableMapping[str, Any]):
    """The attributes of a module, each by its name; to count them, or to go through all of them, is refused."""

    def __init__(self, module: nn.Module, held: dict[str, Any]) -> None:
        """Show what `module` holds."""
        self._module, self._held = module, held

    def __getitem__(self, name: str) -> Any:
        return self._held[self._known(name)]

    def __setitem__(self, name: str, value: Any) -> None:
        self._held[name] = value

    def __delitem__(self, name: str) -> None:
        del self._held[name]

    def __contains__(self, name: object) -> bool:
        return self._known(name) in self._held

    def get(self, name: str, default: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """What is held by a name; `default` if nothing is."""
        return self._held.get(self._known(name), default)

    def __iter__(self) -> Iterator[str]:
        _refuse("goes through all that a module's `__dict__` holds")

    def __len__(self) -> int:
        _refuse("asks how many entries a module's `__dict__` has")

    def copy(self) -> dict[str, Any]:
        """As a dict has it, and refused."""
        return dict(self)

    def __or__(self, other: Any) -> dict[str, Any]:
        return dict(self)

    def _known(self, name: Any) -> Any:
        looked_up = sys._getframe(2).f_code.co_name in _LOOKS_UP  # pyright: ignore[reportPrivateUsage]
        if not looked_up and (str(name).startswith(_OURS) or name in own_tensors(self._module)):
            _refuse(f"looks for `{name}` in a module's `__dict__`")
        return name


def _refuse(what: str) -> NoReturn:
    raise UnfollowedError(
        f"it {what}, which has more entries after `parallelize`",
        "ask for attributes by their names, as by `getattr(module, name, None)`",
    )


__all__ = ["OwnAttributes"]
