"""From a mapping under `modules:` to rules.

In: nodes, `model.norm: sequence`. Out: `Rule(Pattern("model.norm"), Style.SEQUENCE)`; mistakes are collected.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import TypeVar

from tpplan.plan.nearest import did_you_mean, word_help
from tpplan.plan.nodes import ListNode, MapNode, Node, ScalarNode, describe, shorten
from tpplan.plan.pattern import Pattern, PatternError
from tpplan.plan.plan_keys import RULE_KEYS
from tpplan.plan.positions import Span
from tpplan.plan.problems import Problems
from tpplan.plan.rules import NamedPack, Rule
from tpplan.plan.vocabulary import OPTIONS_BY_STYLE, Exchange, Overlaps, OverlapUnit, OverlapWord, Pin, Style
from tpplan.plan.wording import one_of

_Word = TypeVar("_Word", bound=StrEnum)
_ATTRIBUTE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")


def read_rules(node: Node, file: str, problems: Problems) -> list[Rule]:
    """Every rule of a plan file that can be read."""
    if not isinstance(node, MapNode):
        wrong_type(node, "`modules` has to be a mapping from patterns to styles", problems)
        return []
    rules = (_rule(key, value, file, problems) for key, value in node.entries)
    return [rule for rule in rules if rule is not None]


def read_pattern(key: ScalarNode, problems: Problems) -> Pattern | None:
    """The pattern that a key is."""
    try:
        return Pattern.parse(key.text)
    except PatternError as error:
        if not key.text.strip():
            help_text = "name a module, or remove the rule"
            problems.add("TP008", "a rule needs a pattern", key, label="empty", help=help_text)
            return None
        help_text = "a plan has no merge keys; use `extends`" if key.text == "<<" else error.help
        span = inner_span(key, error.offset, error.length)
        problems.add("TP009", error.message, span, help=help_text, subject=key.path or None)
        return None


def read_word(node: Node, words: type[_Word], what: str, code: str, problems: Problems) -> _Word | None:
    """A word of a fixed vocabulary."""
    known = [word.value for word in words]
    if not isinstance(node, ScalarNode) or node.value is None:
        wrong_type(node, f"{what} has to be {one_of(known)}", problems)
        return None
    if node.text in known:
        return words(node.text)
    message = f"`{shorten(node.text)}` isn't {what}"
    problems.add(code, message, node, label=f"not {what}", help=word_help(node.text, known))
    return None


def read_overlap(node: Node, problems: Problems) -> Overlaps | None:
    """What is to be overlapped: `auto`, `none`, or a list of units."""
    if not isinstance(node, ListNode):
        unit = did_you_mean(node.text, list(OverlapUnit)) if isinstance(node, ScalarNode) and node.text else None
        if unit is not None:
            expected = f"`overlap` has to be a list of units, or {one_of(OverlapWord)}"
            wrong_type(node, expected, problems, f"write `overlap: [{unit}]`")
            return None
        return read_word(node, OverlapWord, "an overlap", "TP021", problems)
    found = [read_word(item, OverlapUnit, "a unit of overlap", "TP021", problems) for item in node.items]
    return tuple(dict.fromkeys(unit for unit in found if unit is not None))


def wrong_type(node: Node, expected: str, problems: Problems, help_text: str | None = None) -> None:
    """Report a value of the wrong type."""
    found = describe(node)
    problems.add("TP004", f"{expected}, found {found}", node, label=f"this is {found}", help=help_text)


def unknown_key(key: ScalarNode, known: tuple[str, ...], where: str, problems: Problems) -> None:
    """Report a key that isn't part of the language."""
    if where == "a plan" and ("." in key.text or "*" in key.text):
        help_text = "patterns go under `modules:`"
    else:
        help_text = word_help(key.text, known)
    problems.add("TP003", f"`{shorten(key.text)}` isn't a key of {where}", key, label="unknown key", help=help_text)


def origin_of(key: ScalarNode, file: str) -> str:
    """The file and line of a key."""
    return f"{file}:{key.span.start.line}" if key.span else f"{file}: {key.text}"


def inner_span(key: ScalarNode, offset: int, length: int) -> Span | None:
    """The place of some characters of a key or a text, where that is written as it reads."""
    span = key.span
    if span is None or span.source is None or span.start.line != span.end.line:
        return span
    start = span.source.starts[span.start.line - 1] + span.start.column - 1
    written = span.end.column - span.start.column
    quote = 1 if written == len(key.text) + 2 else 0
    if written != len(key.text) + 2 * quote:
        return span
    return span.source.span(start + quote + offset, start + quote + offset + max(length, 1))


def _rule(key: ScalarNode, value: Node, file: str, problems: Problems) -> Rule | None:
    pattern = read_pattern(key, problems)
    if isinstance(value, MapNode):
        return _long_rule(key, pattern, value, file, problems)
    if isinstance(value, ListNode) or value.value is None:
        at = key if isinstance(value, ScalarNode) else value
        known = one_of(style.value for style in Style)
        message = f"a rule is a style or a mapping with `style`, found {describe(value)}"
        problems.add("TP004", message, at, label="needs a style", help=f"use {known}")
        return None
    style = read_word(value, Style, "a style", "TP005", problems)
    if pattern is None or style is None:
        return None
    return Rule(pattern, style, pattern_span=key.span, style_span=value.span, origin=origin_of(key, file))


def _long_rule(
    key: ScalarNode, pattern: Pattern | None, options: MapNode, file: str, problems: Problems
) -> Rule | None:
    style = _style(key, options, problems)
    for name, _ in options.entries:
        if name.text not in RULE_KEYS:
            unknown_key(name, RULE_KEYS, "a rule", problems)
        elif style is not None and name.text not in OPTIONS_BY_STYLE[style] | {"style"}:
            _option_not_for_style(name, style, problems)
    given = options.by_key
    pin_input = read_word(given["input"], Pin, "an input pin", "TP021", problems) if "input" in given else None
    pin_output = read_word(given["output"], Pin, "an output pin", "TP021", problems) if "output" in given else None
    packed = _packed(given["packed"], problems) if "packed" in given else None
    local = _local(given["local"], problems) if "local" in given else ()
    exchange = read_word(given["exchange"], Exchange, "an exchange", "TP021", problems) if "exchange" in given else None
    overlap = read_overlap(given["overlap"], problems) if "overlap" in given else None
    if pattern is None or style is None:
        return None
    return Rule(
        pattern,
        style,
        pin_input,
        pin_output,
        packed,
        local,
        exchange,
        overlap,
        pattern_span=key.span,
        style_span=given["style"].span,
        option_spans={name: node.span for name, node in given.items() if node.span is not None},
        origin=origin_of(key, file),
    )


def _style(key: ScalarNode, options: MapNode, problems: Problems) -> Style | None:
    if "style" in options.by_key:
        return read_word(options.by_key["style"], Style, "a style", "TP005", problems)
    message = f"the rule for `{shorten(key.text)}` has no `style`"
    problems.add("TP007", message, key, label="needs `style`", help="write `{style: colwise, …}`")
    return None


def _option_not_for_style(name: ScalarNode, style: Style, problems: Problems) -> None:
    allowed = sorted(OPTIONS_BY_STYLE[style])
    styles = [other.value for other, options in OPTIONS_BY_STYLE.items() if name.text in options]
    problems.add(
        "TP020",
        f"`{name.text}` doesn't apply to the style `{style}`",
        name,
        label=f"not for `{style}`",
        help=f"remove it; `{name.text}` goes with {one_of(styles)}",
        notes=(f"`{style}` takes {one_of(allowed) if allowed else 'no options'}",),
    )


def _packed(node: Node, problems: Problems) -> tuple[NamedPack, ...] | None:
    if isinstance(node, MapNode):
        sizes = [_size(value, problems) for _, value in node.entries]
        packs = [NamedPack(key.text, size) for (key, _), size in zip(node.entries, sizes, strict=True)]
    elif isinstance(node, ListNode):
        packs = [NamedPack(name) for name in _names(node, "a pack's name", problems)]
    else:
        wrong_type(node, "`packed` has to be a list of names or a mapping from names to sizes", problems)
        return None
    if len(node.entries if isinstance(node, MapNode) else node.items) < 2:
        message = "`packed` needs at least two matrices"
        problems.add("TP021", message, node, label="too few", help="remove it for a projection that packs nothing")
    return tuple(packs)


def _size(node: Node, problems: Problems) -> int | None:
    if not isinstance(node, ScalarNode) or not isinstance(node.value, int) or isinstance(node.value, bool):
        wrong_type(node, "a pack's size has to be a whole number", problems)
        return None
    if node.value < 1:
        problems.add("TP021", "a pack's size has to be at least 1", node, label="too small")
    return node.value


def _local(node: Node, problems: Problems) -> tuple[str, ...]:
    if not isinstance(node, ListNode):
        help_text = f"write `local: [{node.text}]`" if isinstance(node, ScalarNode) and node.text else None
        wrong_type(node, "`local` has to be a list of attribute names", problems, help_text)
        return ()
    return tuple(_names(node, "an attribute's name", problems))


def _names(node: ListNode, what: str, problems: Problems) -> list[str]:
    names: list[str] = []
    for item in node.items:
        if not isinstance(item, ScalarNode) or not isinstance(item.value, str):
            wrong_type(item, f"{what} has to be text", problems)
        elif not _ATTRIBUTE.fullmatch(item.text):
            problems.add("TP021", f"`{shorten(item.text)}` can't be {what}", item, help="use letters, digits and `_`")
        elif item.text in names:
            problems.add("TP021", f"`{item.text}` appears twice in this list", item, label="again here")
        else:
            names.append(item.text)
    return names
