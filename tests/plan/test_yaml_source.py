"""Reading YAML: places, types, and bounds on what a file may demand."""

import time

import pytest

from tpplan.plan import Diagnostic, Plan, check_plan


def check(text: str) -> tuple[Plan | None, list[Diagnostic]]:
    return check_plan(f"{text}\n")


def only(text: str) -> Diagnostic:
    _, (finding,) = check(text)
    return finding


@pytest.mark.parametrize(
    ("text", "place", "part_of_help"),
    [
        ("version: 1\nmodules:\n\ta: colwise", "3:1", "spaces"),
        ("version: 1\nmodules:\n  *.a: colwise", "3:3", "quote"),
        ("version: 1\nmodules:\n  a: b: c", "3:7", "indentation"),
        ("version: 1\nmodules: {a: colwise", "3:1", "close the bracket"),
        ("version: 1\n---\nversion: 1", "2:1", "one document"),
    ],
)
def test_a_syntax_error_points_at_the_cause_and_says_what_helps(text: str, place: str, part_of_help: str) -> None:
    finding = only(text)
    assert finding.code == "TP001"
    assert str(finding.span) == f"<text>:{place}"
    assert part_of_help in (finding.help or "")


def test_a_pattern_that_reads_as_a_mapping_is_to_be_quoted() -> None:
    _, findings = check("version: 1\nmodules:\n  {a,b}.c: colwise")
    assert [finding.code for finding in findings] == ["TP004", "TP001"]
    assert all("quote" in (finding.help or "") for finding in findings)


def test_a_control_character_is_named() -> None:
    finding = only("version: 1\nname: a\x07b")
    assert finding.code == "TP001" and "U+0007" in finding.message
    assert str(finding.span) == "<text>:2:8"


@pytest.mark.parametrize("style", ["on", "yes", "12:30", "0o14", "1e3", "2020-01-01", "012"])
def test_a_word_is_never_taken_for_something_else(style: str) -> None:
    finding = only(f"version: 1\nmodules: {{a: {style}}}")
    assert finding.code == "TP005" and f"`{style}`" in finding.message


def test_numbers_are_names_where_names_belong() -> None:
    plan, findings = check("version: 1\nmodules: {0: colwise, 1.0: rowwise, null: vocab, true: sequence}")
    assert findings == [] and plan is not None
    assert [rule.pattern.text for rule in plan.rules] == ["0", "1.0", "null", "true"]


def test_a_byte_order_mark_and_other_line_breaks_keep_places_right() -> None:
    for newline in ("\n", "\r\n", "\r"):
        text = newline.join(["version: 1", "modules:", "  a: colwize", ""])
        _, findings = check_plan(f"\ufeff{text}" if "\n" in text else f"{text}\n")
        assert [str(finding.span) for finding in findings if finding.code == "TP005"] == ["<text>:3:6"]


def test_anchors_and_aliases_work() -> None:
    plan, findings = check("version: 1\nmodules:\n  a: &long {style: colwise, output: replicate}\n  b: *long")
    assert findings == [] and plan is not None
    assert plan.rules[0].settings == plan.rules[1].settings


@pytest.mark.parametrize("width", [2, 10])
def test_an_alias_bomb_is_refused_at_once(width: int) -> None:
    levels = [f"l{level}: &l{level} [{', '.join([f'*l{level - 1}'] * width)}]" for level in range(1, 30)]
    started = time.process_time()
    _, findings = check("\n".join(["version: 1", "l0: &l0 [x, x]", *levels, "modules: {a: colwise}"]))
    assert [finding.code for finding in findings] == ["TP016"]
    assert time.process_time() - started < 2


def test_an_alias_to_what_holds_it_is_refused() -> None:
    assert only("version: 1\nmodules: &m {a: *m}").code == "TP001"


@pytest.mark.parametrize("opening", ["[", "{a: ", "- ", "? "])
def test_deep_nesting_is_refused_without_recursion(opening: str) -> None:
    _, findings = check(f"version: 1\nmodules: {opening * 5000}")
    assert {finding.code for finding in findings} <= {"TP016", "TP001"} and findings


def test_a_long_list_is_refused_before_it_is_read_to_the_end() -> None:
    started = time.process_time()
    _, findings = check("version: 1\nmodules:\n" + "  - x\n" * 100_000)
    assert [finding.code for finding in findings] == ["TP016"]
    assert time.process_time() - started < 10


def test_every_tag_is_reported_and_reading_goes_on() -> None:
    _, findings = check('version: !!int "1"\nmodules:\n  a: !!python/object:os.system colwize')
    assert [(finding.code, str(finding.span)) for finding in findings] == [
        ("TP018", "<text>:1:10"),
        ("TP004", "<text>:1:16"),
        ("TP018", "<text>:3:6"),
        ("TP005", "<text>:3:32"),
    ]


def test_a_duplicate_key_names_both_places_and_the_first_one_counts() -> None:
    finding = only("version: 1\nmodules:\n  a: colwise\n  b: rowwise\n  a: vocab")
    assert (finding.code, str(finding.span)) == ("TP002", "<text>:5:3")
    assert finding.notes == ("the first is at <text>:3:3",)


@pytest.mark.parametrize("text", ["\n", "# nothing\n", "---\n", "\n\n\n"])
def test_an_empty_plan_is_a_finding(text: str) -> None:
    _, findings = check_plan(text)
    assert [finding.code for finding in findings] == ["TP004"]
