"""These tests need kernels that run: in a session with TRITON_INTERPRET=1 on the CPU, in any other on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpplan.kernels.backend import INTERPRETED


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if INTERPRETED:
        return
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
