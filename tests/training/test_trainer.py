"""transformers' Trainer with a sharded model: losses, norms, parameters and files of the unsharded run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer

import tpplan
from tests.marking import sweep_but
from tests.plans.parity import PLANS, tolerance
from tests.runtime.world import Member, world
from tests.training.runs import Outcome, Run, launched, made, outcome, sharded, sharded_outcomes, trainer, whole
from tpplan.training.sharding import Sharding, check

pytestmark = pytest.mark.processes

EXACT = tolerance(torch.float32)
SAVING = {"save_strategy": "steps", "save_steps": 2}


def assert_alike(ours: Outcome, stock: Outcome, limit: float = EXACT) -> None:
    for name in ("losses", "norms", "rates", "evaluations"):
        mine, theirs = getattr(ours, name), getattr(stock, name)
        assert mine == pytest.approx(theirs, rel=limit, abs=limit), name
    for name, held in stock.parameters.items():
        assert float((ours.parameters[name] - held).abs().max()) < limit, name
    assert ours.metrics == pytest.approx(stock.metrics, rel=limit, abs=limit)
    assert ours.best == stock.best
    assert type(ours.predictions) is type(stock.predictions)
    assert ours.predictions.shape == stock.predictions.shape
    assert float(abs(ours.predictions - stock.predictions).max()) < 10 * limit


def _without_last(source: Path, target: Path) -> Path:
    """A copy of a run's folder as it was after its first checkpoint."""
    shutil.copytree(source, target)
    shutil.rmtree(target / "checkpoint-4")
    return target


@pytest.mark.slow
def test_a_run_is_that_of_the_unsharded_model_and_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    run = Run({"label_smoothing_factor": 0.1, "eval_strategy": "steps", "eval_steps": 2, **SAVING}, split=True)
    stock = outcome(made("llama"), run, tmp_path / "stock")
    straight, *_ = world(2).run(sharded_outcomes, [(run, True, str(tmp_path / "ours"))])[0]
    assert_alike(straight, stock)
    rest = _without_last(tmp_path / "ours", tmp_path / "rest")
    resumed, *_ = world(2).run(sharded_outcomes, [(replace(run, resume=True), True, str(rest))])[0]
    assert resumed.losses == straight.losses and resumed.norms == straight.norms
    assert all(torch.equal(held, straight.parameters[name]) for name, held in resumed.parameters.items())

    for folder in ("checkpoint-2", "checkpoint-4"):
        names = {path.name for path in (tmp_path / "ours" / folder).iterdir()} - {"rng_state_0.pth", "rng_state_1.pth"}
        assert names | {"rng_state.pth"} == {path.name for path in (tmp_path / "stock" / folder).iterdir()}
    ours, theirs = (tmp_path / of / "checkpoint-4" for of in ("ours", "stock"))
    assert (ours / "config.json").read_text() == (theirs / "config.json").read_text()
    loaded = AutoModelForCausalLM.from_pretrained(ours)
    for name, held in loaded.named_parameters():
        assert torch.equal(held.detach(), straight.parameters[name]), name

    # The unsharded model goes on from there as well, and this from its checkpoint.
    other = _without_last(tmp_path / "ours", tmp_path / "unsharded")
    assert_alike(outcome(made("llama"), replace(run, resume=True), other), stock)


RUNS = {
    "gpt2": Run(model="gpt2"),
    "bfloat16": Run({"bf16": True}),
    "activation checkpoints": Run({"activation_checkpointing": True}),
    "sgd": Run({"optim": "sgd", "label_names": ["labels"]}),
    "adamw, each device's own tokens": Run({"optim": "adamw_torch", "average_tokens_across_devices": False}),
    "no clipping": Run({"max_grad_norm": 0.0, "lr_scheduler_type": "cosine"}),
    "grouped by length": Run({"train_sampling_strategy": "group_by_length"}, lengths=(16, 8, 12, 9)),
    "odd lengths, last batch dropped": Run({"dataloader_drop_last": True}, lengths=(15,), samples=23),
    "no length": Run(iterable=True),
    "random masks": Run(masks=True),
    "best at the end": Run(
        {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "learning_rate": 0.2, **SAVING}
    ),
}
LIMITS = {"bfloat16": 1e-2, "best at the end": 1e-3}


SWEPT = ("sgd", "adamw, each device's own tokens", "no clipping", "no length")
SLOW = [name for name in RUNS if name not in SWEPT]


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("names", "sequence"), sweep_but([(SLOW, True)], [(SLOW, True), (SWEPT, True), ([*RUNS], False)])
)
def test_runs_of_all_kinds(names: list[str], sequence: bool, tmp_path: Path) -> None:
    told = [(RUNS[name], sequence, str(tmp_path / f"ours {name}")) for name in names]
    every = world(2).run(sharded_outcomes, told)[0]
    for name, ours in zip(names, every, strict=True):
        run = RUNS[name]
        stock = outcome(made(run.model), run, tmp_path / f"stock {name}")
        assert_alike(ours, stock, LIMITS.get(name, EXACT))


@pytest.mark.sweep
def test_the_unsharded_models_checkpoint_goes_on_sharded(tmp_path: Path) -> None:
    run = Run(SAVING, model="gpt2")
    stock = outcome(made("gpt2"), run, tmp_path / "stock")
    rest = _without_last(tmp_path / "stock", tmp_path / "rest")
    ours, *_ = world(2).run(sharded_outcomes, [(replace(run, resume=True), False, str(rest))])[0]
    assert_alike(ours, stock)


# -- what can't be done ------------------------------------------------------------------------------------------------
def _refusals(member: Member, folder: str) -> list[str]:
    found: list[str] = []
    run, where = Run(), Path(folder)
    model = sharded(member, "llama")
    options: tuple[dict[str, Any], ...] = (
        {"train_sampling_strategy": "batch_rebalance"},
        {"use_cpu": False},
        {"optim": "adafactor"},
        {"fsdp": "full_shard"},
        {"accelerator_config": {"dispatch_batches": True}},
    )
    for option in options:
        with launched(member):
            try:
                trainer(model, replace(run, arguments=option), where).train()
                found.append("")
            except tpplan.TrainingError as error:
                found.append(str(error))
    with launched(member):
        from accelerate import Accelerator

        try:
            Accelerator(cpu=True).prepare(model)
        except tpplan.TrainingError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize(
    ("kind", "config", "ranks", "said"),
    [
        ("FSDP", {}, (0, 1), "TP191 loop-option: accelerate is set up for FSDP"),
        ("MULTI_GPU", {"tp_size": 4}, (0, 1), r"TP190 loop-unaware: .* has tp_size=4(.|\n)*tp_size=2, dp_shard_size=2"),
        ("MULTI_GPU", {"cp_enabled": True}, (0, 1), "TP191 loop-option: accelerate is set up to split sequences"),
        ("MULTI_GPU", {}, (1, 2), "TP190 loop-unaware: ranks 1, 2 share a model"),
        ("MULTI_GPU", {}, (1, 3), "TP190 loop-unaware: ranks 1, 3 share a model"),
    ],
)
def test_how_accelerate_is_set_up(kind: str, config: dict[str, Any], ranks: tuple[int, ...], said: str) -> None:
    known = {"tp_size": 2, "cp_enabled": False, "sp_enabled": False}
    accelerator = SimpleNamespace(
        distributed_type=SimpleNamespace(value=kind),
        num_processes=4,
        parallelism_config=SimpleNamespace(**known | config),
    )
    with pytest.raises(tpplan.TrainingError, match=said):
        check(accelerator, Sharding(ranks, 4, False))
    accelerator.distributed_type.value = "MULTI_GPU"
    accelerator.parallelism_config = SimpleNamespace(**known)
    check(accelerator, Sharding((2, 3), 4, False))


def test_what_cannot_be_done_is_said_at_start(tmp_path: Path) -> None:
    rebalance, blind, adafactor, fsdp, dispatch, unaware = world(2).run(_refusals, str(tmp_path))[0]
    assert rebalance.startswith("TP191 loop-option: `train_sampling_strategy='batch_rebalance'`")
    assert blind.startswith("TP190 loop-unaware: ") and "accelerate sees 1" in blind and "use_cpu=True" in blind
    assert adafactor.startswith("TP191 loop-option: ") and "Adafactor" in adafactor
    assert fsdp.startswith("TP191 loop-option: `fsdp`")
    assert dispatch.startswith("TP191 loop-option: with dispatch_batches")
    assert unaware.startswith("TP190 loop-unaware: ") and "ParallelismConfig(tp_size=2)" in unaware


# -- with replicas -----------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("fsdp", [False, True], ids=["replicas", "fsdp"])
@pytest.mark.sweep
def test_replicas_train_to_the_losses_of_one_process_with_their_batches(fsdp: bool, tmp_path: Path) -> None:
    run = Run(
        {**SAVING, "eval_strategy": "steps", "eval_steps": 2, "per_device_train_batch_size": 2}, samples=24, held_out=8
    )
    wide = replace(run, arguments=run.arguments | {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 8})
    told = [(run, False, str(tmp_path / "ours")), (run, True, str(tmp_path / "sp"))]
    ours = world(4).run(sharded_outcomes, told, 2, fsdp)
    stock = outcome(made("llama"), wide, tmp_path / "stock")
    for of in ours[0]:
        assert_alike(of, stock)
    rest = _without_last(tmp_path / "ours", tmp_path / "rest")
    again = world(4).run(sharded_outcomes, [(replace(run, resume=True), False, str(rest))], 2, fsdp)[0][0]
    assert all(torch.equal(held, ours[0][0].parameters[name]) for name, held in again.parameters.items())
    for rank in range(1, 4):
        for name, held in ours[0][0].parameters.items():
            assert torch.equal(ours[rank][0].parameters[name], held), (rank, name)


def _scattered(member: Member, folder: str) -> str:
    mesh = member.mesh(2, 2, names=("tp", "dp"))
    model = tpplan.parallelize(made("llama"), PLANS / "llama.yaml", mesh["tp"])
    with launched(member), pytest.raises(tpplan.TrainingError) as raised:
        trainer(model, Run(), Path(folder)).train()
    return str(raised.value)


@pytest.mark.slow
def test_ranks_of_the_axis_are_neighbours(tmp_path: Path) -> None:
    assert "ranks 0, 2 share a model" in world(4).run(_scattered, str(tmp_path))[0]


# -- under torchrun ----------------------------------------------------------------------------------------------------
WORKERS = {"dataloader_num_workers": 2, **SAVING}
SCRIPT = """
import sys
from pathlib import Path

import torch

import tpplan
from tests.training.runs import Run, made, outcome
from tests.training.test_trainer import WORKERS
from tests.plans.parity import PLANS

folder = Path(sys.argv[1])
model = tpplan.parallelize(made("llama"), PLANS / "llama-sequence.yaml")
found = outcome(model, Run({**WORKERS}, masks=True), folder)
if torch.distributed.get_rank() == 0:
    torch.save((found.losses, found.norms, found.parameters), folder / "found.pt")
"""


@pytest.mark.sweep
def test_under_torchrun_with_workers_that_draw_masks(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), str(Path(tpplan.__file__).parents[1])])
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    subprocess.run([*torchrun, str(script), str(tmp_path / "ours")], env=environment, check=True, timeout=240)
    stock = outcome(made("llama"), Run({**WORKERS}, masks=True), tmp_path / "stock")
    ours = torch.load(tmp_path / "ours" / "found.pt")
    assert ours[0] == pytest.approx(stock.losses, rel=EXACT) and ours[1] == pytest.approx(stock.norms, rel=EXACT)
    for name, held in stock.parameters.items():
        assert float((ours[2][name] - held).abs().max()) < EXACT, name
    state = json.loads((tmp_path / "ours" / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["global_step"] == 4


def _with_optimizer(member: Member | None, folder: str) -> Any:
    """A run whose optimizer is older than the sharded parameters."""
    model = made("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if member is not None:
        tpplan.parallelize(model, PLANS / "llama.yaml", member.mesh())
    with nullcontext() if member is None else launched(member):
        one = trainer(model, Run(), Path(folder), partial(Trainer, optimizers=(optimizer, None)))
        one.train()
    logs = [log for log in one.state.log_history if "grad_norm" in log]
    return [[log[name] for log in logs] for name in ("loss", "grad_norm", "learning_rate")], whole(model)


@pytest.mark.slow
def test_an_optimizer_that_was_made_before_goes_on(tmp_path: Path) -> None:
    curves, parameters = _with_optimizer(None, str(tmp_path / "stock"))
    for ours, held in world(2).run(_with_optimizer, str(tmp_path / "ours")):
        assert len(ours[0]) == 4
        for mine, theirs in zip(ours, curves, strict=True):
            assert mine == pytest.approx(theirs, rel=EXACT, abs=EXACT)
        assert max(float((held[name] - tensor).abs().max()) for name, tensor in parameters.items()) < EXACT
