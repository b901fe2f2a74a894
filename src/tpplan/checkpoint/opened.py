"""A checkpoint that was opened for a model: its headers are read, and its tensors have the model's names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from tpplan.checkpoint.assembled import Sources
from tpplan.checkpoint.converted import by_model_names
from tpplan.checkpoint.files import CheckpointError
from tpplan.checkpoint.meter import Meter
from tpplan.checkpoint.stored import Checkpoint, read_checkpoint
from tpplan.checkpoint.wanted import renamed


@dataclass(frozen=True, slots=True)
class Opened:
    """A checkpoint for a model.

    Attributes:
        source: what the user named.
        checkpoint: as it lies on the disk.
        tensors: by the model's names, after the user's patterns and transformers' rules.
        meter: has counted what was read of it.
    """

    source: str
    checkpoint: Checkpoint
    tensors: Sources
    meter: Meter


def open_checkpoint(
    model: nn.Module,
    source: str | os.PathLike[str],
    rename: Mapping[str, str] | None = None,
    checkpoint: Checkpoint | None = None,
    meter: Meter | None = None,
) -> Opened:
    """Read and check a checkpoint's headers, and find the model's names for its tensors.

    Args:
        model: the model, sharded or not.
        source: a safetensors file, an index, or a folder with either.
        rename: regular expressions with what replaces their matches; see `load_weights`.
        checkpoint: what was read of `source` before, if it was.
        meter: counts what is read.

    Raises:
        CheckpointError: TP121, with all that is wrong.
    """
    meter = meter or Meter()
    checkpoint = checkpoint or read_checkpoint(source, meter)
    tensors, wrong = renamed(checkpoint.tensors, rename or {})
    if wrong:
        raise CheckpointError(wrong)
    named, errors = by_model_names(model, tensors)
    if errors:
        raise CheckpointError(errors)
    return Opened(os.fspath(source), checkpoint, named, meter)


__all__ = ["Opened", "open_checkpoint"]
