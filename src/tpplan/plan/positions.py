"""Where something stands in a plan file: positions, spans, and the text that they point into."""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass, field

_LINE_BREAK = re.compile(r"\r\n|\n|\r|\x85|\u2028|\u2029")


@dataclass(frozen=True, slots=True)
class Position:
    """A place in a text. Both numbers count from 1; a column is one Unicode code point."""

    line: int
    column: int


@dataclass(frozen=True, slots=True)
class SourceText:
    """A plan file's text, cut into lines for positions and for rendering.

    Attributes:
        name: the file as the user should see it, such as `plans/llama.yaml`.
        lines: the text's lines without their line breaks.
        starts: the offset at which each line begins.
    """

    name: str
    lines: tuple[str, ...]
    starts: tuple[int, ...] = field(repr=False)

    @classmethod
    def of(cls, name: str, text: str) -> SourceText:
        """Cut `text` into lines where YAML does."""
        breaks = [match.span() for match in _LINE_BREAK.finditer(text)]
        starts = (0, *(end for _, end in breaks))
        ends = (*(start for start, _ in breaks), len(text))
        return cls(name, tuple(text[start:end] for start, end in zip(starts, ends, strict=True)), starts)

    def position(self, offset: int) -> Position:
        """The place of the character at `offset`."""
        line = bisect_right(self.starts, offset)
        return Position(line, offset - self.starts[line - 1] + 1)

    def span(self, start: int, end: int) -> Span:
        """The half-open range of characters from `start` to `end`."""
        return Span(self.name, self.position(start), self.position(max(start, end)), self)


@dataclass(frozen=True, slots=True)
class Span:
    """A half-open range in a file: `start` is inside it, `end` just behind it."""

    file: str
    start: Position
    end: Position
    source: SourceText | None = field(default=None, repr=False, compare=False)

    @property
    def line_text(self) -> str | None:
        """The text of the line on which the span starts, where the source is known."""
        if self.source is None or self.start.line > len(self.source.lines):
            return None
        return self.source.lines[self.start.line - 1]

    def __str__(self) -> str:
        """Render as `file:line:column`."""
        return f"{self.file}:{self.start.line}:{self.start.column}"
