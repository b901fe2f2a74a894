"""Bodies that draw for sharded and for replicated values, in training: the same outputs and gradients.

The dropouts draw and drop nothing, so that every number can be held against the stock model's.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from tests.models.mixed_draws import SUBJECTS, dropouts_that_drop_nothing, mixed_draws
from tpplan.compiler.ir.program import Program
from tpplan.compiler.pipeline import compile_call
from tpplan.compiler.request import Request
from tpplan.parity import verification as parity_run
from tpplan.parity import verify_program
from tpplan.plan import load_plan
from tpplan.runtime.random.mixed_draws import MixedStreams

KINDS: dict[str, dict[str, Any]] = {
    "functional": {"": ("same", "split", "same", "same")},
    "one dropout in two places": {"": ("split", "same"), "dropout": "caller"},
    "from its record": {"0": ("split", "same")},
    "nested": {
        "": ("same", "split", "same"),
        "between": "split",
        "layers.0": ("same", "split", "same", "same"),
        "layers.1": ("split", "same"),
        "layers.1.dropout": "caller",
    },
    "bart": {
        "model.encoder": "same",
        "model.encoder.layers.1": ("same", "split", "same"),
        "model.encoder.layers.1.self_attn": "split",
        "model.decoder.layers.0": ("same", "same", "split", "same"),
        "model.decoder.layers.0.encoder_attn": "split",
    },
    "seed_oss": {"model.layers.0.self_attn": ("split", "same"), "model.layers.1.mlp": "same"},
}


def compiled(name: str, tp: int) -> tuple[nn.Module, Program, dict[str, Any]]:
    model, plan, keywords = mixed_draws(name)
    return model, compile_call(Request(model, load_plan(plan), tp, (), keywords)).program, keywords


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", SUBJECTS)
def test_the_program_tells_the_draws_of_each_body_apart(name: str) -> None:
    _, program, _ = compiled(name, 2)
    kinds = {module.name: module.random for module in program.modules}
    assert {module: kinds[module] for module in KINDS[name]} == KINDS[name]
    again = Program.from_dict(program.to_dict())
    assert again == program and again.digest == program.digest


@pytest.mark.parametrize("name", SUBJECTS)
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.one_in(5)
def test_training_computes_the_same(name: str, tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, program, keywords = compiled(name, tp)
    stock = parity_run.copy_with_numbers
    monkeypatch.setattr(parity_run, "copy_with_numbers", lambda *given: stock(*given).train())  # pyright: ignore
    drawn: list[int] = []
    stream_of = MixedStreams.stream_of

    def counted(self: MixedStreams, counter: Any) -> Any:
        drawn.append(1)
        return stream_of(self, counter)

    monkeypatch.setattr(MixedStreams, "stream_of", counted)
    with dropouts_that_drop_nothing():
        report = verify_program(model, program, ((), keywords))
    assert report.ok, str(report)
    assert report.max_error < (1e-5 if name == "seed_oss" else 1e-12)
    assert report.collectives == report.predicted
    assert len(drawn) == tp * sum(len(m.random) for m in program.modules if isinstance(m.random, tuple))
