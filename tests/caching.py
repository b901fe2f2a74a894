"""What transformers calls the cache of a call: an argument of its models, and what they return under the same name."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

NAMES = ("cache", "past_key_values", "cache_params")  # the first for all models from 5.24 on


def cache_name(model: nn.Module | type[nn.Module]) -> str:
    accepted = inspect.signature((model if isinstance(model, type) else type(model)).forward).parameters
    return next(name for name in NAMES if name in accepted)


def passing(model: nn.Module, cache: Any) -> dict[str, Any]:
    """The keyword by which a call of `model`, or of its `generate`, is given a cache."""
    return {cache_name(model): cache}


def returned_cache(result: Any) -> dict[str, Any]:
    """The keyword by which the next call is given the cache that a model returned."""
    name = next(name for name in NAMES if name in result)  # the new name comes first: a result answers to old ones, too
    return {name: result[name]}


def cache_of(result: Any) -> Any:
    """The cache in what a model returned."""
    (cache,) = returned_cache(result).values()
    return cache
