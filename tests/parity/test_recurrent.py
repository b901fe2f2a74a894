"""Recurrent layers whose hidden state is split: equal to torch's, with the gathers that are predicted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tpplan
from tpplan.parity import verify_program

BATCH, STEPS, INPUTS, FEATURES = 2, 3, 6, 8
KINDS: dict[str, Any] = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "rnn": nn.RNN,
    "relu": lambda *args, **options: nn.RNN(*args, nonlinearity="relu", **options),
}


class Tagger(nn.Module):
    """A recurrent layer between two linear ones; the second reads its output, or its last states."""

    def __init__(self, kind: str, features: int = FEATURES, reads: str = "output", **options: Any) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, INPUTS)
        self.rnn = KINDS[kind](INPUTS, features, **options)
        self.reads, self.features = reads, features
        ways = 2 if options.get("bidirectional") else 1
        self.head = nn.Linear(features * ways, 5)

    def forward(self, x: Tensor, *states: Tensor) -> Tensor:
        x = self.first(x)
        output, last = self.rnn(x, states if len(states) == 2 else states[0]) if states else self.rnn(x)
        if self.reads == "output":
            return self.head(output)
        last = last[0] if isinstance(last, tuple) else last  # pyright: ignore
        if self.reads == "ends":
            return self.head(torch.cat([last[-2], last[-1]], -1))
        return self.head(last)


def plan_for(rnn: object = "colwise", head: object = "rowwise") -> dict[str, Any]:
    return {"version": 1, "modules": {"rnn": rnn, "head": head}}


BOTH = {"style": "rowwise", "packed": ["forwards", "backwards"]}
GATHERED = {"style": "colwise", "output": "replicate"}


def example(*shape: int, trained: bool = True) -> Tensor:
    return torch.randn(shape or (STEPS, BATCH, INPUTS), requires_grad=trained)


def check(model: nn.Module, plan: dict[str, Any], tp: int, *call: Tensor, **how: Any) -> tpplan.Program:
    """Compile, and compare outputs, gradients and collectives with the unsharded model's."""
    program = tpplan.compile_plan(model, plan, tp, call)
    report = verify_program(model, program, (call, {}), **how)
    assert report.ok, report.problems
    assert not report.notes, report.notes  # all collectives were predicted
    return program


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "deep": {"num_layers": 3},
    "both": {"bidirectional": True},
    "deep both": {"num_layers": 2, "bidirectional": True},
    "without biases": {"bias": False, "num_layers": 2},
}
CASES = [(kind, options) for options in OPTIONS for kind in KINDS]


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize(("kind", "options"), CASES)
def test_each_kind(kind: str, options: str, tp: int) -> None:
    given = OPTIONS[options]
    program = check(Tagger(kind, **given), plan_for(head=BOTH if "both" in options else "rowwise"), tp, example())
    ways, layers = 2 if "both" in options else 1, given.get("num_layers", 1)
    # The last state of the last layer isn't gathered; the head's result is a sum, as is the gradient of the input.
    gathered = ways * (layers * STEPS - 1)
    assert program.count_collectives() == {"all-gather": gathered, "reduce-scatter": gathered, "all-reduce": 2}
    for placement in program.parameters:
        if placement.name.startswith("rnn."):
            assert placement.local_shape[0] == placement.shape[0] // tp


@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_batches_first_and_results_that_are_gathered(kind: str, states: bool) -> None:
    model = Tagger(kind, batch_first=True, num_layers=2, bidirectional=True)
    number = (2 if kind == "lstm" else 1) if states else 0
    given = [example(4, BATCH, FEATURES) for _ in range(number)]
    check(model, plan_for(GATHERED, "colwise"), 2, example(BATCH, STEPS, INPUTS), *given)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("kind", ["lstm", "gru", "rnn"])
def test_first_states(kind: str, tp: int) -> None:
    states = [example(2, BATCH, FEATURES) for _ in range(2 if kind == "lstm" else 1)]
    check(Tagger(kind, num_layers=2), plan_for(), tp, example(), *states)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_first_states_without_gradients(kind: str) -> None:
    states = [example(1, BATCH, FEATURES, trained=False) for _ in range(2 if kind == "lstm" else 1)]
    check(Tagger(kind), plan_for(), 2, example(trained=False), *states)


def test_one_tensor_for_both_first_states() -> None:
    class Alike(Tagger):
        def forward(self, x: Tensor, *states: Tensor) -> Tensor:
            return super().forward(x, *states, *states)

    check(Alike("lstm"), plan_for(), 2, example(), example(1, BATCH, FEATURES))


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_without_a_batch(kind: str) -> None:
    check(Tagger(kind, num_layers=2), plan_for(), 2, example(STEPS, INPUTS))
    state = [example(1, FEATURES) for _ in range(2 if kind == "lstm" else 1)]
    check(Tagger(kind, batch_first=True), plan_for(), 2, example(STEPS, INPUTS), *state)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
@pytest.mark.parametrize("reads", ["ends", "last"])
def test_last_states(kind: str, reads: str) -> None:
    model = Tagger(kind, reads=reads, bidirectional=reads == "ends")
    check(model, plan_for(head=BOTH if reads == "ends" else "rowwise"), 2, example())


@pytest.mark.parametrize("kind", ["lstm", "gru", "rnn"])
@pytest.mark.parametrize("tp", [3, 4])
def test_features_that_do_not_divide(kind: str, tp: int) -> None:
    check(Tagger(kind, 10, num_layers=2, bidirectional=True), plan_for(head=BOTH), tp, example())
    check(Tagger(kind, 5), plan_for(head=GATHERED), tp, example())  # on four ranks, the last has none


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_a_single_step(kind: str) -> None:
    check(Tagger(kind), plan_for(), 2, example(1, BATCH, INPUTS))


@pytest.mark.processes
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_on_processes(kind: str, tp: int) -> None:
    model = Tagger(kind, num_layers=2, bidirectional=True)
    report = tpplan.verify(model, plan_for(head=BOTH), tp, (example(),), processes=True)
    assert report.ok, report.problems
    assert not report.notes
