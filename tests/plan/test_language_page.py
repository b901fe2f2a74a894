"""The examples of the language's reference page, loaded and run."""

import re
from pathlib import Path

import pytest

from tpplan.plan import Pattern, Pin, Style, load_plan
from tpplan.plan.plan_keys import PLAN_KEYS, RULE_KEYS
from tpplan.plan.vocabulary import Exchange, KernelChoice, KernelKind, OverlapUnit, OverlapWord

TEXT = (Path(__file__).parents[2] / "docs" / "plan-language.md").read_text(encoding="utf-8")
YAML = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
PATTERN_ROWS = re.findall(r"^\| `\"?([^`\"]+)\"?` \| (`.+`) \| (`.+`) \|$", TEXT, re.MULTILINE)


@pytest.mark.parametrize("example", YAML, ids=range(len(YAML)))
def test_every_plan_on_the_page_is_valid(example: str) -> None:
    plan = load_plan(example)
    assert plan.rules and load_plan(plan.to_yaml()) == plan


def test_the_table_of_patterns_is_right() -> None:
    assert len(PATTERN_ROWS) == 7
    for text, matching, others in PATTERN_ROWS:
        pattern = Pattern.parse(text)
        assert all(pattern.matches(name) for name in re.findall("`([^`]+)`", matching)), text
        assert not any(pattern.matches(name) for name in re.findall("`([^`]+)`", others)), text


def test_the_order_of_specificity_is_as_described() -> None:
    rows = re.findall(r"^\d\. .*`(.+)` before `(.+)`[;.]$", TEXT, re.MULTILINE)
    assert len(rows) == 5
    for winner, loser in rows:
        name = re.sub(r"\{(\w+),\w+\}", r"\1", winner).replace("**.", "").replace("*", "b")
        closer, wider = Pattern.parse(winner).specificity(name), Pattern.parse(loser).specificity(name)
        assert closer is not None and wider is not None and closer > wider, (winner, loser, name)


def test_the_python_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plans").mkdir()
    (tmp_path / "plans" / "my-model.yaml").write_text(YAML[0])
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    exec(example, {})


def test_every_word_of_the_language_is_on_the_page() -> None:
    words = [*PLAN_KEYS, *RULE_KEYS, *Style, *Pin, *Exchange, *KernelKind, *KernelChoice, *OverlapUnit, *OverlapWord]
    assert [word for word in words if f"`{word}`" not in TEXT and f"`{word}:" not in TEXT] == []
