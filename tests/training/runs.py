"""Runs of transformers' Trainer, sharded or not, and what they leave: logs, parameters, predictions, files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import IterableDataset
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import tpplan
from tests.plans.parity import PLANS
from tests.runtime.world import Member
from tpplan.rehearsal.prove import prove

Sample = dict[str, Tensor]


@dataclass(frozen=True)
class Run:
    """A run of the Trainer.

    Attributes:
        arguments: of TrainingArguments, beside the usual ones.
        model: llama or gpt2.
        lengths: of the samples, in turns.
        iterable: whether the data set has no length.
        masks: whether the collator draws random numbers.
        resume: whether to resume from the checkpoint in `source`.
        split: whether the head's result is split over the ranks.
    """

    arguments: dict[str, Any] = field(default_factory=dict[str, Any])
    model: str = "llama"
    lengths: tuple[int, ...] = (16,)
    iterable: bool = False
    masks: bool = False
    resume: bool = False
    split: bool = False
    samples: int = 22
    held_out: int = 7
    steps: int = 4


@dataclass
class Outcome:
    """What a run left."""

    losses: list[float]
    norms: list[float]
    rates: list[float]
    evaluations: list[float]
    parameters: dict[str, Tensor]
    predictions: Any
    metrics: dict[str, float]
    best: str | None


def made(name: str) -> Any:
    torch.manual_seed(3)
    if name == "gpt2":
        rates = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0)
        return GPT2LMHeadModel(
            GPT2Config(
                n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=32, bos_token_id=0, eos_token_id=1, **rates
            )
        )
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=64,
            max_position_embeddings=64,
            pad_token_id=0,
            tie_word_embeddings=False,
        )
    )


def samples(run: Run, count: int) -> list[Sample]:
    generator = torch.Generator().manual_seed(7)
    found: list[Sample] = []
    for number in range(count):
        ids = torch.randint(1, 64, (run.lengths[number % len(run.lengths)],), generator=generator)
        found.append({"input_ids": ids, "labels": ids.clone()})
    return found


class Stream(IterableDataset[Sample]):
    def __init__(self, held: list[Sample]) -> None:
        self.held = held

    def __iter__(self) -> Iterator[Sample]:
        return iter(self.held)


def padded(batch: list[Sample]) -> Sample:
    return {
        name: nn.utils.rnn.pad_sequence([item[name] for item in batch], True, pad)
        for name, pad in (("input_ids", 0), ("labels", -100))
    }


def masked(batch: list[Sample]) -> Sample:
    """Some ids replaced at random, by the generators of torch and numpy."""
    made = padded(batch)
    drawn = torch.rand(made["input_ids"].shape) + torch.as_tensor(np.random.rand())
    return made | {"input_ids": made["input_ids"].masked_fill(drawn > 1.4, 2)}


def accuracy(prediction: Any) -> dict[str, float]:
    logits, labels = prediction.predictions, prediction.label_ids
    assert logits.shape[:2] == labels.shape
    return {"accuracy": float((logits.argmax(-1)[:, :-1] == labels[:, 1:]).mean()), "count": float(len(labels))}


def trainer(model: Any, run: Run, folder: Path, kind: Callable[..., Any] = Trainer) -> Any:
    usual: dict[str, Any] = {
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "max_steps": run.steps,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "gradient_accumulation_steps": 3,
        "max_grad_norm": 0.5,
        "weight_decay": 0.1,
        "warmup_steps": 2,
        "save_strategy": "no",
    }
    held = samples(run, run.samples)
    return kind(
        model=model,
        args=TrainingArguments(output_dir=str(folder), **usual | run.arguments),
        train_dataset=Stream(held) if run.iterable else held,
        eval_dataset=samples(run, run.held_out),
        data_collator=masked if run.masks else padded,
        compute_metrics=accuracy if len(run.lengths) == 1 else None,
    )


def outcome(model: Any, run: Run, folder: Path) -> Outcome:
    one = trainer(model, run, folder)
    one.train(resume_from_checkpoint=run.resume)
    predicted = one.predict(samples(run, run.held_out))
    logs = one.state.log_history
    return Outcome(
        [log["loss"] for log in logs if "loss" in log],
        [log["grad_norm"] for log in logs if "grad_norm" in log],
        [log["learning_rate"] for log in logs if "learning_rate" in log],
        [log["eval_loss"] for log in logs if "eval_loss" in log],
        whole(model),
        predicted.predictions,
        {name: held for name, held in predicted.metrics.items() if name.split("_")[1] in ("loss", "accuracy", "count")},
        None if one.state.best_model_checkpoint is None else Path(one.state.best_model_checkpoint).name,
    )


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: (held.full_tensor() if isinstance(held, DTensor) else held).detach().clone()
        for name, held in model.named_parameters()
    }


@contextmanager
def launched(member: Member) -> Iterator[None]:
    """A block in which a process of a world looks as torchrun starts it."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    ranks = {"RANK": member.rank, "LOCAL_RANK": member.rank, "WORLD_SIZE": member.size, "LOCAL_WORLD_SIZE": member.size}
    told = {name: str(held) for name, held in ranks.items()} | {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    with mock.patch.dict(os.environ, told):
        try:
            yield
        finally:
            AcceleratorState._reset_state(True)
            PartialState._reset_state()
            GradientState._reset_state()


_proofs: dict[tuple[Any, ...], Any] = {}
"""Many runs begin with the same; what a run does to its model is proved by itself."""


def sharded(member: Member, name: str, sequence: bool = False, replicas: int = 1, split: bool = False) -> Any:
    plan = tpplan.load_plan(PLANS / f"{name}{'-sequence' if sequence else ''}.yaml")
    if split:
        text: Any = plan.to_dict()
        plan = tpplan.load_plan(
            text | {"modules": text["modules"] | {"lm_head": {"style": "colwise", "output": "shard"}}}
        )
    mesh = member.mesh()
    if replicas > 1:
        mesh = member.mesh(replicas, member.size // replicas, names=("dp", "tp"))["tp"]

    def proved(request: Any) -> Any:
        key = (name, sequence, split, request.size)
        if key not in _proofs:
            _proofs[key] = prove(request)
        return _proofs[key]

    with mock.patch("tpplan.api.prove", proved):
        return tpplan.parallelize(made(name), plan, mesh)


def sharded_outcomes(
    member: Member, runs: list[tuple[Run, bool, str]], replicas: int = 1, fsdp: bool = False
) -> list[Outcome]:
    """Each run, with or without a split sequence, in its folder."""
    found: list[Outcome] = []
    for run, sequence, folder in runs:
        model = sharded(member, run.model, sequence, replicas, run.split)
        if fsdp:
            mesh = member.mesh(replicas, member.size // replicas, names=("dp", "tp"))
            model = fully_shard(model, mesh=mesh["dp"])
        with launched(member):
            found.append(outcome(model, run, Path(folder)))
    return found
