"""Wording: lists and articles in messages."""

from __future__ import annotations

from collections.abc import Iterable

# Letters whose names begin with a vowel: `an RMSNorm`, `an MLP`, but `a Linear`, `a UNet`.
_SPELT = frozenset("AEFHILMNORSX")
_CONSONANTS = ("uni", "use", "eu", "one")  # sounds, whatever the letter


def one_of(words: Iterable[str]) -> str:
    """A list for a help line: `a`, `b` or `c`."""
    return _listed(words, "or")


def all_of(words: Iterable[str]) -> str:
    """A list for a message: `a`, `b` and `c`."""
    return _listed(words, "and")


def with_article(name: str) -> str:
    """A class's name as messages say it: an `Embedding`, a `Linear`, an `RMSNorm`."""
    start = name.lstrip("_")
    if len(start) > 1 and start[:2].isupper():
        vowel = start[0] in _SPELT
    else:
        vowel = start[:1].lower() in tuple("aeiou") and not start.lower().startswith(_CONSONANTS)
    return f"{'an' if vowel else 'a'} `{name}`"


def _listed(words: Iterable[str], joint: str) -> str:
    quoted = [f"`{word}`" for word in words]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} {joint} {quoted[-1]}"


__all__ = ["all_of", "one_of", "with_article"]
