"""Patterns over dotted module names.

In: `model.layers.*.self_attn.{q,k,v}_proj`. Out: three alternatives, each a compiled expression and a specificity.

A segment is what stands between two dots. `*` matches any one segment, and inside a segment any characters
(`layer*`); `**` matches any number of segments, none included; `{a,b}` stands for either text, dots and all.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from typing import Final, NamedTuple

MAX_PATTERN_LENGTH: Final = 512
MAX_ALTERNATIVES: Final = 128

_BRACES = re.compile(r"\{([^{}]*)\}")
_FORBIDDEN = re.compile(r"[\s\[\]()?\\/'\"<>|]")


class PatternError(ValueError):
    """A pattern can't be read. `offset` and `length` say which of its characters are at fault."""

    def __init__(self, message: str, offset: int, length: int, help_text: str | None = None) -> None:
        """Keep the place inside the pattern's text."""
        super().__init__(message)
        self.message = message
        self.offset = offset
        self.length = length
        self.help = help_text


class Specificity(NamedTuple):
    """How closely a pattern names a module. Compared from the first field to the last; the larger one wins.

    Attributes:
        literal_segments: segments written out in full.
        minus_deep_wildcards: the number of `**`, negated.
        partial_segments: segments such as `layer*`.
        partial_characters: characters written out in those.
        wildcards: segments that are `*`; each demands one more segment.
        minus_alternatives: the number of texts that the whole pattern's braces stand for, negated.
    """

    literal_segments: int
    minus_deep_wildcards: int
    partial_segments: int
    partial_characters: int
    wildcards: int
    minus_alternatives: int


class Alternative(NamedTuple):
    """One text that a pattern stands for once its braces are expanded."""

    text: str
    specificity: Specificity

    @property
    def expression(self) -> re.Pattern[str]:
        """What a matching name, with a dot behind each of its segments, looks like."""
        return _compiled(self.text)

    @property
    def prefix(self) -> str:
        """What every matching name begins with."""
        return self.text.partition("*")[0].rstrip(".")

    @property
    def last_segment(self) -> re.Pattern[str] | None:
        """What a matching name's last segment looks like: an index for quick matching. None if it may be anything."""
        last = self.text.rpartition(".")[2]
        return None if last in ("*", "**") else _compiled_segment(last)

    def matches(self, name: str) -> bool:
        """Whether the module called `name` is meant."""
        return _compiled(self.text).fullmatch(f"{name}." if name else "") is not None


@dataclass(frozen=True, slots=True)
class Pattern:
    """A pattern over dotted module names.

    Example:
        >>> Pattern.parse("model.layers.*.mlp.{gate,up}_proj").matches("model.layers.7.mlp.up_proj")
        True
    """

    text: str
    alternatives: tuple[Alternative, ...] = field(repr=False, compare=False)

    @classmethod
    def parse(cls, text: str) -> Pattern:
        """Read a pattern; raises PatternError with the place of the first mistake."""
        _check_text(text)
        expanded = list(dict.fromkeys(_expand(text)))
        return cls(text, tuple(_alternative(item, text, len(expanded)) for item in expanded))

    @property
    def is_literal(self) -> bool:
        """Whether the pattern is one module's plain name."""
        return len(self.alternatives) == 1 and "*" not in self.text

    def matches(self, name: str) -> bool:
        """Whether the module called `name` is meant."""
        return any(alternative.matches(name) for alternative in self.alternatives)

    def specificity(self, name: str) -> Specificity | None:
        """The specificity of the closest alternative that matches `name`; None if none does."""
        found = [alternative.specificity for alternative in self.alternatives if alternative.matches(name)]
        return max(found, default=None)

    def within(self, base: str) -> Pattern | None:
        """The pattern for names that start from the module `base`; None if it may mean others."""
        start = f"{base}."
        if not all(a.text.startswith((start, "**.")) for a in self.alternatives):
            return None
        return replace(self, alternatives=tuple(a._replace(text=a.text.removeprefix(start)) for a in self.alternatives))

    def __str__(self) -> str:
        """The pattern as it was written."""
        return self.text


def _check_text(text: str) -> None:
    if not text.strip():
        raise PatternError("the pattern is empty", 0, len(text))
    if len(text) > MAX_PATTERN_LENGTH:
        raise PatternError(f"the pattern is longer than {MAX_PATTERN_LENGTH} characters", 0, len(text))
    if bad := _FORBIDDEN.search(text):
        help_text = "write an index as a segment of its own: `layers.0`" if bad.group() in "[]" else None
        raise PatternError(f"`{bad.group()}` isn't allowed in a pattern", bad.start(), 1, help_text)
    _check_braces(text)


def _check_braces(text: str) -> None:
    opened: int | None = None
    for offset, character in enumerate(text):
        if character == "{":
            if opened is not None:
                raise PatternError("braces can't be nested", offset, 1, "list every alternative in one pair of braces")
            opened = offset
        elif character == "}":
            if opened is None:
                raise PatternError("`}` without a `{` before it", offset, 1)
            opened = None
        elif character == "," and opened is None:
            raise PatternError("`,` outside of braces", offset, 1, "write alternatives as `{a,b}`")
    if opened is not None:
        raise PatternError("`{` is never closed", opened, len(text) - opened)


def _expand(text: str) -> list[str]:
    parts: list[list[str]] = []
    end = 0
    count = 1
    for group in _BRACES.finditer(text):
        options = group.group(1).split(",")
        count *= len(options)
        if count > MAX_ALTERNATIVES:
            message = f"the braces expand to more than {MAX_ALTERNATIVES} alternatives"
            raise PatternError(message, group.start(), len(group.group()), "split the rule, or use `*`")
        parts += [[text[end : group.start()]], options]
        end = group.end()
    parts.append([text[end:]])
    return ["".join(chosen) for chosen in product(*parts)]


def _alternative(text: str, pattern: str, alternatives: int) -> Alternative:
    segments = text.split(".")
    for segment, following in zip(segments, [*segments[1:], None], strict=True):
        _check_segment(segment, following, text, pattern)
    literal = sum("*" not in segment for segment in segments)
    partial = [segment for segment in segments if "*" in segment and segment.strip("*")]
    specificity = Specificity(
        literal_segments=literal,
        minus_deep_wildcards=-segments.count("**"),
        partial_segments=len(partial),
        partial_characters=sum(len(segment.replace("*", "")) for segment in partial),
        wildcards=segments.count("*"),
        minus_alternatives=-alternatives,
    )
    return Alternative(text, specificity)


def _check_segment(segment: str, following: str | None, text: str, pattern: str) -> None:
    if not segment:
        where = "has an empty segment" if text == pattern else f"has an empty segment once expanded to `{text}`"
        offset = _empty_segment(pattern)
        raise PatternError(
            f"`{pattern}` {where}", offset, 1 if offset else len(pattern), "separate segments by one dot"
        )
    if segment == "**" == following:
        offset = max(0, pattern.find("**.**"))
        raise PatternError("`**` twice in a row is the same as once", offset, 5, "write one `**`")
    if "**" in segment and segment != "**":
        offset = max(0, pattern.find("**"))
        raise PatternError("`**` has to be a whole segment", offset, 2, "use `*` inside a segment")


def _empty_segment(pattern: str) -> int:
    if ".." in pattern:
        return pattern.index("..") + 1
    return len(pattern) - 1 if pattern.endswith(".") else 0


# Compiled when first matched, since a plan that's only validated matches nothing.
@lru_cache(maxsize=4096)
def _compiled(text: str) -> re.Pattern[str]:
    return re.compile(_expression(text.split(".")))


@lru_cache(maxsize=4096)
def _compiled_segment(segment: str) -> re.Pattern[str]:
    return re.compile(_segment_expression(segment))


def _expression(segments: list[str]) -> str:
    # Each segment consumes exactly one, so the first place at which a run of segments fits is as good as any other;
    # atomic groups say so, and keep several `**` from backtracking.
    runs: list[str] = [""]
    for segment in segments:
        if segment == "**":
            runs.append("")
        else:
            runs[-1] += _segment_expression(segment) + r"\."
    first, *others = runs
    if not others:
        return first
    middle = "".join(rf"(?>(?:[^.]+\.)*?{run})" for run in others[:-1])
    return rf"{first}{middle}(?:[^.]+\.)*{others[-1]}"


def _segment_expression(segment: str) -> str:
    if segment == "*":
        return "[^.]+"
    first, *others = [re.escape(part) for part in segment.split("*")]
    if not others:
        return first
    middle = "".join(rf"(?>[^.]*?{part})" for part in others[:-1])
    return rf"{first}{middle}[^.]*{others[-1]}"
