"""Nothing is compiled while a model is captured, and everything is as it was afterwards, in threads too."""

from __future__ import annotations

import threading
from typing import Any

import torch

from tpplan.compat.dynamo import nothing_compiled


def compiles() -> bool:
    seen: list[bool] = []

    def backend(graph: Any, _: Any) -> Any:
        seen.append(True)
        return graph.forward

    torch._dynamo.reset()
    torch.compile(lambda x: x + 1, backend=backend)(torch.zeros(1))
    return bool(seen)


def test_nothing_is_compiled_inside_and_everything_after() -> None:
    assert compiles()
    with nothing_compiled(), nothing_compiled():
        assert not compiles()
    assert compiles()


def test_threads_leave_in_any_order() -> None:
    entered, left = threading.Event(), threading.Event()

    def first() -> None:
        with nothing_compiled():
            entered.wait(20)
        left.set()

    thread = threading.Thread(target=first)
    thread.start()
    with nothing_compiled():
        entered.set()
        left.wait(20)
        assert not compiles()
    thread.join()
    assert compiles()
