"""Small modules that hide something from a trace: equal to the stock one on every call, or refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.battery.cases import CASES, SLOW
from tests.battery.harness import result_of
from tests.battery.page import is_met

# Of each cause some are in the default suite; all take minutes, and are a sweep.
_EVERY = 12


def _chosen() -> Iterator[Any]:
    seen: Counter[str] = Counter()
    for case in CASES.values():
        seen[case.cause] += 1
        swept = case.name in SLOW or seen[case.cause] % _EVERY != 1
        yield pytest.param(case.name, marks=[pytest.mark.sweep] if swept else [], id=f"{case.cause}-{case.name}")


@pytest.mark.processes
@pytest.mark.parametrize("name", list(_chosen()))
@pytest.mark.one_in(5)
def test_no_wrong_number_leaves(name: str) -> None:
    result = result_of(name)
    assert is_met(CASES[name].expect, result.verdict), f"{result.verdict} at {result.detail}"
