"""Folders that torchao has quantised stay so: needs the extra `torchao`, and is skipped without it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.utils import quantization_config

import tpplan
from tests.checkpoint.quantised import change, made
from tests.marking import slow_but
from tests.runtime.world import Member, world
from tpplan.checkpoint.files import SINGLE
from tpplan.checkpoint.stored import read_checkpoint
from tpplan.cli.main import main
from tpplan.compat.dtensors import local_of
from tpplan.hf.quantised import keep_quantised
from tpplan.plan import PlanError

quantisation: Any = pytest.importorskip("torchao.quantization", reason="needs the extra `torchao`, 0.18.0")
pytest.importorskip("torchao.prototype.safetensors.safetensors_support")

pytestmark = pytest.mark.processes

IDS = torch.arange(24).view(2, 12)
KINDS: dict[str, Any] = {
    "int8": lambda: quantisation.Int8WeightOnlyConfig(),
    "float8": lambda: quantisation.Float8WeightOnlyConfig(),
    "int4 in groups": lambda: quantisation.IntxWeightOnlyConfig(
        weight_dtype=vars(torch)["int4"], granularity=quantisation.granularity.PerGroup(32)
    ),
    "int8 by token": lambda: quantisation.Int8DynamicActivationInt8WeightConfig(),
}


def _write(kind: str, folder: Path, dtype: torch.dtype = torch.float32) -> str:
    made("llama").to(dtype).save_pretrained(folder / "plain")
    config = vars(quantization_config)["TorchAoConfig"](KINDS[kind]())
    _stock(folder / "plain", quantization_config=config).save_pretrained(folder)
    return str(folder)


def _stock(folder: str | Path, **options: Any) -> Any:
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    return load(folder, **options)


def _loads(member: Member, folder: str) -> tuple[float, float]:
    """Load on all ranks; how far the logits are from the stock model's, and the share of bytes that this rank has."""
    model: Any = tpplan.from_pretrained(folder, "llama", member.mesh())
    stock = _stock(folder)
    assert model.config.to_dict() == stock.config.to_dict()
    weight = stock.model.layers[1].mlp.down_proj.weight
    ours: Any = model.model.layers[1].mlp.down_proj.weight
    assert type(ours.to_local()) is type(weight) and ours.full_tensor().shape == weight.shape
    assert torch.equal(ours.full_tensor().dequantize(), weight.dequantize())
    with torch.no_grad():
        logits, expected = model(input_ids=IDS).logits, stock(input_ids=IDS).logits
    every = sum(tensor.nbytes for tensor in load_file(Path(folder) / SINGLE).values())
    held = sum(local_of(parameter).nbytes for parameter in model.parameters())
    return float((logits - expected).abs().max() / expected.abs().max()), held / every


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", slow_but([2], [2, 4]))
def test_a_folder_stays_quantised(tmp_path: Path, kind: str, size: int) -> None:
    folder = _write(kind, tmp_path)
    for error, share in world(size).run(_loads, folder):
        assert error < (0.02 if "token" in kind else 1e-5) and share < 1 / size + 0.1, (error, share)


def test_the_command_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = _write("int8", tmp_path, torch.bfloat16)
    command = ["checkpoint", "check", folder, "llama", "--model", folder, "--tp", "2"]
    assert main(command) == 0, capsys.readouterr()
    options = ["--plan", "llama", "--model", folder, "--tp", "2", "--format", "json"]
    capsys.readouterr()
    assert main(["checkpoint", "inspect", folder, *options]) == 0
    tensors = json.loads(capsys.readouterr().out)["tensors"]
    assert tensors["model.layers.0.mlp.down_proj._weight_qdata"]["bytes_by_rank"] == [256 * 192] * 2


def test_the_model_needs_no_config(tmp_path: Path) -> None:
    folder, stock, model = _write("int8", tmp_path), made("llama").to("meta"), nn.Module()
    model.model, model.lm_head = stock.model, stock.lm_head
    assert "Int8Tensor" in keep_quantised(model, read_checkpoint(folder))
    assert type(model.get_parameter("model.layers.0.mlp.up_proj.weight").data).__name__ == "Int8Tensor"


def _tries(member: Member, folder: str, options: dict[str, Any]) -> str:
    try:
        tpplan.from_pretrained(folder, "llama", member.mesh(), **options)
    except PlanError as error:
        return str(error)
    return ""


def _without(folder: Path, name: str, metadata: dict[str, str] | None = None) -> None:
    held: dict[str, Tensor] = load_file(folder / SINGLE)
    with safe_open(folder / SINGLE, "pt") as file:
        said: dict[str, str] = file.metadata()
    held.pop(name, None)
    save_file(held, folder / SINGLE, metadata=said if metadata is None else metadata)


@pytest.mark.parametrize("fault", ["dtype", "dequantize", "a part", "config", "metadata"])
def test_a_fault_is_told(tmp_path: Path, fault: str) -> None:
    folder = _write("int8", tmp_path)
    expected, options = "", dict[str, Any]()
    if fault == "dtype":
        expected, options = "were quantised for torch.float32, and are torch.bfloat16", {"dtype": torch.bfloat16}
    elif fault == "dequantize":
        expected, options = "leave out `dequantize=True`", {"dequantize": True}
    elif fault == "a part":
        _without(tmp_path, "model.layers.0.mlp.up_proj._weight_scale")
        expected = "`model.layers.0.mlp.up_proj.weight`, a Int8Tensor, isn't there as a whole"
    elif fault == "config":
        change(tmp_path, quantization_config={"quant_method": "torchao", "quant_type": {}})
        expected = "torchao can't make the weights that .*: Expected only one key 'default'"
    else:
        _without(tmp_path, "", {"format": "pt"})
        expected = "don't say of which classes"
    for said in world(2).run(_tries, folder, options):
        assert re.search(expected, said) and said.count("TP121") == 1, said
