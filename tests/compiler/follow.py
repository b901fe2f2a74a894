"""What a finding's help says to do to a plan, done: a reader of the remedies, as a user would follow them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tpplan.plan import Diagnostic

_LINE = re.compile(r"\((?:[^()\s]*?):(\d+)\)")
_OPTION = re.compile(r"`(input|output): (\w+)`(?: for `([^`]+)`)?")
_LONG = re.compile(r"`(\{style: [^`]*\})`")
_PACKED = re.compile(r"write `packed: (\[[^`]*\]|\{[^`]*\})`")
_MADE = re.compile(r"`([\w.*{},]+)` `(colwise|rowwise|replicate|vocab)`")
_STYLES = re.compile(r"can be (.*)")


@dataclass(frozen=True)
class Attempt:
    """A plan's rules by pattern, and the number of ranks."""

    rules: Mapping[str, Any]
    size: int

    def text(self) -> str:
        """The plan, a rule to a line from the third on."""
        lines = (f"  '{pattern}': {held}" for pattern, held in self.rules.items())
        return "\n".join(("version: 1", "modules:" if self.rules else "modules: {}", *lines)) + "\n"

    def at(self, line: int) -> str:
        """The pattern of the rule in a line."""
        return [*self.rules][line - 3]

    def without(self, pattern: str) -> Attempt:
        """Without a rule."""
        return replace(self, rules={p: held for p, held in self.rules.items() if p != pattern})

    def with_rule(self, pattern: str, held: str) -> Attempt:
        """With a rule."""
        return replace(self, rules={**self.rules, pattern: held})


def remedies(found: Diagnostic, tried: Attempt) -> Iterator[tuple[str, Attempt]]:
    """Each remedy in a finding's help, with the plan once it was followed; none that change the model or the call."""
    text = found.help or ""
    line = None if found.span is None else found.span.start.line
    own = None if line is None else tried.at(line)
    for part in re.split(r"; (?:or )?|, or (?=remove|write|make|keep)", text):
        named = _LINE.search(part)
        pattern = tried.at(int(named[1])) if named else own
        if re.search(r"remove (the|its) rules?", part) and pattern is not None:
            yield part, tried.without(pattern)
        unpinned = re.search(r"remove (?:`(input|output)`(?: from the rule for `([^`]+)`)?|the pin)", part)
        if unpinned and pattern is not None:
            target = (_rule_of(unpinned[2], tried) if unpinned[2] else None) or pattern
            # Without a name, it is the one that the finding points at.
            names = [unpinned[1]] if unpinned[1] else ["input"] if "input" in found.message else ["output"]
            for name in names:
                yield part, tried.with_rule(target, _without_option(tried.rules[target], name))
        attribute = re.match(r"use `(\w+)`", part)
        if attribute and own is not None:
            yield part, tried.with_rule(own, re.sub(r"local: \[[^]]*\]", f"local: [{attribute[1]}]", tried.rules[own]))
        if part == "remove it" and own is not None and found.span is not None:  # the option that it points at
            option = re.search(r"`(\w+)` doesn't apply", found.message)
            if option:
                yield part, tried.with_rule(own, _without_option(tried.rules[own], option[1]))
        for option in _OPTION.finditer(part):
            target = pattern if option[3] is None or pattern is None else _rule_of(option[3], tried) or option[3]
            if target is not None:
                yield (
                    part,
                    tried.with_rule(target, _with_option(tried.rules.get(target, "replicate"), option[1], option[2])),
                )
        long = _LONG.search(part)
        if long and pattern is not None:
            yield part, tried.with_rule(pattern, long[1])
        for made in _MADE.finditer(part):
            yield part, tried.with_rule(_rule_of(made[1], tried) or made[1], made[2])
        sizes = re.search(r"at most (\d+) ranks|of the axis that divides (\d+)", part)
        if sizes:
            yield part, replace(tried, size=int(sizes[1] or sizes[2]))
        both = re.search(r"give both modules styles.*\(`(\w+)` and `(\w+)` agree\)", part)
        other = re.search(r"the other rule is at \S+?:(\d+)", text)
        if both and other and own is not None:
            yield part, tried.with_rule(own, both[1]).with_rule(tried.at(int(other[1])), both[2])
        styles = _STYLES.search(part)
        if styles and pattern is not None:
            for style in re.findall(r"`(\w+)`", styles[1]):
                yield part, tried.with_rule(pattern, style)


def _rule_of(name: str, tried: Attempt) -> str | None:
    return name if name in tried.rules else None


def _without_option(held: str, option: str) -> str:
    kept = [item for item in re.split(r", (?=\w+:)", held.strip("{}")) if not item.startswith(f"{option}:")]
    return "{" + ", ".join(kept) + "}" if held.startswith("{") else held


def _with_option(held: str, option: str, value: str) -> str:
    inside = held.strip("{}") if held.startswith("{") else f"style: {held}"
    kept = [item for item in re.split(r", (?=\w+:)", inside) if not item.startswith(f"{option}:")]
    return "{" + ", ".join([*kept, f"{option}: {value}"]) + "}"
