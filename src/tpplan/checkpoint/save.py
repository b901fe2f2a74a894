"""Saving: the stock model's checkpoint from a parallelized model, whole tensors under the stock names."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from tpplan.checkpoint.commit import Stage, begin, commit, finish, place, recover
from tpplan.checkpoint.files import INDEX, CheckpointError, problem
from tpplan.checkpoint.saved_configs import write_configs
from tpplan.checkpoint.saving_ranks import Ranks
from tpplan.checkpoint.stored_tensors import File, entries_of, in_files
from tpplan.checkpoint.stream import stream
from tpplan.checkpoint.told_bytes import Progress, shown
from tpplan.checkpoint.writer import FileWriter, write_file
from tpplan.plan.taken import FOLDER, PROGRESS, WHOLE, takes
from tpplan.plan.warned import warn_user
from tpplan.runtime.compiled.compiled_before import bare
from tpplan.runtime.parameters.taken_apart import taken_apart
from tpplan.runtime.parameters.whole_states import without_replicas
from tpplan.taken_models import MODEL

FILE_BYTES = 5 * 1024**3


def _tell(given: Mapping[str, Any], error: Exception) -> None:
    def refuse() -> None:
        raise error

    Ranks(str(given["folder"])).together(refuse)


@takes(_tell, model=MODEL, folder=FOLDER, file_bytes=WHOLE, progress=PROGRESS)
def save_weights(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    file_bytes: int = FILE_BYTES,
    progress: bool | Progress | None = None,
) -> None:
    """Write a parallelized (or a stock) model as a checkpoint of the stock model.

    Every rank of the world must call this. Where all see the same folder, each writes some of the files; otherwise the
    first rank writes them, to its folder. No rank gets more of the model than its shards and a block of a tensor. Where
    the model is one of transformers', its config and generation config are written as well.

    Killed at any moment, the folder holds what it held before, or the new checkpoint; see `commit.py`.

    Args:
        model: the model.
        folder: where to; made if need be. A checkpoint that is there is replaced.
        file_bytes: the size past which a further file is begun.
        progress: True for a bar on the first rank's terminal, or a function that is called with the bytes that this
            rank has written and all that it will.

    Warns:
        UserWarning: a tensor has a NaN; or the checkpoint is written, but something old couldn't be removed.

    Raises:
        CheckpointError: TP121, on every rank, if the model has no numbers yet, the ranks' models differ, or the folder
            can't be written. What was there before is unchanged.

    Example:
        >>> model = tpplan.parallelize(model, "auto", inputs=x)
        >>> tpplan.save_weights(model, "checkpoint")
        >>> sorted(os.listdir("checkpoint"))
        ['model.safetensors']
    """
    ranks = Ranks(folder)
    with bare(without_replicas(model)) as stock, taken_apart(stock):
        saving = _planned(stock, Path(folder), file_bytes, ranks)
        try:
            with shown("saving weights", progress, ranks.rank == 0) as tell:
                nan = _write(saving, stock, tell)
        except CheckpointError:
            if ranks.rank == 0:
                _undo(saving.stage.folder)
            raise
    if ranks.rank == 0:
        try:
            finish(saving.stage)
        except OSError as error:
            warn_user(f"the checkpoint in `{folder}` is written, but what it replaces couldn't be removed: {error}")
    ranks.together(lambda: None)
    if nan:
        more = f" and {len(nan) - 1} more tensors" if len(nan) > 1 else ""
        warn_user(f"`{nan[0]}`{more} had NaN in them when they were saved to `{folder}`")


@dataclass(frozen=True, slots=True)
class _Saving:
    """What the ranks have agreed on.

    Attributes:
        ranks: they.
        stage: where files are before the commit.
        files: what they hold.
        writers: the ranks that write them in turns.
    """

    ranks: Ranks
    stage: Stage
    files: list[File]
    writers: list[int]

    @property
    def own(self) -> list[tuple[str, File]]:
        """The files that this rank writes, by name."""
        named = list(zip(self.stage.names, self.files, strict=True))
        if self.ranks.rank not in self.writers:
            return []
        return named[self.writers.index(self.ranks.rank) :: len(self.writers)]


def _planned(model: nn.Module, folder: Path, file_bytes: int, ranks: Ranks) -> _Saving:
    files: list[File] = []

    def describe() -> str:
        if file_bytes < 1:
            raise problem(f"a file can't have {file_bytes} bytes", "give `file_bytes` a size")
        files.extend(in_files(entries_of(model), file_bytes))
        return hashlib.sha256(b"".join(file.header() for file in files)).hexdigest()

    digests = ranks.together(describe)
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is not None:
        raise problem(
            f"rank 0 and rank {other} save different models",
            "call save_weights with the same model on every rank of the world",
        )
    # The same folder may have another path on another machine.
    stage = replace(ranks.first(lambda: begin(folder, len(files))), folder=folder)
    seen = ranks.together(stage.is_visible)
    writers = [rank for rank, sees in enumerate(seen) if sees or rank == 0]
    return _Saving(ranks, stage, files, writers)


def _write(saving: _Saving, model: nn.Module, tell: Progress) -> list[str]:
    """Write all files and commit them; returns the names of tensors with a NaN."""
    ranks, stage = saving.ranks, saving.stage
    ranks.first(lambda: _write_small(saving, model))
    sink = FileWriter([(stage.staged(name), file) for name, file in saving.own], tell)

    def send() -> set[str]:
        try:
            outcome = stream(saving.files, saving.writers, ranks, sink)
            if outcome.error is not None:
                raise outcome.error
            sink.finish()
        finally:
            sink.abandon()
        return outcome.nan

    nan = sorted({name for names in ranks.together(send) for name in names})
    ranks.together(lambda: place(stage, [name for name, _ in saving.own]))
    ranks.first(lambda: _commit(stage))
    return nan


def _write_small(saving: _Saving, model: nn.Module) -> None:
    stage, files = saving.stage, saving.files
    write_configs(model, stage.new)
    if len(files) > 1:
        write_file(stage.new / INDEX, _index(stage.names, files))


def _index(names: Sequence[str], files: Sequence[File]) -> bytes:
    table = {entry.name: name for name, file in zip(names, files, strict=True) for entry in file.entries}
    total = sum(file.bytes for file in files)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(table.items()))}
    return (json.dumps(index, indent=2) + "\n").encode()


def _commit(stage: Stage) -> None:
    unseen = [name for name in stage.names if len(stage.names) > 1 and not (stage.folder / name).is_file()]
    if unseen:
        raise problem(
            f"the first rank doesn't see `{unseen[0]}`, which another rank has written to `{stage.folder}`",
            "save to a folder that all ranks share at every moment, or to one that each rank has for itself",
        )
    commit(stage)


def _undo(folder: Path) -> None:
    try:
        recover(folder)
    except OSError as error:
        warn_user(f"what a failed save has left in `{folder}` couldn't be removed; the next save will: {error}")


__all__ = ["save_weights"]
