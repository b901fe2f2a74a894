# pyright: reportPrivateUsage=false
"""Containers that torch.utils._pytree knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils import _pytree as pytree


def is_registered_container(value: object) -> bool:
    """Whether torch's pytree registry knows how to take `value` apart (transformers registers its ModelOutput).

    For every torch.
    """
    return type(value) in pytree.SUPPORTED_NODES and type(value) not in (tuple, list, dict)


def rebuild_container(value: Any, transform: Callable[[Any], Any]) -> Any:
    """Rebuild a registered container with `transform` applied to each child. For every torch."""
    node = pytree.SUPPORTED_NODES[type(value)]
    children, context = node.flatten_fn(value)
    return node.unflatten_fn([transform(child) for child in children], context)


def flattened_tree(held: Any) -> tuple[list[Any], Any]:
    """The leaves of nested containers, and their form. For every torch."""
    return pytree.tree_flatten(held)


def rebuilt_tree(leaves: list[Any], form: Any) -> Any:
    """Containers of a form with these leaves. For every torch."""
    return pytree.tree_unflatten(leaves, form)
