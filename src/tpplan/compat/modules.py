# pyright: reportPrivateUsage=false
"""Modules: their own tables of parameters, buffers and modules, by whatever name torch keeps them."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.prune import BasePruningMethod

from tpplan.compat.tensors import version_of


def named_modules(model: nn.Module, remove_duplicate: bool = True) -> list[tuple[str, nn.Module]]:
    """As `model.named_modules`, whose types torch leaves open, in time that doesn't grow with the depth.

    For every torch.
    """
    found: list[tuple[str, nn.Module]] = []
    seen: set[int] = set()

    def visit(name: str, module: nn.Module) -> None:
        if remove_duplicate and id(module) in seen:
            return
        seen.add(id(module))
        found.append((name, module))
        for leaf, child in module._modules.items():
            if child is not None:
                visit(f"{name}.{leaf}" if name else leaf, child)

    visit("", model)
    return found


def computed_weights(module: nn.Module) -> dict[str, object]:
    """The tensors that hooks before a forward compute, as torch's pruning and old weight norm do, with their hook.

    For every torch.
    """
    hooks = cast("dict[int, object]", module._forward_pre_hooks).values()
    names = {
        getattr(hook, "_tensor_name" if isinstance(hook, BasePruningMethod) else "name", None): hook for hook in hooks
    }
    return {
        name: hook
        for name, hook in names.items()
        if isinstance(name, str) and name not in module._parameters and hasattr(module, name)
    }


FUSED_WEIGHT_NORM: Callable[..., Tensor] = torch._weight_norm  # pyright: ignore[reportPrivateImportUsage]
"""What torch's weight norms call: directions, lengths, the dim that counts the vectors; -1 for a single one."""


PARAMETRIZATIONS = "parametrizations"


def parametrized_tensors(module: nn.Module) -> dict[str, Sequence[nn.Module]]:
    """The tensors of a module that torch's parametrizations compute whenever they're read, with the steps of each.

    For every torch.
    """
    return dict(cast("Any", module).parametrizations) if is_parametrized(module) else {}


def removes_parametrizations(depth: int) -> bool:
    """Whether the caller that is `depth` frames up is torch's `remove_parametrizations`. For every torch."""
    return sys._getframe(depth + 1).f_code is parametrize.remove_parametrizations.__code__


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The table that holds a module's own parameters, by name. For every torch."""
    return module._parameters


WEIGHTS_LISTED = "_flat_weights"
"""The attribute in which a recurrent layer of torch has a list of its weights."""


def weights_to_list(module: nn.RNNBase) -> list[Tensor | None]:
    """What is in that list. For every torch."""
    return [own_parameters(module).get(name) for name in cast("list[str]", module._flat_weights_names)]


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """The table that holds a module's own buffers, by name. For every torch."""
    return module._buffers


def own_table(module: nn.Module, name: str) -> dict[str, Any]:
    """The table that holds a module's own parameter or buffer of a name. For every torch."""
    return module._buffers if name in module._buffers else module._parameters


def own_tensors(module: nn.Module) -> dict[str, Tensor | None]:
    """A module's own parameters and buffers. For every torch."""
    return {**module._parameters, **module._buffers}


def own_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """The table that holds a module's children, by name. For every torch."""
    return module._modules


def hidden_names(module: nn.Module) -> list[str]:
    """The names of parameters, buffers and children that Python doesn't find, as `__dict__` has something by these.

    For every torch.
    """
    tables: tuple[dict[str, Any], ...] = (own_parameters(module), own_buffers(module), own_modules(module))
    own = vars(module)
    return [name for table in tables for name, held in table.items() if held is not None and name in own]


def kept_buffers(module: nn.Module) -> Callable[[], None]:
    """How to put the buffers of a module and of those inside back to what they hold. For every torch."""
    kept = [(buffer, version_of(buffer), buffer.detach().clone()) for buffer in module.buffers()]

    def restore() -> None:
        for buffer, version, numbers in kept:
            if version is None or buffer._version != version:
                with torch.inference_mode(version is None), torch.no_grad():
                    buffer.copy_(numbers)

    return restore


BATCH_NORM_FORWARD = _BatchNorm.forward.__code__
"""The code of the forward that torch's batch norms share."""


def transient_buffers(module: nn.Module) -> set[str]:
    """The names of a module's own buffers that aren't in its state_dict. For every torch."""
    return module._non_persistent_buffers_set


def give_class(held: object, kind: type[object]) -> None:
    """Give an object of our own, or one that is put back, another class. For every torch."""
    held.__class__ = kind


def derive_class(held: object, members: dict[str, object]) -> None:
    """Give an object of our own, such as a module of a skeleton, a class with these members, derived from its own.

    For every torch.
    """
    kind: type[object] = held.__class__
    held.__class__ = type(kind.__name__, (kind,), members | {"__module__": kind.__module__})


def class_over(name: str, base: type[Any], stock: type[Any], members: dict[str, Any]) -> type[Any]:
    """A class of `base` and then `stock`, for whose objects those of `stock` can be taken by setting `__class__`.

    Python lets that be where both classes have the same first base without a `__dict__`. Of a class whose first one has
    no `__dict__` (`class Layer(ABC, nn.Linear)`, `Generic`), it has to come first here, and only the order in which
    attributes are looked up has `base` before it. For every torch.
    """
    if _without_dict(base) is _without_dict(stock):
        return type(name, (base, stock), members)
    order: list[type[Any]] = [*(kind for kind in base.__mro__ if kind not in stock.__mro__), *stock.__mro__]
    meta: Any = types.prepare_class(name, (stock, base))[0]

    def mro(cls: type[Any]) -> list[type[Any]]:
        return [cls, *order] if cls.__bases__ == (stock, base) else meta.mro(cls)

    return type(meta.__name__, (meta,), {"mro": mro})(name, (stock, base), members)


def _without_dict(kind: type[Any]) -> type[Any]:
    """The first base of a class whose objects have no `__dict__`."""
    while kind.__dictoffset__ and kind.__base__ is not None:
        kind = kind.__base__
    return kind


@contextmanager
def without_cached_weights() -> Generator[None]:
    """A block outside of `parametrize.cached()`, which keeps what is computed of parameters. For every torch."""
    module: Any = parametrize
    before = module._cache_enabled, module._cache
    module._cache_enabled, module._cache = 0, {}
    try:
        yield
    finally:
        module._cache_enabled, module._cache = before


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source to its target, in one call. For every torch."""
    torch._foreach_copy_(targets, sources)  # pyright: ignore
