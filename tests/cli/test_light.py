"""What is wrong with paths, options and plans is told before anything heavy is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "src"
CASES = [
    ("", 0, "usage: tpplan"),
    ("plans", 0, "llama  "),
    ("plans --show llama", 0, "model.embed_tokens: vocab"),
    ("rule tp12", 0, "TP012 unmatched-pattern"),
    ("validate llama --model ./nowhere", 2, "`./nowhere` is no file or folder"),
    ("validate llama --model nowhere/at-all", 2, "hf download nowhere/at-all"),
    ("validate llama --model nowhere:make", 2, "there is no module `nowhere`"),
    ("validate lama --model hf:llama", 2, "TP019"),
    ("explain lama --model hf:llama", 2, "TP019"),
    ("explain llama --model .", 2, "has no config.json"),
    ("explain auto --model nowhere:make", 2, "there is no module `nowhere`"),
    ("verify llama --model hf:lamma --tp 2 4", 2, "did you mean `hf:llama`"),
    ("advise --model hf:llama --gpus 8 --gpu h1000", 2, "did you mean `h100`"),
    ("advise --model hf:llama --gpus 8 --optimizer adam", 2, "there is no optimizer `adam`"),
    ("advise --model hf:llama --gpus 8 --target-memory much", 2, "isn't a size"),
    ("advise --model nowhere:make --gpus 8", 2, "there is no module `nowhere`"),
    ("explain llama --model hf:llama --gpu h1000", 2, "did you mean `h100`"),
    ("explain llama --model hf:llama --gpu h100 --checkpointing some", 2, "there are none, selective, full"),
    ("diff llama llama-sequense --model hf:llama", 2, "TP019"),
    ("diff llama llama-sequence --model hf:llama --topology nowhere.yaml", 2, "TP220"),
    ("suggest --model empty.json", 2, "has no `model_type`"),
    ("suggest --model hf:llama -o nowhere/plan.yaml", 2, "there is no folder nowhere"),
    ("suggest --model hf:llama -o .", 2, "it's a folder"),
    ("suggest --model hf:llama --from-deepspeed nowhere.json", 2, "there is no file nowhere.json"),
    ("export llama --to transformers -o nowhere/plan.json", 2, "there is no folder nowhere"),
    ("export my.yaml --to transformers --model nowhere/at-all", 2, "TP019"),
    ("checkpoint inspect nowhere", 1, "there is no checkpoint"),
    ("checkpoint check nowhere llama --model hf:llama", 1, "there is no checkpoint"),
    ("demo --plan nowhere", 2, "TP019"),
    ("bench overhead --json nowhere/figures.json", 2, "there is no folder nowhere"),
]


SCRIPT = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from tpplan.cli.main import main
told = []
for words in json.loads(sys.argv[1]):
    with redirect_stdout(io.StringIO()) as text, redirect_stderr(text):
        told.append((main(words.split()), text.getvalue()))
print(json.dumps([told, [name for name in ("torch", "transformers", "numpy", "rich") if name in sys.modules]]))
"""


def test_nothing_heavy_is_imported(tmp_path: Path) -> None:
    (tmp_path / "empty.json").write_text("{}")
    environment = {**os.environ, "PYTHONPATH": str(SOURCES), "HF_HOME": str(tmp_path), "COLUMNS": "200"}
    command = [sys.executable, "-c", SCRIPT, json.dumps([words for words, _, _ in CASES])]
    finished = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=True)
    told, imported = json.loads(finished.stdout)
    for (words, code, text), (found, answer) in zip(CASES, told, strict=True):
        assert (found, text in answer) == (code, True), (words, found, answer)
    assert imported == []


def test_the_tables_of_model_types_are_those_of_the_library() -> None:
    transformers = pytest.importorskip("transformers")
    from tpplan.hf.configs import _listed_types, known_types

    assert set(_listed_types()) == set(known_types()) == set(transformers.CONFIG_MAPPING.keys())
