"""Fingerprints: all that a module's code can see of it, so that equal layers are checked once.

in:  a module
out: a hashable object, equal for modules that the same code can't tell apart, but for the numbers in their tensors

    Scale(lambda h: h / 32)   and   Scale(lambda h: h / h.shape[-1])   ->   two fingerprints
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from tpplan.compat.modules import named_modules
from tpplan.compiler.ir.program import LocalAttribute
from tpplan.compiler.ir.pytree import leaves
from tpplan.state.content import Identity, Reader, is_constant, plain
from tpplan.state.parts import PLAIN, UnseenError

_HOOKS = "_hooks"


class Fingerprints:
    """Fingerprints of the modules of one model; what modules share is looked at once."""

    def __init__(self, model: nn.Module, attributes: Mapping[str, tuple[LocalAttribute, ...]]) -> None:
        """Look at `model`, in which these attributes will be local."""
        self._modules = dict(named_modules(model))
        self._attributes = attributes
        self._others = {module: f"the module {id(module)}" for module in self._modules.values()}

    def of(self, name: str) -> object:
        """The fingerprint of a module and of all inside.

        A number that is the module's own position among its siblings (`layer_idx`) counts as a position.
        """
        positions = _positions(name)
        inside = {module: inner for inner, module in named_modules(self._modules[name])}
        reader, parts = Reader({**self._others, **inside}, _geometry), list[object]()
        for inner, module in named_modules(self._modules[name]):
            attributes = tuple((key, _attribute(key, value, positions, reader)) for key, value in _visible(module))
            full = f"{name}.{inner}" if inner else name
            parts.append((inner, type(module), attributes, self._attributes.get(full)))
        return tuple(parts)

    def passed(self, arguments: Any, name: str, running: nn.Module) -> object:
        """What a call is told beside tensors: its plain arguments, and what is set on the module that runs."""
        positions = _positions(name)
        told = ((path, held) for path, held in leaves(arguments) if not isinstance(held, Tensor))
        own = ((at, key, held) for at, module in named_modules(running) for key, held in vars(module).items())
        return (
            tuple((path, _told(held, Reader(self._others, _geometry))) for path, held in told),
            tuple((at, key, _plain(held, positions)) for at, key, held in own if type(held) in PLAIN),
        )


def _told(held: Any, reader: Reader) -> object:
    """An argument; of an object, such as a cache that each layer writes to, which it is, and its own numbers."""
    own: dict[str, Any] = getattr(held, "__dict__", {})
    if not own or callable(held):
        return _content(held, reader)
    return (Identity(held), tuple((name, _plain(item, ())) for name, item in own.items() if type(item) in PLAIN))


def _attribute(key: str, value: Any, positions: Collection[int], reader: Reader) -> object:
    if type(value) in PLAIN:
        return _plain(value, positions)
    if key.endswith(_HOOKS) and isinstance(value, dict):  # the keys number all hooks of the process
        return tuple(_content(hook, reader) for hook in value.values())  # pyright: ignore
    return _content(value, reader)


def _content(held: object, reader: Reader) -> object:
    try:
        return reader(held)
    except UnseenError:
        return Identity(held)


def _positions(name: str) -> set[int]:
    return {int(part) for part in name.split(".") if part.isdigit()}


def _plain(value: Any, positions: Collection[int]) -> object:
    """What plain data counts as; None of what isn't plain."""
    if type(value) is int and value in positions:
        return "position"
    return plain(value) if type(value) in PLAIN else None


def _visible(module: nn.Module) -> Iterable[tuple[str, Any]]:
    """A module's attributes without its children, which are looked at by name, and without empty tables."""
    for key, value in vars(module).items():
        if key == "_modules" or (type(value) in (dict, OrderedDict) and not value):
            continue
        yield key, value


def _geometry(tensor: Tensor) -> object:
    number: object = None
    if is_constant(tensor):
        number = str(tensor.item())  # a capture lets the model read it
    return (type(tensor), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.requires_grad, number)


__all__ = ["Fingerprints"]
