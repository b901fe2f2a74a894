"""The program says of every module and parameter what becomes of it, and where that comes from."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tpplan
from tests.compiler.toys import ATTENTION, HIDDEN, MLP, SEQUENCE, Attention, Block, Mlp, Normed, codes, compiled, x_BSH
from tpplan.compiler.ir.layout import REPLICATED, sharded
from tpplan.compiler.ir.program import ModuleProgram

IN_BODY = {f"body.{name}": style for name, style in MLP.items()}


def module(program: tpplan.Program, name: str) -> ModuleProgram:
    return next(held for held in program.modules if held.name == name)


def test_parameters_come_in_the_models_order_with_local_shapes() -> None:
    program = compiled(Block(Mlp()), IN_BODY)
    assert [p.name for p in program.parameters] == [n for n, _ in Block(Mlp()).named_parameters()]
    up = next(p for p in program.parameters if p.name == "body.up.weight")
    assert (up.shape, up.local_shape, up.layout) == ((32, 16), (16, 16), sharded(0))
    assert up.local_bytes * 2 == up.bytes == 32 * 16 * 4
    norm = next(p for p in program.parameters if p.name == "norm.weight")
    assert (norm.layout, norm.origin) == (REPLICATED, "replicated: no rule shards it")


def test_a_reshard_says_which_rule_it_serves() -> None:
    plan = tpplan.load_plan("version: 1\nname: p\nmodules:\n  body.up: colwise\n  body.down: rowwise\n")
    program = tpplan.compile_plan(Block(Mlp()), plan, 2, (x_BSH().requires_grad_(),))
    origins = {f"{m.name}:{r.path}": r.origin for m, r in program.reshards()}
    assert "up" in origins["body:('x',)"] and ":4" in origins["body:('x',)"]
    assert origins["body.down:()"].startswith("rowwise body.down")


class Thrice(nn.Module):
    """One block, called three times, as in ALBERT."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + self.mlp(x)
        return x


def test_a_shared_module_may_be_called_first_with_a_value_that_wants_no_gradient() -> None:
    program = compiled(Thrice(), {f"mlp.{name}": style for name, style in MLP.items()}, x_BSH())
    assert module(program, "mlp.down").calls == 3


def test_a_shared_module_may_be_called_on_its_own_result() -> None:
    class Chained(Thrice):
        def forward(self, x: Tensor) -> Tensor:
            return self.mlp(self.mlp(self.mlp(x)))

    program = compiled(Chained(), {f"mlp.{name}": style for name, style in MLP.items()})
    assert program.count_collectives() == {"all-reduce": 6}


def test_calls_are_counted_and_collectives_with_them() -> None:
    program = compiled(Thrice(), {f"mlp.{name}": style for name, style in MLP.items()})
    assert module(program, "mlp.down").calls == 3
    assert program.count_collectives(backward=False) == {"all-reduce": 3}
    assert program.count_collectives() == {"all-reduce": 6}


def test_a_shared_module_whose_calls_cannot_be_served_alike_is_refused() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(HIDDEN, HIDDEN)
            self.down = nn.Linear(HIDDEN, HIDDEN)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.up(x)) + self.down(x)

    with pytest.raises(tpplan.CompileError) as raised:
        compiled(Shared(), {"up": "colwise", "down": "rowwise"})
    assert "TP109" in codes(raised.value)


def test_a_parameter_read_by_another_modules_body_is_listed_there() -> None:
    class Borrows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(32, HIDDEN)
            self.norm = nn.LayerNorm(HIDDEN)

        def forward(self, ids: Tensor) -> Tensor:
            return functional.linear(self.norm(self.embed(ids)), self.embed.weight)

    program = compiled(Borrows(), {"embed": "vocab"}, torch.zeros(3, 12, dtype=torch.long, device="meta"))
    assert module(program, "").reads == ("embed.weight",)
    assert module(program, "embed").reads == ("embed.weight",)


class Dropped(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(super().forward(x), 0.5, self.training)


def test_bodies_that_draw_for_shards_are_told_from_those_that_do_not() -> None:
    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(HIDDEN, 32)
            self.inner_dropout = nn.Dropout(0.1)
            self.down = nn.Linear(32, HIDDEN)
            self.outer_dropout = nn.Dropout(0.1)

        def forward(self, x: Tensor) -> Tensor:
            return self.outer_dropout(self.down(self.inner_dropout(self.up(x))))

    program = compiled(Drops(), MLP)
    kinds = {held.name: held.random for held in program.modules}
    assert (kinds["inner_dropout"], kinds["outer_dropout"]) == ("split", "same")


def test_warnings_are_no_part_of_what_ranks_compare() -> None:
    quiet = compiled(Normed(), {"proj": {"style": "colwise", "output": "replicate"}})
    loud = compiled(Normed(), {"proj": "colwise"})
    assert [d.code for d in loud.diagnostics] == ["TP104"] and not quiet.diagnostics
    assert loud.to_dict().get("diagnostics") is None


def test_attention_and_sequence_together_name_each_collective() -> None:
    program = compiled(
        nn.Sequential(Block(Attention()), nn.LayerNorm(HIDDEN)),
        {
            **{f"0.body.{k}": v for k, v in ATTENTION.items()},
            **{f"0.{k}": v for k, v in SEQUENCE.items()},
            "1": "sequence",
        },
    )
    assert all(reshard.origin for _, reshard in program.reshards())
