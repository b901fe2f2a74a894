"""The caret stays under the token, whatever the line holds."""

import unicodedata

import pytest

from tpplan.plan import SourceText
from tpplan.report.excerpt import MAX_WIDTH, Excerpt, excerpt, printable


def shown(line: str, token: str) -> Excerpt:
    source = SourceText.of("f", f"first\n{line}\nlast")
    start = source.starts[1] + line.index(token)
    found = excerpt(source.span(start, start + len(token)))
    assert found is not None
    return found


def cells(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)


def under_the_carets(found: Excerpt) -> str:
    """What stands above the carets, counted in cells."""
    text = ""
    column = 0
    for character in found.text:
        if found.indent <= column < found.indent + found.width:
            text += character
        column += cells(character) if not unicodedata.combining(character) else 0
    return text


@pytest.mark.parametrize(
    "line",
    [
        "  a.b: token",
        "token: x",
        "\ta:\ttoken # tabs",
        "日本語: token",
        "日本: token # 語",
        "😀😀: token",
        "e\u0301 cafe\u0301: token",
        "x" * 500 + ": token",
        "x" * 500 + ": token " + "y" * 500,
        "token " + "z" * 500,
        "語" * 300 + " token " + "語" * 300,
    ],
)
def test_the_carets_stand_under_the_token(line: str) -> None:
    found = shown(line, "token")
    assert under_the_carets(found) == "token"
    assert found.number == 2
    assert cells(found.text) <= MAX_WIDTH + 40


def test_a_wide_token_gets_two_carets_a_character() -> None:
    assert shown("a: 日本", "日本").width == 4


def test_a_token_longer_than_the_screen_is_cut() -> None:
    found = shown("  " + "x" * 400, "x" * 400)
    assert found.text.endswith("…") and found.width <= MAX_WIDTH


def test_an_empty_token_still_gets_a_caret() -> None:
    source = SourceText.of("f", "name:")
    found = excerpt(source.span(5, 5))
    assert found is not None and (found.indent, found.width) == (5, 1)


def test_a_token_of_several_lines_is_marked_on_its_first() -> None:
    source = SourceText.of("f", "a:\n  - b  \n  - c\n")
    found = excerpt(source.span(5, 16))
    assert found is not None and (found.number, found.indent, found.width) == (2, 2, 3)


def test_without_a_source_there_is_no_excerpt() -> None:
    from tpplan.plan import Position, Span

    assert excerpt(Span("f", Position(1, 1), Position(1, 2))) is None


def test_escape_sequences_never_reach_the_terminal() -> None:
    assert printable("a\x1b[31mb\rc\n") == "a\\x1b[31mb\\x0dc\\x0a"
    assert "\x1b" not in shown("x\x1b[31m token", "token").text
