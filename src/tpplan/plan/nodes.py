"""A plan's contents before they have a meaning: scalars, lists and mappings, each with its place."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple, cast

from tpplan.plan.positions import Span

Plain = str | int | float | bool | None

_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_BOOL: Final = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = re.compile(r"[-+]?[0-9]{1,18}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]{1,3})?")


class ScalarNode(NamedTuple):
    """A single value: `text` as written, `value` as YAML 1.2 means it."""

    text: str
    value: Plain
    span: Span | None
    path: str = ""
    size: int = 1


class ListNode(NamedTuple):
    """A list."""

    items: tuple[Node, ...]
    span: Span | None
    path: str = ""
    size: int = 1


class MapNode(NamedTuple):
    """A mapping, in the order of the file. Keys are scalars and differ."""

    entries: tuple[tuple[ScalarNode, Node], ...]
    span: Span | None
    path: str = ""
    size: int = 1

    @property
    def by_key(self) -> dict[str, Node]:
        """The values by their keys' text."""
        return {key.text: value for key, value in self.entries}


Node = ScalarNode | ListNode | MapNode


def plain_scalar(text: str) -> Plain:
    """The value of an unquoted scalar under YAML 1.2's core schema."""
    if text in _NULL:
        return None
    if text in _BOOL:
        return _BOOL[text]
    if _INT.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else text


def describe(node: Node) -> str:
    """What a node is, for "expected …, found …"."""
    if isinstance(node, MapNode):
        return "a mapping"
    if isinstance(node, ListNode):
        return "a list"
    if node.value is None:
        return "nothing"
    if isinstance(node.value, bool):
        return f"`{node.text}`, a truth value"
    if isinstance(node.value, int | float):
        return f"the number {shorten(node.text)}"
    return f"the text `{shorten(node.text)}`"


def shorten(text: str, limit: int = 60) -> str:
    """One line of at most `limit` characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def nodes_from_data(data: object, path: str = "", depth: int = 0) -> Node | None:
    """The node for plain data; None where something in it can't stand in a plan or is nested too deep."""
    if data is None or isinstance(data, str | int | float):
        return ScalarNode("" if data is None else str(data), data, None, path)
    if depth > 16:
        return None
    if isinstance(data, Mapping):
        return _map_node(cast("Mapping[object, object]", data), path, depth)
    if isinstance(data, list | tuple):
        items = [nodes_from_data(item, path, depth + 1) for item in cast("list[object]", data)]
        present = tuple(item for item in items if item is not None)
        return ListNode(present, None, path) if len(present) == len(items) else None
    return None


def _map_node(data: Mapping[object, object], path: str, depth: int) -> Node | None:
    entries: list[tuple[ScalarNode, Node]] = []
    for key, value in data.items():
        if not isinstance(key, str | int):
            return None
        inner = f"{path}: {key}" if path else str(key)
        node = nodes_from_data(value, inner, depth + 1)
        if node is None:
            return None
        entries.append((ScalarNode(str(key), str(key), None, inner), node))
    return MapNode(tuple(entries), None, path)
