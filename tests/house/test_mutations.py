"""The list of bugs that `make mutations` plants still fits the code."""

from dataclasses import replace

from tests.mutations.__main__ import misplaced
from tests.mutations.bugs import BUGS


def test_each_bug_can_still_be_planted() -> None:
    assert misplaced() == []


def test_a_bug_that_is_lost_is_told() -> None:
    (first, *_) = BUGS
    (found,) = misplaced((replace(first, text="no such text"),))
    assert found == f"{first.name}: its text is 0 times in {first.file}"
