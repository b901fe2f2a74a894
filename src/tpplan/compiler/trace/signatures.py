"""Signatures: how a `forward` may be called."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


@functools.cache
def argument_names(forward: Callable[..., Any]) -> tuple[str, ...]:
    """The names by which a `forward`'s positional arguments can be passed, without `self`."""
    try:
        signature = inspect.signature(forward)
    except (TypeError, ValueError):
        return ()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(name for name, parameter in signature.parameters.items() if parameter.kind in kinds)[1:]


def takes_keywords(forward: Callable[..., Any]) -> bool:
    """Whether a `forward` takes any keyword, which it may pass on."""
    try:
        parameters = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)


__all__ = ["argument_names", "takes_keywords"]
