"""What a call passes, as it was before the call: lists, dicts and objects that it may have written to are put back.

in:  a call's arguments
out: whether they can be put back to what they were, and that done

    cache = DynamicCache();  before = Passed((ids,), {"past_key_values": cache});  model(ids, past_key_values=cache)
    before.restore()         ->   the cache is empty again
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, MutableMapping
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor

from tpplan.compat.tensors import version_of
from tpplan.compat.trees import is_registered_container
from tpplan.compiler.ir.objects import PLAIN, SHARED
from tpplan.compiler.ir.pytree import children, shows_its_state

Items = list[tuple[str | int, Any]]
_FIXED = (FunctionType, torch.Stream, torch.Event, *SHARED)


class Passed:
    """What the arguments of a call hold, before it."""

    def __init__(self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        """Look, and remember."""
        self._tensors: list[tuple[Tensor, int | None]] = []  # with versions, which tensors of inference mode don't have
        self._numbers: dict[int, Tensor] = {}  # of some of these, by their places
        self._held: list[tuple[Any, Items]] = []
        self._known = True
        seen: set[int] = set()
        waiting: list[Any] = [*arguments, *keywords.values()]
        while waiting:
            held = waiting.pop()
            if type(held) in PLAIN or isinstance(held, _FIXED) or id(held) in seen:
                continue
            seen.add(id(held))
            items = None if isinstance(held, Tensor) else children(held, objects=True)
            if items is not None:
                self._held.append((held, items))
                waiting += [item for _, item in items]
            elif isinstance(held, Tensor):
                self._tensors.append((held, version_of(held)))
            else:
                self._known = False  # whatever it keeps
        # Nobody can tell later whether these were written to. What objects hold may be a large cache.
        passed = {id(held) for held in (*arguments, *keywords.values())}
        self._keep(lambda tensor, version: version is None and id(tensor) in passed)

    def keep_numbers(self) -> None:
        """Have the numbers in tensors put back as well, unless autograd has a record of the writes."""
        self._keep(lambda tensor, version: True)

    def _keep(self, wanted: Callable[[Tensor, int | None], bool]) -> None:
        for place, held in enumerate(self._tensors):
            if place not in self._numbers and wanted(*held):
                self._numbers[place] = held[0].detach().clone()

    @property
    def is_restorable(self) -> bool:
        """Whether all that there was can be put back: no tensor of it was written to, or numbers were kept."""
        for place, (tensor, version) in enumerate(self._tensors):
            written = version is None or tensor._version != version
            if written and (place not in self._numbers or tensor.requires_grad):
                return False
        if not self._known:
            return False
        return all(_writer(held) is not None for held, _ in self._changed())

    def restore(self) -> None:
        """Put it back."""
        for held, items in self._changed():
            write = _writer(held)
            assert write is not None
            write(held, items)
        for place, numbers in self._numbers.items():
            tensor, version = self._tensors[place]
            if version is None:
                with torch.inference_mode():
                    tensor.copy_(numbers)
            elif tensor._version != version:
                with torch.no_grad():
                    tensor.copy_(numbers)
                self._tensors[place] = tensor, tensor._version

    def _changed(self) -> list[tuple[Any, Items]]:
        return [(held, items) for held, items in self._held if not _is_same(children(held, objects=True) or [], items)]


def _is_same(now: Items, before: Items) -> bool:
    return len(now) == len(before) and all(a == b and x is y for (a, x), (b, y) in zip(now, before, strict=True))


def _writer(held: Any) -> Callable[[Any, Items], None] | None:
    """What puts items back into a container or an object; None if nothing is known to."""
    kind = cast("type[Any]", type(held))
    if kind is list:
        return _write_list
    if kind in (dict, OrderedDict, defaultdict):
        return _write_mapping
    return _write_state if shows_its_state(kind) and not is_registered_container(held) else None


def _write_list(held: list[Any], items: Items) -> None:
    held[:] = [item for _, item in items]


def _write_mapping(held: MutableMapping[Any, Any], items: Items) -> None:
    held.clear()
    held.update(items)


def _write_state(held: Any, items: Items) -> None:
    _write_mapping(cast("dict[Any, Any]", vars(held)), items)


__all__ = ["Passed"]
