"""Loading: each rank reads the bytes of its own parts from a checkpoint, and nothing else."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tpplan.checkpoint.agreed import AgreeingRanks
from tpplan.checkpoint.assembled import Source, Sources, reads
from tpplan.checkpoint.buffers import Made, make_buffers
from tpplan.checkpoint.dequantised import Readable, raw
from tpplan.checkpoint.files import CheckpointError, finding, listed, unreadable
from tpplan.checkpoint.meter import Meter
from tpplan.checkpoint.opened import Opened, open_checkpoint
from tpplan.checkpoint.ranges import elements
from tpplan.checkpoint.reading import Files
from tpplan.checkpoint.stored import alike
from tpplan.checkpoint.told_bytes import Progress, shown
from tpplan.checkpoint.wanted import Match, Wanted, match
from tpplan.compat.dtensors import local_of
from tpplan.plan import Diagnostic, Severity
from tpplan.plan.taken import FLAG, FOLDER, PROGRESS, TEXTS, optional, takes
from tpplan.plan.warned import warn_user
from tpplan.runtime.compiled.compiled_before import bare
from tpplan.runtime.parameters.distribute import device_of_mesh
from tpplan.runtime.parameters.pieces import Box, whole_box
from tpplan.runtime.parameters.taken_apart import taken_apart
from tpplan.runtime.parameters.whole_states import part_of, without_replicas
from tpplan.taken_models import MODEL

_THREADS = 4
_AHEAD = 12  # tensors that the system is asked to read before their turn


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a load did.

    Attributes:
        model: the model that was loaded.
        bytes_read: by this rank, headers included.
        missing: the model's tensors that the checkpoint hasn't, which were left as they are.
        unexpected: the checkpoint's tensors that the model hasn't.
        warnings: what the user should know, on the first rank of the model.
    """

    model: nn.Module
    bytes_read: int
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    warnings: tuple[Diagnostic, ...]


@dataclass(frozen=True, slots=True)
class _Fill:
    """A tensor to be read.

    Attributes:
        wanted: where in the model it belongs.
        source: where it lies.
        tensor: what is filled: the model's own memory, or new memory if that is on `meta`.
        reads: which boxes of which stored tensors hold what this rank holds of it.
    """

    wanted: Wanted
    source: Source
    tensor: Tensor
    reads: list[tuple[Readable, tuple[Box, ...]]]

    @property
    def bytes(self) -> int:
        """How many are read."""
        return sum(stored.bytes_of(elements(boxes)) for stored, boxes in raw(self.reads))


@dataclass(frozen=True, slots=True)
class _LoadJob:
    fills: tuple[_Fill, ...]
    made: tuple[Made, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    findings: tuple[Diagnostic, ...]
    digest: str
    meter: Meter


def _tell(given: Mapping[str, Any], error: Exception) -> None:
    AgreeingRanks(without_replicas(given["model"])).settle(str(given["source"]), None, (), error)


@takes(_tell, model=MODEL, source=FOLDER, rename=optional(TEXTS), strict=FLAG, progress=PROGRESS, partial=FLAG)
def load_weights(
    model: nn.Module,
    source: str | os.PathLike[str],
    *,
    rename: Mapping[str, str] | None = None,
    strict: bool = True,
    progress: bool | Progress | None = None,
    partial: bool = False,
) -> nn.Module:
    """Load a checkpoint of the stock model into a parallelized (or a stock) model, in place.

    Headers, names, shapes and dtypes are compared first, on all ranks; nothing is changed on any of them unless all
    fits on each. Every rank that holds a part of the model must call this. Tensors still on `meta` are made on the
    device of their mesh, and buffers on `meta` that no checkpoint has are made by the model's `_init_weights`.
    Floating-point numbers are cast to the model's dtype; quantised ones never are.

    Args:
        model: the model.
        source: a safetensors file, an index, a folder with either, or one that torch.distributed.checkpoint has saved,
            of which a rank reads the chunks that it needs any of.
        rename: regular expressions with what replaces their matches, as in `re.sub`, for names of the checkpoint that
            differ from the model's: `{"^bert[.]": ""}`. Each sees what the one before it has made.
        strict: whether the checkpoint must have every tensor of the model. If not, those that it hasn't stay as they
            are, and are named in a warning.
        progress: True for a bar on the first rank's terminal, or a function that is called with the bytes that this
            rank has read and all that it will.
        partial: whether `model` may be a part of what the checkpoint has, such as a stage of a pipeline: nobody is told
            of further tensors there. The model's own must all be there, as before. They go by their names: a stage
            whose layers are numbered anew, such as a slice of an `nn.Sequential`, needs `rename`.

    Returns:
        `model` itself.

    Warns:
        UserWarning: the checkpoint has more than the model, or numbers that aren't finite; or what `strict` left.

    Raises:
        CheckpointError: TP121, with everything that is wrong, the same on all ranks.

    Example:
        >>> tpplan.save_weights(model, "checkpoint")
        >>> model = tpplan.parallelize(type(model)(), "auto", inputs=x)
        >>> model = tpplan.load_weights(model, "checkpoint")
    """
    with bare(without_replicas(model)) as stock, taken_apart(stock):
        loaded = load(stock, source, rename=rename, strict=strict, progress=progress, partial=partial)
    for held in loaded.warnings:
        warn_user(held.text)
    return model


def load(
    model: nn.Module,
    source: str | os.PathLike[str] | Opened,
    *,
    rename: Mapping[str, str] | None = None,
    strict: bool = True,
    progress: bool | Progress | None = None,
    partial: bool = False,
) -> Loaded:
    """As `load_weights`, also of what was opened before; returns what it did, and warns of nothing."""
    ranks = AgreeingRanks(model)
    named = source.source if isinstance(source, Opened) else os.fspath(source)
    job: _LoadJob | None = None
    error: Exception | None = None  # whatever a rank fails with, the others must not wait for it
    try:
        opened = source if isinstance(source, Opened) else open_checkpoint(model, source, rename)
        job = _prepared(model, opened, strict, ranks, partial)
    except Exception as raised:
        error = raised
    digest, findings = (None, ()) if job is None else (job.digest, job.findings)
    warned = ranks.settle(named, digest, findings, error)
    assert job is not None
    strange: list[Diagnostic] = []
    try:
        with shown("loading weights", progress, ranks.speaks) as tell:
            strange = _read(job, tell)
    except Exception as raised:
        error = raised
    warned += ranks.settle(named, digest, strange, error)
    for fill in job.fills:
        fill.wanted.put(fill.tensor)
    for buffer in job.made:
        setattr(buffer.module, buffer.leaf, buffer.numbers)
    return Loaded(model, job.meter.bytes, job.missing, job.unexpected, warned if ranks.speaks else ())


def _prepared(model: nn.Module, opened: Opened, strict: bool, ranks: AgreeingRanks, partial: bool) -> _LoadJob:
    """Everything that can fail before a tensor is read; the model isn't changed."""
    checkpoint, tensors, meter = opened.checkpoint, opened.tensors, opened.meter
    device = device_of_mesh(ranks.meshes[0]) if ranks.meshes else torch.device("cpu")
    matched = match(model, tensors, strict, partial)
    made, without = make_buffers(model, device, strict)
    findings = (*checkpoint.warnings, *matched.findings, *without, *_untied(matched, tensors, meter))
    fills: list[_Fill] = []
    if all(held.severity is not Severity.ERROR for held in findings):
        fills = [_fill(wanted, source, device) for wanted, source in matched.pairs]
        fills.sort(key=lambda fill: (fill.source.path, fill.source.start))
    names = [(wanted.names[0], source.name) for wanted, source in matched.pairs]
    digest = hashlib.sha256(f"{checkpoint.digest} {names}".encode()).hexdigest()
    return _LoadJob(tuple(fills), tuple(made), matched.missing, matched.unexpected, findings, digest, meter)


def _untied(matched: Match, tensors: Sources, meter: Meter) -> list[Diagnostic]:
    """Tensors that are one in the model and not in the checkpoint, of which only one could be loaded."""
    found: list[Diagnostic] = []
    for wanted, source in matched.pairs:
        names = [name for name in wanted.names if name in tensors]
        if not all(tensors[name] is source or _alike(tensors[name], source, meter) for name in names):
            message = f"{listed(names)} are one tensor in the model, and have different numbers in the checkpoint"
            found.append(finding(message, "build the model with tensors of their own for them (untied)"))
    return found


def _alike(one: Source, other: Source, meter: Meter) -> bool:
    boxes = whole_box(one.shape)
    if one.shape != other.shape or not boxes:
        return one.shape == other.shape
    ours, theirs = raw(reads(one, boxes)), raw(reads(other, boxes))
    if [inside for _, inside in ours] != [inside for _, inside in theirs]:
        return False
    pairs = [(a, b) for (a, _), (b, _) in zip(ours, theirs, strict=True)]
    return all(alike(a, b, meter) for a, b in (pairs[:1] if pairs[0][0].pickled else pairs))


def _fill(wanted: Wanted, source: Source, device: torch.device) -> _Fill:
    tensor = wanted.tensor
    boxes = part_of(tensor).boxes if isinstance(tensor, DTensor) else whole_box(source.shape)
    return _Fill(wanted, source, wanted.with_memory(device), reads(source, boxes))


def _read(job: _LoadJob, tell: Progress) -> list[Diagnostic]:
    """Fill all tensors, several at once; warnings of numbers that aren't finite.

    Raises:
        CheckpointError: TP121, if a file can't be read after all.
    """
    total, done = sum(fill.bytes for fill in job.fills), 0
    strange: list[str] = []
    with Files(job.meter) as files, ThreadPoolExecutor(_THREADS, "tpplan-load") as pool:
        later = [*job.fills[_AHEAD:], *[None] * _AHEAD]
        for fill in job.fills[:_AHEAD]:
            files.expect(fill.reads)
        running: dict[Future[bool], _Fill] = {
            pool.submit(_filled, fill, files, ahead): fill for fill, ahead in zip(job.fills, later, strict=False)
        }
        try:
            for read in as_completed(running):
                if not read.result():
                    strange.append(running[read].source.name)
                done += running[read].bytes
                tell(done, total)
        except (OSError, CheckpointError) as error:
            broken = [] if all(local_of(fill.wanted.tensor).is_meta for fill in job.fills) else [_MIXED]
            if isinstance(error, OSError):
                error = unreadable(error.filename or job.fills[0].source.path, error)
            found = error.diagnostics[0]
            raise CheckpointError([finding(found.message, str(found.help), *found.notes, *broken)]) from None
        finally:
            pool.shutdown(cancel_futures=True)
    if not strange:
        return []
    message = f"{len(strange)} of the checkpoint's tensors have numbers that are NaN or infinite: {listed(strange)}"
    way_out = "check the checkpoint; in a narrower dtype than its own, large numbers are infinite"
    return [finding(message, way_out, severity=Severity.WARNING)]


_MIXED = "the model has been loaded in part: its numbers are no longer those from before; load it again"


def _filled(fill: _Fill, files: Files, ahead: _Fill | None) -> bool:
    if ahead is not None:
        files.expect(ahead.reads)
    part = local_of(fill.tensor)
    with torch.no_grad():
        finite = files.fill_by(part, fill.reads)
    if not part.is_inference():
        torch.autograd.graph.increment_version(part)  # reading into memory is no operation that autograd knows of
    return finite


__all__ = ["Loaded", "load", "load_weights"]
