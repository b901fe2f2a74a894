"""Which cases of a parametrized test are left to the slow ones, or to the sweep."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_but(quick: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """The cases, of which those that aren't `quick` are marked as slow."""
    return _marked(quick, cases, pytest.mark.slow)


def sweep_but(quick: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """The cases, of which those that aren't `quick` are left to the sweep."""
    return _marked(quick, cases, pytest.mark.sweep)


def _marked(quick: Collection[Any], cases: Iterable[Any], mark: pytest.MarkDecorator) -> list[Any]:
    return [
        case if case in quick else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=mark)
        for case in cases
    ]
