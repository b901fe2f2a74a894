"""Did you mean: the nearest known word, and the nearest pattern that would match."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import islice

from tpplan.plan.pattern import Pattern, PatternError
from tpplan.plan.wording import one_of

_SHAPES = 500
_LISTED = 5
_CUTOFF = 0.6
_BRACES = re.compile(r"(?P<before>[^{}]*)\{(?P<words>[^{}.]*)\}(?P<after>[^{}]*)")


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """The known word that's nearest to `word`, if any is near."""
    return next(iter(nearest_words(word, known, 1)), None)


def nearest_words(word: str, known: Iterable[str], most: int = 3, cutoff: float = 0.6) -> list[str]:
    """The known words that are near to `word`, in any case, the nearest first."""
    from difflib import get_close_matches

    spelt = {name.lower(): name for name in known}
    return [spelt[held] for held in get_close_matches(word.lower()[:64], spelt, most, cutoff)]


def word_help(word: str, known: Sequence[str]) -> str:
    """The help line for a word that isn't among the known ones."""
    nearest = did_you_mean(word, known)
    return f"did you mean `{nearest}`?" if nearest else f"use {one_of(known)}"


class Suggestions:
    """Help lines for patterns that match no module, and no parameter, of one model.

    It looks at shapes, which are names with `*` for each index: a model of any depth has a few dozen.
    """

    def __init__(self, names: Sequence[str], parameters: Sequence[str] = ()) -> None:
        self.names = names
        self.parameters = parameters

    @cached_property
    def shapes(self) -> dict[str, str]:
        """Each shape of a module, with the first name that has it."""
        return _shapes(self.names)

    @cached_property
    def parameter_shapes(self) -> dict[str, str]:
        """The same of parameters."""
        return _shapes(self.parameters)

    def help_for(self, pattern: Pattern) -> str:
        """The nearest pattern that matches, or else what there is to match."""
        if not self.shapes:
            return "the model has no modules"
        suggestion = self.with_other_prefix(pattern) or self.joined(pattern) or self.nearest(pattern)
        if suggestion:
            return f"did you mean `{suggestion}`?"
        listed = ", ".join(f"`{shape}`" for shape in islice(self.shapes, _LISTED))
        return f"the model has modules such as {listed}"

    def with_other_prefix(self, pattern: Pattern) -> str | None:
        """The pattern with a segment more or fewer in front, where that matches."""
        heads = dict.fromkeys(name.partition(".")[0] for name in self.shapes.values() if "." in name)
        texts = [f"{head}.{pattern.text}" for head in islice(heads, _LISTED)]
        first, _, rest = pattern.text.partition(".")
        if rest and "{" not in first:
            texts.append(rest)
        return next((text for text in texts if self.matches_any(text)), None)

    def matches_any(self, text: str) -> bool:
        """Whether a pattern of this text would match some module."""
        try:
            pattern, shape = Pattern.parse(text), Pattern.parse(_shape(text))
        except PatternError:
            return False
        likely = any(shape.matches(name) for name in self.shapes.values())
        return likely and any(pattern.matches(name) for name in self.names)

    def joined(self, pattern: Pattern) -> str | None:
        """The module beside which the pattern looks, that has all of its alternatives in its name."""
        braces = _BRACES.fullmatch(pattern.text)
        if braces is None or "." in braces["after"]:
            return None
        parent = _shape(braces["before"]).rpartition(".")[0]
        words = re.compile(r"[^.]*?".join(map(re.escape, braces["words"].split(","))))
        for shape in self.shapes:
            above, _, leaf = shape.rpartition(".")
            if above == parent and words.match(leaf) and leaf.endswith(braces["after"]):
                return _with_indices(shape, pattern.text)
        return None

    def nearest(self, pattern: Pattern) -> str | None:
        """What reads most like the pattern, with its braces if all that they stand for is there."""
        found = self.nearest_name(pattern)
        braces = _BRACES.fullmatch(pattern.text)
        if found is None or braces is None:
            return found
        place, words = braces["before"].count("."), f"{{{braces['words']}}}"
        segments = found.split(".")
        for word in braces["words"].split(","):
            if place < len(segments) and word and word in segments[place]:
                text = ".".join([*segments[:place], segments[place].replace(word, words, 1), *segments[place + 1 :]])
                if all(self.matches_any(alternative.text) for alternative in Pattern.parse(text).alternatives):
                    return text
        return found

    def nearest_name(self, pattern: Pattern) -> str | None:
        """The shape that reads most like one of the pattern's alternatives, with the pattern's own indices."""
        from difflib import SequenceMatcher

        best = (_CUTOFF, "")
        for alternative in pattern.alternatives[:4]:
            text = alternative.text
            matcher = SequenceMatcher(b=_shape(text), autojunk=False)
            for shape in (*self.shapes, *self.parameter_shapes):
                matcher.set_seq1(shape)
                if matcher.real_quick_ratio() > best[0] and matcher.quick_ratio() > best[0]:
                    same_depth = shape.count(".") == text.count(".")
                    ratio = matcher.ratio() + (0.02 if same_depth else 0)
                    best = max(best, (ratio, _with_indices(shape, text)), key=lambda pair: pair[0])
        return best[1] or None


def _shapes(names: Sequence[str]) -> dict[str, str]:
    shapes: dict[str, str] = {}
    for name in names:
        if name and len(shapes) < _SHAPES:
            shapes.setdefault(_shape(name), name)
    return shapes


def _shape(text: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in text.split("."))


def _with_indices(shape: str, text: str) -> str:
    for index in (part for part in text.split(".") if part.isdigit()):
        shape = shape.replace("*", index, 1)
    return shape
