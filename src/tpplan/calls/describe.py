"""Describe: how a call differs from the example, for people.

`wide` is True, which the example doesn't pass; `attention_mask` isn't passed; the call is in evaluation
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from tpplan.compiler.ir.objects import PLAIN
from tpplan.compiler.ir.program import dtype_name

_SHOWN = 4
_LONGEST = 40


def described(arguments: Sequence[Any], keywords: Mapping[str, Any], names: Sequence[str]) -> dict[str, str]:
    """What each argument of a call is, in words; those that are None are left out."""
    named = {names[i] if i < len(names) else f"*{i}": held for i, held in enumerate(arguments)} | dict(keywords)
    return {name: _argument(held) for name, held in named.items() if held is not None}


def call_difference(example: Mapping[str, str], call: Mapping[str, str], modes: tuple[bool, bool]) -> str:
    """How a call differs from the example; empty if it shows no difference.

    Args:
        example, call: see `described`.
        modes: whether the example and the call are in training.
    """
    found: list[str] = []
    for name, text in call.items():
        if name not in example:
            found.append(f"`{name}` is {text}, which the example doesn't pass")
        elif example[name] != text:
            found.append(f"`{name}` is {text}, and {example[name]} in the example")
    found += [f"`{name}` isn't passed" for name in example if name not in call]
    if len(found) > _SHOWN:
        found[_SHOWN:] = ["and more"]
    if modes[0] != modes[1]:
        found.append(f"the call is in {'training' if modes[1] else 'evaluation'}")
    return "; ".join(found)


def _argument(held: object) -> str:
    if isinstance(held, Tensor):
        gradient = " that requires grad" if held.requires_grad else ""
        return f"a {dtype_name(held.dtype)} tensor of {held.dim()} dims{gradient}"
    if isinstance(held, (tuple, list)):
        return f"a {type(held).__name__} of {len(held)}"  # pyright: ignore[reportUnknownArgumentType]
    if type(held) in PLAIN and len(repr(held)) < _LONGEST:
        return repr(held)
    return f"an object of `{type(held).__name__}`"


__all__ = ["call_difference", "described"]
