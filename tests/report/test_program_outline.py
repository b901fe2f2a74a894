"""Equal layers are shown once, and only equal ones."""

from dataclasses import replace

import pytest

from tests.report.toy_program import linear, one_module, parameter, reshard, toy_program
from tpplan.compiler.ir.layout import PARTIAL, REPLICATED, sharded
from tpplan.compiler.ir.program import ModuleProgram, ParameterPlacement, Program
from tpplan.report.program_outline import Block, Item, Unit, collapse, units, units_of, without_boundaries


def names(items: tuple[Item, ...]) -> list[object]:
    return [(i.name, i.count, names(i.items)) if isinstance(i, Block) else i.name for i in items]


def program_of(*parts: ModuleProgram | ParameterPlacement) -> Program:
    return replace(
        toy_program(0),
        modules=tuple(part for part in parts if isinstance(part, ModuleProgram)),
        parameters=tuple(part for part in parts if isinstance(part, ParameterPlacement)),
    )


def linears(*full_names: str, leave: tuple[str, ...] = ()) -> Program:
    out = reshard(PARTIAL, REPLICATED)
    return program_of(
        *(part for name in full_names for part in linear(name, "rowwise", (64, 64), out if name in leave else None))
    )


def test_the_first_layer_stands_apart_where_it_differs() -> None:
    inside = ["self_attn", "self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "input_layernorm"]
    assert names(collapse(units(toy_program(4)))) == [
        "",
        "model.embed_tokens",
        ("model.layers.0", 1, ["", *inside]),
        ("model.layers.1-3", 3, inside),
        "model.norm",
        "lm_head",
    ]


def test_without_reshards_it_is_like_the_others() -> None:
    found = collapse(without_boundaries(units(toy_program(4))))
    assert [item.name for item in found] == ["model.embed_tokens", "model.layers.*", "model.norm", "lm_head"]


def test_every_unit_is_there_as_often_as_the_model_has_it() -> None:
    program = toy_program(4)
    found = collapse(units(program))
    assert sum(count for _, count in units_of(found)) == len(units(program))
    held = sum(len(unit.parameters) * count for unit, count in units_of(found))
    assert held == len(program.parameters)


def test_experts_inside_layers_are_shown_once() -> None:
    program = linears(*(f"layers.{i}.experts.{j}.{w}" for i in range(2) for j in range(3) for w in ("up", "down")))
    assert names(collapse(units(program))) == [("layers.*", 2, [("experts.*", 3, ["up", "down"])])]


def test_another_plan_line_keeps_a_layer_apart() -> None:
    program = linears(*(f"layers.{i}.{w}" for i in range(3) for w in ("up", "down")))
    modules = tuple(replace(m, origin="toy.yaml:9") if m.name == "layers.1.up" else m for m in program.modules)
    found = collapse(units(replace(program, modules=modules)))
    assert [item.name for item in found] == ["layers.0,2", "layers.1"]


@pytest.mark.parametrize(
    ("different", "shown"),
    [((0,), "1-6"), ((3,), "0-2,4-6"), ((1, 3, 5), "0,2,…,6"), ((0, 1, 2, 3, 4, 5), "6"), ((), "*")],
)
def test_the_indices_of_equal_layers_are_written_short(different: tuple[int, ...], shown: str) -> None:
    leave = tuple(f"h.{i}.a" for i in different)
    program = linears(*(f"h.{i}.{w}" for i in range(7) for w in ("a", "b")), leave=leave)
    assert f"h.{shown}" in [item.name for item in collapse(units(program))]


def test_the_members_of_a_sequential_keep_their_names() -> None:
    leave = ("mlp.2",)
    assert names(collapse(units(linears("mlp.0", "mlp.2", leave=leave)))) == ["mlp.0", "mlp.2"]


def test_a_tie_is_shown_where_the_second_name_is() -> None:
    found = {unit.full_name: unit for unit in units(toy_program())}
    assert found["lm_head"].tied == (("weight", "model.embed_tokens.weight"),) and not found["lm_head"].parameters
    assert [p.name for p in found["model.embed_tokens"].parameters] == ["model.embed_tokens.weight"]


def test_the_owner_of_a_parameter_is_shown_though_its_body_reads_none() -> None:
    module = ModuleProgram("", "Model", None, "inferred", 1)
    found = units(one_module(module, parameter("head.weight", shape=(8, 8))))
    assert [unit.full_name for unit in found] == ["", "head"] and found[1].module is None


def test_a_module_of_which_nothing_is_left_to_say_is_left_out() -> None:
    module = ModuleProgram("a", "A", None, "inferred", 1, entries=(reshard(sharded(1), REPLICATED, "x"),))
    unit = Unit("a", "a", module, ())
    assert list(without_boundaries([unit])) == []
    assert [held.name for held in without_boundaries([replace(unit, module=replace(module, style="none"))])] == ["a"]
