"""Arguments that several commands share."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tpplan.cli.mistakes import MODEL_HELP

if TYPE_CHECKING:
    Options = argparse._ActionsContainer  # pyright: ignore[reportPrivateUsage]
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]  # pyright: ignore[reportPrivateUsage]

PLAN_HELP = "a plan file, or a shipped plan's name"
AUTO_HELP = f"{PLAN_HELP}, or auto to have one found"
PICTURES = ("html", "svg", "mermaid")
_PIPED_WIDTH = 100


def add_command(
    subparsers: Subparsers, name: str, help: str, description: str, examples: str
) -> argparse.ArgumentParser:
    """Add a command whose help ends with examples."""
    parser = subparsers.add_parser(
        name,
        help=help,
        description=description,
        epilog=f"examples:\n{examples.rstrip()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--traceback", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an internal error"
    )
    return parser


def add_text_format_argument(parser: argparse.ArgumentParser, whole: str, *more: str) -> None:
    """Add `--format` of a command that shows tables; `whole` is what it writes as JSON, `more` are other formats."""
    choices = ("text", "json", *more)
    parser.add_argument(
        "--format",
        choices=choices,
        default="text",
        metavar="|".join(choices),
        help=f"text for people, or {whole} (default: text)",
    )


def add_model_arguments(parser: argparse.ArgumentParser, *, required: bool, partial: bool = False) -> None:
    """Add `--model` and what goes with it; `partial`: also for a plan that may be for more than the model."""
    group = parser.add_argument_group("model")
    group.add_argument("--model", metavar="REF", required=required, help=MODEL_HELP)
    add_sizes_argument(group, "the number of ranks on the axis (default: 2); several are taken one after the other")
    group.add_argument(
        "--set",
        dest="overrides",
        type=override,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a field of the model's config; may be given again",
    )
    group.add_argument("--batch", type=positive, metavar="N", help="the batch size of the example inputs")
    group.add_argument("--sequence", type=positive, metavar="N", help="the sequence length of the example inputs")
    if partial:
        group.add_argument(
            "--partial", action="store_true",
            help="the model may be a part of what the plan is for, such as a stage of a pipeline",
        )  # fmt: skip


def add_sizes_argument(parser: Options, help: str) -> None:
    """Add `--tp`, which takes one number of ranks or several: `--tp 2 4`, or `--tp 2 --tp 4`."""
    parser.add_argument("--tp", dest="sizes", type=_size, action="append", metavar="N", help=help)


def add_output_argument(parser: argparse.ArgumentParser, what: str, *names: str, folder: bool = False) -> None:
    """Add an option for where `what` is written; a place where nothing can be is refused before anything is done."""
    parser.add_argument(
        *names,
        metavar="FOLDER" if folder else "FILE",
        type=_writable_folder if folder else _writable_file,
        help=f"where to write {what}",
    )


def with_sizes_apart(words: Sequence[str]) -> list[str]:
    """Arguments in which each number behind `--tp` has an option of its own, so that no other word is taken for one."""
    apart: list[str] = []
    for word in words:
        behind = apart[-2:-1] == ["--tp"] or (bool(apart) and apart[-1].startswith("--tp="))
        apart += ["--tp", word] if behind and word.isdecimal() else [word]
    return apart


def terminal_width(least: int = 80) -> int:
    """How wide output may be: COLUMNS comes first, then the terminal's own width; a pipe has neither."""
    return max(shutil.get_terminal_size((_PIPED_WIDTH, 0)).columns, least)


def positive(text: str) -> int:
    """A whole number of at least 1."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} isn't a whole number") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def _size(text: str) -> int:
    if "," in text:
        raise argparse.ArgumentTypeError(f"write several one by one: --tp {text.replace(',', ' ')}")
    return positive(text)


def _writable_file(text: str) -> Path:
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"can't write {text}: it's a folder")
    _require_place(path, text)
    return path


def _writable_folder(text: str) -> Path:
    path = Path(text)
    if path.is_file():
        raise argparse.ArgumentTypeError(f"can't write to {text}: it's a file")
    _require_place(path, text)
    return path


def _require_place(path: Path, text: str) -> None:
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"can't write {text}: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"can't write {text}: permission denied")


def override(text: str) -> tuple[str, str]:
    """A `key=value` pair; the value stays text."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError(f"{text!r} isn't of the form KEY=VALUE")
    return key, value
