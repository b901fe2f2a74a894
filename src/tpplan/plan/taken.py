"""What public functions take: their arguments are checked in one place, before anything is made of them.

@takes(model=MODEL, tp=RANKS)
def compile_plan(model, plan, tp): ...

compile_plan(model, "llama", tp="2")
# ArgumentError: compile_plan: `tp` takes a number of ranks, 1 or more, not the text '2': write 2
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, ParamSpec, TypeVar, cast

from tpplan.plan.exceptions import ArgumentError
from tpplan.plan.wording import with_article

P = ParamSpec("P")
R = TypeVar("R")
_SHOWN = 60


def _nothing(came: Any) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class ArgumentKind:
    """What an argument may be.

    Attributes:
        fits: whether a value will do.
        text: what will do, in words.
        way_out: what to write instead of a value that won't; "" for nothing in particular.
    """

    fits: Callable[[Any], bool]
    text: str
    way_out: Callable[[Any], str] = _nothing


def takes(
    tell: Callable[[dict[str, Any], ArgumentError], object] | None = None, /, **kinds: ArgumentKind
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator of a function whose arguments of these names are checked when it's called.

    Args:
        tell: of a function that ranks call together: lets those know that wait for this one. It gets what arrived, and
            the error.
        kinds: what the arguments may be.

    Raises:
        ArgumentError: by the function; one of the arguments is something else.
    """

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                given = signature.bind(*args, **kwargs).arguments
            except TypeError as error:
                raise ArgumentError(f"{function.__name__}: {error}; it takes {_shown(signature)}") from None
            for name, kind in kinds.items():
                if name in given and not kind.fits(given[name]):
                    error = ArgumentError(f"{function.__name__}: {refusal(name, kind, given[name])}")
                    with suppress(Exception):  # which has that error in it, or can't tell who the others are
                        if tell is not None:
                            tell(given, error)
                    raise error
            return function(*args, **kwargs)

        checked.taken = kinds  # type: ignore[attr-defined]  # for whoever asks what it takes
        return checked

    return decorated


def refusal(name: str, kind: ArgumentKind, came: Any) -> str:
    """What is said of an argument: its name, what it takes, what came, and what to do."""
    way_out = kind.way_out(came)
    return f"`{name}` takes {kind.text}, not {_described(came)}" + (f": {way_out}" if way_out else "")


def _described(came: Any) -> str:
    """A value in a few words: what it is, and how it reads where that's short."""
    if came is None or isinstance(came, bool):
        return repr(came)
    if isinstance(came, type):
        return f"the class `{came.__name__}`"
    if isinstance(came, (int, float)):
        return f"the number {came!r}"
    if isinstance(came, (str, bytes)):
        return f"the text {came[:_SHOWN]!r}"
    return with_article(type(came).__name__)


def _shown(signature: inspect.Signature) -> str:
    return ", ".join(f"`{name}`" for name in signature.parameters)


def _of_ranks(came: Any) -> str:
    return f"write {int(came)}" if isinstance(came, str) and came.strip().isdecimal() else ""


def _is_whole(value: Any) -> bool:
    if isinstance(value, (bool, type)) or hasattr(value, "requires_grad"):
        return False
    return hasattr(value, "__index__") and getattr(value, "shape", ()) == ()  # numpy has numbers with a shape


def _is_number(value: Any) -> bool:
    return hasattr(value, "__float__") and not isinstance(value, (bool, type))


def _is_order(value: Any) -> bool:
    try:
        return _is_number(value) or (isinstance(value, str) and float(value) > 0)
    except ValueError:
        return False


RANKS: Final = ArgumentKind(lambda n: _is_whole(n) and n >= 1, "a number of ranks, at least 1", _of_ranks)
SIZE: Final = ArgumentKind(lambda n: _is_whole(n) and n >= 1, "a whole number, at least 1")
WHOLE: Final = ArgumentKind(_is_whole, "a whole number")
NUMBER: Final = ArgumentKind(_is_number, "a number")
ORDER: Final = ArgumentKind(_is_order, "a number, or `inf`")
SECONDS: Final = ArgumentKind(lambda n: _is_number(n) and n > 0, "a number of seconds, more than 0")
SHARE: Final = ArgumentKind(lambda n: _is_number(n) and 0 <= n <= 1, "a number from 0 to 1")
TEXT: Final = ArgumentKind(lambda held: isinstance(held, str), "text")
FUNCTION: Final = ArgumentKind(callable, "a function")
PROGRESS: Final = ArgumentKind(
    lambda held: held is None or isinstance(held, bool) or (callable(held) and not isinstance(held, type)),
    "True, False, None or a function of two numbers of bytes",
)
TEXTS: Final = ArgumentKind(
    lambda held: (
        isinstance(held, Mapping)
        and all(isinstance(text, str) for pair in cast("Mapping[Any, Any]", held).items() for text in pair)
    ),
    "a mapping of text to text",
)
COUNT: Final = ArgumentKind(lambda n: _is_whole(n) and n >= 0, "a whole number, at least 0")
FLAG: Final = ArgumentKind(lambda held: isinstance(held, bool), "True or False")
FOLDER: Final = ArgumentKind(lambda held: isinstance(held, (str, os.PathLike)), "a path, as text or a Path")
PLAN_SOURCE: Final = ArgumentKind(
    lambda held: isinstance(held, (str, os.PathLike, Mapping)),
    "a path, a shipped plan's name, YAML text or a mapping",
    lambda came: "" if came is not None else "`tpplan.suggest_plan` finds one",
)


def optional(kind: ArgumentKind) -> ArgumentKind:
    """The same, or None."""
    return ArgumentKind(lambda held: held is None or kind.fits(held), f"{kind.text}, or None", kind.way_out)


__all__ = [
    "COUNT",
    "FLAG",
    "FOLDER",
    "FUNCTION",
    "NUMBER",
    "PLAN_SOURCE",
    "PROGRESS",
    "RANKS",
    "SECONDS",
    "SHARE",
    "SIZE",
    "TEXT",
    "TEXTS",
    "WHOLE",
    "ArgumentKind",
    "optional",
    "refusal",
    "takes",
]
