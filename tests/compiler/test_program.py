"""A program is plain data: equal for equal inputs, whole after JSON, with a digest that ranks can compare."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

import tpplan
from tests.compiler.toys import ATTENTION, Attention, Block, compiled, plan_of
from tpplan.compiler.ir.layout import PARTIAL, REPLICATED, REPLICATED_PARTIAL, Collective, Pack, sharded
from tpplan.compiler.ir.program import ModuleProgram, Program, Reshard
from tpplan.compiler.ir.replaced_bodies import (
    BODIES,
    Body,
    MovedOperand,
    RecordedBody,
    Recurrence,
    SharedExperts,
    SplitNorm,
)
from tpplan.plan import Exchange

RULES = {f"*.body.{name}": style for name, style in ATTENTION.items()}

SCRIPT = """
from tests.compiler.test_program import program
print(program().digest)
"""


def program() -> tpplan.Program:
    return compiled(nn.Sequential(Block(Attention()), Block(Attention())), {**RULES, "*.norm": "sequence"})


def test_equal_inputs_give_equal_programs() -> None:
    assert program() == program()
    assert program().digest == program().digest


@pytest.mark.slow
def test_the_digest_is_the_same_in_another_process() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=root, env={"PYTHONPATH": f"{root / 'src'}:{root}", "PYTHONHASHSEED": "7"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == program().digest


def test_a_program_survives_json() -> None:
    one = program()
    other = tpplan.Program.from_dict(json.loads(one.to_json()))
    assert other == one and other.digest == one.digest
    assert other.count_collectives() == one.count_collectives()


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "body",
    [
        SplitNorm(sharded(2), True, 1e-6, 1.0, "before", "norm.weight", None, "gate", True, True),
        RecordedBody(
            ((("x", 0), sharded(1)),), (("inner", 1, (((0,), PARTIAL),)),), (((), REPLICATED),), ((Pack(4, 2),),),
            (MovedOperand("aten.mul.Tensor", 1, 0, REPLICATED),), partial=("weight",), averages=True,
            lengths=((("x",), 3),), weights=(("w",),), features=((Pack(8),),),
        ),
        SharedExperts(owner=1),
        SharedExperts(count=8, tokens="x", chosen="ids", weights="w", ranks=2, exchange=Exchange.ALL_TO_ALL),
        Recurrence("LSTM", 8, False, 2, 2, True, 0.5),
    ],
)  # fmt: skip
def test_every_body_survives_json(body: Body) -> None:
    made = replace(program(), modules=(ModuleProgram("m", "Module", None, "inferred", 1, body=body),))
    plain = json.loads(made.to_json())
    (module,) = plain["modules"]
    assert [key for key in BODIES if module.get(key)] == [key for key, kind in BODIES.items() if type(body) is kind]
    assert Program.from_dict(plain).modules == made.modules


def test_whatever_changes_the_program_changes_the_digest() -> None:
    one = program()
    assert one.digest != compiled(nn.Sequential(Block(Attention()), Block(Attention())), RULES).digest
    assert one.digest != replace(one, size=4).digest
    assert one.digest == replace(one, diagnostics=()).digest


def test_the_same_collective_each_way_counts_twice_a_call() -> None:
    reshard = Reshard(
        (), PARTIAL, REPLICATED_PARTIAL, Collective.ALL_REDUCE, Collective.ALL_REDUCE, (2, 4), "float32", 32, True, "x"
    )
    module = ModuleProgram("down", "Linear", "rowwise", "x", calls=2, exits=(reshard,))
    one = Program("p", "M", "tp", 2, True, (), (), (module,))
    assert one.count_collectives() == {"all-reduce": 4}
    assert one.count_collectives(backward=False) == {"all-reduce": 2}


def test_another_version_is_not_read() -> None:
    plain = program().to_dict() | {"version": 99}
    with pytest.raises(ValueError, match="99"):
        tpplan.Program.from_dict(plain)


def test_numbers_in_the_model_do_not_count() -> None:
    one, other = Block(Attention()), Block(Attention())
    assert not one.norm.weight.equal(other.body.q.weight)  # pyright: ignore
    rules = {name.removeprefix("*."): style for name, style in RULES.items()}
    assert compiled(one, rules) == compiled(other.to("meta"), rules)


def test_a_plans_name_is_kept() -> None:
    plan = plan_of({name.removeprefix("*."): style for name, style in RULES.items()}, name="mine")
    from tests.compiler.toys import x_BSH

    assert tpplan.compile_plan(Block(Attention()), plan, 2, (x_BSH(),)).plan == "mine"
