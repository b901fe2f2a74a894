"""Sizes and signs as people read them."""

import pytest

from tests.report.toy_program import toy_program
from tpplan.report.program_page import render_program
from tpplan.report.quantities import bytes_text, count_text, encodable, path_text, shape_text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (2**20 - 1, "1.0 MiB"),
        (28 * 2**20, "28.0 MiB"),
        (2**60, "1,024.0 PiB"),
    ],
)
def test_bytes_are_written_in_the_unit_that_keeps_them_short(count: int, text: str) -> None:
    assert bytes_text(count) == text


def test_shapes_counts_and_places() -> None:
    assert [shape_text(shape) for shape in ((), (64,), (3, 32))] == ["()", "(64)", "(3, 32)"]
    assert [count_text(count, "rank") for count in (0, 1, 2000)] == ["0 ranks", "1 rank", "2,000 ranks"]
    assert [path_text(path) for path in ((), ("x",), ("pair", 0))] == ["result", "x", "pair.0"]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", None])
def test_a_narrow_encoding_gets_the_same_columns(encoding: str | None) -> None:
    text = render_program(toy_program()) + "−3 µs"
    narrow = encodable(text, encoding)
    assert narrow.isascii() and "R.dP" in narrow
    assert [len(line) for line in narrow.splitlines()] == [len(line) for line in text.splitlines()]


def test_where_the_signs_can_be_encoded_they_stay() -> None:
    assert encodable("P → R", "utf-8") == "P → R"
