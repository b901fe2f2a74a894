import pickle
from pathlib import Path

import pytest

from tests.plan.toy import TOY_PLAN
from tpplan.plan import PlanError, Style, check_plan, load_plan


def write(folder: Path, **plans: str) -> None:
    for name, text in plans.items():
        (folder / f"{name}.yaml").write_text(text)


def test_a_path_a_text_and_a_mapping_yield_the_same_plan(tmp_path: Path) -> None:
    path = tmp_path / "toy.yaml"
    path.write_text(TOY_PLAN)
    plan = load_plan(path)
    assert plan == load_plan(str(path)) == load_plan(TOY_PLAN) == load_plan(plan.to_dict())
    assert plan.sources == (path.as_posix(),)
    assert plan.rules[0].origin == f"{path.as_posix()}:4"


def test_a_shipped_plan_is_found_by_name() -> None:
    assert load_plan("llama") == load_plan("llama.yaml")
    assert load_plan("llama").name == "llama"


def test_a_plan_without_a_name_is_called_after_its_file(tmp_path: Path) -> None:
    write(tmp_path, mine="version: 1\nmodules: {a: colwise}\n")
    assert load_plan(tmp_path / "mine.yaml").name == "mine"


def test_a_plan_survives_pickling() -> None:
    plan = load_plan(TOY_PLAN)
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_the_child_wins_on_an_equal_pattern_and_the_rest_stays(tmp_path: Path) -> None:
    write(
        tmp_path,
        base="version: 1\naxis: model\nmodules: {a: colwise, b: rowwise, c: vocab}\nkernels: {gelu: torch}\n",
        child="version: 1\nextends: base.yaml\nmodules:\n  d: sequence\n  b: none\n",
    )
    plan = load_plan(tmp_path / "child.yaml")
    assert [(rule.pattern.text, rule.style) for rule in plan.rules] == [
        ("a", Style.COLWISE),
        ("b", Style.NONE),
        ("c", Style.VOCAB),
        ("d", Style.SEQUENCE),
    ]
    assert (plan.name, plan.axis) == ("child", "model")
    assert plan.kernels[0].choice == "torch"
    spans = [rule.pattern_span for rule in plan.rules]
    assert [Path(span.file).name for span in spans if span] == ["base.yaml", "child.yaml", "base.yaml", "child.yaml"]
    assert [span.line_text for span in spans if span][1] == "  b: none"


def test_none_drops_an_inherited_rule_that_the_model_has_no_module_for(tmp_path: Path) -> None:
    write(
        tmp_path,
        base="version: 1\nmodules: {a: colwise, b: rowwise}\n",
        child="version: 1\nextends: base.yaml\nmodules: {b: none}\n",
    )
    assert load_plan(tmp_path / "child.yaml").match(["a"]).diagnostics == []


def test_a_base_of_a_base_is_found_relative_to_its_own_folder(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    write(tmp_path, top="version: 1\nextends: deep/middle.yaml\n")
    write(tmp_path / "deep", middle="version: 1\nextends: bottom.yaml\n", bottom="version: 1\nmodules: {a: colwise}\n")
    assert [rule.pattern.text for rule in load_plan(tmp_path / "top.yaml").rules] == ["a"]
    assert len(load_plan(tmp_path / "top.yaml").sources) == 3


def test_a_shipped_plan_can_be_extended_from_text() -> None:
    plan = load_plan("version: 1\nextends: llama\nmodules: {lm_head: none}\n")
    assert {rule.pattern.text: rule.style for rule in plan.rules}["lm_head"] is Style.NONE


def test_kernel_choices_are_merged_by_pattern_and_kind() -> None:
    plan = load_plan("version: 1\nextends: llama\nkernels: {rms_norm: torch, gelu: triton}\n")
    assert [(rule.kind.value, rule.choice.value) for rule in plan.kernels] == [
        ("rms_norm", "torch"),
        ("swiglu", "auto"),
        ("gelu", "triton"),
    ]


def test_a_cycle_through_several_files_is_reported_where_it_closes(tmp_path: Path) -> None:
    write(
        tmp_path,
        one="version: 1\nextends: two.yaml\n",
        two="version: 1\nextends: three.yaml\n",
        three="version: 1\nextends: one.yaml\n",
    )
    plan, (finding,) = check_plan(tmp_path / "one.yaml")
    assert plan is None and finding.code == "TP011"
    assert finding.span is not None and Path(finding.span.file).name == "three.yaml"
    assert [Path(name).name for name in finding.notes[0].split(" → ")] == [
        "one.yaml",
        "two.yaml",
        "three.yaml",
        "one.yaml",
    ]


def test_a_long_chain_is_refused(tmp_path: Path) -> None:
    write(tmp_path, **{f"p{number}": f"version: 1\nextends: p{number + 1}.yaml\n" for number in range(40)})
    _, findings = check_plan(tmp_path / "p0.yaml")
    assert [finding.code for finding in findings] == ["TP011"]


def test_mistakes_of_a_base_are_reported_with_the_child_s(tmp_path: Path) -> None:
    write(
        tmp_path,
        base="version: 1\nmodules: {a: colwize}\n",
        child="version: 1\nextends: base.yaml\nmodules: {b: rowwize}\n",
    )
    with pytest.raises(PlanError) as error:
        load_plan(tmp_path / "child.yaml")
    assert [Path(finding.span.file).name for finding in error.value.diagnostics if finding.span] == [
        "base.yaml",
        "child.yaml",
    ]


def test_a_missing_base_suggests_a_shipped_plan() -> None:
    _, (finding,) = check_plan("version: 1\nextends: lama\n")
    assert finding.code == "TP010"
    assert finding.help == "did you mean the shipped plan `llama`? `tpplan plans` lists them all"


@pytest.mark.parametrize(
    "data", [{"version": 1, "modules": {"a": object()}}, {"version": 1, 3.5: 1}, {"version": {1, 2}}]
)
def test_data_that_no_plan_file_could_hold_is_a_finding(data: dict[str, object]) -> None:
    _, (finding,) = check_plan(data)
    assert finding.code == "TP004"


def test_findings_in_a_mapping_name_the_place_in_it() -> None:
    _, (finding,) = check_plan({"version": 1, "modules": {"a": {"style": "colwize"}}})
    assert finding.headline == "modules: a: style: TP005 unknown-style: `colwize` isn't a style"


def test_the_error_s_text_holds_every_finding_and_its_help() -> None:
    with pytest.raises(PlanError) as error:
        load_plan("version: 2\nmodules: {a: colwize}\n")
    assert str(error.value).splitlines() == [
        "<text>:1:10: TP006 unsupported-version: this tpplan reads version 1 of the plan language, found 2",
        "  help: write `version: 1`, or use a tpplan that reads this plan",
        "<text>:2:14: TP005 unknown-style: `colwize` isn't a style",
        "  help: did you mean `colwise`?",
    ]
