"""Folders of torch.distributed.checkpoint: where the chunks of each tensor lie, and their numbers.

in:  `.metadata`, a pickle, of which nothing but the classes that torch writes is made
out: `Stored` tensors with chunks, each of which is read whole, by the ranks that need any of it
"""

from __future__ import annotations

import hashlib
import io
import itertools
import math
import os
import pathlib
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from tpplan.checkpoint.files import METADATA, CheckpointError, problem, unreadable
from tpplan.checkpoint.header import Stored, StoredChunk, dtype_name
from tpplan.checkpoint.meter import Meter

_WRITTEN = {
    "torch.distributed.checkpoint.metadata": frozenset(
        (
            "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
            "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
        )
    ),
    "torch.distributed.checkpoint.filesystem": frozenset(("_StorageInfo", "_StoragePrefix")),
    "torch.serialization": frozenset(("_get_layout",)),
    "collections": frozenset(("OrderedDict",)),
}  # fmt: skip
_AGAIN = "save it again, with torch.distributed.checkpoint or `tpplan.save_weights`"


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """What metadata is made of; nothing else is looked up, as it could run anything."""
        if module_name == "torch":
            held = getattr(torch, global_name, None)
            if held is torch.Size or isinstance(held, torch.dtype):
                return held
        elif module_name.partition(".")[0] == "pathlib":
            return pathlib.PurePath
        elif global_name in _WRITTEN.get(module_name, ()):
            return super().find_class(module_name, global_name)
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}, which torch doesn't write there")


def read_distributed(path: Path, meter: Meter) -> tuple[dict[str, Stored], dict[str, int], str]:
    """The tensors of a folder, by name, the lengths of its files, and a digest of both.

    Args:
        path: its `.metadata`.
        meter: counts what is read.

    Raises:
        CheckpointError: TP121, with everything that is wrong.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from None
    meter.add(len(text))
    metadata = _metadata(path, text)
    places: dict[str, dict[tuple[int, ...], Any]] = {}
    for index, place in cast("Mapping[Any, Any]", metadata.storage_data).items():
        places.setdefault(index.fqn, {})[tuple(index.offset or ())] = place
    tensors = {
        name: _stored(name, path.parent, held, places.get(name, {}))
        for name, held in metadata.state_dict_metadata.items()
        if isinstance(held, TensorStorageMetadata)
    }
    ends: dict[Path, int] = {}
    for chunk in (chunk for stored in tensors.values() for chunk in stored.chunks):
        ends[chunk.path] = max(ends.get(chunk.path, 0), chunk.start + chunk.bytes)
    files: dict[Path, int] = {}
    reasons = [reason for stored in tensors.values() for reason in _uncovered(stored)]
    for file, end in ends.items():
        try:
            files[file] = size = os.stat(file).st_size
        except OSError as error:
            reasons.append(f"`{file.name}` can't be read: {error.strerror}")
            continue
        if size < end:
            reasons.append(f"`{file.name}` has {size} bytes, and should have {end}: it was cut off")
    if reasons:
        raise _broken(path, f"has {len(reasons)} faults", *reasons)
    lengths = {file.name: size for file, size in files.items()}
    return tensors, lengths, hashlib.sha256(text + repr(sorted(lengths.items())).encode()).hexdigest()


def _broken(path: Path, what: str, *notes: str) -> CheckpointError:
    message = f"`{path.parent}`, a checkpoint of torch.distributed.checkpoint, {what}"
    return problem(message, f"complete it; or {_AGAIN}", *notes[:20])


def _metadata(path: Path, text: bytes) -> Metadata:
    try:
        metadata = _Unpickler(io.BytesIO(text)).load()
    except Exception as error:  # a pickle that isn't one fails with anything
        raise _broken(path, f"has a `{METADATA}` that can't be read: {error}") from None
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, Mapping):
        raise _broken(path, f"has a `{METADATA}` that holds something else")
    return metadata


def _stored(name: str, folder: Path, held: TensorStorageMetadata, places: Mapping[tuple[int, ...], Any]) -> Stored:
    chunks: list[StoredChunk] = []
    for chunk in held.chunks:
        place = places.get(tuple(chunk.offsets))
        if place is None:
            continue  # the tensor isn't covered, which is told of
        relative = pathlib.PurePosixPath(place.relative_path)
        if relative.is_absolute() or ".." in relative.parts:
            raise problem(f"`{folder}` names `{relative}`, which isn't in the folder", _AGAIN)
        if getattr(place, "transform_descriptors", None):
            raise problem(f"`{folder}` is compressed or encrypted", "load it with torch.distributed.checkpoint")
        chunks.append(
            StoredChunk(folder / relative, place.offset, place.length, tuple(chunk.offsets), tuple(chunk.sizes))
        )
    shape, dtype = tuple(held.size), held.properties.dtype
    count = math.prod(shape) * dtype.itemsize
    return Stored(name, chunks[0].path if chunks else folder, dtype_name(dtype), shape, 0, count, tuple(chunks))


def _uncovered(stored: Stored) -> Iterator[str]:
    chunks = [chunk for chunk in stored.chunks if 0 not in chunk.sizes]
    if any(not _is_within(chunk, stored.shape) for chunk in chunks):
        yield f"`{stored.name}` has chunks that aren't within its shape {list(stored.shape)}"
    elif _overlap(chunks):
        yield f"`{stored.name}` has chunks that overlap"
    elif sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(stored.shape):
        yield f"`{stored.name}` isn't there as a whole"


def _is_within(chunk: StoredChunk, shape: tuple[int, ...]) -> bool:
    if not len(chunk.offsets) == len(chunk.sizes) == len(shape):
        return False
    ends = zip(chunk.offsets, chunk.sizes, shape, strict=True)
    return all(offset >= 0 and size >= 0 and offset + size <= length for offset, size, length in ends)


def _overlap(chunks: list[StoredChunk]) -> bool:
    """Whether two chunks have an element in common: their edges cut the tensor into cells, each of one chunk."""
    if len(chunks) < 2:
        return False
    edges = [
        sorted({edge for c in chunks for edge in (c.offsets[d], c.offsets[d] + c.sizes[d])}) for d in _dims(chunks)
    ]
    places = [{edge: place for place, edge in enumerate(of_dim)} for of_dim in edges]
    cells: set[tuple[int, ...]] = set()
    for chunk in chunks:
        stretches = [
            range(places[d][chunk.offsets[d]], places[d][chunk.offsets[d] + chunk.sizes[d]]) for d in _dims(chunks)
        ]
        before = len(cells)
        cells.update(itertools.product(*stretches))
        if len(cells) - before != math.prod(len(stretch) for stretch in stretches):
            return True
    return False


def _dims(chunks: list[StoredChunk]) -> range:
    return range(len(chunks[0].sizes))


def read_chunk(chunk: StoredChunk, meter: Meter) -> Tensor:
    """The numbers of a chunk.

    Raises:
        CheckpointError: TP121, if it isn't a tensor of the promised shape.
    """
    with open(chunk.path, "rb", buffering=0) as file:
        read = os.pread(file.fileno(), chunk.bytes, chunk.start)
    meter.add(len(read))
    try:
        numbers = torch.load(io.BytesIO(read), map_location="cpu", weights_only=True)
    except Exception as error:
        raise problem(f"`{chunk.path}` can't be read: {str(error).splitlines()[0]}", _AGAIN) from None
    if not isinstance(numbers, Tensor) or tuple(numbers.shape) != chunk.sizes:
        raise problem(f"`{chunk.path}` holds something else than its `{METADATA}` says", _AGAIN)
    return numbers


__all__ = ["read_chunk", "read_distributed"]
