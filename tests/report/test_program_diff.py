"""What is told to change from one program to another is what changes, and what it costs more is called worse."""

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.report.toy_program import reshard, toy_program
from tpplan.compiler.ir.layout import PARTIAL, REPLICATED, REPLICATED_PARTIAL, sharded
from tpplan.compiler.ir.program import KernelUse, LocalAttribute, ModuleProgram, Program
from tpplan.plan import Diagnostic, Severity
from tpplan.report.diff_tables import diff_markdown, render_diff
from tpplan.report.program_compare import ComparedProgram, ComparisonError, compare
from tpplan.report.program_diff import ProgramDiff

TOY = toy_program()


def diff(other: Program, one: Program = TOY, names: tuple[str, str] = ("a", "b")) -> ProgramDiff:
    return compare(*(ComparedProgram(name, p, p.diagnostics) for name, p in zip(names, (one, other), strict=True)))


def with_modules(change: Callable[[ModuleProgram], ModuleProgram], named: str) -> Program:
    return replace(TOY, modules=tuple(change(m) if m.name.endswith(named) else m for m in TOY.modules))


def with_parameters(named: str, **changes: object) -> Program:
    held = tuple(replace(p, **changes) if p.name.endswith(named) else p for p in TOY.parameters)  # pyright: ignore
    return replace(TOY, parameters=held)


def renamed_reasons() -> Program:
    """The same, by a plan of another name with its rules on other lines."""
    modules = tuple(
        replace(m, origin="x:1", entries=tuple(replace(r, origin="y") for r in m.entries)) for m in TOY.modules
    )
    return replace(with_parameters("", origin="z:3"), plan="other", modules=modules)


def warned(*texts: str) -> Program:
    return replace(TOY, diagnostics=tuple(Diagnostic("TP130", text, severity=Severity.WARNING) for text in texts))


REDUCED = with_modules(lambda m: replace(m, exits=(reshard(PARTIAL, REPLICATED),)), "o_proj")
TWICE = with_modules(lambda m: replace(m, calls=2), "model.layers.1.self_attn.o_proj")
ATTRIBUTE = with_modules(lambda m: replace(m, local_attributes=(LocalAttribute("n", 8, 4),)), "1.self_attn")
WHOLE = with_parameters("q_proj.weight", layout=REPLICATED, local_shape=(64, 64))


@pytest.mark.parametrize("form", [render_diff, diff_markdown], ids=["rich", "markdown"])
def test_where_nothing_but_names_and_reasons_differs_it_is_one_line(form) -> None:
    same = diff(renamed_reasons())
    text = form(same, 100, False) if form is render_diff else form(same)
    assert not same.changed and not same.worse and len(text.splitlines()) == 1
    assert "no change for" in text and "LlamaForCausalLM" in text


@pytest.mark.parametrize(
    ("other", "worse", "better"),
    [
        (REDUCED, set(), {"collectives"}),  # as many bytes, all of them forward
        (TWICE, {"collectives", "bytes sent"}, set()),
        (WHOLE, {"memory of parameters"}, set()),
        (warned("more"), {"warnings"}, set()),
        (with_modules(lambda m: replace(m, exits=()), "lm_head"), set(), {"collectives", "bytes sent"}),
    ],
    ids=["reduced", "twice", "whole", "warned", "fewer"],
)
def test_more_of_it_is_worse_and_the_way_back_is_better(other: Program, worse: set[str], better: set[str]) -> None:
    assert set(diff(other).worse) == worse
    assert set(diff(TOY, other).worse) == better


def test_equal_layers_are_told_once_by_star_by_indices_or_by_name() -> None:
    (all_of_them,) = diff(REDUCED).reshards
    assert (all_of_them.module, all_of_them.count) == ("model.layers.*.self_attn.o_proj", 3)
    assert all_of_them.before is not None and all_of_them.before.moved == "P → S(1)"
    assert all_of_them.after is not None and [way[1:3] for way in all_of_them.after.ways] == [
        ("all-reduce", 1), ("none", 0)
    ]  # fmt: skip
    (one,) = diff(TWICE).reshards
    assert (one.module, one.count) == ("model.layers.1.self_attn.o_proj", 1)
    later = with_modules(lambda m: m if ".0." in m.name else replace(m, exits=()), "o_proj")
    (some,) = diff(later).reshards
    assert (some.module, some.count, some.after) == ("model.layers.1-2.self_attn.o_proj", 2, None)
    (parameter,) = diff(WHOLE).parameters
    assert (parameter.name, parameter.count) == ("model.layers.*.self_attn.q_proj.weight", 3)


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (with_parameters("model.norm.weight", summed=False), "parameters"),
        (with_parameters("model.norm.weight", layout=replace(REPLICATED, forward="R", gradient="P")), "parameters"),
        (with_modules(lambda m: replace(m, inner=(reshard(sharded(1), REPLICATED_PARTIAL),)), "model.norm"), "mid"),
        (ATTRIBUTE, "local attributes of 1 module"),
        (with_modules(lambda m: replace(m, random=None), "self_attn"), "random of 3 modules"),
        (replace(TOY, kernels=(KernelUse("model.norm", "rms_norm", "auto", "float32"),)), "kernels"),
        (replace(TOY, one_shot=4096), "one shot"),
        (replace(TOY, modules=TOY.modules[:-1]), "style of 1 module"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_nothing_that_differs_is_left_out(other: Program, told: str) -> None:
    for found in (diff(other), diff(TOY, other)):
        assert found.changed and told in render_diff(found, 100, False) and told in diff_markdown(found)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (replace(TOY, model="GPT2"), "different models: the model is LlamaForCausalLM in one, GPT2 in the other"),
        (replace(TOY, size=8), "different numbers of ranks: the axis is 4 ranks in one, 8 ranks in the other"),
        (toy_program(2), "model.layers.2.self_attn.q_proj.weight is (64, 64) float32 in one, missing in the other"),
        (
            with_parameters("model.norm.weight", shape=(65,)),
            "model.norm.weight is (64) float32 in one, (65) float32 in",
        ),
        (
            replace(TOY, inputs=(replace(TOY.inputs[0], shape=(3, 64)),)),
            "example calls: input_ids is (3, 32) int64 in one, (3, 64) int64",
        ),
        (replace(TOY, training=False), "different modes: the mode is training in one, evaluation in the other"),
    ],
    ids=["model", "size", "layers", "width", "inputs", "mode"],
)
def test_programs_that_can_t_be_compared_say_why(other: Program, message: str) -> None:
    with pytest.raises(ComparisonError) as raised:
        diff(other)
    (found,) = raised.value.diagnostics
    assert found.code == "TP231" and found.help and found.place == "a and b" and message in found.message


def test_warnings_are_compared_whatever_line_they_stand_at_and_only_where_they_are_known() -> None:
    moved = diff(warned("see b.yaml:9:3"), warned("see a.yaml:4"))
    assert not moved.changed
    assert len(diff(warned("one", "one"), warned("one")).new_warnings) == 1
    unknown = compare(
        ComparedProgram("a.json", TOY, None), ComparedProgram("b", warned("one"), warned("one").diagnostics)
    )
    assert (
        not unknown.worse
        and "a.json" in unknown.notes[0]
        and "Warnings aren't compared" in render_diff(unknown, 100, False)
    )


def test_json_says_the_same_in_numbers() -> None:
    plain = json.loads(diff(REDUCED).to_json())
    assert plain["changed"] is True and plain["worse"] == [] and plain["model"] == "LlamaForCausalLM"
    # The layer's sum was scattered forward and gathered backward, 3/4 of 24 KiB each; it is summed for twice that.
    assert plain["reshards"][0]["before"]["forward"] == {"collective": "reduce-scatter", "count": 1, "bytes": 18432}
    assert plain["reshards"][0]["after"]["forward"] == {"collective": "all-reduce", "count": 1, "bytes": 36864}
    amounts = {amount["name"]: (amount["before"], amount["after"]) for amount in plain["amounts"]}
    assert amounts["all-reduce, forward"] == (0, 3) and amounts["reduce-scatter, forward"] == (4, 1)


@pytest.mark.parametrize("name", ["a|b", "`x`", "<img src=x>", "a\nb", "*a*_b_", "&lt;", "@team", "[x](y)"])
def test_markdown_shows_names_as_they_are(name: str) -> None:
    text = diff_markdown(diff(REDUCED, names=(name, "b")))
    first = text.splitlines()[0]
    assert first.startswith(("`", "<code>")) and "<img" not in text and "→ `b`: " in first
    if not set(name) & set("|<&`"):
        assert f"`{' '.join(name.split())}`" in first
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {row.count("|") for row in rows} == {5, 4}


def test_text_keeps_to_its_width() -> None:
    assert max(map(len, render_diff(diff(REDUCED), 80, False).splitlines())) <= 80
