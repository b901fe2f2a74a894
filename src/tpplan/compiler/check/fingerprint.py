"""Fingerprints: all that a module's code can see of it, so that equal layers are checked once.

in:  a module
out: a hashable object, equal for modules that the same code can't tell apart, but for the numbers in their tensors

    Scale(lambda h: h / 32)   and   Scale(lambda h: h / h.shape[-1])   ->   two fingerprints
"""

from __future__ import annotations

import functools
import types
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tpplan.compat import SYMBOLIC, expression_of, named_modules
from tpplan.compiler.ir.program import LocalAttribute
from tpplan.compiler.ir.pytree import leaves

_PLAIN = frozenset((int, float, complex, bool, str, bytes, type(None), type(Ellipsis)))
_BY_IDENTITY = (type, types.ModuleType, types.BuiltinFunctionType, torch.dtype, torch.device)
_HOOKS = "_hooks"


class Fingerprints:
    """Fingerprints of the modules of one model; what modules share is looked at once."""

    def __init__(self, model: nn.Module, attributes: Mapping[str, tuple[LocalAttribute, ...]]) -> None:
        """Look at `model`, in which these attributes will be local."""
        self._modules = dict(named_modules(model))
        self._attributes = attributes
        self._known: dict[int, object] = {}
        self._alive: list[object] = []  # an identity is one object's while that lives

    def of(self, name: str) -> object:
        """The fingerprint of a module and of all inside.

        A number that is the module's own position among its siblings (`layer_idx`) counts as a position.
        """
        positions = _positions(name)
        inside = {id(module): inner for inner, module in named_modules(self._modules[name])}
        parts: list[object] = []
        for inner, module in named_modules(self._modules[name]):
            attributes = tuple((key, self._attribute(key, value, positions, inside)) for key, value in _visible(module))
            full = f"{name}.{inner}" if inner else name
            parts.append((inner, type(module), attributes, self._attributes.get(full)))
        return tuple(parts)

    def passed(self, arguments: Any, name: str, running: nn.Module) -> object:
        """What a call is told beside tensors: its plain arguments, and what is set on the module that runs."""
        positions = _positions(name)
        told = ((path, held) for path, held in leaves(arguments) if not isinstance(held, Tensor))
        own = ((at, key, held) for at, module in named_modules(running) for key, held in vars(module).items())
        return (
            tuple((path, self._told(held)) for path, held in told),
            tuple((at, key, _plain(held, positions)) for at, key, held in own if type(held) in _PLAIN),
        )

    def _told(self, held: Any) -> object:
        """An argument; of an object, such as a cache that each layer writes to, which it is, and its own numbers."""
        own: dict[str, Any] = getattr(held, "__dict__", {})
        if not own or isinstance(held, (type, types.FunctionType, functools.partial)):
            return self._content(held, {})
        self._alive.append(held)
        return ("object", id(held), tuple((k, _plain(item, ())) for k, item in own.items() if type(item) in _PLAIN))

    def _attribute(self, key: str, value: Any, positions: Collection[int], inside: Mapping[int, str]) -> object:
        if type(value) in _PLAIN:
            return _plain(value, positions)
        if key.endswith(_HOOKS) and isinstance(value, dict):  # the keys number all hooks of the process
            return tuple(self._content(hook, inside) for hook in value.values())  # pyright: ignore
        return self._content(value, inside)

    def _content(self, value: Any, inside: Mapping[int, str]) -> object:
        if type(value) in _PLAIN:
            return (_class(value), value)
        if isinstance(value, SYMBOLIC):
            return (_class(value), str(expression_of(value)))
        if isinstance(value, nn.Module):
            return ("module", inside.get(id(value), id(value)))
        if isinstance(value, Tensor):
            return _geometry(value)
        if isinstance(value, _BY_IDENTITY):
            return value if isinstance(value, (torch.dtype, torch.device)) else id(value)
        known = self._known.get(id(value))
        if known is None:
            self._alive.append(value)
            self._known[id(value)] = ("object", id(value))  # for what contains itself
            known = self._walk(value, inside)
            if not _sees_modules(known):
                self._known[id(value)] = known
            else:
                del self._known[id(value)]  # it reads differently from another module's side
        return known

    def _walk(self, value: Any, inside: Mapping[int, str]) -> object:
        if isinstance(value, (tuple, list)):
            return (_class(value), self._each(value, inside))  # pyright: ignore[reportUnknownArgumentType]
        if isinstance(value, dict):
            items = [(self._content(k, inside), self._content(v, inside)) for k, v in value.items()]  # pyright: ignore
            return (_class(value), tuple(items), self._state(value, inside))  # pyright: ignore
        if isinstance(value, (set, frozenset)):
            return (_class(value), frozenset(self._each(value, inside)))  # pyright: ignore
        if isinstance(value, types.FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
            seen = (*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
            return (value.__code__, id(value.__globals__), self._each(seen, inside))
        if isinstance(value, types.MethodType):
            return (self._content(value.__func__, inside), self._content(value.__self__, inside))
        if isinstance(value, functools.partial):
            parts = (value.func, value.args, value.keywords)  # pyright: ignore[reportUnknownMemberType]
            return (functools.partial, self._each(parts, inside))
        state = self._state(value, inside)
        return ("object", id(value)) if state is None else (_class(value), state)

    def _each(self, items: Iterable[Any], inside: Mapping[int, str]) -> tuple[object, ...]:
        return tuple(self._content(item, inside) for item in items)

    def _state(self, value: Any, inside: Mapping[int, str]) -> object:
        """The attributes of an object; None if it has no table of them."""
        table = getattr(value, "__dict__", None)
        if not isinstance(table, dict):
            return None
        return tuple((name, self._content(item, inside)) for name, item in table.items())  # pyright: ignore


def _positions(name: str) -> set[int]:
    return {int(part) for part in name.split(".") if part.isdigit()}


def _plain(value: Any, positions: Collection[int]) -> object:
    """What plain data counts as; None of what isn't plain."""
    if type(value) is int and value in positions:
        return "position"
    return (_class(value), value) if type(value) in _PLAIN else None


def _class(value: object) -> object:
    return type(value)


def _visible(module: nn.Module) -> Iterable[tuple[str, Any]]:
    """A module's attributes without its children, which are looked at by name, and without empty tables."""
    for key, value in vars(module).items():
        if key == "_modules" or (type(value) in (dict, OrderedDict) and not value):
            continue
        yield key, value


def _geometry(tensor: Tensor) -> object:
    number: object = None
    if tensor.dim() == 0 and tensor.device.type == "cpu" and not isinstance(tensor, nn.Parameter):
        number = str(tensor.item())  # a capture lets the model read it
    return (type(tensor), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.requires_grad, number)


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _sees_modules(content: object) -> bool:
    if not isinstance(content, (tuple, frozenset)):
        return False
    return "module" in content or any(map(_sees_modules, content))  # pyright: ignore


__all__ = ["Fingerprints"]
