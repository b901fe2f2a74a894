"""Each wrong form of `--model` says what is wrong with it and what to write."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tpplan.cli.model_reference import load_model
from tpplan.plan import PlanError

OWN = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)

def make(): return Net()
def wide(width): return Net()
def nothing(): pass
def pair(): return Net(), (torch.zeros(2, 8),)
def triple(): return Net(), 1, 2
def raises(): raise ValueError("no config")

model = Net()
number = 3
"""
NO_FORM = "is no file or folder, no `hf:MODEL_TYPE`, no `package.module:callable` and no `FILE.py:callable`"
WRONG = [
    ("owned:mak", "the module `owned` has no `mak`", "did you mean `owned:make`?"),
    ("owned:Net()", "has no `Net()`", "did you mean `owned:Net`?"),
    ("owned:xyz", "has no `xyz`", "it has `Net`, `make`, `wide`, `nothing` and `pair`"),
    ("owned:wide", "can't be called without `width`", "give --set width=…"),
    ("owned:wide widht=3", "takes no `widht`", "did you mean `width`?"),
    ("owned:make width=3", "takes no `width`", "it takes no arguments"),
    ("owned:nothing", "gave nothing", "return a torch.nn.Module"),
    ("owned:triple", "gave a tuple of 3", "return a model, or a model and its inputs"),
    ("owned:model", "is a model already, a `Net`", "name a function"),
    ("owned:number", "is an `int`", "name a function"),
    ("owned:raises", "raised ValueError: no config", "under `torch.device('meta')`"),
    ("owned.py", "is Python", "`owned:…`"),
    ("absent.py:make", "there is no file `absent.py`", "name a file"),
    ("owned.py:mak", "the file `owned.py` has no `mak`", "did you mean `owned.py:make`?"),
    ("broken.py:make", "raised SyntaxError", "`python broken.py` must pass"),
    ("nets/owned:make", "is no module's name", "`nets/owned.py:make`"),
    ("owned", NO_FORM, "`owned:make_model`"),
    ("owned:", NO_FORM, "`owned:make_model`"),
    (":make", NO_FORM, "`package.module:make_model`"),
    ("", NO_FORM, "`package.module:make_model`"),
    ("absent:make", "there is no module `absent`", "PYTHONPATH"),
    ("needy:make", "needs `absent_dependency`, which isn't installed", "install it"),
    ("broken:make", "raised SyntaxError", "mend it"),
    ("booming:make", "raised RuntimeError: boom", "mend it"),
    ("text.json", "isn't JSON", "name a config.json"),
    ("kindless.json", "has no `model_type`", "add one"),
    (".", "has no config.json", "save_pretrained"),
]
FILES = {
    "owned.py": OWN,
    "needy.py": "import absent_dependency",
    "broken.py": "def make(:",
    "booming.py": "raise RuntimeError('boom')",
    "text.json": "text",
    "kindless.json": '{"a": 1}',
}
WITH_TRANSFORMERS = [
    ("llama", NO_FORM, "did you mean `hf:llama`?"),
    ("hf:LLAMA", "no model type `LLAMA`", "`hf:llama`"),
    ("HF:lamma", "no model type `lamma`", "`hf:llama`"),
    ("hf:", "no model type ``", "such as `llama`"),
    ("misspelt.json", "no model type `llamma`", "did you mean `hf:llama`"),
]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    for name, text in FILES.items() | {("misspelt.json", '{"model_type": "llamma"}')}:
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    for name in FILES:
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)


def reported(reference: str) -> tuple[str, str]:
    name, _, setting = reference.partition(" ")
    with pytest.raises(PlanError) as caught:
        load_model(name, dict([setting.split("=")]) if setting else {})
    (found,) = caught.value.diagnostics
    assert found.code == "TP122"
    return found.message, found.help or ""


@pytest.mark.parametrize(("reference", "why", "way_out"), WRONG)
def test_a_wrong_reference_is_explained(reference: str, why: str, way_out: str) -> None:
    if reference.endswith("json") or reference == ".":
        pytest.importorskip("transformers")
    message, found = reported(reference)
    assert why in message and way_out in found, (message, found)


@pytest.mark.parametrize(("reference", "why", "way_out"), WITH_TRANSFORMERS)
def test_a_wrong_architecture_is_explained(reference: str, why: str, way_out: str) -> None:
    pytest.importorskip("transformers")
    message, found = reported(reference)
    assert why in message and way_out in found, (message, found)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"num_hidden_layers": "two"}, "expected int, got str (value: 'two')"),
        ({"hidden_size": "100"}, "100) is not a multiple of the number of attention heads (32)"),
        ({"hidden_act": "nothing"}, "there is no 'nothing'"),
    ],
)
def test_a_config_s_own_reason_is_told_whole(settings: dict[str, str], reason: str) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(PlanError) as caught:
        load_model("hf:llama", {"num_hidden_layers": "1"} | settings)
    found = caught.value.diagnostics[0]
    assert reason in found.message and all(
        f"--set {key}={value}" in (found.help or "") for key, value in settings.items()
    )


@pytest.mark.parametrize("name", ["owner/small-llama", "small-llama"])
def test_a_model_of_the_hub_is_read_from_the_cache(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    cached = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
    (cached / "snapshots" / "0123").mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0123")
    fields = {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32}
    (cached / "snapshots" / "0123" / "config.json").write_text(json.dumps(fields | {"dtype": "bfloat16"}))
    model, _ = load_model(name, {})
    assert type(model).__name__ == "LlamaForCausalLM" and str(model.dtype) == "torch.bfloat16"
    message, way_out = reported("owner/another")
    assert str(tmp_path / "hub") in message and "`hf download owner/another config.json`" in way_out


@pytest.mark.parametrize(
    ("reference", "given"),
    [("owned:Net", False), ("owned:pair", True), ("owned:wide", False), ("owned.py:pair", True)],
)
def test_a_callable_makes_the_model_on_meta(reference: str, given: bool) -> None:
    model, inputs = load_model(reference, {"width": "3"} if reference.endswith("wide") else {})
    assert next(model.parameters()).is_meta and (inputs is not None) is given
