"""`from_pretrained`: the stock model's numbers, modes and configs, from its folder, for whatever plan and degree."""

from __future__ import annotations

import json
import math
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import safetensors.torch
import torch
import transformers
from torch import Tensor

import tpplan
from tests.checkpoint.memory import MIB, peak
from tests.marking import in_thirds, slow_but, sweep_but
from tests.plans.parity import tolerance
from tests.runtime.world import Member, world
from tpplan.checkpoint import loading
from tpplan.checkpoint.files import SINGLE
from tpplan.checkpoint.loading import Loaded
from tpplan.compat.dtensors import local_of
from tpplan.plan import PlanError

pytestmark = pytest.mark.processes

IDS = torch.arange(24).view(2, 12)
_SPECIAL: dict[str, Any] = {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3}
_SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    **_SPECIAL,
}
_EXPERTS: dict[str, Any] = _SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2}
_BERT: dict[str, Any] = {key: value for key, value in _SMALL.items() if key != "num_key_value_heads"}
_GPT2: dict[str, Any] = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 96, "n_positions": 64} | _SPECIAL


def _made(name: str) -> Any:
    """A stock model with random numbers, norms and biases too."""
    torch.manual_seed(3)
    kind, _, more = name.partition(" ")
    if kind == "gpt2":
        model: Any = transformers.GPT2LMHeadModel(transformers.GPT2Config(**_GPT2))
    elif kind == "mixtral":
        model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**_EXPERTS))
    elif kind == "bert":
        model = transformers.BertForMaskedLM(transformers.BertConfig(**_BERT))
    else:
        settings: dict[str, Any] = _SMALL | {"tie_word_embeddings": "tied" in more}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape) / math.sqrt(parameter.shape[-1])
            parameter.copy_(noise if parameter.dim() > 1 else 1 + 0.3 * noise)
    return model.to(torch.bfloat16) if "bfloat16" in more else model


def _folder(name: str, path: Path, **options: Any) -> str:
    model = _made(name)
    if model.can_generate():
        model.generation_config.max_new_tokens = 5
        model.generation_config.repetition_penalty = 1.3
    model.save_pretrained(path, **options)
    return str(path)


def _whole(model: Any) -> dict[str, Tensor]:
    state = model.state_dict()
    return {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in state.items()}


def _loads(member: Member, folder: str, plan: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Load on all ranks; what there is to compare, with the stock model from the same folder."""
    model: Any = tpplan.from_pretrained(folder, plan, member.mesh(), **options)
    stock = _stock(folder, options.get("dtype", "auto"))
    assert not model.training and not any(module.training for module in model.modules())
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    assert model.config.to_dict() == stock.config.to_dict()
    ours, theirs = _whole(model), stock.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor), name
    for (name, ours_), theirs_ in zip(model.named_buffers(), stock.buffers(), strict=True):
        assert torch.equal(ours_, theirs_), name
    with torch.no_grad():
        logits, expected = model(input_ids=IDS).logits, stock(input_ids=IDS).logits
    error = (logits - expected).abs().max() / expected.abs().max()
    assert error <= tolerance(expected.dtype, 8 if expected.dtype is torch.bfloat16 else 512), error
    held = sum(local_of(p).numel() for p in model.parameters()) / sum(p.numel() for p in stock.parameters())
    if stock.can_generate():
        assert model.generation_config.to_dict() == stock.generation_config.to_dict()
        assert torch.equal(model.generate(IDS), stock.generate(IDS))
    return {"held": held, "kind": type(model).__mro__[1].__name__}


def _stock(folder: str, dtype: Any) -> Any:
    names = json.loads((Path(folder) / "config.json").read_text())["architectures"]
    return getattr(transformers, names[0]).from_pretrained(folder, dtype=dtype)


QUICK: list[Any] = [("llama tied", "auto", {})]
SLOW: list[Any] = [
    ("mixtral", "mixtral", {}),
    ("llama bfloat16", "llama-sequence", {}),
    ("gpt2", "auto", {}),
    ("bert", "auto", {}),
]
WAYS: list[Any] = [
    *QUICK,
    *SLOW,
    ("llama", "auto", {"sequence_parallel": True}),
    ("llama bfloat16", "auto", {"dtype": torch.float32}),
    ("llama", "auto", {}),
    ("llama", "llama", {}),
    ("llama", "llama", {"dtype": "bfloat16"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "plan", "options"),
    in_thirds(QUICK, SLOW, WAYS),
    ids=str,
)
def test_it_is_the_stock_model(tmp_path: Path, name: str, plan: Any, options: dict[str, Any]) -> None:
    folder = _folder(name, tmp_path, max_shard_size=40_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    for found in world(2).run(_loads, folder, plan, options):
        assert found["held"] < 0.6, found


@pytest.mark.parametrize("name", sweep_but([], ["llama", "mixtral"]))
def test_key_heads_fewer_than_ranks(tmp_path: Path, name: str) -> None:
    for found in world(4).run(_loads, _folder(name, tmp_path), name, {}):
        assert found["held"] < 0.4, found


def test_a_plan_from_a_file_and_names_that_differ(tmp_path: Path) -> None:
    folder = Path(_folder("llama", tmp_path / "model"))
    plan = tmp_path / "mine.yaml"
    plan.write_text("version: 1\nmodules:\n  model.layers.*.mlp.{gate,up}_proj: colwise\n  '**.down_proj': rowwise\n")
    held = safetensors.torch.load_file(folder / SINGLE)
    ours = tmp_path / "renamed"
    shutil.copytree(folder, ours)
    renamed = {name.replace("model.layers", "stack"): t for name, t in held.items()}
    safetensors.torch.save_file(renamed, ours / SINGLE)
    assert world(2).run(_renamed, str(folder), str(ours), str(plan)) == [True, True]


def _renamed(member: Member, folder: str, ours: str, plan: str) -> bool:
    model = tpplan.from_pretrained(ours, plan, member.mesh(), rename={"^stack": "model.layers"})
    held = safetensors.torch.load_file(Path(folder) / SINGLE)
    return all(torch.equal(tensor, held[name]) for name, tensor in _whole(model).items())


def _trained(member: Member, folder: str, target: str) -> float:
    """Load, train a step, and save."""
    model: Any = tpplan.from_pretrained(folder, mesh=member.mesh()).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()
    tpplan.save_weights(model, target)
    return float(model(input_ids=IDS, labels=IDS).loss.detach())


def _loss(member: Member, folder: str) -> float:
    model: Any = tpplan.from_pretrained(folder, mesh=member.mesh())
    return float(model(input_ids=IDS, labels=IDS).loss.detach())


def _stock_loss(folder: str) -> float:
    return float(_stock(folder, "auto")(input_ids=IDS, labels=IDS).loss.detach())


@pytest.mark.sweep
@pytest.mark.parametrize("name", slow_but([], ["llama tied", "mixtral"]))
def test_what_save_weights_writes_is_read_at_another_degree(tmp_path: Path, name: str) -> None:
    folder, target = _folder(name, tmp_path / "first"), tmp_path / "second"
    before = world(2).run(_trained, folder, str(target))
    after = world(4).run(_loss, str(target))
    torch.testing.assert_close(torch.tensor(after), torch.full((4,), before[0]))
    loss = _stock_loss(str(target))
    torch.testing.assert_close(torch.tensor(after[0]), torch.tensor(loss))
    assert loss < _stock_loss(folder)


def _reads(member: Member, folder: str, plan: str) -> tuple[int, int]:
    counted: list[Loaded] = []

    def load(*arguments: Any, **keywords: Any) -> Loaded:
        counted.append(loading.load(*arguments, **keywords))
        return counted[-1]

    with mock.patch("tpplan.pretrained.load", load):
        model = tpplan.from_pretrained(folder, plan, member.mesh())
    return counted[0].bytes_read, sum(local_of(p).nbytes for p in model.parameters())


@pytest.mark.parametrize("name", slow_but(["mixtral"], ["llama", "mixtral"]))
def test_a_rank_reads_its_share(tmp_path: Path, name: str) -> None:
    kind = getattr(transformers, f"{name.title()}Config")
    model = getattr(transformers, f"{name.title()}ForCausalLM")
    settings = _EXPERTS if name == "mixtral" else _SMALL
    model(kind(**settings | {"hidden_size": 256, "intermediate_size": 320})).save_pretrained(tmp_path)
    for read, share in world(2).run(_reads, str(tmp_path), name):
        assert share <= read <= 1.02 * share, (read, share)


def _tries(member: Member, folders: list[str], arguments: Any, hides: bool = False) -> str:
    """What is said to a rank, each with its own folder; the second one may have no transformers."""
    hidden = {"transformers": None} if hides and member.rank else {}
    with mock.patch.dict("sys.modules", hidden):
        try:
            tpplan.from_pretrained(folders[member.rank], **({"mesh": member.mesh()} | arguments))
        except PlanError as error:
            return str(error)
    return ""


def _config(folder: Path, **changes: Any) -> None:
    fields = json.loads((folder / "config.json").read_text()) | changes
    kept = {name: value for name, value in fields.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))


FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no folder": (shutil.rmtree, "there is no checkpoint at"),
    "no config": (lambda f: (f / "config.json").unlink(), "has no config.json"),
    "no JSON": (lambda f: (f / "config.json").write_text("{"), "isn't JSON"),
    "a list": (lambda f: (f / "config.json").write_text("[]"), "holds no object"),
    "no type": (lambda f: _config(f, model_type=None), "has no `model_type`"),
    "another type": (lambda f: _config(f, model_type="llamma"), "no model type `llamma`"),
    "wrong fields": (lambda f: _config(f, hidden_size="wide"), "is no transformers config"),
    "no class": (lambda f: _config(f, architectures=None), "has no `architectures`"),
    "another class": (lambda f: _config(f, architectures=["LlamaForAll"]), "names the class `LlamaForAll`"),
    "its own class": (
        lambda f: _config(f, architectures=["OwnForCausalLM"], auto_map={"AutoModelForCausalLM": "own.OwnForCausalLM"}),
        "names code of its own (`auto_map`) for `OwnForCausalLM`",
    ),
    "its own type": (
        lambda f: _config(f, model_type="own", auto_map={"AutoConfig": "own.Own"}),
        "names code of its own",
    ),
    "quantised": (lambda f: _config(f, quantization_config={"quant_method": "gptq", "bits": 4}), "is quantised (gptq)"),
    "other sizes": (lambda f: _config(f, intermediate_size=100), "has shape [96, 64] there and [100, 64] in the model"),
    "fewer layers": (lambda f: _config(f, num_hidden_layers=3), "`model.layers.2.self_attn.q_proj.weight` is not in"),
    "other config": (lambda f: _config(f, rms_norm_eps=1e-3), "would load different configs"),
    "other dtype": (lambda f: _config(f, dtype="bfloat16"), "would load different configs and dtypes"),
    "generation": (lambda f: (f / "generation_config.json").write_text("{"), "generation_config.json` is no"),
    "cut off": (lambda f: os.truncate(f / SINGLE, 5000), "was cut off"),
    "other numbers": (lambda f: _scale(f), "would load different checkpoints"),
    "adapter": (lambda f: (f / "config.json").rename(f / "adapter_config.json"), "an adapter for another model"),
}


def _scale(folder: Path) -> None:
    held = safetensors.torch.load_file(folder / SINGLE)
    safetensors.torch.save_file({name: 2 * tensor for name, tensor in held.items()}, folder / SINGLE)


@pytest.mark.parametrize("fault", in_thirds([*FAULTS][::6], [*FAULTS], FAULTS))
@pytest.mark.one_in(3)
def test_a_fault_on_one_rank_is_told_on_all(tmp_path: Path, fault: str) -> None:
    make, expected = FAULTS[fault]
    folders = [_folder("llama", tmp_path / str(rank)) for rank in range(2)]
    make(tmp_path / "1")
    ours, theirs = world(2).run(_tries, folders, {})
    assert ours == theirs and ours.count("TP121") == 1, (ours, theirs)
    assert expected in ours and "help: " in ours and ("of 2" in ours or "rank 0 and rank 1" in ours)


def test_a_rank_without_transformers(tmp_path: Path) -> None:
    ours, theirs = world(2).run(_tries, [_folder("llama", tmp_path)] * 2, {}, True)
    assert ours == theirs and "needs transformers, which isn't installed" in ours and "on rank 1 of 2" in ours


@pytest.mark.parametrize(
    ("source", "arguments", "expected"),
    [
        ("meta-llama/Llama-3.2-1B", {}, "hf download"),
        ("model.safetensors", {}, "name the folder that holds it"),
        (".", {"dtype": "int8"}, "can't have the dtype 'int8'"),
        (".", {"dtype": torch.int32}, "can't have the dtype torch.int32"),
        (".", {"plan": "lama"}, "TP019"),
        (".", {"plan": {"version": 1, "modules": {"nothing": "colwise"}}}, "TP012"),
        (".", {"plan": {"version": 1, "axis": "rows", "modules": {"lm_head": "colwise"}}}, "TP115"),
        (".", {"rename": {"^nothing": ""}}, "matches no name"),
    ],
)
def test_a_mistake_is_told_with_the_way_out(
    tmp_path: Path, source: str, arguments: dict[str, Any], expected: str
) -> None:
    folder = _folder("llama", tmp_path)
    place = source if "/" in source else f"{folder}/{source}"
    for said in world(2).run(_tries, [place] * 2, arguments):
        assert expected in said and "help: " in said, said
        assert "on rank" not in said


def _mixed(member: Member, folder: str) -> str:
    """One rank is told something else that is no plan at all."""
    try:
        tpplan.from_pretrained(folder, 3 if member.rank else "auto", member.mesh())  # pyright: ignore
    except Exception as error:
        return f"{type(error).__name__} {error}"
    return ""


def test_an_error_of_another_kind_does_not_let_the_others_wait(tmp_path: Path) -> None:
    ours, theirs = world(2).run(_mixed, _folder("llama", tmp_path))
    assert "TP121" in ours and "on rank 1 of 2" in ours and theirs


def _base(member: Member, folder: str) -> tuple[str, list[str], list[str]]:
    said = _tries(member, [folder] * member.size, {})
    torch.manual_seed(7)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model: Any = tpplan.from_pretrained(folder, mesh=member.mesh(), strict=False)
    torch.manual_seed(7)
    fresh = transformers.BertForMaskedLM(transformers.BertConfig(**_BERT))
    loaded = _made("bert").state_dict()
    made: list[str] = []
    for name, tensor in fresh.state_dict().items():
        ours = model.state_dict()[name].full_tensor()
        if torch.equal(ours, tensor) and name.startswith("cls.") and "decoder.weight" not in name:
            made.append(name)
        else:
            assert torch.equal(ours, loaded[name]), name
    return said, made, [str(one.message) for one in caught if "TP121" in str(one.message)]


@pytest.mark.slow
def test_a_base_model_in_a_folder_that_promises_a_head(tmp_path: Path) -> None:
    model = _made("bert")
    model.bert.save_pretrained(tmp_path)
    _config(tmp_path, architectures=["BertForMaskedLM"])
    (ours, made, warned), (theirs, *_) = world(2).run(_base, str(tmp_path))
    assert ours == theirs and "5 of the model's" in ours and "`cls.predictions.bias` is not in the checkpoint" in ours
    assert len(made) >= 5  # what the folder hasn't is as the class initialises it, the rest as stored
    assert "5 of the model's tensors are not in the checkpoint, and stay as they are" in "".join(warned)


def test_without_torchrun_it_says_how_to_start(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"TP115(.|\n)*torchrun"):
        tpplan.from_pretrained(_folder("llama", tmp_path))


def _by_hand(member: Member, folder: str, kind: str) -> None:
    """README's route: on `meta`, parallelized, then loaded, by names that only the stock class has rules for."""
    with torch.device("meta"):
        model: Any = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    tpplan.parallelize(model, kind, member.mesh())
    tpplan.load_weights(model, folder)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    stock = transformers.AutoModelForCausalLM.from_pretrained(folder)
    expected = stock(input_ids=IDS).logits
    torch.testing.assert_close(model(input_ids=IDS).logits, expected)


@pytest.mark.parametrize("kind", slow_but(["llama"], ["gpt_neox", "llama"]))
def test_a_model_built_on_meta_by_hand(tmp_path: Path, kind: str) -> None:
    settings = _BERT if kind == "gpt_neox" else _SMALL
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(kind, **settings)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    names = safetensors.torch.load_file(tmp_path / SINGLE)
    assert ("embed_out.weight" in names) is (kind == "gpt_neox")
    world(2).run(_by_hand, str(tmp_path), kind)


def _large(member: Member, small: str, folder: str) -> tuple[int, int, int]:
    tpplan.from_pretrained(small, "llama", member.mesh())  # what is imported and compiled for any model
    torch.distributed.barrier()
    with peak(0.01) as seen:
        model = tpplan.from_pretrained(folder, "llama", member.mesh())
    held = [local_of(parameter).nbytes for parameter in model.parameters()]
    return sum(held), max(held), seen[0]


@pytest.mark.slow
def test_nothing_but_the_shards_is_in_memory(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 8,
        "vocab_size": 40000,
    }
    config = transformers.LlamaConfig(**_SMALL | sizes)
    with torch.device("meta"):
        model: Any = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.to_empty(device="cpu").parameters():
            parameter.fill_(0.01)
    model.save_pretrained(tmp_path, max_shard_size="200MB")
    del model
    for share, slice_, most in world(2).run(_large, _folder("llama", tmp_path / "small"), str(tmp_path)):
        print(f"{most // MIB} MiB at the most, for a share of {share // MIB}")
        assert share > 380 * MIB
        assert most <= share + slice_ + 100 * MIB < 2 * share
