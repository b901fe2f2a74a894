"""Sharding: the ranks that a model is sharded over, and what a training loop may not do with it.

TP190   the loop gives out batches and gradients as if each rank had a model of its own
TP191   the loop does something that sharded models can't have
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from tpplan.plan import TpplanError
from tpplan.runtime.modules.module_runtime import RUNTIME, ModuleRuntime
from tpplan.runtime.ranks.communicator import ProcessGroupCommunicator


class TrainingError(TpplanError):
    """A training loop of another library can't train a sharded model, or not as it is set up."""


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a model is spread over the processes.

    Attributes:
        ranks: those that share this rank's model, in order.
        world: how many processes there are.
        is_fsdp: whether FSDP shards it as well, and averages its gradients.
    """

    ranks: tuple[int, ...]
    world: int
    is_fsdp: bool

    @property
    def size(self) -> int:
        """How many ranks share a model."""
        return len(self.ranks)

    @property
    def replicas(self) -> int:
        """How many times the model is there, each trained on batches of its own."""
        return self.world // self.size

    @property
    def config(self) -> str:
        """What accelerate must be told."""
        more = f", dp_shard_size={self.replicas}" if self.replicas > 1 else ""
        return f"ParallelismConfig(tp_size={self.size}{more})"

    def refuse_scattered(self) -> None:
        """Refuse ranks that aren't numbered one after the other, as accelerate takes those with the same batches to be.

        Raises:
            TrainingError: TP190.
        """
        first = self.ranks[0]
        if first % self.size or self.ranks != tuple(range(first, first + self.size)):
            raise mismatch(
                f"ranks {', '.join(map(str, self.ranks))} share a model, and accelerate gives the same batches to "
                "ranks that are numbered one after the other",
                "let the plan's axis be the last of the mesh: init_device_mesh(device, (replicas, parts), "
                'mesh_dim_names=("dp", "tp"))',
            )


def sharding_of(model: object) -> Sharding | None:
    """How a model, or one that is wrapped in it, is sharded; None if it isn't."""
    if not isinstance(model, nn.Module) or not dist.is_initialized():
        return None
    for module in model.modules():
        runtime: ModuleRuntime | None = module.__dict__.get(RUNTIME)
        if runtime is not None:
            if not isinstance(runtime.axis, ProcessGroupCommunicator) or runtime.axis.size == 1:
                return None
            ranks = tuple(dist.get_process_group_ranks(runtime.axis.group))
            is_fsdp = any(isinstance(other, FSDPModule) for other in model.modules())
            return Sharding(ranks, dist.get_world_size(), is_fsdp)
    return None


def check(accelerator: Any, sharding: Sharding) -> None:
    """Refuse what an Accelerator would do wrong with a sharded model.

    Raises:
        TrainingError: TP190 or TP191.
    """
    kind = accelerator.distributed_type.value
    if kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA"):
        raise refusal(
            f"accelerate is set up for {kind}, which would shard or wrap a model that is sharded already",
            "leave it out; FSDP may be put around the model before: fully_shard(model, mesh=mesh['dp'])",
        )
    if accelerator.num_processes != sharding.world:
        raise blind(accelerator.num_processes, sharding)
    config = accelerator.parallelism_config
    size = 1 if config is None else config.tp_size
    if config is None or size != sharding.size:
        knows = "has no parallelism_config" if config is None else f"has tp_size={size}"
        raise mismatch(
            f"the model is shared by {sharding.size} ranks, and the Accelerator {knows}: each rank would get batches "
            "of its own, and gradients would be averaged over parts of one model",
            f"pass parallelism_config={sharding.config} to Accelerator, or to TrainingArguments",
        )
    if config.cp_enabled or config.sp_enabled:
        raise refusal(
            "accelerate is set up to split sequences (cp_size, sp_size), which the program of a sharded model doesn't "
            "know of",
            "leave them out; a plan splits sequences by `sequence` rules",
        )
    sharding.refuse_scattered()


def blind(seen: int, sharding: Sharding) -> TrainingError:
    """The finding that accelerate doesn't see all processes."""
    return mismatch(
        f"the model is shared by {sharding.size} of {sharding.world} processes, and accelerate sees {seen}",
        "start the script by torchrun; on a machine without a GPU pass use_cpu=True to TrainingArguments, or cpu=True "
        "to Accelerator",
    )


def mismatch(message: str, way_out: str) -> TrainingError:
    """A TP190."""
    return TrainingError.of("TP190", message, help=way_out)


def refusal(message: str, way_out: str) -> TrainingError:
    """A TP191."""
    return TrainingError.of("TP191", message, help=way_out)


def keep_reading(settings: Any) -> None:
    """Let each rank read the data set itself, also one without a length, which accelerate else reads on one rank.

    Raises:
        TrainingError: TP191; `settings` of accelerate ask for the latter.
    """
    if settings.dispatch_batches:
        raise refusal(
            "with dispatch_batches accelerate leaves out batches where ranks share a model, and gives the same ones to "
            "all replicas",
            "leave dispatch_batches out, and let the data set give the same on all ranks that share a model",
        )
    settings.dispatch_batches = False


__all__ = ["Sharding", "TrainingError", "blind", "check", "keep_reading", "mismatch", "refusal", "sharding_of"]
