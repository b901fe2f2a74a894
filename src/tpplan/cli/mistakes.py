"""Words of a command line that aren't taken: all of them are told at once, each with what to write instead.

in:  a parser and words
out: what they say, or a `MisuseError` that lists the mistakes

argparse stops at the first. So the options that it doesn't know are looked for beforehand, and a value that it refuses
is left out of the words, which are then read again.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any, NoReturn

MODEL_HELP = (
    "a folder or file with a transformers config.json, a model in the Hugging Face cache (OWNER/NAME), hf:MODEL_TYPE, "
    "package.module:callable or FILE.py:callable"
)
# argparse's words.
_VALUE = re.compile(r"argument (?P<names>\S+): (?P<text>.*)", re.DOTALL)
_MISSING = re.compile(r"the following arguments are required: (?P<names>.*)")
_PLAINER = {"expected one argument": "it takes a value", "ignored": "it takes no value"}
_CHOICE = re.compile(r"invalid choice: '(?P<word>.*)' \(choose from (?P<choices>.*)\)", re.DOTALL)


class MisuseError(Exception):
    """Words aren't taken.

    Attributes:
        called: the command, such as `tpplan validate`.
        mistakes: what is wrong with them.
    """

    def __init__(self, called: str, mistakes: Sequence[str]) -> None:
        super().__init__("\n".join(mistakes))
        self.called = called
        self.mistakes = tuple(mistakes)

    def __str__(self) -> str:
        told = "\n".join(f"{self.called}: {mistake}" for mistake in self.mistakes)
        return f"{told}\n`{self.called} --help` says what it takes"


class CommandParser(argparse.ArgumentParser):
    """A parser that raises what it doesn't take, where argparse's prints it and exits."""

    def error(self, message: str) -> NoReturn:
        """Raise what argparse has found."""
        raise _RefusedError(self, message)

    def print_help(self, file: Any = None) -> None:
        """Print it; argparse's own is silent where that can't be written."""
        print(self.format_help(), end="", file=file)

    def options(self) -> list[str]:
        """The options that it knows."""
        return ["-h", "--help", *re.findall(r"(?<![\w-])--?[a-z][a-z-]*", self.format_usage())]


class _RefusedError(Exception):
    """What argparse says of the first mistake; in the words of the parser of one command."""

    def __init__(self, parser: CommandParser, message: str) -> None:
        super().__init__(message)
        self.parser = parser
        self.message = message


def parsed(parser: CommandParser, words: Sequence[str]) -> argparse.Namespace:
    """What the words say.

    Raises:
        MisuseError: some of them aren't taken, or some are missing.
    """
    commands = list(_inner(parser))
    if words and not words[0].startswith("-") and words[0] not in commands:
        raise MisuseError(parser.prog, [f"there is no command `{words[0]}`{_near(words[0], commands)}"])
    left, values, refused = list(words), list[str](), set[str]()
    while True:
        try:
            namespace, unknown = parser.parse_known_args(left)
        except _RefusedError as error:
            missing = _MISSING.fullmatch(error.message)
            if missing is not None:
                named = (name.split("/") for name in missing["names"].split(", "))
                lacking = [names[-1] for names in named if refused.isdisjoint(names)]
                raise MisuseError(error.parser.prog, _told(error.parser, words, commands, values, lacking)) from None
            names, text = _of_value(error.message)
            values.append(text)
            refused.update(names)
            shorter = list(_without(left, names))
            if len(shorter) == len(left):
                raise MisuseError(error.parser.prog, _told(error.parser, words, commands, values)) from None
            left = shorter
            continue
        if not unknown and not values:
            return namespace
        reader = _reader(parser, namespace)
        if unknown and not any(map(_is_option, unknown)):
            values.append(f"`{unknown[0]}` is one argument too many")
        raise MisuseError(reader.prog, _told(reader, unknown, commands, values, unknown=unknown))


def _told(
    parser: CommandParser,
    words: Sequence[str],
    commands: Sequence[str],
    values: Sequence[str],
    missing: Sequence[str] = (),
    unknown: Sequence[str] = (),
) -> list[str]:
    """All mistakes: options that there aren't first, as the others may come of them."""
    from tpplan.plan.nearest import did_you_mean
    from tpplan.plan.plan_keys import PLAN_KEYS
    from tpplan.plan.wording import all_of

    told, meant = list[str](), set[str]()
    known = parser.options()
    own = words if " " in parser.prog else takewhile(lambda word: word not in commands, words)
    for option in dict.fromkeys(word.partition("=")[0] for word in own if _is_option(word)):
        key = option.lstrip("-").replace("-", "_")
        if option in known:
            if option in unknown:
                told.append(f"`{option}` stands behind the command: `{parser.prog} {option} …`")
            continue
        if key in PLAN_KEYS:
            told.append(f"`{option}` isn't an option; write `{key}:` in the plan")
            continue
        near = did_you_mean(option.lstrip("-"), [held.lstrip("-") for held in known])
        meant.add(f"--{near}")
        told.append(f"there is no option `{option}`" + (f"; did you mean `--{near}`?" if near else ""))
    lacking = [name for name in missing if name not in meant]
    if "--model" in lacking:
        lacking.remove("--model")
        told.append(f"name a model with --model REF, {MODEL_HELP}")
    if lacking:
        told.append(f"{all_of(lacking)} {'is' if len(lacking) == 1 else 'are'} missing")
    return [*told, *values]


def _of_value(message: str) -> tuple[list[str], str]:
    """The names of the argument whose value is refused, and what is said of it."""
    value = _VALUE.fullmatch(message)
    if value is None:
        return [], message
    names, text = value["names"].split("/"), value["text"]
    choice = _CHOICE.fullmatch(text)
    if choice is not None:
        choices = [held.strip("'") for held in choice["choices"].split(", ")]
        text = no_such(choice["word"], choices)
    return names, f"{names[-1]}: {_PLAINER.get(text.partition(' explicit')[0], text)}"


def _inner(parser: argparse.ArgumentParser) -> dict[str, CommandParser]:
    """The parsers of a parser's commands, by name."""
    actions = parser._actions  # pyright: ignore[reportPrivateUsage]
    found: Any = (a for a in actions if isinstance(a, argparse._SubParsersAction))  # pyright: ignore
    return next((held.choices for held in found), dict[str, CommandParser]())


def _reader(parser: CommandParser, namespace: argparse.Namespace) -> CommandParser:
    """The parser of the command that the words name."""
    for name in (namespace.command, getattr(namespace, "action", None)):
        parser = _inner(parser).get(name or "", parser)
    return parser


def _is_option(word: str) -> bool:
    return re.match(r"--?[A-Za-z]", word) is not None


def _without(words: Sequence[str], names: Sequence[str]) -> Iterator[str]:
    """Words without options of these names and their values."""
    behind = False
    for word in words:
        if behind and not _is_option(word):
            behind = False
            continue
        behind = word in names
        if not behind and not word.startswith(tuple(f"{name}=" for name in names)):
            yield word


def no_such(word: str, known: Sequence[str]) -> str:
    """What is said of a word that isn't among the known ones."""
    from tpplan.plan.nearest import did_you_mean

    near = did_you_mean(word, known)
    meant = f"did you mean `{near}`? There are" if near else "there are"
    return f"there is no `{word}`; {meant} {', '.join(known)}"


def _near(word: str, known: Sequence[str]) -> str:
    from tpplan.plan.nearest import did_you_mean

    near = did_you_mean(word, known)
    return f"; did you mean `{near}`?" if near else ""


__all__ = ["MODEL_HELP", "CommandParser", "MisuseError", "no_such", "parsed"]
