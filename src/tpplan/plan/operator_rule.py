"""Rules of operators, in einops' manner: which dims of the results are which dims of the arguments.

in:  a text, with a term for each tensor argument, and for each result behind the arrow
out: an `OperatorRule`, or a `RuleTextError` with the characters at fault

    b h s! d!, b h t! d!, b h t! d! -> b h s! d!        attention: batch and heads may be split
    ... i+, o i+ -> ... o                               a linear layer: a sum over the ranks' parts of `i`
    b s! (k g) d!, b t! k d!, b t! k d! -> b s! (k g) d!    queries of which `g` share a key

A plain name may be split over ranks: a rank's part of the result is the operator on its parts. `!` is for what each
rank needs whole, `+` for what is summed. Of several results, one without a name that is split is summed over its parts.
`...` are leading dims, all plain, `_` is an argument that is whole or None, or a result that is None, a term in
brackets a list of tensors, and `()` a number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

_TOKEN = re.compile(r"\s*(->|\.\.\.|[A-Za-z][A-Za-z0-9_]*|[_1,()\[\]!+]|\S)")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
ELLIPSIS = "..."


class RuleTextError(ValueError):
    """A rule can't be read. `offset` and `length` say which of its characters are at fault."""

    def __init__(self, message: str, offset: int, length: int, help_text: str) -> None:
        """Keep the place inside of the rule's text."""
        super().__init__(message)
        self.message = message
        self.offset = offset
        self.length = length
        self.help = help_text


@dataclass(frozen=True, slots=True)
class Dim:
    """A dim of a tensor: the names that make it up, the last of which counts fastest; none of a dim of size 1."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Term:
    """A tensor argument or a result.

    Attributes:
        dims: `...` is a dim of that name; None for an argument that is whole or None, and for a result that is None.
        items: of a list of tensors: the terms of its items, or a single one for all of them; empty for a tensor.
    """

    dims: tuple[Dim, ...] | None
    items: tuple[Term, ...] = ()

    @property
    def names(self) -> frozenset[str]:
        """All names of its dims."""
        own = {name for dim in self.dims or () for name in dim.names}
        return frozenset(own.union(*(item.names for item in self.items)))


@dataclass(frozen=True, slots=True)
class OperatorRule:
    """What is known of an operator.

    Attributes:
        text: as it was given.
        operands, results: the terms.
        whole: the names that each rank needs all of.
        summed: the names over whose parts the ranks' results add up.
        linear: the arguments through which a sum that is still to be made may pass.
        sizes: arguments that count a dim, with its name.
        random: whether it draws random numbers, each rank those of its part.
        audit: whether it may be tried.
        own: the results of which some sizes are their own, or that say nothing of the call: states of generators.
        reasons: why names are whole, where there is more to say than that the rule has them so.
        derived: whether it follows from another rule, which is tried, or from what others say of their operator.
        placed: whether it says of one dim alone how it may be split, as placements do.
    """

    text: str
    operands: tuple[Term, ...]
    results: tuple[Term, ...]
    whole: frozenset[str]
    summed: frozenset[str]
    linear: tuple[str, ...] = ()
    sizes: tuple[tuple[str, str], ...] = ()
    random: bool = False
    audit: bool = True
    derived: bool = False
    own: frozenset[int] = frozenset()
    reasons: tuple[tuple[str, str], ...] = ()
    placed: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """All names, in the order of the arguments."""
        return tuple(dict.fromkeys(name for term in self.operands for name in sorted(term.names)))

    @property
    def plain(self) -> tuple[str, ...]:
        """The names that may be split without a sum."""
        return tuple(name for name in self.names if name not in self.whole | self.summed)


@dataclass(frozen=True, slots=True)
class _Token:
    text: str
    offset: int


class _RuleReader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = [_Token(found[1], found.start(1)) for found in _TOKEN.finditer(text)]
        self.at = 0
        self.flags: dict[str, str] = {}
        self.first: dict[str, _Token] = {}

    def fail(self, message: str, token: _Token | None, help_text: str) -> NoReturn:
        """Raise, with the token at fault, or the end."""
        if token is None:
            raise RuleTextError(message, len(self.text), 1, help_text)
        raise RuleTextError(message, token.offset, len(token.text), help_text)

    @property
    def token(self) -> _Token | None:
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def next(self) -> _Token | None:
        held = self.token
        self.at += 1
        return held

    def terms(self, ends: str, result: bool) -> list[tuple[Term, _Token | None]]:
        """The terms up to `ends`, which may be the end of the text."""
        found: list[tuple[Term, _Token | None]] = []
        while True:
            begins = self.token
            found.append((self.term(result), begins))
            held = self.next()
            if (held.text if held is not None else "") == ends:
                return found
            if held is None or held.text != ",":
                if held is not None and held.text == "->" and not ends:
                    self.fail("there is a second arrow", held, "write one arrow, before the results")
                wanted = f"`{ends}`" if ends else "the end"
                shown = "the rule ends" if held is None else f"`{held.text}` stands"
                help_text = "write terms with commas between them and `->` before the results"
                self.fail(f"{shown} where a comma or {wanted} belongs", held, help_text)

    def term(self, result: bool) -> Term:
        token = self.token
        if token is not None and token.text == "_":
            self.next()
            return Term(None)
        if token is not None and token.text == "[":
            self.next()
            return Term((), tuple(held for held, _ in self.terms("]", result)))
        dims: list[Dim] = []
        seen: set[str] = set()
        number = False
        while (token := self.token) is not None and token.text not in (",", "->", "]"):
            self.next()
            if token.text == "(":
                names = self.group(token, seen, result)
                number |= not names
                if names:
                    dims.append(Dim(names))
            elif token.text == "1":
                dims.append(Dim(()))
            else:
                dims.append(Dim((self.name(token, seen, result),)))
        if not dims and not number:
            self.fail("a term is empty", token, "write `()` for a number, `_` for an argument that is whole or None")
        return Term(tuple(dims))

    def group(self, opening: _Token, seen: set[str], result: bool) -> tuple[str, ...]:
        names: list[tuple[str, _Token]] = []
        while (token := self.next()) is not None and token.text not in (")", ",", "->"):
            names.append((self.name(token, seen, result), token))
        if token is None or token.text != ")":
            self.fail("the bracket isn't closed", opening, "write `(k g)` for a dim that is made up of two")
        mark = self.token
        if mark is not None and mark.text in ("!", "+"):
            self.next()
            for name, held in names:
                self.mark(name, held, mark, result)
        return tuple(name for name, _ in names)

    def name(self, token: _Token, seen: set[str], result: bool) -> str:
        name = token.text
        if name != ELLIPSIS and _NAME.fullmatch(name) is None:
            self.fail(f"`{name}` is no name of a dim", token, "names have letters and digits; see the rules' notation")
        if name in seen:
            self.fail(f"`{name}` is twice in a term", token, "give each dim a name of its own")
        seen.add(name)
        if result and name not in self.first:
            self.fail(
                f"`{name}` is a dim of a result, and of no argument",
                token,
                "name a dim of an argument; what the operator makes anew has a size that no rule tells",
            )
        self.first.setdefault(name, token)
        self.flag(name, token, result)
        return name

    def flag(self, name: str, token: _Token, result: bool) -> None:
        mark = self.token
        if mark is not None and mark.text in ("!", "+"):
            self.next()
            self.mark(name, token, mark, result)

    def mark(self, name: str, token: _Token, mark: _Token, result: bool) -> None:
        if name == ELLIPSIS:
            self.fail("`...` are plain dims", token, "name the dims that aren't")
        if result and mark.text == "+":
            self.fail("a result has no dim that is summed", mark, "write `+` at the arguments' dims alone")
        if self.flags.setdefault(name, mark.text) != mark.text:
            self.fail(f"`{name}` can't be both whole and summed", mark, "write either `!` or `+`")


def read_rule(text: str) -> OperatorRule:
    """Read a rule.

    Raises:
        RuleTextError: it can't be read, or contradicts itself.
    """
    reader = _RuleReader(text)
    if not any(token.text == "->" for token in reader.tokens):
        reader.fail("there is no arrow", None, "write the results' terms behind `->`")
    operands = reader.terms("->", result=False)
    results = reader.terms("", result=True)
    whole = frozenset(name for name, mark in reader.flags.items() if mark == "!")
    summed = frozenset(name for name, mark in reader.flags.items() if mark == "+")
    for term, token in results:
        for name in reader.first:
            if name in summed and name in term.names:
                reader.fail(f"`{name}` is summed, and a dim of a result", token, "leave out its `+`")
            if name not in whole | summed and not any(name in other.names for other, _ in results):
                reader.fail(
                    f"`{name}` is on the left alone",
                    reader.first[name],
                    f"write `{name}!` if each rank needs all of it, `{name}+` if the ranks' results add up",
                )
    return OperatorRule(text, tuple(t for t, _ in operands), tuple(t for t, _ in results), whole, summed)


def flattened(terms: tuple[Term, ...], lengths: tuple[int | None, ...]) -> Iterator[Term]:
    """The terms of tensors, those of a list one by one; `lengths` has that of each list, None for a tensor.

    Raises:
        ValueError: a list has another number of tensors than its term says.
    """
    for term, length in zip(terms, lengths, strict=True):
        if length is None:
            yield term
        elif len(term.items) == 1:
            yield from term.items * length
        elif len(term.items) == length or term.dims is None:
            yield from term.items or (Term(None),) * length
        else:
            raise ValueError(f"a list has {length} tensors, its term {len(term.items)}")


__all__ = ["ELLIPSIS", "Dim", "OperatorRule", "RuleTextError", "Term", "flattened", "read_rule"]
