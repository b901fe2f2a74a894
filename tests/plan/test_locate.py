from pathlib import Path

import pytest

from tpplan.plan import locate

shipped_plan_directory = locate.shipped_plan_directory


def test_the_checkout_s_plans_are_found() -> None:
    import tpplan.plan.locate as module

    directory = Path(module.__file__).parents[3] / "plans"
    shipped_plan_directory.cache_clear()
    found = shipped_plan_directory()
    assert found is not None and found.name in ("plans", "_plans")
    assert found == directory or found.name == "_plans"


def test_a_wheel_s_plans_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site-packages" / "tpplan"
    (package / "plan").mkdir(parents=True)
    (package / "_plans").mkdir()
    monkeypatch.setattr(locate, "__file__", str(package / "plan" / "locate.py"))
    assert shipped_plan_directory.__wrapped__() == package / "_plans"


def test_an_installation_without_plans_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site-packages" / "tpplan"
    (package / "plan").mkdir(parents=True)
    (tmp_path / "plans").mkdir()
    monkeypatch.setattr(locate, "__file__", str(package / "plan" / "locate.py"))
    assert shipped_plan_directory.__wrapped__() is None


def test_a_name_a_file_name_and_a_path_are_told_apart(shipped_plans: Path, tmp_path: Path) -> None:
    assert locate.find_plan("llama") == shipped_plans / "llama.yaml"
    assert locate.find_plan("llama.yaml") == shipped_plans / "llama.yaml"
    assert locate.find_plan("other/llama") is None
    assert locate.find_plan("../shipped/llama.yaml") is None
    (tmp_path / "llama").write_text("x")
    assert locate.find_plan("llama", tmp_path) == tmp_path / "llama"
    assert locate.shipped_plan_names() == ("llama",)
