# pyright: reportPrivateUsage=false
"""Hooks of modules, of all of them and of one, and how a module is called around them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.modules import module as _modules


def has_hooks(module: nn.Module) -> bool:
    """Whether something is called with a module's arguments, results or gradients besides its forward.

    For every torch.
    """
    return any(getattr(module, name) for name in HOOK_TABLES)


HOOK_TABLES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def hook_tables(module: nn.Module) -> dict[str, dict[int, Any]]:
    """The tables of what is called with a module's arguments, results or gradients besides its forward.

    For every torch.
    """
    return {name: getattr(module, name) for name in HOOK_TABLES}


def hooks_of(module: nn.Module) -> list[object]:
    """What is in a module's tables of hooks. For every torch."""
    return [hook for table in hook_tables(module).values() for hook in table.values()]


def copy_hook(source: nn.Module, target: nn.Module, table: str, key: int, hook: object) -> None:
    """Register `hook` on `target` as that of `source` by the name `key`, with its options. For every torch."""
    getattr(target, table)[key] = hook
    for options in ("with_kwargs", "always_called"):
        chosen = getattr(source, f"{table}_{options}", None)
        if chosen is not None and key in chosen:
            getattr(target, f"{table}_{options}")[key] = True
    if table == "_backward_hooks":
        target._is_full_backward_hook = source._is_full_backward_hook


FORWARD_HOOKS = HOOK_TABLES[:2]
"""The attributes of a module with the tables of what is called before and after its forward."""


_CALLED = ("forward_pre", "forward", "backward_pre", "backward")


_REGISTERED = ("module_registration", "parameter_registration", "buffer_registration")


def tables_of_all() -> dict[str, dict[int, Any]]:
    """The tables of hooks that all modules call, by what they are called for. For every torch."""
    return {kind: getattr(_modules, f"_global_{kind}_hooks") for kind in _CALLED}


def global_hook_tables() -> tuple[dict[int, object], dict[int, object]]:
    """The tables of what is called before and after the forward of any module. For every torch."""
    tables = tables_of_all()
    return tables["forward_pre"], tables["forward"]


def has_hooks_of_all() -> bool:
    """Whether there are hooks that all modules call. For every torch."""
    return any(getattr(_modules, f"_global_{kind}_hooks") for kind in _CALLED)


def global_hooks() -> list[object]:
    """The forward hooks and pre-hooks of all modules. For every torch."""
    return [hook for table in global_hook_tables() for hook in table.values()]


def is_called_as_usual(module: nn.Module) -> bool:
    """Whether the module's class leaves it to torch what a call does around the forward. For every torch."""
    return type(module)._call_impl is nn.Module._call_impl


def ordinary_call(module: nn.Module) -> Callable[..., Any]:
    """What a call of the module does, hooks and all, where nothing was compiled for it. For every torch."""
    return cast("Any", module)._call_impl


@contextmanager
def without_global_hooks(left_out: Callable[[str, object], bool]) -> Generator[None]:
    """A block in which those hooks of all modules don't run that are `left_out`, by kind. For every torch."""
    every = tables_of_all() | {kind: getattr(_modules, f"_global_{kind}_hooks") for kind in _REGISTERED}
    before = {kind: dict(table) for kind, table in every.items()}
    for kind, table in every.items():
        for key in [key for key, hook in table.items() if left_out(kind, hook)]:
            del table[key]
    try:
        yield
    finally:
        for kind, table in every.items():
            added = {key: hook for key, hook in table.items() if key not in before[kind]}
            table.clear()
            table.update(before[kind] | added)


@dataclass(frozen=True, slots=True)
class ModuleHooks:
    """A module's hooks before and after its backward; `legacy` for those that see the last operation alone.

    For every torch.
    """

    before: tuple[Callable[..., Any], ...]
    after: tuple[Callable[..., Any], ...]
    legacy: bool


def backward_hooks(module: nn.Module) -> ModuleHooks | None:
    """The hooks of a module's backward, those of all modules among them; None if there are none. For every torch."""
    tables, held = cast("Any", _modules), cast("Any", module)
    own, everywhere = _listed(held._backward_hooks), _listed(tables._global_backward_hooks)
    before, sooner = _listed(held._backward_pre_hooks), _listed(tables._global_backward_pre_hooks)
    if not (own or before or everywhere or sooner):
        return None
    legacy = (bool(own) and module._is_full_backward_hook is False) or (
        bool(everywhere) and tables._global_is_full_backward_hook is False
    )
    return ModuleHooks((*sooner, *before), (*everywhere, *own), legacy)


def _listed(table: Mapping[int, Callable[..., Any]]) -> tuple[Callable[..., Any], ...]:
    return tuple(table.values())


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Whether there are hooks on a tensor's gradient. For every torch."""
    accumulated: object = getattr(tensor, "_post_accumulate_grad_hooks", None)
    return bool(tensor._backward_hooks) or bool(accumulated)


def note_forward_hooks(model: nn.Module) -> Callable[[], None]:
    """Note the forward hooks of a model's modules; what comes back takes away those that came later.

    For every torch.
    """
    before = [(module, set(hook_tables(module)["_forward_hooks"])) for module in model.modules()]

    def take_away() -> None:
        for module, kept in before:
            for key in module._forward_hooks.keys() - kept:
                del module._forward_hooks[key]

    return take_away
