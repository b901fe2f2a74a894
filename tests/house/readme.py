"""The fenced blocks of a Markdown page, and how a console session in one is replayed and compared.

An HTML comment on the line before a fence says how the block is meant:
`<!-- tested -->` a Python block that runs; `<!-- slow -->` a block that takes long; `<!-- torchrun: 2 -->` one that
runs in so many processes, and prints the block after it; `<!-- untested: why -->` none of these.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

FENCE = re.compile(
    r"""
    ^(?: <!--[ ]* (?P<comment> .*? ) [ ]*--> [ ]*\n \n? ^ )?
    (?P<ticks> `{3,} ) (?P<language> [\w-]* ) [ ]*\n
    (?P<text> .*? )
    ^(?P=ticks) [ ]*$
    """,
    re.MULTILINE | re.DOTALL | re.VERBOSE,
)


@dataclass(frozen=True)
class Block:
    """One fenced block; `line` is that of its opening fence, for messages and test names."""

    language: str
    text: str
    line: int
    comment: str = ""

    @property
    def tested(self) -> bool:
        return self.comment in {"tested", "slow"}

    @property
    def processes(self) -> int:
        marker, _, count = self.comment.partition(":")
        return int(count) if marker == "torchrun" else 0

    @property
    def slow(self) -> bool:
        return self.comment == "slow"

    @property
    def why_untested(self) -> str:
        marker, _, reason = self.comment.partition(":")
        return reason.strip() if marker == "untested" else ""


@dataclass(frozen=True)
class Exchange:
    """A command of a console session and what it prints."""

    command: str
    output: str


def blocks(page: str) -> list[Block]:
    return [
        Block(
            language=match["language"],
            text=match["text"],
            line=page.count("\n", 0, match.start("ticks")) + 1,
            comment=match["comment"] or "",
        )
        for match in FENCE.finditer(page)
    ]


def exchanges(session: str) -> list[Exchange]:
    """Splits a console block at its `$ ` prompts; a command goes on after a backslash at the end of its line."""
    found: list[Exchange] = []
    lines = iter(session.splitlines())
    command, output = "", list[str]()
    for line in lines:
        if not line.startswith("$ "):
            output.append(line)
            continue
        if command:
            found.append(Exchange(command, "\n".join(output)))
        command, output = line[2:], []
        while command.endswith("\\"):
            command = f"{command[:-1].rstrip()} {next(lines, '').strip()}"
    if command:
        found.append(Exchange(command, "\n".join(output)))
    return found


def matches(expected: str, printed: str) -> bool:
    """Compares output line by line; `...` stands for any text in its line, and alone in a line for any lines."""
    pattern = ""
    for line in _tidy(expected):
        if line.strip() in {"...", "…"}:
            pattern += r"(?:.*\n)*?"
        else:
            pattern += ".*?".join(re.escape(part) for part in re.split(r"\.\.\.|…", line)) + r"\n"
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in _tidy(printed))) is not None


def _tidy(text: str) -> list[str]:
    """The lines without trailing blanks, and without the empty lines at either end."""
    return [line.rstrip() for line in text.strip("\n").rstrip().splitlines()]
