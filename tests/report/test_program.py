"""The text of `explain`: as recorded, whole at every width, and plain where no terminal reads it."""

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.report.toy_program import layer, linear, one_module, parameter, reshard, toy_program
from tpplan.compiler.ir.layout import PARTIAL, REPLICATED, sharded
from tpplan.compiler.ir.program import ModuleProgram, Program
from tpplan.plan import Diagnostic, Pattern
from tpplan.report.program_page import render_program
from tpplan.report.program_why import render_why

SNAPSHOTS = Path(__file__).parent / "snapshots"
UPDATE = bool(os.environ.get("UPDATE_SNAPSHOTS"))


def hold_against_snapshot(name: str, text: str) -> None:
    path = SNAPSHOTS / name
    if UPDATE:
        path.write_text(text + "\n", encoding="utf-8")
    assert text + "\n" == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("width", [80, 100])
def test_the_program_is_shown_as_recorded(width: int) -> None:
    hold_against_snapshot(f"program-{width}.txt", render_program(toy_program(), width=width))


@pytest.mark.parametrize("wanted", ["model.layers.0.self_attn", "model.layers.*.self_attn"])
def test_the_reasons_are_shown_as_recorded(wanted: str) -> None:
    name = "why-all.txt" if "*" in wanted else "why-one.txt"
    hold_against_snapshot(name, render_why(toy_program(), Pattern.parse(wanted), width=100))


LONG = "text_model.encoder.blocks_of_the_second_kind"


def program_with_long_names() -> Program:
    out = reshard(PARTIAL, REPLICATED, shape=(8, 16384, 16384))
    parts = list(linear(f"{LONG}.{'deep.' * 4}down_projection", "rowwise", (16384, 65536), out))
    module = next(part for part in parts if isinstance(part, ModuleProgram))
    return one_module(module, *(part for part in parts if not isinstance(part, ModuleProgram)))


def column(text: str, heading: str, next_heading: str) -> str:
    """The first column of a table, its lines joined."""
    lines = text[text.index(f"\n{heading}") + 1 :].splitlines()
    end = lines[0].index(next_heading)
    return "".join(line[:end].strip() for line in lines)


@pytest.mark.parametrize("width", [80, 100, 200])
@pytest.mark.parametrize("program", [toy_program(), program_with_long_names()], ids=["toy", "long"])
def test_no_name_is_cut_and_no_line_is_too_long(program: Program, width: int) -> None:
    text = render_program(program, width=width)
    assert max(map(len, text.splitlines())) <= width and "…" not in text
    for heading, next_heading in (("communication", "placement"), ("modules", "style")):
        names = column(text, heading, next_heading)
        for module in program.modules:
            if (heading == "modules" and module.style is not None) or module.exits:
                assert re.sub(r".*layers\.\d+\.", "", module.name) in names


def test_a_flattened_sequence_is_explained_and_fits() -> None:
    out = reshard(PARTIAL, sharded(0, interleave=3), shape=(96, 64))
    program = one_module(ModuleProgram("decoder.layers.fc2", "Linear", "rowwise", "toy.yaml:5", 1, exits=(out,)))
    text = render_program(program, width=80)
    assert max(map(len, text.splitlines())) <= 80
    assert "→ S(0, interleave=3)" in text and "interleave=b): split along the sequence" in text
    assert "interleave" not in render_program(toy_program())


def test_at_100_columns_a_reshard_takes_one_line() -> None:
    lines = render_program(toy_program(), width=100).splitlines()
    line = next(line for line in lines if "self_attn.o_proj" in line)
    assert " ".join(line.split()) == "self_attn.o_proj out P → S(1) reduce-scatter 18.0 KiB all-gather 18.0 KiB"


def test_without_colour_there_are_no_escapes_and_no_trailing_blanks() -> None:
    text = render_program(toy_program())
    assert "\x1b" not in text and not re.search(r" +$", text, re.MULTILINE)
    colored = render_program(toy_program(), color=True)
    assert "\x1b" in colored
    plain = re.sub(r"\x1b\[[0-9;]*m", "", colored)
    assert [line.rstrip() for line in plain.splitlines()] == text.splitlines()


def test_warnings_come_last_with_their_help() -> None:
    warning = Diagnostic("TP104", "the result of `lm_head` is gathered", subject="lm_head", help="pin it")
    text = render_program(replace(toy_program(), diagnostics=(warning,)))
    assert text.endswith(
        "\n\nlm_head: warning TP104 gathered-colwise: the result of `lm_head` is gathered\nhelp: pin it"
    )


def test_an_assumption_that_is_met_twice_is_listed_once() -> None:
    assert render_program(toy_program()).count("modeling_toy.py:12") == 1


def test_dtypes_are_named_by_each_parameter_where_they_differ() -> None:
    module = ModuleProgram("", "Model", None, "inferred", 1)
    held = (parameter("a", shape=(8, 8), dim=0), parameter("b", shape=(8,), dtype="bfloat16"))
    text = render_program(one_module(module, *held))
    assert "(8, 8) → (2, 8) float32" in text and "(8) bfloat16" in text
    assert "float32" in next(line for line in render_program(toy_program()).splitlines() if "modules" in line)


def test_a_program_without_communication_says_so() -> None:
    text = render_program(one_module(ModuleProgram("", "Model", None, "inferred", 1), parameter("a", shape=(8,))))
    assert [line.split() for line in text.splitlines() if line.startswith("a step")] == [["a", "step", "–", "–"]]


def reasons(wanted: str, width: int = 100) -> str:
    return render_why(toy_program(), Pattern.parse(wanted), width=width)


def test_every_decision_is_shown_with_its_origin() -> None:
    text = " ".join(reasons("model.layers.0").split())
    for part in layer(0):
        if isinstance(part, ModuleProgram):
            origins = [held.origin for held in (*part.entries, *part.exits)]
            assert all(f"why: {origin}" in text for origin in origins if origin != part.origin)
            assert part.name in text and (part.style is None or f"{part.style}, {part.origin}" in text)
    assert "num_heads 8 → 2" in text and "random numbers differ by rank" in text


def test_draws_that_differ_by_rank_are_counted_where_not_all_do() -> None:
    program = toy_program()
    mixed = tuple(replace(m, random=("same", "split", "same")) if m.random else m for m in program.modules)
    text = render_why(replace(program, modules=mixed), Pattern.parse("model.layers.0"), width=100)
    assert "random numbers differ by rank in 1 of 3 draws" in " ".join(text.split())


def test_of_equal_modules_none_is_named_alone() -> None:
    text = reasons("model.layers.*.self_attn.o_proj")
    assert "model.layers.*.self_attn.o_proj × 3" in text and "layers.0.self_attn.o_proj" not in text


def test_the_reshards_of_the_modules_around_are_shown() -> None:
    inside, _, around = reasons("model.layers.0.self_attn.q_proj").partition("Around it")
    assert "hidden_states" not in inside
    assert "model.layers.0  LlamaDecoderLayer" in around and "model.layers.0.self_attn  LlamaAttention" in around
    assert "model.layers.1" not in around


def test_a_module_that_is_left_alone_is_said_to_be() -> None:
    text = reasons("model.layers.0.self_attn.rotary")
    assert text.startswith("Nothing happens to model.layers.0.self_attn.rotary itself")
    assert "model.layers.0.self_attn  LlamaAttention" in text
