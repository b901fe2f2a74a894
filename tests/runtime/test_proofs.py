"""Which calls a program covers: nothing that differs between two programs is overlooked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.compiler.toys import HIDDEN, MLP, Mlp, compiled
from tpplan.calls.proofs import covers, left_difference
from tpplan.compiler.ir.layout import REPLICATED, sharded
from tpplan.compiler.ir.program import LeftTensor, LocalAttribute, ModuleProgram, Program
from tpplan.compiler.later import placement_difference
from tpplan.compiler.pipeline import Compiled

PROGRAM = compiled(Mlp(), MLP, torch.zeros(3, 12, HIDDEN, requires_grad=True))


def with_module(name: str, **changed: Any) -> Program:
    modules = tuple(replace(m, **changed) if m.name == name else m for m in PROGRAM.modules)
    return replace(PROGRAM, modules=modules)


def with_parameter(name: str, **changed: Any) -> Program:
    parameters = tuple(replace(p, **changed) if p.name == name else p for p in PROGRAM.parameters)
    return replace(PROGRAM, parameters=parameters)


def without(name: str) -> Program:
    return replace(PROGRAM, modules=tuple(m for m in PROGRAM.modules if m.name != name))


def call_of(program: Program, *uncalled: str) -> Compiled:
    """A call that runs all modules of `PROGRAM` but some."""
    paths = {m.name: frozenset(r.path for r in m.entries) for m in PROGRAM.modules if m.name not in uncalled}
    return Compiled(program, {}, (), called=paths)


HEADS = (LocalAttribute("heads", 4, 2),)
OTHERS: dict[str, Program] = {
    "reshards": with_module("down", exits=()),
    "local attributes": with_module("up", local_attributes=HEADS),
    "random numbers": with_module("up", random="split"),
    "layouts of parameters": with_parameter("up.weight", layout=REPLICATED),
    "sums of gradients": with_parameter("up.weight", summed=True),
    "a module that has nothing to do": without("down"),
    "a module more": replace(PROGRAM, modules=(*PROGRAM.modules, ModuleProgram("act", "GELU", None, "", 1))),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_program_does_not_cover_a_call_that_needs_other(what: str) -> None:
    assert not covers(PROGRAM, call_of(OTHERS[what]))


def test_a_program_covers_a_call_that_does_without_a_module() -> None:
    assert covers(PROGRAM, call_of(PROGRAM))
    assert covers(PROGRAM, call_of(with_module("down", calls=0, exits=()), "down"))
    assert covers(PROGRAM, call_of(without("down"), "down"))


def test_a_program_covers_a_call_to_which_less_gradients_come_back() -> None:
    call = call_of(with_module("", entries=()))
    assert covers(PROGRAM, replace(call, called={**call.called, "": frozenset()}))
    assert not covers(PROGRAM, replace(call, called={**call.called, "": frozenset([("x",)])}))


def test_a_split_batch_may_be_of_any_size() -> None:
    def flat(interleave: int, batch: int) -> Program:
        (reshard,) = next(m.exits for m in PROGRAM.modules if m.name == "down")
        program = with_module("down", exits=(replace(reshard, target=sharded(0, interleave)),))
        (example,) = program.inputs
        return replace(program, inputs=(replace(example, shape=(batch, 12, HIDDEN)),))

    assert covers(flat(3, 3), call_of(flat(2, 2)))
    assert not covers(flat(3, 3), call_of(flat(4, 2))) and not covers(flat(3, 3), call_of(flat(1, 1)))


def test_parameters_that_lie_otherwise_are_named() -> None:
    text = placement_difference(PROGRAM, with_parameter("up.weight", layout=REPLICATED))
    assert text == "`up.weight` would need layout R for it, and has S(0)"
    assert placement_difference(PROGRAM, with_module("down", exits=())) == ""


def test_what_is_left_otherwise_is_named() -> None:
    path = ("caches", 0)
    other = replace(PROGRAM, left=(LeftTensor(path, (2, 4), sharded(1)),))
    assert left_difference({path: sharded(0)}, other) == "it leaves `caches.0` as S(1), and other calls as S(0)"
    assert left_difference({path: sharded(1)}, other) == ""
