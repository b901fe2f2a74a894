"""Which cases of a parametrized test are left to the slow ones, or to the sweep."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest


def slow_but(quick: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """The cases, of which those that aren't `quick` are marked as slow."""
    return [case if case in quick else _marked(case, pytest.mark.slow) for case in cases]


def sweep_but(quick: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """The cases, of which those that aren't `quick` are left to the sweep."""
    return [case if case in quick else _marked(case, pytest.mark.sweep) for case in cases]


def in_thirds(quick: Collection[Any], slow: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """The cases, of which those in `slow` are marked as slow, and what isn't `quick` either is left to the sweep."""
    mark = pytest.mark
    return [case if case in quick else _marked(case, mark.slow if case in slow else mark.sweep) for case in cases]


def in_turns(cases: Sequence[Any], others: Sequence[Any], quick: int | None = None) -> list[Any]:
    """Pairs of both. Each case has one of the others, in turns; what remains is left to the sweep.

    With `quick` only the first so many of these pairs aren't marked as slow.
    """
    turns = [(case, others[place % len(others)]) for place, case in enumerate(cases)]
    return in_thirds(turns[:quick], turns, [(case, other) for case in cases for other in others])


def _marked(case: Any, mark: pytest.MarkDecorator) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=mark)
