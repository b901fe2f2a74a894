"""Transformers' `Trainer`, adapted to sharded models.

    Trainer(model=sharded, args=TrainingArguments(…), …).train()

Its Accelerator is told how many ranks share the model. All ranks come to where the first one saves, since what it
saves is gathered from them; the files are those of an unsharded run. The rest is a matter of `accelerator.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn

from tpplan.loss import cross_entropy
from tpplan.runtime.around.outside_forwards import serving
from tpplan.runtime.modules.module_runtime import RUNTIME
from tpplan.runtime.modules.sharded_modules import ShardedRoot
from tpplan.runtime.parameters.saved_models import whole_state_of
from tpplan.training.follow import wrap
from tpplan.training.sharding import Sharding, blind, keep_reading, refusal, sharding_of

_Stock = Callable[..., Any]


def adapt(module: ModuleType) -> None:
    """Adapt the module `transformers.trainer`."""
    for name, around in _METHODS.items():
        wrap(module.Trainer, name, around)


def _build_accelerator_args(stock: _Stock, self: Any, **kwargs: Any) -> dict[str, Any]:
    found: dict[str, Any] = stock(self, **kwargs)
    sharding = sharding_of(self.model)
    if sharding is None:
        return found
    _refuse_arguments(self.args, sharding)
    if found.get("parallelism_config") is None:
        from accelerate import ParallelismConfig

        found["parallelism_config"] = ParallelismConfig(tp_size=sharding.size, dp_shard_size=sharding.replicas)
    data = found.get("dataloader_config")
    if data is not None:
        keep_reading(data)
    return found


def _refuse_arguments(arguments: Any, sharding: Sharding) -> None:
    if arguments.world_size != sharding.world:
        raise blind(arguments.world_size, sharding)
    if arguments.fsdp:
        raise refusal(
            "`fsdp` of TrainingArguments would shard a model that is sharded already, over a mesh of its own",
            'leave it out: gradients are averaged over replicas anyway; or call fully_shard(model, mesh=mesh["dp"]) '
            "before",
        )
    if arguments.deepspeed:
        raise refusal("DeepSpeed can't take a model that is sharded already", "leave `deepspeed` out")
    if arguments.train_sampling_strategy == "batch_rebalance":
        raise refusal(
            "`train_sampling_strategy='batch_rebalance'` gives each rank batches of its own, also ranks that share a "
            "model",
            "use another one, such as 'group_by_length'",
        )


def _get_num_items_in_batch(stock: _Stock, self: Any, *args: Any, **kwargs: Any) -> Any:
    """The number of this replica's, where numbers aren't summed over all ranks: it is divided as if they were."""
    number = stock(self, *args, **kwargs)
    if self.args.average_tokens_across_devices or not isinstance(number, Tensor):
        return number
    sharding = sharding_of(self.model)
    return number if sharding is None else number * sharding.size


def _compute_loss(stock: _Stock, self: Any, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """With label smoothing over split classes, which is computed outside of the model."""
    smoother = self.label_smoother
    if smoother is None or not _split_classes(self.model):
        return stock(self, model, *args, **kwargs)
    self.label_smoother = _Smoother(smoother, self.model)
    try:
        return stock(self, model, *args, **kwargs)
    finally:
        self.label_smoother = smoother


def _split_classes(model: nn.Module) -> tuple[int, ...]:
    """Of results that a sharded model leaves split, the numbers of all classes."""
    root = next((module for module in model.modules() if isinstance(module, ShardedRoot)), None)
    return () if root is None else root.__dict__[RUNTIME].split_classes


@dataclass(frozen=True, slots=True)
class _Smoother:
    """As transformers' `LabelSmoother`, of the logits that a sharded model returns."""

    stock: Any
    model: nn.Module

    def __call__(
        self, model_output: Any, labels: Tensor, shift_labels: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        logits = cast(Tensor, model_output["logits"] if isinstance(model_output, dict) else model_output[0])
        if shift_labels:
            logits, labels = logits[..., :-1, :], labels[..., 1:]
        labels = torch.where(labels == self.stock.ignore_index, labels, labels.clamp(min=0))
        rows = cross_entropy(logits, labels, None, self.stock.ignore_index, "sum", self.stock.epsilon, model=self.model)
        if num_items_in_batch is None:
            return rows / (labels != self.stock.ignore_index).sum()
        return rows / (
            num_items_in_batch.to(rows.device) if torch.is_tensor(num_items_in_batch) else num_items_in_batch
        )


def _prediction_step(
    stock: _Stock, self: Any, model: nn.Module, inputs: Any, prediction_loss_only: bool, *args: Any, **kwargs: Any
) -> Any:
    """With predictions of all classes."""
    with nullcontext() if prediction_loss_only or sharding_of(self.model) is None else serving():
        return stock(self, model, inputs, prediction_loss_only, *args, **kwargs)


def _save(stock: _Stock, self: Any, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
    """On all ranks, of which one writes."""
    if sharding_of(self.model) is None:
        stock(self, output_dir, state_dict)
        return
    if state_dict is None and not hasattr(self.model, "save_pretrained"):
        state_dict = whole_state_of(self.model, keep=self.args.should_save)
    before = self.is_distributed_loading_by_transformers
    self.is_distributed_loading_by_transformers = True  # by which it sends all ranks to save_pretrained
    try:
        stock(self, output_dir, state_dict)
    finally:
        self.is_distributed_loading_by_transformers = before


def _save_optimizer_and_scheduler(stock: _Stock, self: Any, output_dir: str) -> None:
    """With a state that all ranks have gathered before the first one writes it."""
    if sharding_of(self.model) is None:
        stock(self, output_dir)
        return
    state = self.optimizer.state_dict()
    self.optimizer.state_dict = lambda: state
    try:
        stock(self, output_dir)
    finally:
        del self.optimizer.state_dict


_METHODS = {
    "_build_accelerator_args": _build_accelerator_args,
    "compute_loss": _compute_loss,
    "prediction_step": _prediction_step,
    "_get_num_items_in_batch": _get_num_items_in_batch,
    "_save": _save,
    "_save_optimizer_and_scheduler": _save_optimizer_and_scheduler,
}

__all__ = ["adapt"]
