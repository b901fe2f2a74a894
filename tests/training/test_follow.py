"""Modules of others are adapted when they are imported; what can't be adapted is imported all the same."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest

from tpplan.process import undo_process_changes
from tpplan.training.follow import ADAPTERS, follow


def adapt(module: ModuleType) -> None:
    module.__dict__["adapted"] = module.__dict__.get("adapted", 0) + 1


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    undo_process_changes()  # another finder would adapt them, too
    undo = follow()
    monkeypatch.syspath_prepend(str(tmp_path))
    found = [f"{tmp_path.name}_{number}" for number in range(4)]
    for name in found:
        (tmp_path / f"{name}.py").write_text("def train():\n    return 1\n")
        monkeypatch.setitem(ADAPTERS, name, __name__)
    yield found
    undo()


def test_modules_are_adapted_once_loaded_and_stay_what_they_are(names: list[str]) -> None:
    with ThreadPoolExecutor(len(names)) as threads:
        modules = list(threads.map(importlib.import_module, names))
    for module in modules:
        assert module.__dict__["adapted"] == 1
        assert "return 1" in inspect.getsource(module.__dict__["train"])
        assert not type(module.__loader__).__module__.startswith("tpplan")
        assert importlib.reload(module).__dict__["adapted"] == 2


def test_a_module_that_cannot_be_adapted_is_imported_with_a_warning(
    names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ADAPTERS, names[0], "tpplan.nowhere")
    with pytest.warns(UserWarning, match=f"tpplan doesn't know this version of `{names[0]}`"):
        module = importlib.import_module(names[0])
    assert module.__dict__["train"]() == 1 and "adapted" not in module.__dict__
    assert sys.modules[names[0]] is module
