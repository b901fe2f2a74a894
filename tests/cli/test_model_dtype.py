"""A model has the dtype of its folder, or that of `--set`, in all that is said of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tpplan.cli.main import main
from tpplan.cli.model_reference import load_model
from tpplan.plan import PlanError

pytest.importorskip("transformers")

LLAMA: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1, "vocab_size": 64,
}  # fmt: skip
T5 = {"num_layers": "1", "d_model": "32", "d_kv": "8", "num_heads": "4", "d_ff": "64", "vocab_size": "64"}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    monkeypatch.chdir(tmp_path)


def configure(**fields: Any) -> str:
    Path("config.json").write_text(json.dumps(LLAMA | fields), encoding="utf-8")
    return "."


def dtypes(reference: str, **options: Any) -> set[torch.dtype]:
    overrides = options.pop("overrides", {})
    model, _ = load_model(reference, overrides, **options)
    return {parameter.dtype for parameter in model.parameters()}


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("architectures", [["LlamaForCausalLM"], None], ids=["named", "unnamed"])
def test_a_folder_s_model_has_its_dtype(field: str, architectures: list[str] | None) -> None:
    folder = configure(architectures=architectures, **{field: "bfloat16"})
    assert dtypes(folder) == {torch.bfloat16}
    assert dtypes("config.json", overrides={"num_hidden_layers": "2"}) == {torch.bfloat16}
    assert dtypes(folder, float32=True) == {torch.float32}


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("reference", [".", "hf:llama"])
def test_the_option_comes_first(reference: str, field: str) -> None:
    configure(dtype="bfloat16")
    overrides = {key: str(value) for key, value in LLAMA.items() if isinstance(value, int)}
    assert dtypes(reference, overrides=overrides | {field: "torch.float16"}) == {torch.float16}
    assert dtypes(reference, overrides=overrides | {field: "double"}) == {torch.float64}


def test_without_a_dtype_the_checkpoint_beside_tells_it() -> None:
    folder = configure()
    assert dtypes(folder) == {torch.float32}
    save_file({"counts": torch.ones(2).int(), "weight": torch.ones(2).half()}, "model.safetensors")
    assert dtypes(folder) == {torch.float16}
    assert dtypes(folder, overrides={"num_hidden_layers": "2"}) == {torch.float16}
    assert dtypes(configure(dtype="bfloat16")) == {torch.bfloat16}
    Path("model.safetensors").write_bytes(b"nonsense")
    assert dtypes(configure()) == {torch.float32}


def test_what_transformers_keeps_in_float32_stays_there() -> None:
    model, _ = load_model("hf:t5", T5 | {"dtype": "float16"})
    kept = {name for name, parameter in model.named_parameters() if parameter.dtype == torch.float32}
    assert kept == {name for name, _ in model.named_parameters() if ".wo." in name} != set()
    assert dtypes("hf:t5", overrides=T5 | {"dtype": "bfloat16"}) == {torch.bfloat16}


@pytest.mark.parametrize(
    ("name", "message", "way_out"),
    [
        ("bfloat17", "there is no dtype `bfloat17`", "did you mean `bfloat16`?"),
        ("fp16", "there is no dtype `fp16`", "did you mean `float16`?"),
        ("16", "there is no dtype `16`", "use `float32`, `bfloat16`, `float16` or `float64`"),
        ("int8", "no model can be built in `int8`", "use `float32`, `bfloat16`, `float16` or `float64`"),
    ],
)
def test_a_wrong_dtype_is_explained(name: str, message: str, way_out: str, capsys: pytest.CaptureFixture[str]) -> None:
    for reference, where in ((configure(), "--set"), ("hf:llama", "--set")):
        command = ["explain", "llama", "--model", reference, "--set", f"dtype={name}"]
        assert main(command) == 2
        text = capsys.readouterr().err
        assert "TP122" in text and f"{where}: {message}" in text and way_out in text, text
    with pytest.raises(PlanError) as caught:
        load_model(configure(dtype=name), {})
    assert f"`config.json`: {message}" in caught.value.diagnostics[0].message


def test_explain_counts_in_the_folder_s_dtype(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    command = ["explain", "llama", "--model", configure(dtype="bfloat16"), "--batch", "1", "--sequence", "64"]
    assert main(command) == 0
    text = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in text.splitlines()]
    # 64 · 32 numbers of two bytes are 4 KiB, of which each of two ranks sends as much in an all-reduce.
    assert "self_attn.o_proj out P → R all-reduce 4.0 KiB –" in lines, text
    assert "modules, bfloat16" in text and "float32" not in text
    assert "model.norm rms_norm (eps 1e-06) on a GPU, at any size (a guess)" in lines


@pytest.mark.slow
def test_a_tensor_of_another_dtype_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    sizes = [part for item in (T5 | {"dtype": "float16"}).items() for part in ("--set", "{}={}".format(*item))]
    assert main(["explain", "t5", "--model", "hf:t5", *sizes]) == 0
    text = capsys.readouterr().out
    assert "\nmodules  " in text
    assert "(32, 64) → (32, 32) float32" in text and "(64, 32) → (32, 32) float16" in text, text


def test_a_picture_comes_in_the_model_s_dtype() -> None:
    from tpplan.inputs import example_call

    model, _ = load_model("hf:vit", {"num_hidden_layers": "1", "dtype": "bfloat16"})
    assert example_call(model, 2)[1]["pixel_values"].dtype == torch.bfloat16


def test_verify_computes_in_its_own_dtype(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "llama", "--model", configure(dtype="bfloat16"), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["dtype"] == "float64"
