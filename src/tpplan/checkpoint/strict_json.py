"""JSON as a checkpoint's headers and indexes are allowed to be written: one object, no key twice."""

from __future__ import annotations

import json
from typing import Any, NoReturn, cast


class NotStrict(ValueError):
    """The text isn't such an object; the message says why."""


def read_object(data: bytes) -> dict[str, Any]:
    """The object that a text in UTF-8 consists of.

    Raises:
        NotStrict: it isn't UTF-8, not JSON, no object, or has a key twice.
    """
    try:
        read: Any = json.loads(data.decode("utf-8"), object_pairs_hook=_without_repeats, parse_constant=_refused)
    except UnicodeDecodeError:
        raise NotStrict("it isn't text in UTF-8") from None
    except json.JSONDecodeError as error:
        raise NotStrict(f"it isn't JSON: {error}") from None
    except RecursionError:
        raise NotStrict("its JSON is nested too deeply") from None
    except ValueError as error:  # ours, and numbers of more digits than Python reads
        raise NotStrict(str(error)) from None
    if not isinstance(read, dict):
        raise NotStrict(f"it is {kind_of(read)}, not an object")
    return cast("dict[str, Any]", read)


def kind_of(value: object) -> str:
    """What JSON calls a value."""
    if value is None:
        return "null"
    kinds: dict[type, str] = {list: "a list", dict: "an object", str: "a string", bool: "true or false"}
    return kinds.get(type(value), "a number")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise NotStrict(f"it has the key `{twice}` twice")
    return table


def _refused(text: str) -> NoReturn:
    raise NotStrict(f"it has {text}, which isn't JSON")


__all__ = ["NotStrict", "kind_of", "read_object"]
