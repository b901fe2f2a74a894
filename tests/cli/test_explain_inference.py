"""`tpplan explain --inference`: parameters, the cache, and a forward without gradients, as text and as JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.caching import cache_name
from tpplan.cli.main import main

transformers = pytest.importorskip("transformers")

CONFIG: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", "hidden_size": 64,
    "intermediate_size": 128, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8,
    "num_hidden_layers": 3, "vocab_size": 128, "max_position_embeddings": 1024, "use_cache": False,
}  # fmt: skip
SHOW = ["explain", "llama", "--model", ".", "--tp", "4", "--inference"]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    Path("config.json").write_text(json.dumps(CONFIG), encoding="utf-8")


def test_it_is_a_page_about_memory_and_calls_without_gradients(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SHOW, "--batch", "2", "--sequence", "512"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("LlamaForCausalLM with plan llama on 4 ranks (axis tp), for inference\n")
    assert "input_ids (2, 512) int64" in text and "logits_to_keep=1" in text and "backward" not in text
    lines = [" ".join(line.split()) for line in text.splitlines()]
    # Two heads of 8 for 2 · 512 tokens, in two bytes each, are 32 KiB; each rank needs one of them.
    name = cache_name(transformers.LlamaForCausalLM)
    assert f"{name}.layers.*.keys × 3 (2, 2, 512, 8) → (2, 1, 512, 8) bfloat16 48.0 KiB" in lines
    assert "cache 6 tensors 192.0 KiB 96.0 KiB 50.0%" in lines
    assert "The ranks hold 2 times the whole cache together" in text
    # 64 numbers of two bytes for 1024 tokens are 128 KiB, of which a ring of 4 sends 3/4 twice, 7 times.
    assert "the call above 7 all-reduce, 1 all-gather 1.3 MiB" in lines
    assert "one token more 7 all-reduce, 1 all-gather 3.0 KiB" in lines
    assert "One token more for each sequence adds 192 B to a rank's cache." in text
    assert any(line.startswith("temporary ") for line in lines) and "of temporary memory." in text


def test_with_a_gpu_it_ends_with_the_time_of_a_token(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SHOW, "--gpu", "h100", "--dp", "2", "--assumptions"]) == 0
    text = capsys.readouterr().out
    assert "the prompts, tp 4, dp 2, batch 1 × 1,024" in text and "each token more" in text and "launch" in text
    assert main([*SHOW, "--gpu", "h100", "--format", "json"]) == 0
    view = json.loads(capsys.readouterr().out)
    assert view["estimate"]["memory"]["cache"] == view["cache"]["bytes_by_rank"][0]
    assert view["estimate"]["generation"]["token_seconds"] > 0 and view["estimate"]["mfu"] is None
    assert main([*SHOW, "--gpu", "h100", "--optimizer", "sgd"]) == 2
    assert "--optimizer is of training; leave out --inference" in capsys.readouterr().err


def test_json_has_the_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SHOW, "--format", "json"]) == 0
    view = json.loads(capsys.readouterr().out)
    assert (view["plan"], view["size"], view["unknown"]) == ("llama", 4, {})
    assert view["inputs"][0] == {"path": "input_ids", "shape": [1, 1024], "dtype": "int64"}  # as far as positions go
    cache = view["cache"]
    assert cache["bytes"] == 6 * 1024 * 2 * 8 * 2 and cache["bytes_by_rank"] == [cache["bytes"] // 2] * 4
    assert cache["bytes"] == sum(2 * math.prod(tensor["shape"]) for tensor in cache["tensors"])
    assert cache["growth_by_rank"] == [6 * 8 * 2] * 4 and cache["storage_by_rank"] == cache["bytes_by_rank"]
    assert {held["placed"]: held["dtype"] for held in view["parameters"]} == dict.fromkeys(
        ("sharded", "replicated"), "bfloat16"
    )
    temporary = view["temporary"]
    assert temporary["bytes"] > max(temporary["bytes_by_rank"]) > 100 * max(temporary["decode_bytes_by_rank"]) > 0
    assert view["prefill"]["collectives"] == view["decode"]["collectives"] == {"all-reduce": 7, "all-gather": 1}
    assert view["prefill"]["bytes"] == sum(view["prefill"]["sent"].values()) > 1000 * view["decode"]["bytes"] // 4


def test_a_model_that_keeps_nothing_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "num_hidden_layers": 1}
    options = [part for item in sizes.items() for part in ("--set", "{}={}".format(*item))]
    assert main(["explain", "bert", "--model", "hf:bert", "--inference", "--sequence", "16", *options]) == 0
    text = capsys.readouterr().out
    assert "No cache: " in text and "cache  " not in text and "one token more" not in text


@pytest.mark.parametrize(
    ("more", "message"),
    [(["model.norm"], "--inference is about the whole model; leave out MODULE"), (["--set", "dtype=int8"], "TP122")],
)
def test_what_makes_no_sense_is_refused(more: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SHOW, *more]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and message in captured.err


def test_a_plan_that_doesn_t_fit_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    Path("wrong.yaml").write_text("version: 1\nmodules:\n  model.layers.*.mpl.up_proj: colwise\n", encoding="utf-8")
    assert main(["explain", "wrong.yaml", *SHOW[2:]]) == 1
    assert "TP012" in capsys.readouterr().err
