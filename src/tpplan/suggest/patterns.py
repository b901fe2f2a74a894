"""Patterns: from the settings of modules to the few lines of a plan that say the same.

in:  a setting by module, and all of the model's names
out: (pattern, setting) pairs that match these modules and no others

    layers.0.q: c, layers.0.k: c, layers.1.q: c, layers.1.k: c   ->   layers.*.{q,k}: c
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeVar

from tpplan.plan.pattern import MAX_ALTERNATIVES, MAX_PATTERN_LENGTH, Pattern

_Setting = TypeVar("_Setting")


def shape_of(name: str) -> str:
    """The name with `*` for every number."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def is_repeated(name: str) -> bool:
    """Whether it lies in a numbered block."""
    return any(part.isdigit() for part in name.split("."))


def patterns_for(settings: Mapping[str, _Setting], names: Collection[str]) -> list[tuple[str, _Setting]]:
    """The shortest list of patterns for `settings`, in the order of its modules.

    Args:
        settings: a hashable setting by module name.
        names: the names of all of the model's modules.
    """
    families: dict[tuple[str, _Setting], list[str]] = {}
    for name, setting in settings.items():
        families.setdefault((shape_of(name), setting), []).append(name)
    siblings: dict[tuple[str, _Setting], list[str]] = {}
    for (shape, setting), members in families.items():
        for text in _exact(shape, members, names):
            parent, _, leaf = text.rpartition(".")
            siblings.setdefault((parent, setting), []).append(leaf)
    return [(text, setting) for (parent, setting), leaves in siblings.items() for text in _joined(parent, leaves)]


def _exact(shape: str, members: list[str], names: Collection[str]) -> list[str]:
    """Texts that match the members alone: the shape, if all that it matches is meant."""
    wide = Pattern.parse(shape)
    if {name for name in names if wide.matches(name)} <= set(members):
        return [shape]
    if shape.count("*") > 1:
        return min((_by_number(shape, place, members, names) for place in _numbered(shape)), key=len)
    if "*" not in shape:
        return members
    before, _, after = shape.partition("*")
    indices = [name[len(before) : len(name) - len(after)] for name in members]
    step = MAX_ALTERNATIVES // 4
    chunks = [indices[i : i + step] for i in range(0, len(indices), step)]
    return [
        f"{before}{{{','.join(chunk)}}}{after}" if len(chunk) > 1 else f"{before}{chunk[0]}{after}" for chunk in chunks
    ]


def _numbered(shape: str) -> list[int]:
    """The parts of a shape that stand for numbers, the last first: often it is what sets modules apart."""
    return [place for place, part in reversed(list(enumerate(shape.split(".")))) if part == "*"]


def _by_number(shape: str, place: int, members: list[str], names: Collection[str]) -> list[str]:
    """Texts for the members with each number at one place: `blocks.*.mlp.0`, `blocks.*.mlp.2`."""
    groups: dict[str, list[str]] = {}
    for name in members:
        groups.setdefault(name.split(".")[place], []).append(name)
    parts = shape.split(".")
    kept = {number: ".".join((*parts[:place], number, *parts[place + 1 :])) for number in groups}
    return [text for number, held in groups.items() for text in _exact(kept[number], held, names)]


def _joined(parent: str, leaves: list[str]) -> list[str]:
    """The leaves of one parent in braces, if that can be read."""
    front = f"{parent}." if parent else ""
    if len(leaves) == 1 or len(leaves) > 16 or any(set(leaf) & set("{*") for leaf in leaves):
        return [front + leaf for leaf in leaves]
    start, end = _affixes(leaves)
    middles = [leaf[len(start) : len(leaf) - len(end)] for leaf in leaves]
    text = f"{front}{start}{{{','.join(middles)}}}{end}"
    return [text] if len(text) <= MAX_PATTERN_LENGTH else [front + leaf for leaf in leaves]


def _affixes(leaves: list[str]) -> tuple[str, str]:
    """What the leaves begin and end with in common, up to an underscore."""
    start = _common(leaves)
    start = start[: start.rfind("_") + 1]
    end = _common([leaf[len(start) :][::-1] for leaf in leaves])[::-1]
    return start, end[end.find("_") :] if "_" in end else ""


def _common(texts: list[str]) -> str:
    """What all texts begin with."""
    count = next((i for i, held in enumerate(zip(*texts, strict=False)) if len(set(held)) > 1), min(map(len, texts)))
    return texts[0][:count]
