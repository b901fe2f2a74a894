"""Did you mean: the nearest known word, and the nearest pattern that would match."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from tpplan.plan.pattern import Pattern, PatternError

_CANDIDATES = 3000
_LISTED = 5


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """The known word that's nearest to `word`, if any is near."""
    from difflib import get_close_matches

    found = get_close_matches(word.lower()[:64], list(known), n=1, cutoff=0.6)
    return found[0] if found else None


def one_of(known: Iterable[str]) -> str:
    """A list for a help line: `a`, `b` or `c`."""
    words = [f"`{word}`" for word in known]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def word_help(word: str, known: Sequence[str]) -> str:
    """The help line for a word that isn't among the known ones."""
    nearest = did_you_mean(word, known)
    return f"did you mean `{nearest}`?" if nearest else f"use {one_of(known)}"


def unmatched_help(pattern: Pattern, names: Sequence[str]) -> str:
    """The help line for a pattern that matches no module."""
    shapes = _shapes(names)
    if not shapes:
        return "the model has no modules"
    suggestion = _other_prefix(pattern, names) or _nearest(pattern, shapes)
    if suggestion:
        return f"did you mean `{suggestion}`?"
    listed = ", ".join(f"`{shape}`" for shape in islice(shapes, _LISTED))
    return f"the model has modules such as {listed}"


def _shapes(names: Sequence[str]) -> dict[str, None]:
    """The names with `*` for each index: a model of any depth has a few dozen."""
    unique = (".".join("*" if part.isdigit() else part for part in name.split(".")) for name in names if name)
    return dict.fromkeys(islice(dict.fromkeys(unique), _CANDIDATES))


def _other_prefix(pattern: Pattern, names: Sequence[str]) -> str | None:
    """The pattern with a segment more or fewer in front, where that matches."""
    heads = list(dict.fromkeys(name.split(".")[0] for name in names if "." in name))
    texts = [f"{head}.{pattern.text}" for head in heads]
    if not pattern.text.split(".")[0].count("{"):
        texts.append(pattern.text.partition(".")[2])
    for text in texts:
        try:
            candidate = Pattern.parse(text)
        except PatternError:
            continue
        if any(candidate.matches(name) for name in names):
            return text
    return None


def _nearest(pattern: Pattern, shapes: Iterable[str]) -> str | None:
    from difflib import SequenceMatcher

    texts = [alternative.text for alternative in pattern.alternatives[:4]]
    indices = [[part for part in text.split(".") if part.isdigit()] for text in texts]
    best: tuple[float, str] = (0.6, "")
    for text, digits in zip(texts, indices, strict=True):
        matcher = SequenceMatcher(b=_generalised(text), autojunk=False)
        for shape in shapes:
            matcher.set_seq1(shape)
            if matcher.real_quick_ratio() > best[0] and matcher.quick_ratio() > best[0]:
                ratio = matcher.ratio() + (0.02 if shape.count(".") == text.count(".") else 0)
                best = max(best, (ratio, _with_indices(shape, digits)), key=lambda pair: pair[0])
    return best[1] or None


def _generalised(text: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in text.split("."))


def _with_indices(shape: str, digits: Sequence[str]) -> str:
    for index in digits:
        shape = shape.replace("*", index, 1)
    return shape
