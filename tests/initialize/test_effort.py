"""What a replay holds at a time, and how often it draws; counted without other ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tpplan
from tests.initialize.compare import on_meta
from tests.zoo.architectures import ARCHITECTURES, model_of
from tpplan.initialize.executor import Executor
from tpplan.initialize.record import InitialOperation


class Seen:
    """The most bytes that an executor has held after an operation, and the draws that were made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes, self.draws = 0, 0
        stock = Executor.run

        def run(executor: Executor, operation: InitialOperation) -> None:
            stock(executor, operation)
            self.bytes = max(self.bytes, sum(held.nbytes() for held in executor.held.values()))
            self.draws += operation.draw is not None

        monkeypatch.setattr(Executor, "run", run)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_one_whole_tensor_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen(monkeypatch)
    model = on_meta(lambda: model_of(ARCHITECTURES[name]))
    tpplan.init_weights(model)
    assert seen.bytes <= max(p.nbytes for p in (*model.parameters(), *model.buffers())) + 1024


def _truncated() -> nn.Module:
    model = nn.Sequential(*[nn.Linear(50, 60) for _ in range(8)])
    for layer in model:
        assert isinstance(layer, nn.Linear)
        nn.init.trunc_normal_(layer.weight, a=-1.5, b=1.5)
    return model


def test_what_is_read_is_drawn_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = 0
    stock = torch.Tensor.normal_

    def counts(*args: object, **kwargs: object) -> object:
        nonlocal drawn
        drawn += 1
        return stock(*args, **kwargs)  # pyright: ignore

    with monkeypatch.context() as counted:
        counted.setattr(torch.Tensor, "normal_", counts)
        _truncated()
    seen = Seen(monkeypatch)
    tpplan.init_weights(on_meta(_truncated), build=_truncated)
    uniform = 2 * 8
    assert drawn > 20 and seen.draws <= 2 * (drawn + uniform)
    assert seen.bytes <= 5 * 50 * 60 * 4
