"""Around: what wraps a sharded model, such as peft's classes, tells when its methods fail since they change that model.

    peft_model.add_weighted_adapter(…)     puts stock layers beside sharded ones, and adds up both: TP130

A method that only adds or removes modules returns; then the next call of the model is the TP130.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch import nn

from tpplan.compat.modules import named_modules
from tpplan.plan import TpplanError
from tpplan.runtime.modules.writes import WRITES


class ChangedAroundError(TpplanError):
    """A method of what wraps a sharded model failed, having changed that model."""


def telling_methods(stock: type[nn.Module], path: tuple[str, ...]) -> dict[str, Callable[..., Any]]:
    """The public methods of a class but `forward`, such that an error says which change of the model it comes from.

    Args:
        stock: the class of a module that wraps a sharded model.
        path: the names that lead from such a module to that model.
    """
    members: dict[str, Any] = {}
    for kind in reversed([kind for kind in stock.__mro__ if not issubclass(nn.Module, kind)]):
        members |= vars(kind)
    return {
        name: _telling(member, path)
        for name, member in members.items()
        if isinstance(member, FunctionType) and not name.startswith("_") and name != "forward"
    }


def _telling(method: Callable[..., Any], path: tuple[str, ...]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except TpplanError:
            raise
        except Exception as error:
            added = _added(self.get_submodule(".".join(path)))
            if added is None:
                raise
            name, kind = added
            raise ChangedAroundError.of(
                "TP130",
                f"`{method.__name__}` put `{name}`, a `{kind}`, into the sharded model, and failed on tensors of which "
                f"some are whole and some are parts ({error})",
                help="change the stock model before `parallelize`: apply adapters first, and parallelize the adapted "
                "model",
            ) from error

    return call


def _added(model: nn.Module) -> tuple[str, str] | None:
    """A module that wasn't there when the model was sharded."""
    for name, module in named_modules(model):
        if WRITES not in vars(module):
            return name, type(module).__name__
    return None


__all__ = ["ChangedAroundError", "telling_methods"]
