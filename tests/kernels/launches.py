"""As on a device where kernels run, for tests on a CPU: their operators run their formulas, and calls are counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from tpplan import kernels
from tpplan.kernels import backend


@contextmanager
def counted(owner: Any, *names: str) -> Iterator[Counter[str]]:
    """How often each of these functions of `owner` is called on numbers, in a block where kernels are said to run."""
    calls: Counter[str] = Counter()

    def counting(name: str, stock: Any) -> Any:
        def call(*given: Any, **keywords: Any) -> Any:
            calls[name] += not given[0].is_meta
            return stock(*given, **keywords)

        return call

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(backend, "runs_kernels", lambda tensor: not tensor.is_meta))
        there = kernels.Backend("triton", "for the test")
        patches.enter_context(mock.patch.object(kernels, "available", lambda device: there))
        for name in names:
            patches.enter_context(mock.patch.object(owner, name, counting(name, getattr(owner, name))))
        yield calls
