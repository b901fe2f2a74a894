"""`tpplan checkpoint` shows what a checkpoint holds, and says whether it would load."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoint.quantised import write
from tests.runtime.world import Member, world
from tpplan.checkpoint.files import SINGLE
from tpplan.checkpoint.loading import load
from tpplan.cli.main import main

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
MORE: dict[str, Any] = {"head_dim": 8, "vocab_size": 128, "num_hidden_layers": 2}


def make():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, **MORE))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    make().save_pretrained(path, max_shard_size="200KB")
    return path


def test_inspect_shows_equal_layers_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "inspect", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "model.layers.*.mlp.up_proj.weight × 2" in text and "(128, 64)" in text and "64.0 KiB" in text
    assert text.count("up_proj") == 1 and "F32" in text and "a rank" not in text
    assert f"21 tensors in {len(list(folder.glob('*.safetensors')))} files, " in text


def _read(member: Member, path: str) -> int:
    import tpplan
    from tpplan.compat.dtensors import local_of

    with torch.device("meta"):
        model = make()
    tpplan.parallelize(model, "llama", member.mesh())
    loaded = load(model, path)
    stock, ids = make(), torch.arange(12).view(2, 6)
    assert torch.equal(model.model.rotary_emb.inv_freq, stock.model.rotary_emb.inv_freq)
    torch.testing.assert_close(model(ids).logits, stock(ids).logits)
    held = sum(local_of(parameter).nbytes for parameter in model.parameters())
    assert held <= loaded.bytes_read <= 1.05 * held  # headers count much in a model as small as this
    return held


@pytest.mark.slow
@pytest.mark.processes
def test_a_rank_reads_what_inspect_says(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And a model built on `meta`, rotary frequencies included, computes what the stock model does."""
    options = ["--plan", "llama", "--model", str(folder), "--tp", "2"]
    assert main(["checkpoint", "inspect", str(folder), *options, "--format", "json"]) == 0
    tensors = json.loads(capsys.readouterr().out)["tensors"]
    assert tensors["model.norm.weight"]["bytes_by_rank"] == [256, 256]
    said = [sum(held["bytes_by_rank"][rank] for held in tensors.values()) for rank in range(2)]
    assert world(2).run(_read, str(folder)) == said
    assert main(["checkpoint", "inspect", str(folder), *options]) == 0
    assert "a rank" in (text := capsys.readouterr().out) and "Each of 2 ranks reads" in text


def test_check_says_that_it_would_load(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "check", str(folder), "llama", "--model", str(folder), "--tp", "4"]) == 0
    assert capsys.readouterr().out.endswith(f"{folder} would load into {folder} at tp=4.\n")


def test_check_reports_all_misfits_of_plan_and_checkpoint_at_once(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}
    del state["model.layers.1.mlp.up_proj.weight"]
    state |= {"lm_head.weight": state["lm_head.weight"].to(torch.int8), "model.norm.weight": torch.ones(3)}
    save_file(state, tmp_path / SINGLE)
    command = ["checkpoint", "check", str(tmp_path), "llama", "--model", str(folder), "--format", "concise"]
    assert main([*command, "--tp", "12"]) == 1  # more ranks than heads
    text = capsys.readouterr().out
    assert "TP103" in text, text
    assert "2 of the model's 21 tensors can't be loaded" in text and "1 of the checkpoint's tensors hold" in text


def test_a_quantised_folder_is_read_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write("llama odd", "fp8", tmp_path)
    command = ["checkpoint", "check", folder, "llama", "--model", folder, "--tp", "2"]
    assert main(command) == 1 and "dequantize=True" in capsys.readouterr().out
    assert main([*command, "--dequantize"]) == 0
    options = ["--plan", "llama", "--model", folder, "--tp", "2", "--dequantize", "--format", "json"]
    capsys.readouterr()
    assert main(["checkpoint", "inspect", folder, *options]) == 0
    tensors = json.loads(capsys.readouterr().out)["tensors"]
    down = "model.layers.0.mlp.down_proj.weight"  # [160, 328]: 164 columns each, of blocks 0 and 1, and 1 and 2
    assert tensors[down]["bytes_by_rank"] == [160 * 164] * 2
    assert tensors[f"{down}_scale_inv"]["bytes_by_rank"] == [2 * 2 * 4] * 2
    assert main(["checkpoint", "inspect", folder, "--dequantize"]) == 2


def test_what_cannot_be_read(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    assert main(["checkpoint", "inspect", str(tmp_path)]) == 1
    assert "TP121" in (text := capsys.readouterr().err) and "pickles" in text
    assert main(["checkpoint", "check", str(tmp_path), "llama", "--model", str(folder)]) == 1
    assert "pickles" in capsys.readouterr().out
    assert main(["checkpoint", "check", str(folder), "llama", "--model", "hf:lama"]) == 2
    assert "TP122" in capsys.readouterr().out
    assert main(["checkpoint", "inspect", str(folder), "--plan", "llama"]) == 2
    assert main(["checkpoint"]) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check", "out", "llama"], "tpplan checkpoint check: name a model with --model REF, a folder or file with "),
        (["inspect", "out", "--plan", "llama"], "tpplan checkpoint inspect: --plan and --model go together"),
        (["inspect", "out", "--tp", "4"], "tpplan checkpoint inspect: --tp needs --model\n"),
    ],
)
def test_wrong_usage_is_told_in_a_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith(message) and captured.err.count("\n") <= 2


def test_check_knows_the_names_of_transformers_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**SIZES, **MORE, num_local_experts=4, num_experts_per_tok=2)
    MixtralForCausalLM(config).save_pretrained(tmp_path)
    assert any("experts.3.w2" in name for name in load_file(tmp_path / SINGLE))
    assert main(["checkpoint", "check", str(tmp_path), "mixtral", "--model", str(tmp_path), "--tp", "2"]) == 0
    assert "would load into" in capsys.readouterr().out


def _mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**SIZES, **MORE, num_local_experts=4, num_experts_per_tok=2))


def _loads(member: Member, path: str) -> int:
    import tpplan

    with torch.device("meta"):
        model = _mixtral()
    tpplan.parallelize(model, "mixtral", member.mesh())
    before = sum(8 + int.from_bytes(file.read_bytes()[:8], "little") for file in Path(path).glob("*.safetensors"))
    read = load(model, path).bytes_read - before
    samples = 8 * 64 * len(list(Path(path).glob("*.safetensors")))
    return read - samples


@pytest.mark.processes
def test_of_tensors_in_pieces_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stock = _mixtral()
    stock.save_pretrained(tmp_path)
    file = tmp_path / SINGLE
    state = load_file(file)
    assert any("experts.0.w1" in name for name in state), "transformers saves experts one by one"
    save_file(state | {"more": torch.ones(3)}, file, {"format": "pt"})
    options = ["--plan", "mixtral", "--model", str(tmp_path), "--tp", "2"]
    assert main(["checkpoint", "inspect", str(tmp_path), *options, "--format", "json"]) == 0
    tensors = json.loads(capsys.readouterr().out)["tensors"]
    assert "bytes_by_rank" not in tensors.pop("more") and all("bytes_by_rank" in held for held in tensors.values())
    said = [sum(held["bytes_by_rank"][rank] for held in tensors.values()) for rank in range(2)]
    save_file(state, file, {"format": "pt"})
    assert world(2).run(_loads, str(tmp_path)) == said
    assert main(["checkpoint", "inspect", str(tmp_path), *options]) == 0
    assert "aren't the model's" not in capsys.readouterr().out
