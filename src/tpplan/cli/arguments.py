"""Arguments that several commands share."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]  # pyright: ignore[reportPrivateUsage]

FORMATS = ("full", "concise", "json", "github")
MODEL_HELP = "a folder or file with a transformers config.json, hf:MODEL_TYPE, or package.module:callable"


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


def add_format_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--format`."""
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default="full",
        metavar="|".join(FORMATS),
        help="how findings are written (default: full)",
    )


def add_model_arguments(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Add `--model` and what goes with it."""
    group = parser.add_argument_group("model")
    group.add_argument("--model", metavar="REF", required=required, help=MODEL_HELP)
    group.add_argument("--tp", type=positive, metavar="N", help="the number of ranks on the axis (default: 2)")
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


def positive(text: str) -> int:
    """A whole number of at least 1."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} isn't a whole number") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def override(text: str) -> tuple[str, str]:
    """A `key=value` pair; the value stays text."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError(f"{text!r} isn't of the form KEY=VALUE")
    return key, value
