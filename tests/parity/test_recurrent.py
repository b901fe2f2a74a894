"""Recurrent layers whose hidden state is split: equal to torch's, with the gathers that are predicted."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import tpplan
from tests.marking import slow_but
from tests.runtime.simulated import worst
from tests.runtime.world import Member, world
from tpplan.api import suggest_text
from tpplan.compat.modules import WEIGHTS_LISTED
from tpplan.parity import verify_program
from tpplan.plan import CompileError, load_plan
from tpplan.runtime.bodies.recurrent_bodies import RecurrentBody

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
CASES = [(kind, options, tp) for options in OPTIONS for kind in KINDS for tp in (2, 4)]
QUICK = {("lstm", "deep both", 4), ("gru", "deep both", 2), ("rnn", "both", 2), ("relu", "plain", 4)}
QUICK |= {("lstm", "without biases", 2), ("gru", "plain", 4), ("lstm", "plain", 2)}


@pytest.mark.one_in(5)
@pytest.mark.parametrize(("kind", "options", "tp"), slow_but(QUICK, CASES))
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


@pytest.mark.parametrize(
    ("kind", "states"), slow_but({("lstm", True), ("gru", False)}, [(k, s) for k in KINDS for s in (False, True)])
)
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


@pytest.mark.parametrize(
    ("kind", "tp"), slow_but({("lstm", 4), ("gru", 3)}, [(k, n) for k in ("lstm", "gru", "rnn") for n in (3, 4)])
)
def test_features_that_do_not_divide(kind: str, tp: int) -> None:
    check(Tagger(kind, 10, num_layers=2, bidirectional=True), plan_for(head=BOTH), tp, example())
    check(Tagger(kind, 5), plan_for(head=GATHERED), tp, example())  # on four ranks, the last has none


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_a_single_step(kind: str) -> None:
    check(Tagger(kind), plan_for(), 2, example(1, BATCH, INPUTS))


class Loop(nn.Module):
    """A cell that the model calls for each step."""

    def __init__(self, kind: str, zeros: bool) -> None:
        super().__init__()
        cells = {"lstm": nn.LSTMCell, "gru": nn.GRUCell, "rnn": nn.RNNCell}
        self.cell, self.head = cells[kind](INPUTS, FEATURES), nn.Linear(FEATURES, 5)
        self.zeros, self.pairs = zeros, kind == "lstm"

    def forward(self, x: Tensor) -> Tensor:
        state: Any = None
        if self.zeros:
            state = x.new_zeros(x.shape[1], FEATURES)
            state = (state, state) if self.pairs else state
        made: list[Tensor] = []
        for step in x.unbind(0):
            state = self.cell(step, state)
            made.append(state[0] if self.pairs else state)
        return self.head(torch.stack(made))


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("kind", ["lstm", "gru", "rnn"])
def test_cells(kind: str, zeros: bool) -> None:
    plan = {"version": 1, "modules": {"cell": "colwise", "head": "rowwise"}}
    program = check(Loop(kind, zeros), plan, 2, example())
    gathered = STEPS - 1
    assert program.count_collectives() == {"all-gather": gathered, "reduce-scatter": gathered, "all-reduce": 2}


class Twice(Tagger):
    """Goes on where it has stopped, with fewer steps."""

    def forward(self, x: Tensor, *states: Tensor) -> Tensor:
        x = self.first(x)
        output, last = self.rnn(x, *states)
        return self.head(output[:2] + self.rnn(x[:2], last)[0])


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_states_that_go_on(kind: str) -> None:
    program = check(Twice(kind, num_layers=2), plan_for(), 2, example())
    both = (2 * STEPS - 1) + (2 * 2 - 1) + 1  # the states of both layers are gathered at once
    assert program.count_collectives() == {"all-gather": both, "reduce-scatter": both, "all-reduce": 2}


def test_frozen_layers() -> None:
    model = Tagger("lstm", num_layers=2)
    model.first.requires_grad_(False)
    for name, parameter in model.rnn.named_parameters():
        parameter.requires_grad_(name == "weight_hh_l1")
    program = check(model, plan_for(), 2, example(trained=False))
    # Of the first layer no state has a gradient.
    assert program.count_collectives() == {"all-gather": 2 * STEPS - 1, "reduce-scatter": STEPS - 1, "all-reduce": 1}


class Quiet(Tagger):
    def forward(self, x: Tensor, *states: Tensor) -> Tensor:
        with torch.no_grad():
            output = self.rnn(x)[0]
        return self.head(output + self.first(x).sum())


def test_without_gradients() -> None:
    check(Quiet("gru"), plan_for(), 2, example(trained=False))


def test_outputs_that_are_pinned_to_be_split() -> None:
    pinned = {"style": "colwise", "output": "shard"}
    check(Tagger("lstm", bidirectional=True), plan_for(pinned, BOTH), 2, example())


def test_other_lengths_and_modes_run_by_the_same_proof() -> None:
    proofs: list[int] = []

    def call(*shape: int) -> Any:
        return ((example(*shape, INPUTS).detach().double().requires_grad_(),), {})

    model = Tagger("lstm", num_layers=2, bidirectional=True).double()
    calls = [call(3, 2), call(5, 2), call(5, 4), call(1, 2), lambda m: m.eval(), call(4, 2)]
    rules = plan_for(head=BOTH)["modules"]
    assert max(worst(model, rules, 2, call(3, 2), calls, proofs)) < 1e-12  # pyright: ignore[reportArgumentType]
    assert proofs == [1, 1]


def _trained(member: Member, kind: str) -> list[float]:
    """The largest differences to the unsharded model, in runs one after the other."""
    torch.manual_seed(3)
    stock, x = Tagger(kind, num_layers=2, bidirectional=True, dropout=0.4).double(), example().detach().double()
    model = copy.deepcopy(stock)
    model = tpplan.parallelize(model, plan_for(head=BOTH), member.mesh(), (x,))
    assert all(isinstance(listed, DTensor) for listed in model.rnn.__dict__[WEIGHTS_LISTED])
    found: list[float] = []

    def run(which: nn.Module) -> Tensor:
        torch.manual_seed(5)
        return which(x)

    for training in (True, False):  # in training, all ranks drop what the unsharded model drops
        stock.train(training)
        model.train(training)
        found.append(_apart(run(model), run(stock)))
    with CommDebugMode() as counted:
        run(model).sum().backward()
    predicted = tpplan.compile_plan(stock, plan_for(head=BOTH), member.size, (x,)).count_collectives()
    assert counted.get_total_counts() == sum(predicted.values())
    state = {name: whole.full_tensor() for name, whole in model.state_dict().items()}
    assert all(torch.equal(state[name], whole) for name, whole in stock.state_dict().items())
    other = Tagger(kind, num_layers=2, bidirectional=True, dropout=0.4).double().eval()
    model.load_state_dict(other.state_dict())
    found.append(_apart(run(model), run(other)))
    for which in (model, other):
        optimizer = torch.optim.Adam(which.parameters())
        optimizer.zero_grad()
        run(which).square().sum().backward()
        torch.nn.utils.clip_grad_norm_(which.parameters(), 0.1)
        optimizer.step()
    found.append(_apart(run(model), run(other)))
    with torch.no_grad():
        found.append(_apart(run(model), run(other)))
    found.append(_apart(run(copy.deepcopy(model)), run(other)))
    return found


def _apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).detach().abs().max())


class Recomputing(Tagger):
    def forward(self, x: Tensor, *states: Tensor) -> Tensor:
        return self.head(checkpoint(self.rnn, self.first(x), use_reentrant=False)[0])  # pyright: ignore


def _around(member: Member, kind: str) -> None:
    """What is put around a model: checkpoints, autocast, a compiler."""
    torch.manual_seed(3)
    stock, x = Recomputing(kind, num_layers=2, bidirectional=True), example()
    model: Any = tpplan.parallelize(copy.deepcopy(stock), plan_for(head=BOTH), member.mesh(), (x,))
    for which in (stock, model):
        which(x).square().sum().backward()
    for own, whole in zip(model.parameters(), stock.parameters(), strict=True):
        assert own.grad is not None and whole.grad is not None
        assert _apart(own.grad.full_tensor(), whole.grad) < 1e-5  # pyright: ignore
    assert _apart(model.rnn(x.detach())[0], stock.rnn(x.detach())[0]) < 1e-5
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = model.rnn(x.detach()), stock.rnn(x.detach())
    assert ours[0].dtype is theirs[0].dtype
    assert _apart(ours[0].float(), theirs[0].float()) < 0.05
    assert _apart(torch.compile(model, backend="aot_eager")(x), stock(x)) < 1e-5


@pytest.mark.processes
@pytest.mark.parametrize("kind", slow_but(["gru"], ["lstm", "gru"]))
def test_what_is_put_around_a_model(kind: str) -> None:
    world(2).run(_around, kind)


@pytest.mark.processes
@pytest.mark.parametrize("kind", slow_but(["lstm"], ["lstm", "gru"]))
def test_training_and_states_on_processes(kind: str) -> None:
    for found in world(2).run(_trained, kind):
        assert max(found) < 1e-12, found


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "tp"), slow_but({("lstm", 2)}, [(kind, tp) for kind in ("lstm", "gru") for tp in (2, 4)])
)
def test_on_processes(kind: str, tp: int) -> None:
    model = Tagger(kind, num_layers=2, bidirectional=True)
    report = tpplan.verify(model, plan_for(head=BOTH), tp, (example(),), processes=True)
    assert report.ok, report.problems
    assert not report.notes


def test_gates_in_another_order_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Tagger("lstm")
    program = tpplan.compile_plan(model, plan_for(), 2, (example(),))
    true = RecurrentBody._step

    def swapped(self: RecurrentBody, from_input: Tensor, from_state: Tensor, h: Tensor, c: Tensor) -> Any:
        i, f, g, o = (from_input + from_state).chunk(4, -1)
        return true(self, torch.cat([f, i, g, o], -1), torch.zeros_like(from_state), h, c)

    monkeypatch.setattr(RecurrentBody, "_step", swapped)
    assert not verify_program(model, program, ((example(),), {})).ok


# -- refusals -------------------------------------------------------------------------------------------------------
class Own(nn.LSTM):
    def forward(self, input: Tensor, hx: Any = None) -> Any:
        return super().forward(input * 2, hx)


class Listed(Tagger):
    def forward(self, x: Tensor, *states: Tensor) -> Tensor:
        return self.head(self.rnn(x, [*states])[0])


class Kept(Tagger):
    """Reads the size of a result that is a part."""

    def forward(self, x: Tensor, *states: Tensor) -> Tensor:
        output, last = self.rnn(x)
        return self.head(output) * last.shape[-1]


def _projected() -> nn.Module:
    return Tagger("lstm", FEATURES, "output", proj_size=4, bidirectional=True)


def _hooked() -> nn.Module:
    model = Tagger("gru")
    parametrizations.weight_norm(model.rnn, "weight_hh_l0")
    return model


def _own() -> nn.Module:
    model = Tagger("lstm")
    model.rnn = Own(INPUTS, FEATURES)
    return model


REFUSED: dict[str, tuple[Any, object, str, str]] = {
    "projections": (_projected, "colwise", "TP112", "proj_size=4"),
    "a computed weight": (_hooked, "colwise", "TP112", "isn't a parameter"),
    "a forward of its own": (_own, "colwise", "TP112", "a `forward` of its own"),
    "rows": (lambda: Tagger("gru"), "rowwise", "TP101", "each gate is a function of its products"),
    "packs": (lambda: Tagger("gru"), {"style": "colwise", "packed": ["r", "z", "n"]}, "TP106", "its gates are known"),
    "a split input": (lambda: Tagger("gru"), {"style": "colwise", "input": "shard"}, "TP114", "a part of its input"),
    "few features": (lambda: Tagger("gru", 1), "colwise", "TP102", "fewer features (1) than there are ranks (2)"),
    "states in a list": (lambda: Listed("lstm"), "colwise", "TP112", "pass a tuple"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_at_the_line_of_the_plan(case: str) -> None:
    make, rule, code, message = REFUSED[case]
    states = [example(1, BATCH, FEATURES) for _ in range(2)] if case == "states in a list" else []
    plan = load_plan(json.dumps(plan_for(rule, "replicate"), indent=1))
    with pytest.raises(CompileError) as caught:
        tpplan.compile_plan(make(), plan, 2, (example(), *states))
    finding = next(d for d in caught.value.diagnostics if d.code == code)
    assert message in finding.message
    assert finding.span is not None
    assert finding.help


def test_weights_in_other_places_are_refused() -> None:
    model = Tagger("lstm", INPUTS)
    rnn: Any = model.rnn
    names = rnn._flat_weights_names
    names[0], names[1] = names[1], names[0]  # as a library does that changes how torch finds them
    rnn._init_flat_weights()
    with pytest.raises(CompileError, match="or on other operands"):
        tpplan.compile_plan(model, plan_for(), 2, (example(),))


def test_the_size_of_a_result_that_is_split_is_a_parts() -> None:
    with pytest.raises(CompileError, match="called with 4 instead of 8"):
        tpplan.compile_plan(Kept("gru"), plan_for(head="replicate"), 2, (example(),))


class Mostly(nn.Module):
    """Less than half can be split: what is exchanged inside of bodies is tried as well, but for a recurrent layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 8)
        self.recurrent = nn.LSTM(16, 16, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(self.up(x).relu())
        return x + self.last(self.recurrent(self.first(x).relu())[0].relu())


def test_a_layer_that_stays_whole_is_not_searched_step_by_step() -> None:
    text = suggest_text(Mostly(), 2, inputs=(torch.randn(2, 40, 8),))
    assert "  up: colwise" in text and "recurrent" not in text.partition("modules:")[2]
