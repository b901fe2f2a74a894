"""What tpplan changes in the process, beyond the models that it is given. Nothing at import.

in:  the first `parallelize`
out: hooks of torch and wrapped methods of training loops, once; `undo_process_changes` takes them back

Each asks whether a model is sharded, and leaves others as they are. After an `undo_process_changes` sharded models go
on without what the table says; the next `parallelize` makes the changes anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from tpplan.runtime.data_parallel.replicas import follow_wrappers, refuse_units
from tpplan.runtime.data_parallel.stepping import step_on_parts
from tpplan.runtime.parameters.packed_tensors import allow_in_files, watch_optimizers
from tpplan.runtime.ranks.board import is_alone
from tpplan.runtime.ranks.faults import tell_of_exits
from tpplan.training.follow import follow

Undo = Callable[[], None]


@dataclass(frozen=True, slots=True)
class ProcessChange:
    """A change to something that isn't tpplan's.

    Attributes:
        what: the thing that is changed.
        why: what sharded models need it for.
        make: makes it; returns what takes it back.
    """

    what: str
    why: str
    make: Callable[[], Undo]


CHANGES = (
    ProcessChange(
        "a hook before steps of torch.optim's optimizers",
        "they step on a rank's parts, several times faster than by DTensor's dispatch",
        step_on_parts,
    ),
    ProcessChange(
        "another hook there, and one where such an optimizer loads its state",
        "states that `set_optimizer_state_dict` has cut are laid out as packed parameters are",
        watch_optimizers,
    ),
    ProcessChange(
        "a hook where nn.Modules register a child",
        "DistributedDataParallel around a sharded model averages its gradients",
        follow_wrappers,
    ),
    ProcessChange(
        "the constructor of what FSDP calls a parameter group",
        "ranks that are no replicas are refused before parameters change",
        refuse_units,
    ),
    ProcessChange(
        "the classes that torch.load reads with `weights_only=True`",
        "packed parameters can be read back",
        allow_in_files,
    ),
    ProcessChange(
        "methods of accelerate's Accelerator and of transformers' Trainer; a finder in sys.meta_path for these",
        "their loops know that ranks share a model",
        follow,
    ),
)
TELLING = ProcessChange(
    "sys.excepthook, in a process with other ranks",
    "these are told of the error that ends it, and raise instead of waiting",
    tell_of_exits,
)

_made: dict[ProcessChange, Undo] = {}


def make_process_changes(group: dist.ProcessGroup) -> None:
    """Make the changes that aren't made yet, for models that the ranks of `group` share."""
    for change in CHANGES if is_alone(group) else (*CHANGES, TELLING):
        _make(change)


def follow_training_loops() -> None:
    """Let accelerate's and transformers' loops know sharded models, before there is one.

    `parallelize` does this. Call it where an `Accelerator(parallelism_config=…)` is made first on processes without a
    GPU, which accelerate refuses by itself.

    Example:
        >>> tpplan.follow_training_loops()
        >>> len(tpplan.process_changes())
        1
    """
    _make(CHANGES[-1])


def process_changes() -> tuple[ProcessChange, ...]:
    """The changes that are made now, in order.

    Example:
        >>> model = tpplan.parallelize(model, "auto", inputs=x)
        >>> tpplan.process_changes()[0].what
        "a hook before steps of torch.optim's optimizers"
    """
    return tuple(_made)


def undo_process_changes() -> None:
    """Take back all changes, the latest first.

    Example:
        >>> tpplan.follow_training_loops()
        >>> tpplan.undo_process_changes()
        >>> tpplan.process_changes()
        ()
    """
    while _made:
        _, undo = _made.popitem()
        undo()


def _make(change: ProcessChange) -> None:
    if change not in _made:
        _made[change] = change.make()


__all__ = [
    "CHANGES",
    "ProcessChange",
    "follow_training_loops",
    "make_process_changes",
    "process_changes",
    "undo_process_changes",
]
