"""A checkpoint as it lies on the disk: every tensor's place, taken from the headers of all its files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from tpplan.checkpoint.assembled import Sources
from tpplan.checkpoint.distributed import read_chunk, read_distributed
from tpplan.checkpoint.files import METADATA, CheckpointError, find_checkpoint, finding, listed, unreadable
from tpplan.checkpoint.header import Header, Stored, read_header
from tpplan.checkpoint.index import read_index
from tpplan.checkpoint.meter import Meter
from tpplan.plan import Diagnostic, Severity

T = TypeVar("T")
R = TypeVar("R")
_THREADS = 8
_SAMPLES, _SAMPLE_BYTES = 8, 64


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a checkpoint holds.

    Attributes:
        path: its index, or its one file.
        tensors: by their names in it.
        files: the lengths of its files, by name.
        digest: of the headers and of a few bytes of each file; equal for equal checkpoints, wherever they lie.
        warnings: what is odd about it.
        metadata: what its safetensors files say besides.
    """

    path: Path
    tensors: Sources
    files: Mapping[str, int]
    digest: str
    warnings: tuple[Diagnostic, ...]
    metadata: Mapping[str, Any]


def read_checkpoint(source: str | os.PathLike[str], meter: Meter | None = None) -> Checkpoint:
    """Read and check an index and all headers; no tensor is read.

    Args:
        source: a safetensors file, an index, or a folder with either; or a folder of torch.distributed.checkpoint.
        meter: counts what is read.

    Raises:
        CheckpointError: TP121, with every file that can't be read.
    """
    meter = meter or Meter()
    path = find_checkpoint(source)
    if path.name == METADATA:
        return Checkpoint(path, *read_distributed(path, meter), (), {})
    if path.suffix != ".json":
        header = read_header(path, meter)
        tensors = {tensor.name: tensor for tensor in header.tensors}
        digest = _digest({path.name: header}, path, meter)
        return Checkpoint(path, tensors, {path.name: header.size}, digest, (), header.metadata)
    table = read_index(path, meter)
    headers = _headers(path, sorted(set(table.values())), meter)
    tensors, odd = _by_index(path, table, headers)
    sizes = {name: header.size for name, header in headers.items()}
    metadata = {key: said for header in headers.values() for key, said in header.metadata.items()}
    return Checkpoint(path, tensors, sizes, _digest(headers, path, meter), odd, metadata)


def _headers(index: Path, names: list[str], meter: Meter) -> dict[str, Header]:
    missing = [name for name in names if not _exists(index.parent / name)]
    findings: list[Diagnostic] = []
    if missing:
        findings.append(
            finding(
                f"`{index}` names files that don't exist: {listed(missing, 10)}",
                "complete the checkpoint: copy or download what is missing",
            )
        )

    def read(name: str) -> Header | CheckpointError:
        try:
            return read_header(index.parent / name, meter)
        except CheckpointError as error:
            return error

    headers: dict[str, Header] = {}
    present = [name for name in names if name not in missing]
    for name, header in zip(present, _in_threads(read, present), strict=True):
        if isinstance(header, CheckpointError):
            findings += header.diagnostics
        else:
            headers[name] = header
    if findings:
        raise CheckpointError(findings)
    return headers


def _in_threads(function: Callable[[T], R], items: Iterable[T]) -> list[R]:
    with ThreadPoolExecutor(_THREADS, "tpplan-headers") as pool:
        return list(pool.map(function, items))


def _exists(path: Path) -> bool:
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError):  # reading it says what is wrong
        return True
    return True


def _by_index(
    path: Path, table: Mapping[str, str], headers: Mapping[str, Header]
) -> tuple[dict[str, Stored], tuple[Diagnostic, ...]]:
    held = {name: {tensor.name: tensor for tensor in header.tensors} for name, header in headers.items()}
    tensors: dict[str, Stored] = {}
    wrong: list[str] = []
    for name, file in table.items():
        if name in held[file]:
            tensors[name] = held[file][name]
            continue
        elsewhere = [other for other, inside in held.items() if name in inside]
        where = f"it is in {listed(elsewhere)}" if elsewhere else "no file that the index names holds it"
        wrong.append(f"it puts `{name}` into `{file}`; {where}")
    if wrong:
        message = f"`{path}` doesn't tell the truth about {len(wrong)} of its tensors"
        raise CheckpointError([finding(message, "write the checkpoint again, or correct its index", *wrong[:20])])
    unlisted = sorted({name for inside in held.values() for name in inside} - table.keys())
    if not unlisted:
        return tensors, ()
    message = f"`{path}` leaves out {len(unlisted)} tensors of its files, which aren't read: {listed(unlisted)}"
    return tensors, (finding(message, "correct the index if they belong to the model", severity=Severity.WARNING),)


def _digest(headers: Mapping[str, Header], path: Path, meter: Meter) -> str:
    """Two checkpoints of one model have equal headers; a few of their numbers tell them apart."""
    digest = hashlib.sha256()

    def sampled(item: tuple[str, Header]) -> bytes:
        return _sampled(path.parent / item[0], item[1], meter)

    ordered = sorted(headers.items())
    for (name, header), sample in zip(ordered, _in_threads(sampled, ordered), strict=True):
        rows = [(t.name, t.dtype, t.shape, t.start) for t in header.tensors]
        digest.update(repr((name if len(headers) > 1 else "", header.size, rows)).encode())
        digest.update(sample)
    return digest.hexdigest()


def _sampled(path: Path, header: Header, meter: Meter) -> bytes:
    return _samples(path, header.length, header.size - header.length, meter)


def alike(one: Stored, other: Stored, meter: Meter) -> bool:
    """Whether two tensors seem to have the same numbers: the same dtype and shape, and the same samples."""
    if (one.dtype, one.shape, one.pickled) != (other.dtype, other.shape, other.pickled):
        return False
    if one.pickled:
        return torch.equal(read_chunk(one, meter), read_chunk(other, meter))
    read = [_samples(held.path, held.start, held.bytes, meter) for held in (one, other)]
    return read[0] == read[1]


def _samples(path: Path, begin: int, length: int, meter: Meter) -> bytes:
    count = min(_SAMPLE_BYTES, length)
    places = dict.fromkeys(begin + (length - count) * i // (_SAMPLES - 1) for i in range(_SAMPLES))
    try:
        with open(path, "rb", buffering=0) as file:
            read = b"".join(os.pread(file.fileno(), count, place) for place in places)
    except OSError as error:
        raise unreadable(path, error) from None
    meter.add(len(read))
    return read


__all__ = ["Checkpoint", "alike", "read_checkpoint"]
